"""The page of `mesh-attention report`: one HTML file with everything in it, made of the facts.

plotly.js draws the pictures; it comes with the Python package `plotly` (the extra `report`) and is
put into the page whole. A policy in `page.html` tells browsers to load nothing from the network.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from mesh_attention.errors import MissingPackageError
from mesh_attention.files import replacing
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.report.comparison_pictures import (
    memory_picture,
    scaling_picture,
    shapes_picture,
)
from mesh_attention.report.facts import ReportFacts
from mesh_attention.report.methods_table import TITLE as TABLE_TITLE
from mesh_attention.report.methods_table import legend, methods_table, ms_text
from mesh_attention.report.picture import Control, Picture
from mesh_attention.report.plan_pictures import assignment_picture, gantt_picture
from mesh_attention.version import __version__

_MOST_BUTTONS = 4  # choices of a control that stand side by side; more are a list
_TITLES = {
    "assignment": "Who computes which tile",
    "gantt": "When each operation runs",
    "shapes": "Tiles and slices",
    "scaling": "More ranks",
    "memory": "Memory and time",
}
_OPERATIONS = {
    "C-1-2": "attention of chunk 1 of the queries with chunk 2 of the keys; chunks count from 0",
    "AG-Q-0, AG-KV-0": "gather a chunk of queries, or of keys and values, from other ranks",
    "RS-Q-0, RS-dQ-0, RS-dKV-0": "bring partial outputs or gradients to the ranks that own them",
    "EX-IN-0, EX-OUT-0": "exchange tokens for heads, and back",
    "KV-1, Q-1, O-1, dKV-1, P-1, PB-1": "a block goes on to the next rank of a ring",
    "delta": "the row sums of output times its gradient, which the backward pass needs",
    ".merge, .sum, .cast, .copy, .arrived, .end": "join or round what has come",
}


def plotly_js() -> str:
    """The library for pictures, or an error that says what to install."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingPackageError(
            "the page is drawn by plotly: pip install 'plotly>=6,<8'"
        ) from None
    return str(get_plotlyjs())


def pictures_of(facts: ReportFacts) -> dict[str, Picture]:
    make = (assignment_picture, gantt_picture, shapes_picture, scaling_picture, memory_picture)
    pictures = [picture_of(facts) for picture_of in make]
    return {picture.name: picture for picture in pictures if picture is not None}


def write_page(facts: ReportFacts, path: Path, library: str) -> None:
    """Writes the whole page or nothing. `library` is what `plotly_js` returns."""
    with replacing(path) as part:
        part.write_text(page_of(facts, library), encoding="utf-8")


def page_of(facts: ReportFacts, library: str) -> str:
    pictures = pictures_of(facts)
    variants = {
        name: {key: variant._asdict() for key, variant in picture.variants.items()}
        for name, picture in pictures.items()
    }
    methods = " and ".join(dict.fromkeys(facts.chosen.values()))
    links = {"choice": "The choice", "methods": TABLE_TITLE}
    links |= {name: _TITLES[name] for name in pictures} | {"notes": "How it was found"}
    sections = [_choice(facts), methods_table(facts), *map(_section, pictures.values())]

    def file(name: str) -> str:
        return (files(__package__) / name).read_text(encoding="utf-8")

    return Template(file("page.html")).substitute(
        version=escape(__version__),
        title=escape(f"{methods} on {facts.ranks} ranks of {facts.cluster}"),
        css=file("page.css"),
        about=f"{escape(facts.problem)}. Modelled, not measured.{_batch(facts)}",
        menu="".join(f'<a href="#{name}">{escape(text)}</a>' for name, text in links.items()),
        sections="".join([*sections, _notes(facts)]),
        variants=_json(variants),
        library=library,
        script=file("page.js"),
    )


