"""The page of `mesh-attention report`: one HTML file with everything in it, made of the facts.

plotly.js draws the pictures; it comes with the Python package `plotly` (the extra `report`) and is
put into the page whole. A policy in `page.html` tells browsers to load nothing from the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from mesh_attention.choose.explain import TIE_TEXT
from mesh_attention.errors import MissingPackageError
from mesh_attention.files import replacing
from mesh_attention.plan.methods.table import all_options
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.report.facts import MethodFacts, ReportFacts
from mesh_attention.report.picture import Control, Picture
from mesh_attention.report.pictures import pictures_of
from mesh_attention.version import __version__

_MOST_BUTTONS = 4  # choices of a control that stand side by side; more are a list
_TITLES = {  # of the sections, in this order
    "choice": "The choice",
    "methods": "All methods",
    "assignment": "Who computes which tile",
    "gantt": "When each operation runs",
    "shapes": "Tiles and slices",
    "scaling": "More ranks",
    "memory": "Memory and time",
    "notes": "How it was found",
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


def write_page(facts: ReportFacts, path: Path, library: str) -> None:
    """Writes the whole page or nothing. `library` is what `plotly_js` returns."""
    with replacing(path) as part:
        part.write_text(page_of(facts, library), encoding="utf-8")


def page_of(facts: ReportFacts, library: str) -> str:
    """The HTML of the page."""
    pictures = pictures_of(facts)
    variants = {
        name: {key: variant._asdict() for key, variant in picture.variants.items()}
        for name, picture in pictures.items()
    }
    contents = {"choice": _choice(facts), "methods": _methods(facts), "notes": _notes(facts)}
    contents |= {name: _figure(picture) for name, picture in pictures.items()}
    methods = " and ".join(dict.fromkeys(facts.chosen.values()))
    menu, sections = "", ""
    for name, title in _TITLES.items():
        if name in contents:
            data = f' data-picture="{name}"' if name in pictures else ""
            menu += f'<a href="#{name}">{title}</a>'
            sections += (
                f'<section id="{name}"{data}>\n<h2>{title}</h2>\n{contents[name]}</section>\n'
            )

    def file(name: str) -> str:
        return (files(__package__) / name).read_text(encoding="utf-8")

    return Template(file("page.html")).substitute(
        version=escape(__version__),
        title=escape(f"{methods} on {facts.ranks} ranks of {facts.cluster}"),
        css=file("page.css"),
        about=f"{escape(facts.problem)}. Modelled, not measured.{_batch(facts)}",
        menu=menu,
        sections=sections,
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
        (f"{_ms_text(facts.seconds)} ms", " and ".join(facts.directions)),
        (f"{facts.mfu_percent:.1f} %", f"MFU, of {facts.gpu}"),
        (bytes_text(sum(facts.received_bytes.values())), "a rank receives"),
        (bytes_text(sum(facts.least_bytes.values())), "is the least possible"),
        (bytes_text(facts.peak_bytes * facts.batch), f"of memory a rank, batch {facts.batch}"),
    ]
    cards = "".join(
        f"<div><dt>{escape(text)}</dt><dd>{escape(number)}</dd></div>" for number, text in numbers
    )
    passes = [
        f"{direction}: {escape(name)} <code>{escape(facts.settings[direction])}</code>"
        for direction, name in facts.chosen.items()
    ]
    return f"""\
<p class="reason">{escape(facts.reason)}</p>
{"".join(f"<p><strong>{escape(line)}</strong></p>" for line in facts.warnings)}
<dl class="cards">{cards}</dl>
{_list(passes)}
{_to_copy("A line of Python to paste", facts.python)}
{_to_copy("The command that made this page", facts.command) if facts.command else ""}
"""


def _ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds >= 1e-3 else f"{seconds * 1e3:.3f}"


def _to_copy(label: str, text: str) -> str:
    return (
        f'<div class="copied"><pre tabindex="0" aria-label="{label}"><code>{escape(text)}</code>'
        '</pre><button type="button" class="copy">copy</button></div>'
    )


def _methods(facts: ReportFacts) -> str:
    """The table of all methods, which `page.js` can sort, and a legend of the settings in it."""
    times = [*facts.directions, *(["both"] if len(facts.directions) > 1 else [])]
    heads = ["method", *(f"{time}, ms" for time in times), "MFU, %"]
    heads += [f"received {direction}" for direction in facts.directions]
    heads += ["from other nodes", "memory", "setting"]
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(text)}</button></th>'
        for text in heads
    )
    rows = "".join(_row(facts, method) for method in facts.methods)
    least = [f"<td>{bytes_text(facts.least_bytes[d])}</td>" for d in facts.directions]
    blank = "<td></td>"
    foot = blank * (len(times) + 1) + "".join(least) + blank * 3
    refused = _list([escape(f"{name}: {text}") for name, text in facts.refused.items()])
    return f"""\
