"""The page of `mesh-attention report`: one HTML file with everything in it, made of the facts.

`page.html` is a template, and what fills its slots is made here.
plotly.js draws the pictures; it comes with the Python package `plotly` (the extra `report`) and is
put into the page whole. A policy in `page.html` tells browsers to load nothing from the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from itertools import chain
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
_TITLES = {  # of the sections with pictures, in this order
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


def write_page(facts: ReportFacts, path: Path, library: str) -> None:
    """Writes the whole page or nothing. `library` is what `plotly_js` returns."""
    with replacing(path) as part:
        part.write_text(page_of(facts, library), encoding="utf-8")


class Html(str):
    """Text that is HTML already. All other text is escaped where it is put into an element."""


def tag(name: str, /, *inside: str, **attributes: Any) -> Html:
    """An element; `class_` is the attribute class, and `data_value` is data-value.

    >>> tag("a", "x < y ", tag("b", "z"), href="#top", class_="wide")
    '<a href="#top" class="wide">x &lt; y <b>z</b></a>'
    """
    names = {key: key.rstrip("_").replace("_", "-") for key in attributes}
    written = "".join(f' {names[key]}="{escape(str(x))}"' for key, x in attributes.items())
    content = "".join(text if isinstance(text, Html) else escape(text) for text in inside)
    return Html(f"<{name}{written}>{content}" + ("" if name in ("br", "input") else f"</{name}>"))


def page_of(facts: ReportFacts, library: str) -> str:
    """The HTML of the page."""
    pictures = pictures_of(facts)
    variants = {
        name: {key: variant._asdict() for key, variant in picture.variants.items()}
        for name, picture in pictures.items()
    }
    titles = {name: title for name, title in _TITLES.items() if name in pictures}
    sections = [
        tag("section", tag("h2", title), *_figure(pictures[name]), id=name, data_picture=name)
        for name, title in titles.items()
    ]
    methods = " and ".join(dict.fromkeys(facts.chosen.values()))

    def file(name: str) -> str:
        return (files(__package__) / name).read_text(encoding="utf-8")

    return Template(file("page.html")).substitute(
        version=escape(__version__),
        title=escape(f"{methods} on {facts.ranks} ranks of {facts.cluster}"),
        css=file("page.css"),
        about=f"{escape(facts.problem)}. Modelled, not measured.{_batch(facts)}",
        menu="".join(tag("a", title, href=f"#{name}") for name, title in titles.items()),
        choice="\n".join(_choice(facts)),
        tie=TIE_TEXT,
        methods="\n".join(_methods(facts)),
        pictures="\n".join(sections),
        notes=_notes(facts),
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


def _choice(facts: ReportFacts) -> Iterator[Html]:
    numbers = {
        " and ".join(facts.directions): f"{_ms_text(facts.seconds)} ms",
        f"MFU, of {facts.gpu}": f"{facts.mfu_percent:.1f} %",
        "a rank receives": bytes_text(sum(facts.received_bytes.values())),
        "is the least possible": bytes_text(sum(facts.least_bytes.values())),
        f"of memory a rank, batch {facts.batch}": bytes_text(facts.peak_bytes * facts.batch),
    }
    yield tag("p", facts.reason, class_="reason")
    yield from (tag("p", tag("strong", line)) for line in facts.warnings)
    cards = [tag("div", tag("dt", text), tag("dd", number)) for text, number in numbers.items()]
    yield tag("dl", *cards, class_="cards")
    passes = [(f"{d}: {name} ", tag("code", facts.settings[d])) for d, name in facts.chosen.items()]
    yield tag("ul", *(tag("li", *texts) for texts in passes))
    yield _to_copy("A line of Python to paste", facts.python)
    if facts.command:
        yield _to_copy("The command that made this page", facts.command)


def _ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds >= 1e-3 else f"{seconds * 1e3:.3f}"


def _to_copy(label: str, text: str) -> Html:
    pre = tag("pre", tag("code", text), tabindex=0, aria_label=label)
    return tag("div", pre, tag("button", "copy", type="button", class_="copy"), class_="copied")


def _methods(facts: ReportFacts) -> Iterator[Html]:
    """The table of all methods, which `page.js` can sort, and a legend of the settings in it."""
    times = [*facts.directions, *(["both"] if len(facts.directions) > 1 else [])]
    heads = ["method", *(f"{time}, ms" for time in times), "MFU, %"]
    heads += [f"received {direction}" for direction in facts.directions]
    heads += ["from other nodes", "memory", "setting"]
    buttons = [tag("button", text, type="button") for text in heads]
    head = tag("tr", *(tag("th", each, scope="col", aria_sort="none") for each in buttons))
    rows = [_row(facts, method) for method in facts.methods]
    least = [bytes_text(facts.least_bytes[direction]) for direction in facts.directions]
    cells = [tag("td", text) for text in ([""] * (len(times) + 1) + least + [""] * 3)]
    foot = tag("tr", tag("th", "least possible", scope="row"), *cells)
    table = tag("table", tag("thead", head), tag("tbody", *rows), tag("tfoot", foot))
    yield tag("div", table, class_="wide", tabindex=0, role="region", aria_label="All methods")
    if facts.refused:
        yield tag("p", "Not possible here:")
        yield tag("ul", *(tag("li", f"{name}: {why}") for name, why in facts.refused.items()))
    yield _legend("What the settings mean", _settings_in_words(facts))


def _settings_in_words(facts: ReportFacts) -> dict[str, str]:
    """The meaning of each option in the table, as the help of the command line says it."""
    settings = [p.setting for method in facts.methods for p in method.passes.values()]
    names = {word.partition("=")[0] for setting in settings for word in setting.split()}
    return {
        f"{name}={'True' if option.type is bool else option.metavar}": option.help.replace("`", "")
        for name, (option, _) in all_options().items()
        if name in names
    }


def _legend(title: str, words: Mapping[str, str]) -> Html:
    if not words:
        return Html("")
    terms = ((tag("dt", tag("code", code)), tag("dd", text)) for code, text in words.items())
    listed = tag("dl", *chain.from_iterable(terms), class_="codes")
    return tag("details", tag("summary", title), listed)


def _row(facts: ReportFacts, method: MethodFacts) -> Html:
    passes = {direction: method.passes[direction] for direction in facts.directions}
    times = [(p.seconds, p.is_simulated) for p in passes.values()]
    if len(passes) > 1:
        times.append((method.seconds, method.is_simulated))
    cells: list[tuple[float, str, str]] = [  # the value to sort by, its text and a small note
        (seconds, f"{'' if is_simulated else 'about '}{_ms_text(seconds)}", "")
        for seconds, is_simulated in times
    ]
    cells.append((method.mfu_percent, f"{method.mfu_percent:.1f}", ""))
    for direction, p in passes.items():
        least = facts.least_bytes[direction]
        ratio = f"{p.received_bytes / least:.2f} x least" if least else ""
        cells.append((p.received_bytes, bytes_text(p.received_bytes), ratio))
    other, peak = sum(p.other_node_bytes for p in passes.values()), method.peak_bytes
    warning = "more than there is" if peak > facts.gpu_bytes else ""
    cells += [(other, bytes_text(other), ""), (peak, bytes_text(peak), warning)]
    numbers = [tag("td", text, _small(note), data_value=repr(x)) for x, text, note in cells]
    settings = list(dict.fromkeys(p.setting for p in passes.values()))
    if len(settings) > 1:
        settings = [f"{direction}: {p.setting}" for direction, p in passes.items()]
    lines = [line for setting in settings for line in (tag("br"), setting)][1:]
    words = tag("td", *lines, class_="words", data_value=settings[0])
    is_choice = method is facts.methods[0]
    mark = "the choice" if is_choice else "as fast" if method.is_tie else ""
    head = tag("th", method.name, _small(mark), scope="row", data_value=method.name)
    return tag("tr", head, *numbers, words, **({"class_": "chosen"} if is_choice else {}))


def _small(note: str) -> Html:
    return tag("small", note) if note else Html("")


def _figure(picture: Picture) -> Iterator[Html]:
    controls = [_control(picture.name, at, c) for at, c in enumerate(picture.controls)]
    yield tag("div", *controls, class_="controls")
    label = _TITLES[picture.name]
    plot = tag("div", class_=f"plot {picture.name}", role="img", aria_label=label)
    caption = next(iter(picture.variants.values())).caption
    yield tag("figure", plot, tag("figcaption", caption, aria_live="polite"))
    if picture.name == "gantt":
        yield _legend("What the names of operations mean", _OPERATIONS)


def _control(picture: str, at: int, control: Control) -> Html:
    """Radio buttons, or a list of many choices; a single choice is a hidden input."""
    how: dict[str, Any] = {"data_control": at, "name": f"{picture}-{control.name}"}
    if len(control.choices) == 1:
        return tag("input", type="hidden", data_control=at, value=control.choices[0][0])
    if len(control.choices) > _MOST_BUTTONS:
        options = [tag("option", text, value=value) for value, text in control.choices]
        return tag("label", f"{control.label} ", tag("select", *options, **how))
    buttons: list[Html] = []
    for value, text in control.choices:
        checked = {} if buttons else {"checked": ""}
        button = tag("input", type="radio", **how, value=value, **checked)
        buttons.append(tag("label", button, tag("span", text)))
    return tag("fieldset", tag("legend", control.label), *buttons)


def _notes(facts: ReportFacts) -> Html:
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
    return tag("ul", *(tag("li", line) for line in lines))
