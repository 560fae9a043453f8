"""Pictures that compare: tiles and slices, numbers of ranks, memory and time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mesh_attention.plan.language.plan import Direction
from mesh_attention.report.facts import ReportFacts
from mesh_attention.report.picture import (
    LEGEND,
    PALETTE,
    SCALE,
    Control,
    Picture,
    Variant,
    axis,
    log_axis,
    ms,
    pass_control,
    picture_of,
    style_of,
)
from mesh_attention.report.scaling import Scaling, ScalingLine, ScalingPoint
from mesh_attention.report.shape_times import ShapeTimes, TimedShape

_SLOW = 1.6  # times the fastest: what is slower has one colour
_NUM_SHOWN = 6  # methods whose lines are shown; the others when their name is clicked
BOTH = "both"


def shapes_picture(facts: ReportFacts) -> Picture | None:
    if not facts.shapes:
        return None
    by_key = {(one.name, one.direction): one for one in facts.shapes}
    names = dict.fromkeys(one.name for one in facts.shapes)

    def make(method: str, direction: str) -> Variant:
        return _heat_map(by_key[method, Direction(direction)])

    controls = (
        Control("method", "Method", tuple((name, name) for name in names)),
        pass_control(facts.directions),
    )
    return picture_of("shapes", controls, make)


def _heat_map(found: ShapeTimes) -> Variant:
    z = [[None if one is None else ms(one.seconds) for one in row] for row in found.times]
    best = min(
        (one.seconds, shape, number)
        for shape, row in zip(found.shapes, found.times, strict=True)
        for number, one in zip(found.slices, row, strict=True)
        if one is not None
    )
    memory = [[None if one is None else _gib(one) for one in row] for row in found.times]
    trace = {
        "type": "heatmap",
        "x": [str(number) for number in found.slices],
        "y": list(found.shapes),
        "z": z,
        "customdata": memory,
        "text": [["" if x is None else f"{x:.3g}" for x in row] for row in z],
        "texttemplate": "%{text}",
        "hovertemplate": "tile %{y}, %{x} slices: %{z:.4~g} ms, %{customdata:.3~g} GiB"
        "<extra></extra>",
        "hoverongaps": False,
        "colorscale": SCALE,
        "reversescale": True,
        "zmin": ms(best[0]),
        "zmax": min(_SLOW * ms(best[0]), max(x for row in z for x in row if x is not None)),
        "xgap": 2,
        "ygap": 2,
        "colorbar": {"title": {"text": "ms"}, "thickness": 12},
    }
    layout = {
        "xaxis": axis("slices of heads", type="category", showgrid=False),
        "yaxis": axis("tile", type="category", autorange="reversed", showgrid=False),
        "shapes": [_frame(found.slices.index(best[2]), found.shapes.index(best[1]))],
    }
    caption = (
        f"{found.name} {found.direction}: milliseconds by tile and number of slices, as one rank "
        f"expects them. The fastest here, in a frame, is {best[1]} with {best[2]} slice"
        f"{'s' if best[2] > 1 else ''}: {ms(best[0]):.4g} ms. Tiles that take twice as long "
        "uncut are not cut."
    )
    return Variant(caption, [trace], layout)


def _frame(column: int, row: int) -> dict[str, Any]:
    sides = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
    return {"type": "rect", "line": {"color": "#d55e00", "width": 3}, **sides}


def _gib(one: TimedShape) -> float:
    return round(one.peak_bytes / 2**30, 4)


def scaling_picture(facts: ReportFacts) -> Picture | None:
    kinds = [one for one in Scaling if any(line.scaling is one for line in facts.scaling)]
    if not kinds:
        return None
    names = {
        Scaling.STRONG: f"strong: {facts.tokens:,} tokens",
        Scaling.WEAK: f"weak: {facts.tokens / facts.ranks:,.0f} tokens a rank",
    }

    def make(kind: str, measure: str) -> Variant:
        lines = [line for line in facts.scaling if line.scaling == kind]
        return _lines(facts, lines, Scaling(kind), measure)

    controls = (
        Control("scaling", "Scaling", tuple((str(one), names[one]) for one in kinds)),
        Control("measure", "Show", (("mfu", "MFU"), ("time", "time"))),
    )
    return picture_of("scaling", controls, make)


def _lines(
    facts: ReportFacts, lines: Sequence[ScalingLine], kind: Scaling, measure: str
) -> Variant:
    ranks = sorted({point.ranks for line in lines for point in line.points})
    scored: dict[int, list[tuple[bool, float, str]]] = {}
    for line in lines:
        for point in line.points:
            bad = point.peak_bytes > facts.gpu_bytes
            scored.setdefault(point.ranks, []).append((bad, point.seconds, line.name))
    fastest = {number: min(found)[-1] for number, found in scored.items()}
    order = [one.name for one in facts.methods]
    winners = [*fastest.values()]
    shown = [*dict.fromkeys([*winners, *order])][:_NUM_SHOWN]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": line.name,
            "x": [point.ranks for point in line.points],
            "y": [_measured(point, measure) for point in line.points],
            "customdata": [
                f"{point.ranks} ranks, {point.tokens:,} tokens: {ms(point.seconds):.4g} ms, MFU "
                f"{point.mfu_percent:.1f} %, {point.peak_bytes / 2**30:.3g} GiB"
                for point in line.points
            ],
            "hovertemplate": f"{line.name}<br>%{{customdata}}<extra></extra>",
            "line": {"color": colour, "dash": dash},
            "marker": {
                "symbol": [
                    symbol + "-open" * (point.peak_bytes > facts.gpu_bytes) for point in line.points
                ],
                "size": 7,
            },
            "visible": True if line.name in shown else "legendonly",
        }
        for line in sorted(lines, key=lambda line: _place(facts, line.name))
        for colour, symbol, dash in [_line_style(_place(facts, line.name))]
    ]
    value = facts.mfu_percent if measure == "mfu" else ms(facts.seconds)
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "the choice",
            "x": [facts.ranks],
            "y": [value],
            "hovertemplate": f"the choice: {ms(facts.seconds):.4g} ms, MFU "
            f"{facts.mfu_percent:.1f} %<extra></extra>",
            "marker": {"symbol": "star-open", "size": 15, "color": "#d55e00", "line": {"width": 2}},
        }
    )
    y = {
        "mfu": axis("MFU, %, modelled", rangemode="tozero"),
        "time": log_axis("milliseconds, modelled", [y for trace in data for y in trace["y"]]),
    }[measure]
    layout = {
        "xaxis": axis("ranks", type="log", tickvals=ranks, ticktext=[str(n) for n in ranks]),
        "yaxis": y,
        "legend": {**LEGEND, "y": -0.25, "yanchor": "top"},
    }
    passes = " and ".join(map(str, facts.directions))
    winner = "; ".join(f"{n}: {fastest[n]}" for n in ranks)
    same = "The same problem" if kind is Scaling.STRONG else "As many tokens on each rank"
    caption = (
        f"{same}, {passes}: as one rank sees the most promising shape of each method; the star "
        f"is the choice, searched and simulated. Fastest at each number of ranks: {winner}. "
        "A click on a name shows or hides its line."
    )
    if any(bad for found in scored.values() for bad, _, _ in found):
        caption += f" Open marks need more memory than {facts.gpu} has."
    if facts.given:
        caption += f" Everywhere with {facts.given}: where that does not fit, a line has no point."
    return Variant(caption, data, layout)


def _place(facts: ReportFacts, method: str) -> int:
    """In the table, so that a method looks alike in all pictures."""
    names = [one.name for one in facts.methods]
    return names.index(method) if method in names else len(names)


def _line_style(at: int) -> tuple[str, str, str]:
    return (*style_of(at), "solid" if at < len(PALETTE) else "dot")


def _measured(point: ScalingPoint, measure: str) -> float:
    return round(point.mfu_percent, 3) if measure == "mfu" else ms(point.seconds)


def memory_picture(facts: ReportFacts) -> Picture:
    limit = facts.gpu_bytes / 2**30

    def make(which: str) -> Variant:
        wanted = facts.directions if which == BOTH else (Direction(which),)
        settings = [*_settings(facts.shapes, wanted)]
        data = [_points("tiles and slices", settings, {"size": 5, "color": "#8c959f"})]
        for at, one in enumerate(facts.methods):
            seconds = sum(one.passes[d].seconds for d in wanted)
            peak = max(one.passes[d].peak_bytes for d in wanted)
            colour, symbol = style_of(at)
            marker = {"size": 12, "color": colour, "symbol": symbol}
            about = "" if all(one.passes[d].is_simulated for d in wanted) else ", about"
            data.append(_points(one.name, [(f"{one.name}{about}", seconds, peak)], marker))
        heights = [y for trace in data for y in trace["y"]]
        if max(heights) * 3 > limit:
            heights.append(limit)
        layout: dict[str, Any] = {
            "xaxis": log_axis("milliseconds, modelled", [x for one in data for x in one["x"]]),
            "yaxis": log_axis("GiB a rank, batch 1", heights),
            "legend": {**LEGEND, "y": -0.25, "yanchor": "top"},
        }
        if limit in heights:
            line = {"dash": "dash", "width": 1.5, "color": PALETTE[5]}
            layout["shapes"] = [
                {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": line}
                | {"y0": limit, "y1": limit}
            ]
        caption = (
            f"{' and '.join(wanted)}: every method at its best, and the tiles and slices of the "
            f"map above. Lower and further left is better; {facts.gpu} has {limit:g} GiB for all "
            f"of a model{' (the dashed line)' if limit in heights else ''}."
        )
        return Variant(caption, data, layout)

    both = (BOTH,) if len(facts.directions) > 1 else ()
    return picture_of("memory", (pass_control(facts.directions, *both),), make)


def _settings(
    shapes: Iterable[ShapeTimes], wanted: Sequence[Direction]
) -> Iterable[tuple[str, float, int]]:
    """(what, seconds, bytes) of those settings that every wanted pass has."""
    found: dict[tuple[str, str, int], list[TimedShape]] = {}
    for one in shapes:
        if one.direction in wanted:
            for shape, row in zip(one.shapes, one.times, strict=True):
                for number, timed in zip(one.slices, row, strict=True):
                    if timed is not None:
                        found.setdefault((one.name, shape, number), []).append(timed)
    for (method, shape, number), timed_shapes in found.items():
        if len(timed_shapes) == len(wanted):
            seconds = sum(one.seconds for one in timed_shapes)
            peak = max(one.peak_bytes for one in timed_shapes)
            yield f"{method}, tile {shape}, {number} slices", seconds, peak


def _points(
    name: str, points: Sequence[tuple[str, float, int]], marker: dict[str, Any]
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "text": [what for what, _, _ in points],
        "x": [ms(seconds) for _, seconds, _ in points],
        "y": [round(peak / 2**30, 4) for _, _, peak in points],
        "hovertemplate": "%{text}<br>%{x:.4~g} ms, %{y:.3~g} GiB<extra></extra>",
        "marker": marker,
    }
