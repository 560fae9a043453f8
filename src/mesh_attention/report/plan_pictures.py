"""Pictures of plans: who computes which tile, and when each operation runs.

`page.py` draws them from the facts; nothing is computed here that the facts do not hold.
"""

from __future__ import annotations

from typing import Any

from mesh_attention.cost.pictures import COLOURS, WAIT
from mesh_attention.cost.timeline import Event, Stream
from mesh_attention.plan.language.plan import Direction
from mesh_attention.report.facts import CHOSEN, GanttFacts, ReportFacts
from mesh_attention.report.picture import (
    LEGEND,
    PALETTE,
    SCALE,
    Control,
    Picture,
    Variant,
    axis,
    ms,
    pass_control,
    picture_of,
)

_ORDINALS = {2: "second", 3: "third"}
_MOST_NUMBERED = 16  # partitions of a matrix whose cells have room for a number


def pictures_of(facts: ReportFacts) -> list[Picture]:
    return [_assignment_picture(facts), _gantt_picture(facts)]


def _assignment_picture(facts: ReportFacts) -> Picture:
    """The matrix of ranks, in colours of nodes, ranks or groups."""
    assignment = facts.assignment
    shown, heads = list(assignment.partitions), assignment.heads
    step = shown[1] if len(shown) > 1 else 1
    is_numbered = len(shown) <= _MOST_NUMBERED
    labels = {"node": "node"} if facts.nodes > 1 else {}
    labels["rank"] = "rank"
    labels |= {kind: f"{kind} group" for groups in assignment.groups.values() for kind in groups}
    part = "" if step == 1 else f", every {_ORDINALS.get(step, f'{step}th')} partition"
    num_groups = assignment.num_head_groups
    if len(heads) < num_groups:
        part += f" (a head of each of the first {len(heads)} of {num_groups} head groups)"

    def make(direction: str, colour: str, head: str) -> Variant:
        matrix = assignment.matrix(Direction(direction), int(head)).ranks
        ranks = tuple(range(len(assignment.nodes)))
        numbers = {"node": assignment.nodes, "rank": ranks}
        numbers |= assignment.groups[Direction(direction)]
        of_rank, what = numbers.get(colour, ranks), labels[colour]
        gap = int(len(shown) <= 2 * _MOST_NUMBERED)
        trace: dict[str, Any] = {
            "type": "heatmap",
            "x": shown,
            "y": shown,
            "z": [[None if r is None else of_rank[r] for r in row] for row in matrix],
            "customdata": matrix,
            "hovertemplate": "Q partition %{y}, KV partition %{x}<br>rank %{customdata}"
            f"<br>{what if colour in numbers else 'rank'} %{{z}}<extra></extra>",
            "hoverongaps": False,
            "xgap": gap,
            "ygap": gap,
            **_category_colours(max(of_rank) + 1, what),
        }
        plain: dict[str, Any] = {"constrain": "domain", "showgrid": False, "zeroline": False}
        if is_numbered:
            # Newer versions of plotly.js write the word null where there is no text.
            text = [["" if r is None else str(r) for r in row] for row in matrix]
            trace |= {"text": text, "texttemplate": "%{text}"}
            plain |= {"tick0": 0, "dtick": 1}
        by = "the rank" if colour == "rank" else f"the {what} of the rank"
        missing = "" if colour in numbers else f" There are no {colour} groups in this pass."
        caption = (
            f"{facts.chosen[Direction(direction)]} {direction}, head {head}{part}: each "
            f"cell is a Q partition against a KV partition, coloured by {by} that "
            f"computes it.{missing} Cells without colour hold nothing that the mask shows."
        )
        turned = {"autorange": "reversed", "scaleanchor": "x", "constraintoward": "top"}
        layout = {
            "xaxis": axis("KV partition", **plain),
            "yaxis": axis("Q partition", **plain, **turned),
        }
        return Variant(caption, [trace], layout)

    controls = (
        pass_control(facts.directions),
        Control("colour", "Colour by", tuple(labels.items())),
        Control("head", "Head", tuple((str(head), f"head {head}") for head in heads)),
    )
    return picture_of("assignment", controls, make)


def _category_colours(number: int, title: str) -> dict[str, Any]:
    """A few categories have a colour each, many a scale."""
    bar: dict[str, Any] = {"title": {"text": title}, "thickness": 12}
    if number > len(PALETTE):
        return {"colorscale": SCALE, "zmin": 0, "zmax": number - 1, "colorbar": bar}
    steps = [[at / number, PALETTE[i]] for i in range(number) for at in (i, i + 1)]
    bar |= {"tickvals": list(range(number))}
    return {"colorscale": steps, "zmin": -0.5, "zmax": number - 0.5, "colorbar": bar}


def _gantt_picture(facts: ReportFacts) -> Picture:
    charts = {(chart.name, chart.direction): chart for chart in facts.gantts}
    names = dict.fromkeys(chart.name for chart in facts.gantts)
    choices = tuple((name, "the chosen plan" if name == CHOSEN else name) for name in names)
    # One scale for all plans of a pass, so that lengths can be compared.
    longest = {
        d: max(c.seconds for c in facts.gantts if c.direction is d) for d in facts.directions
    }

    def make(name: str, direction: str) -> Variant:
        return _chart(charts[name, Direction(direction)], longest[Direction(direction)])

    controls = (Control("plan", "Plan", choices), pass_control(facts.directions))
    return picture_of("gantt", controls, make)


def _chart(chart: GanttFacts, longest: float) -> Variant:
    """A bar for each operation of the first ranks, in a row for each stream. `longest`: seconds at
    which the axis ends."""
    by_kind: dict[str, list[tuple[Event, float, float]]] = {}
    for event in chart.events:
        if event.stream is Stream.COMMUNICATION and event.start > event.issued:
            by_kind.setdefault(WAIT, []).append((event, event.issued, event.start))
        if event.end > event.start:
            by_kind.setdefault(event.kind, []).append((event, event.start, event.end))
    rows = [f"{rank} {stream}" for rank in range(chart.num_ranks) for stream in Stream]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": [f"{event.rank} {event.stream}" for event, _, _ in by_kind[kind]],
            "base": [ms(start) for _, start, _ in by_kind[kind]],
            "x": [ms(end - start) for _, start, end in by_kind[kind]],
            "customdata": [
                f"{event.name}: {ms(start):g} to {ms(end):g} ms"
                for event, start, end in by_kind[kind]
            ],
            "hovertemplate": f"{kind}<br>%{{customdata}}<extra></extra>",
            "text": [event.name for event, _, _ in by_kind[kind]],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "marker": {"color": colour, "line": {"width": 0.5, "color": "#888888"}},
        }
        for kind, colour in COLOURS.items()
        if kind in by_kind
    ]
    layout = {
        "barmode": "overlay",
        "bargap": 0.12,
        "uniformtext": {"minsize": 10, "mode": "hide"},  # names where bars have room for them
        "xaxis": axis("milliseconds, modelled", range=[0, ms(longest) * 1.01 or 1]),
        "yaxis": axis(
            "rank and stream",
            autorange="reversed",
            categoryorder="array",
            categoryarray=rows,
        ),
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