def _json(value: Any) -> str:
    """JSON for the inside of a script element: no character of it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _batch(facts: ReportFacts) -> str:
    if facts.batch == 1:
        return ""
    return (
        f" Batch {facts.batch}: each sequence has {bytes_text(facts.gpu_bytes)} of a GPU. Times, "
        "bytes and pictures are those of one sequence."
    )


def _choice(facts: ReportFacts) -> str:
    numbers = [
        (f"{ms_text(facts.seconds)} ms", " and ".join(facts.directions)),
        (f"{facts.mfu_percent:.1f} %", f"MFU, of {facts.gpu}"),
        (bytes_text(sum(facts.received_bytes.values())), "a rank receives"),
        (bytes_text(sum(facts.least_bytes.values())), "is the least possible"),
        (bytes_text(facts.peak_bytes * facts.batch), f"of memory a rank, batch {facts.batch}"),
    ]
    cards = "".join(
        f"<div><dt>{escape(text)}</dt><dd>{escape(number)}</dd></div>" for number, text in numbers
    )
    passes = "".join(
        f"<li>{direction}: {escape(name)} <code>{escape(facts.settings[direction])}</code></li>"
        for direction, name in facts.chosen.items()
    )
    return f"""<section id="choice">
<h2>The choice</h2>
<p class="reason">{escape(facts.reason)}</p>
{"".join(f"<p><strong>{escape(line)}</strong></p>" for line in facts.warnings)}
<dl class="cards">{cards}</dl>
<ul>{passes}</ul>
{_to_copy("A line of Python to paste", facts.python)}
{_to_copy("The command that made this page", facts.command) if facts.command else ""}
</section>
"""


def _to_copy(label: str, text: str) -> str:
    return (
        f'<div class="copied"><pre tabindex="0" aria-label="{label}"><code>{escape(text)}</code>'
        '</pre><button type="button" class="copy">copy</button></div>'
    )


def _section(picture: Picture) -> str:
    controls = "".join(_control(picture.name, at, c) for at, c in enumerate(picture.controls))
    first = next(iter(picture.variants.values()))
    title = _TITLES[picture.name]
    return f"""<section id="{picture.name}" data-picture="{picture.name}">
<h2>{title}</h2>
<div class="controls">{controls}</div>
<figure>
<div class="plot {picture.name}" role="img" aria-label="{title}"></div>
<figcaption aria-live="polite">{escape(first.caption)}</figcaption>
</figure>
{legend("What the names of operations mean", _OPERATIONS) if picture.name == "gantt" else ""}
</section>
"""


def _control(picture: str, at: int, control: Control) -> str:
    """Radio buttons, or a list of many choices; a single choice is a hidden input."""
    name, label = f"{picture}-{control.name}", escape(control.label)
    choices = [(escape(value), escape(text)) for value, text in control.choices]
    if len(choices) == 1:
        return f'<input type="hidden" data-control="{at}" value="{choices[0][0]}">'
    if len(choices) > _MOST_BUTTONS:
        options = "".join(f'<option value="{value}">{text}</option>' for value, text in choices)
        return (
            f'<label>{label} <select data-control="{at}" name="{name}">{options}</select></label>'
        )
    buttons = "".join(
        f'<label><input type="radio" data-control="{at}" name="{name}" value="{value}"'
        f"{'' if i else ' checked'}><span>{text}</span></label>"
        for i, (value, text) in enumerate(choices)
    )
    return f"<fieldset><legend>{label}</legend>{buttons}</fieldset>"


def _notes(facts: ReportFacts) -> str:
    kernels = "; ".join(
        f"{direction}: {', '.join(f'{name} {part:.0%}' for name, part in used.items())}"
        for direction, used in facts.kernels.items()
    )
    lines = [
        f"Cluster {facts.cluster}: {facts.cluster_description}",
        f"Which cluster: {facts.cluster_found}.",
        f"{facts.ranks} ranks of {facts.gpu} in {facts.nodes} "
        f"{'node' if facts.nodes == 1 else 'nodes'}.",
        f"Kernels of the chosen plan, by their part of its attentions' time: {kernels}.",
        f"The choice is the best of {facts.settings_tried} settings, of which the best few were "
        "simulated with all ranks; the charts of operations are simulated too.",
        "Tiles and slices, and scaling, are what one rank expects of its own program, with all "
        "others on time: mostly within a percent or two of a simulation, and less where ranks wait "
        "for each other.",
        "Everything is modelled from the cluster's file with its rates of kernels and links; "
        "nothing was measured. Memory is the workspace, shards and results of attention for one "
        "sequence, without what kernels take for themselves.",
        *([f"Options that were given: {facts.options}."] if facts.options else []),
        *facts.notes,
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"""<section id="notes">
<h2>How it was found</h2>
<ul>{items}</ul>
<p>Made by mesh_attention {escape(__version__)}.</p>
</section>
"""