<p>Each at the best setting that was found, in each pass. A click on a heading sorts by it. A time
with &ldquo;about&rdquo; was not simulated: it is what one rank sees, and ranks that wait for each
other take longer. &ldquo;As fast&rdquo; means {TIE_TEXT}. Received bytes and memory are those of a
rank. Below received bytes is their ratio to the least possible, a lower bound by the visible area,
which plans come close to under a full mask only. <span class="hint">The table scrolls to the
side.</span></p>
<div class="wide" tabindex="0" role="region" aria-label="{_TITLES["methods"]}">
<table>
<thead><tr>{head}</tr></thead>
<tbody>{rows}</tbody>
<tfoot><tr><th scope="row">least possible</th>{foot}</tr></tfoot>
</table>
</div>
{f"<p>Not possible here:</p>{refused}" if facts.refused else ""}
{_legend("What the settings mean", _settings_in_words(facts))}
"""


def _settings_in_words(facts: ReportFacts) -> dict[str, str]:
    """The meaning of each option in the table, as the help of the command line says it."""
    settings = [p.setting for method in facts.methods for p in method.passes.values()]
    names = {word.partition("=")[0] for setting in settings for word in setting.split()}
    return {
        f"{name}={'True' if option.type is bool else option.metavar}": option.help.replace("`", "")
        for name, (option, _) in all_options().items()
        if name in names
    }


def _legend(title: str, words: Mapping[str, str]) -> str:
    if not words:
        return ""
    rows = "".join(
        f"<dt><code>{escape(code)}</code></dt><dd>{escape(text)}</dd>"
        for code, text in words.items()
    )
    return f'<details><summary>{title}</summary><dl class="codes">{rows}</dl></details>'


def _row(facts: ReportFacts, method: MethodFacts) -> str:
    passes = [method.passes[d] for d in facts.directions]
    times = [(p.seconds, p.is_simulated) for p in passes]
    if len(passes) > 1:
        times.append((method.seconds, method.is_simulated))
    cells: list[tuple[float, str]] = [  # the value to sort by, and HTML
        (seconds, f"{'' if is_simulated else 'about '}{_ms_text(seconds)}")
        for seconds, is_simulated in times
    ]
    cells.append((method.mfu_percent, f"{method.mfu_percent:.1f}"))
    for direction, p in zip(facts.directions, passes, strict=True):
        least = facts.least_bytes[direction]
        ratio = f"<small>{p.received_bytes / least:.2f} x least</small>" if least else ""
        cells.append((p.received_bytes, f"{bytes_text(p.received_bytes)}{ratio}"))
    other, peak = sum(p.other_node_bytes for p in passes), method.peak_bytes
    warning = "<small>more than there is</small>" if peak > facts.gpu_bytes else ""
    cells += [(other, bytes_text(other)), (peak, f"{bytes_text(peak)}{warning}")]
    numbers = "".join(f'<td data-value="{value!r}">{text}</td>' for value, text in cells)
    settings = list(dict.fromkeys(p.setting for p in passes))
    if len(settings) > 1:
        settings = [f"{d}: {p.setting}" for d, p in zip(facts.directions, passes, strict=True)]
    words = "<br>".join(map(escape, settings))
    words = f'<td class="words" data-value="{escape(settings[0])}">{words}</td>'
    name, is_choice = escape(method.name), method is facts.methods[0]
    mark, style = ("<small>as fast</small>" if method.is_tie else ""), ""
    if is_choice:
        mark, style = "<small>the choice</small>", ' class="chosen"'
    head = f'<th scope="row" data-value="{name}">{name}{mark}</th>'
    return f"<tr{style}>{head}{numbers}{words}</tr>\n"


def _figure(picture: Picture) -> str:
    controls = "".join(_control(picture.name, at, c) for at, c in enumerate(picture.controls))
    first = next(iter(picture.variants.values()))
    title = _TITLES[picture.name]
    return f"""\
<div class="controls">{controls}</div>
<figure>
<div class="plot {picture.name}" role="img" aria-label="{title}"></div>
<figcaption aria-live="polite">{escape(first.caption)}</figcaption>
</figure>
{_legend("What the names of operations mean", _OPERATIONS) if picture.name == "gantt" else ""}
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
    made_by = f"<p>Made by mesh_attention {escape(__version__)}.</p>"
    return f"{_list(map(escape, lines))}\n{made_by}\n"


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
