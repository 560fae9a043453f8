"""The pictures of the page but that of `assignment.py`: when each operation runs, tiles and slices,
numbers of ranks, memory and time.

`page.py` shows them; nothing is computed here that the facts do not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mesh_attention.cost.pictures import COLOURS, WAIT
from mesh_attention.cost.timeline import Stream
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import USUAL
from mesh_attention.report.assignment import assignment_picture
from mesh_attention.report.estimates import Scaling, ScalingLine, ShapeTimes, TimedShape
from mesh_attention.report.facts import CHOSEN, GanttFacts, ReportFacts
from mesh_attention.report.picture import (
    LEGEND,
    PALETTE,
    SCALE,
    Control,
    Picture,
    Variant,
    axis,
    colour_bar,
    gib,
    heat_map,
    log_axis,
    ms,
    pass_control,
    picture_of,
    points,
    style_of,
)

_SLOW = 1.6  # times the fastest: what is slower has one colour
_NUM_SHOWN = 6  # methods whose lines are shown; the others when their name is clicked
_BOTH = "both"
_LEGEND_BELOW = {**LEGEND, "y": -0.25, "yanchor": "top"}
_MS = "milliseconds, modelled"


def pictures_of(facts: ReportFacts) -> dict[str, Picture]:
    """All pictures, by name. Those of shapes and scaling are left out where they would be empty."""
    pictures = [assignment_picture(facts.assignment, facts.chosen, facts.nodes), _gantt(facts)]
    pictures += [_shapes(facts)] if facts.shapes else []
    pictures += [_scaling(facts)] if facts.scaling else []
    return {picture.name: picture for picture in (*pictures, _memory(facts))}


def _gantt(facts: ReportFacts) -> Picture:
    charts = {(chart.name, chart.direction): chart for chart in facts.gantts}
    names = dict.fromkeys(chart.name for chart in facts.gantts)
    choices = tuple((name, "the chosen plan" if name == CHOSEN else name) for name in names)

    def make(name: str, direction: str) -> Variant:
        # One scale for all plans of a pass, so that lengths can be compared.
        alike = [chart.seconds for chart in facts.gantts if chart.direction == direction]
        return _chart(charts[name, Direction(direction)], max(alike))

    controls = (Control("plan", "Plan", choices), pass_control(facts.directions))
    return picture_of("gantt", controls, make)


def _chart(chart: GanttFacts, longest: float) -> Variant:
    """A bar for each operation of the first ranks, in a row for each stream. `longest`: seconds at
    which the axis ends."""
    waits = [
        (WAIT, event, event.issued, event.start)
        for event in chart.events
        if event.stream is Stream.COMMUNICATION and event.start > event.issued
    ]
    works = [(e.kind, e, e.start, e.end) for e in chart.events if e.end > e.start]
    data = []
    for kind, colour in COLOURS.items():
        bars = [bar[1:] for bar in waits + works if bar[0] == kind]
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": [f"{event.rank} {event.stream}" for event, _, _ in bars],
            "base": [ms(start) for _, start, _ in bars],
            "x": [ms(end - start) for _, start, end in bars],
            "customdata": [
                f"{event.name}: {ms(start):g} to {ms(end):g} ms" for event, start, end in bars
            ],
            "hovertemplate": f"{kind}<br>%{{customdata}}<extra></extra>",
            "text": [event.name for event, _, _ in bars],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "marker": {"color": colour, "line": {"width": 0.5, "color": "#888888"}},
        }
        data += [trace] if bars else []
    rows = [f"{rank} {stream}" for rank in range(chart.num_ranks) for stream in Stream]
    order = {"autorange": "reversed", "categoryorder": "array", "categoryarray": rows}
    layout = {
        "barmode": "overlay",
        "bargap": 0.12,
        "uniformtext": {"minsize": 10, "mode": "hide"},  # names where bars have room for them
        "xaxis": axis(_MS, range=[0, ms(longest) * 1.01 or 1]),
        "yaxis": axis("rank and stream", **order),
        "legend": {**LEGEND, "y": 1.02, "yanchor": "bottom"},
    }
    ranks = "rank 0" if chart.num_ranks == 1 else f"the first {chart.num_ranks} ranks"
    caption = (
        f"{chart.method} {chart.direction}, {ranks}: {ms(chart.seconds):.4g} ms, MFU "
        f"{chart.mfu_percent:.1f} %; a rank computes nothing for {ms(chart.open_seconds):.3g} ms "
        f"in the mean, {ms(chart.waiting_seconds):.3g} ms of it waiting for other "
        "ranks. All plans of a pass have the same scale."
    )
    return Variant(caption, data, layout)


def _shapes(facts: ReportFacts) -> Picture:
    by_key = {(times.name, times.direction): times for times in facts.shapes}
    names = dict.fromkeys((times.name, times.name) for times in facts.shapes)
    controls = (Control("method", "Method", tuple(names)), pass_control(facts.directions))
    return picture_of("shapes", controls, lambda name, d: _times_map(by_key[name, Direction(d)]))


def _times_map(times: ShapeTimes) -> Variant:
    """Milliseconds of a method in one pass by tile and slices, with a frame around the fastest."""
    z = [[timed and ms(timed.seconds) for timed in row] for row in times.times]
    cells = [(timed.seconds, shape, number) for shape, number, timed in times.taken()]
    seconds, shape, slices = min(cells)
    trace = heat_map(
        [str(number) for number in times.slices],
        list(times.shapes),
        z,
        "tile %{y}, %{x} slices: %{z:.4~g} ms, %{customdata:.3~g} GiB",
        gap=2,
        customdata=[[timed and gib(timed.peak_bytes) for timed in row] for row in times.times],
        text=[["" if x is None else f"{x:.3g}" for x in row] for row in z],
        texttemplate="%{text}",
        colorscale=SCALE,
        reversescale=True,
        zmin=ms(seconds),
        zmax=min(_SLOW * ms(seconds), ms(max(cells)[0])),
        colorbar=colour_bar("ms"),
    )
    column, row = times.slices.index(slices), times.shapes.index(shape)
    frame = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
    layout = {
        "xaxis": axis("slices of heads", type="category", showgrid=False),
        "yaxis": axis("tile", type="category", autorange="reversed", showgrid=False),
        "shapes": [{"type": "rect", "line": {"color": PALETTE[5], "width": 3}, **frame}],
    }
    caption = (
        f"{times.name} {times.direction}: milliseconds by tile and number of slices, as one rank "
        f"expects them. The fastest here, in a frame, is {shape} with {slices} slice"
        f"{'s' if slices > 1 else ''}: {ms(seconds):.4g} ms. Tiles that take twice as long "
        "uncut are not cut."
    )
    return Variant(caption, [trace], layout)


def _scaling(facts: ReportFacts) -> Picture:
    names = {
        Scaling.STRONG: f"strong: {facts.tokens:,} tokens",
        Scaling.WEAK: f"weak: {facts.tokens / facts.ranks:,.0f} tokens a rank",
    }
    kinds = [kind for kind in Scaling if any(line.scaling is kind for line in facts.scaling)]
    controls = (
        Control("scaling", "Scaling", tuple((str(kind), names[kind]) for kind in kinds)),
        Control("measure", "Show", (("mfu", "MFU"), ("time", "time"))),
    )
    return picture_of("scaling", controls, lambda kind, shown: _lines(facts, Scaling(kind), shown))


def _lines(facts: ReportFacts, kind: Scaling, measure: str) -> Variant:
    """MFU or milliseconds by number of ranks, a line for each method."""
    order = [method.name for method in facts.methods]

    def place(line: ScalingLine) -> int:
        """The line's place in the table, so that a method looks alike in all pictures."""
        return order.index(line.name) if line.name in order else len(order)

    lines = sorted((line for line in facts.scaling if line.scaling is kind), key=place)
    scores: dict[int, list[tuple[bool, float, str]]] = {}  # by ranks; the least is the best
    for line in lines:
        for point in line.points:
            too_large = point.peak_bytes > facts.gpu_bytes
            scores.setdefault(point.ranks, []).append((too_large, point.seconds, line.name))
    ranks = sorted(scores)
    fastest = {number: min(scores[number])[-1] for number in ranks}
    usual = [name for name in USUAL if name in {line.name for line in lines}]
    shown = [*dict.fromkeys([*usual, *fastest.values(), *order])][:_NUM_SHOWN]
    data: list[dict[str, Any]] = []
    for line in lines:
        colour, symbol = style_of(place(line))
        symbols = [symbol + "-open" * (p.peak_bytes > facts.gpu_bytes) for p in line.points]
        trace = points(
            line.name,
            [p.ranks for p in line.points],
            [round(p.mfu_percent, 3) if measure == "mfu" else ms(p.seconds) for p in line.points],
            f"{line.name}<br>%{{customdata}}",
            {"symbol": symbols, "size": 7},
            mode="lines+markers",
            line={"color": colour, "dash": "solid" if place(line) < len(PALETTE) else "dot"},
            visible=True if line.name in shown else "legendonly",
            customdata=[
                f"{p.ranks} ranks, {p.tokens:,} tokens: {ms(p.seconds):.4g} ms, "
                f"MFU {p.mfu_percent:.1f} %, {p.peak_bytes / 2**30:.3g} GiB"
                for p in line.points
            ],
        )
        data.append(trace)
    choice = points(
        "the choice",
        [facts.ranks],
        [facts.mfu_percent if measure == "mfu" else ms(facts.seconds)],
        f"the choice: {ms(facts.seconds):.4g} ms, MFU {facts.mfu_percent:.1f} %",
        {"symbol": "star-open", "size": 15, "color": "#d55e00", "line": {"width": 2}},
    )
    data.append(choice)
    heights = [y for trace in data for y in trace["y"]]
    is_mfu = measure == "mfu"
    layout = {
        "xaxis": axis("ranks", type="log", tickvals=ranks, ticktext=[str(n) for n in ranks]),
        "yaxis": axis("MFU, %, modelled", rangemode="tozero") if is_mfu else log_axis(_MS, heights),
        "legend": _LEGEND_BELOW,
    }
    winners = "; ".join(f"{n}: {fastest[n]}" for n in ranks)
    same = "The same problem" if kind is Scaling.STRONG else "As many tokens on each rank"
    caption = (
        f"{same}, {' and '.join(facts.directions)}: as one rank sees the most promising shape of "
        "each method; the star is the choice, searched and simulated. Fastest at each number of "
        f"ranks: {winners}. A click on a name shows or hides its line."
    )
    if any(too_large for of_ranks in scores.values() for too_large, _, _ in of_ranks):
        caption += f" Open marks need more memory than {facts.gpu} has."
    if facts.options:
        caption += (
            f" Everywhere with {facts.options}: where that does not fit, a line has no point."
        )
    return Variant(caption, data, layout)


