"""Pictures that compare settings: tiles and slices, numbers of ranks, memory and time.

`page.py` draws them from the facts; nothing is computed here that the facts do not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import USUAL
from mesh_attention.report.estimates import Scaling, ScalingLine, ShapeTimes, TimedShape
from mesh_attention.report.facts import ReportFacts
from mesh_attention.report.picture import (
    LEGEND,
    PALETTE,
    SCALE,
    Control,
    Picture,
    Variant,
    axis,
    gib,
    log_axis,
    ms,
    pass_control,
    picture_of,
    style_of,
)

_SLOW = 1.6  # times the fastest: what is slower has one colour
_NUM_SHOWN = 6  # methods whose lines are shown; the others when their name is clicked
BOTH = "both"
_LEGEND_BELOW = {**LEGEND, "y": -0.25, "yanchor": "top"}


def pictures_of(facts: ReportFacts) -> list[Picture | None]:
    return [_shapes_picture(facts), _scaling_picture(facts), _memory_picture(facts)]


def _shapes_picture(facts: ReportFacts) -> Picture | None:
    if not facts.shapes:
        return None
    by_key = {(times.name, times.direction): times for times in facts.shapes}
    names = dict.fromkeys(times.name for times in facts.shapes)
    controls = (
        Control("method", "Method", tuple((name, name) for name in names)),
        pass_control(facts.directions),
    )
    return picture_of("shapes", controls, lambda name, d: _heat_map(by_key[name, Direction(d)]))


def _heat_map(times: ShapeTimes) -> Variant:
    """Milliseconds of a method in one pass by tile and slices, with a frame around the fastest."""
    z = [[timed and ms(timed.seconds) for timed in row] for row in times.times]
    cells = [(timed.seconds, shape, number) for shape, number, timed in times.taken()]
    seconds, shape, slices = min(cells)
    trace = {
        "type": "heatmap",
        "x": [str(number) for number in times.slices],
        "y": list(times.shapes),
        "z": z,
        "customdata": [[timed and gib(timed.peak_bytes) for timed in row] for row in times.times],
        "text": [["" if x is None else f"{x:.3g}" for x in row] for row in z],
        "texttemplate": "%{text}",
        "hovertemplate": "tile %{y}, %{x} slices: %{z:.4~g} ms, %{customdata:.3~g} GiB"
        "<extra></extra>",
        "hoverongaps": False,
        "colorscale": SCALE,
        "reversescale": True,
        "zmin": ms(seconds),
        "zmax": min(_SLOW * ms(seconds), ms(max(cells)[0])),
        "xgap": 2,
        "ygap": 2,
        "colorbar": {"title": {"text": "ms"}, "thickness": 12},
    }
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


def _scaling_picture(facts: ReportFacts) -> Picture | None:
    kinds = [kind for kind in Scaling if any(line.scaling is kind for line in facts.scaling)]
    if not kinds:
        return None
    names = {
        Scaling.STRONG: f"strong: {facts.tokens:,} tokens",
        Scaling.WEAK: f"weak: {facts.tokens / facts.ranks:,.0f} tokens a rank",
    }
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

    def shown_value(seconds: float, mfu_percent: float) -> float:
        return round(mfu_percent, 3) if measure == "mfu" else ms(seconds)

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
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": line.name,
                "x": [point.ranks for point in line.points],
                "y": [shown_value(point.seconds, point.mfu_percent) for point in line.points],
                "customdata": [
                    f"{point.ranks} ranks, {point.tokens:,} tokens: {ms(point.seconds):.4g} ms, "
                    f"MFU {point.mfu_percent:.1f} %, {point.peak_bytes / 2**30:.3g} GiB"
                    for point in line.points
                ],
                "hovertemplate": f"{line.name}<br>%{{customdata}}<extra></extra>",
                "line": {"color": colour, "dash": "solid" if place(line) < len(PALETTE) else "dot"},
                "marker": {"symbol": symbols, "size": 7},
                "visible": True if line.name in shown else "legendonly",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "the choice",
            "x": [facts.ranks],
            "y": [facts.mfu_percent if measure == "mfu" else ms(facts.seconds)],
            "hovertemplate": f"the choice: {ms(facts.seconds):.4g} ms, MFU "
            f"{facts.mfu_percent:.1f} %<extra></extra>",
            "marker": {"symbol": "star-open", "size": 15, "color": "#d55e00", "line": {"width": 2}},
        }
    )
    y = axis("MFU, %, modelled", rangemode="tozero")
    if measure == "time":
        y = log_axis("milliseconds, modelled", [y for trace in data for y in trace["y"]])
    layout = {
        "xaxis": axis("ranks", type="log", tickvals=ranks, ticktext=[str(n) for n in ranks]),
        "yaxis": y,
        "legend": _LEGEND_BELOW,
    }
    passes = " and ".join(map(str, facts.directions))
    winners = "; ".join(f"{n}: {fastest[n]}" for n in ranks)
    same = "The same problem" if kind is Scaling.STRONG else "As many tokens on each rank"
    caption = (
        f"{same}, {passes}: as one rank sees the most promising shape of each method; the star "
        f"is the choice, searched and simulated. Fastest at each number of ranks: {winners}. "
        "A click on a name shows or hides its line."
    )
    if any(too_large for of_ranks in scores.values() for too_large, _, _ in of_ranks):
        caption += f" Open marks need more memory than {facts.gpu} has."
    if facts.options:
        caption += (
            f" Everywhere with {facts.options}: where that does not fit, a line has no point."
        )
    return Variant(caption, data, layout)


def _memory_picture(facts: ReportFacts) -> Picture:
    limit = facts.gpu_bytes / 2**30

    def make(which: str) -> Variant:
        directions = facts.directions if which == BOTH else (Direction(which),)
        settings = [*_settings(facts.shapes, directions)]
        data = [_points("tiles and slices", settings, {"size": 5, "color": "#8c959f"})]
        for at, method in enumerate(facts.methods):
            passes = [method.passes[d] for d in directions]
            seconds = sum(pass_.seconds for pass_ in passes)
            peak = max(pass_.peak_bytes for pass_ in passes)
            colour, symbol = style_of(at)
            marker = {"size": 12, "color": colour, "symbol": symbol}
            about = "" if all(pass_.is_simulated for pass_ in passes) else ", about"
            data.append(_points(method.name, [(f"{method.name}{about}", seconds, peak)], marker))
        heights = [y for trace in data for y in trace["y"]]
        shapes, dashed = [], ""
        if max(heights) * 3 > limit:
            heights.append(limit)
            line = {"dash": "dash", "width": 1.5, "color": PALETTE[5]}
            ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit}
            shapes, dashed = [{"type": "line", "line": line, **ends}], " (the dashed line)"
        layout: dict[str, Any] = {
            "xaxis": log_axis("milliseconds, modelled", [x for trace in data for x in trace["x"]]),
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

    both = (BOTH,) if len(facts.directions) > 1 else ()
    return picture_of("memory", (pass_control(facts.directions, *both),), make)


def _settings(
    shapes: Iterable[ShapeTimes], directions: Sequence[Direction]
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


def _points(
    name: str, points: Sequence[tuple[str, float, int]], marker: dict[str, Any]
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "text": [what for what, _, _ in points],
        "x": [ms(seconds) for _, seconds, _ in points],
        "y": [gib(peak) for _, _, peak in points],
        "hovertemplate": "%{text}<br>%{x:.4~g} ms, %{y:.3~g} GiB<extra></extra>",
        "marker": marker,
    }
