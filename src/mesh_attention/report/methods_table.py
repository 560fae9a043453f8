"""HTML of the table of all methods in `mesh-attention report`, and of its legend, for `page.py`."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from mesh_attention.choose.explain import TIE_TEXT
from mesh_attention.plan.methods.table import all_options
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.report.facts import MethodFacts, ReportFacts

TITLE = "All methods"


def methods_table(facts: ReportFacts) -> str:
    heads = ["method", *(f"{d}, ms" for d in facts.directions)]
    if len(facts.directions) > 1:
        heads.append("both, ms")
    heads += ["MFU, %", *(f"received {d}" for d in facts.directions)]
    heads += ["from other nodes", "memory", "setting"]
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(text)}</button></th>'
        for text in heads
    )
    rows = "".join(_row(facts, method) for method in facts.methods)
    blank = "<td></td>"
    foot = blank * (len(facts.directions) + (len(facts.directions) > 1) + 1)
    foot += "".join(f"<td>{bytes_text(facts.least_bytes[d])}</td>" for d in facts.directions)
    foot += blank * 3
    refused = "".join(
        f"<li>{escape(name)}: {escape(text)}</li>" for name, text in facts.refused.items()
    )
    return f"""<section id="methods">
<h2>{TITLE}</h2>
<p>Each at the best setting that was found, in each pass. A click on a heading sorts by it. A time
with &ldquo;about&rdquo; was not simulated: it is what one rank sees, and ranks that wait for each
other take longer. &ldquo;As fast&rdquo; means {TIE_TEXT}. Received bytes and memory are those of a
rank. Below received bytes is their ratio to the least possible, a lower bound by the visible area,
which plans come close to under a full mask only. <span class="hint">The table scrolls to the
side.</span></p>
<div class="wide" tabindex="0" role="region" aria-label="{TITLE}">
<table>
<thead><tr>{head}</tr></thead>
<tbody>{rows}</tbody>
<tfoot><tr><th scope="row">least possible</th>{foot}</tr></tfoot>
</table>
</div>
{f"<p>Not possible here:</p><ul>{refused}</ul>" if refused else ""}
{legend("What the settings mean", _settings_in_words(facts))}
</section>
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


def legend(title: str, words: Mapping[str, str]) -> str:
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
        (seconds, f"{'' if is_simulated else 'about '}{ms_text(seconds)}")
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


def ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds >= 1e-3 else f"{seconds * 1e3:.3f}"