def _memory(facts: ReportFacts) -> Picture:
    limit = facts.gpu_bytes / 2**30

    def make(which: str) -> Variant:
        directions = facts.directions if which == _BOTH else (Direction(which),)
        settings = [*_settings(facts.shapes, directions)]
        data = [_marks("tiles and slices", settings, {"size": 5, "color": "#8c959f"})]
        for at, method in enumerate(facts.methods):
            passes = [method.passes[d] for d in directions]
            colour, symbol = style_of(at)
            about = "" if all(pass_.is_simulated for pass_ in passes) else ", about"
            seconds = sum(pass_.seconds for pass_ in passes)
            mark = (f"{method.name}{about}", seconds, max(pass_.peak_bytes for pass_ in passes))
            marker = {"size": 12, "color": colour, "symbol": symbol}
            data.append(_marks(method.name, [mark], marker))
        heights = [y for trace in data for y in trace["y"]]
        shapes, dashed = [], ""
        if max(heights) * 3 > limit:
            heights.append(limit)
            line = {"dash": "dash", "width": 1.5, "color": PALETTE[5]}
            ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit}
            shapes, dashed = [{"type": "line", "line": line, **ends}], " (the dashed line)"
        layout: dict[str, Any] = {
            "xaxis": log_axis(_MS, [x for trace in data for x in trace["x"]]),
            "yaxis": log_axis("GiB a rank, one sequence", heights),
            "legend": _LEGEND_BELOW,
            "shapes": shapes,
        }
        whose = "all of a model" if facts.batch == 1 else f"each of {facts.batch} sequences"
        caption = (
            f"{' and '.join(directions)}: every method at its best, and the tiles and slices of "
            f"the map above. Lower and further left is better; {facts.gpu} has {limit:g} GiB for "
            f"{whose}{dashed}."
        )
        return Variant(caption, data, layout)

    both = (_BOTH,) if len(facts.directions) > 1 else ()
    return picture_of("memory", (pass_control(facts.directions, *both),), make)


def _settings(
    shapes: Sequence[ShapeTimes], directions: Sequence[Direction]
) -> Iterator[tuple[str, float, int]]:
    """(what, seconds, bytes) of the settings that all `directions` have."""
    settings: dict[str, list[TimedShape]] = {}
    for times in shapes:
        if times.direction in directions:
            for shape, number, timed in times.taken():
                what = f"{times.name}, tile {shape}, {number} slices"
                settings.setdefault(what, []).append(timed)
    for what, every in settings.items():
        if len(every) == len(directions):
            yield what, sum(t.seconds for t in every), max(t.peak_bytes for t in every)


def _marks(
    name: str, marks: Sequence[tuple[str, float, int]], marker: dict[str, Any]
) -> dict[str, Any]:
    """Points of (what, seconds, bytes)."""
    x, y = [ms(seconds) for _, seconds, _ in marks], [gib(peak) for _, _, peak in marks]
    hover = "%{text}<br>%{x:.4~g} ms, %{y:.3~g} GiB"
    return points(name, x, y, hover, marker, text=[what for what, _, _ in marks])
