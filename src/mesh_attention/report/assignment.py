"""Who computes which tile of the chosen plan, a head at a time, and in which node and groups.

`facts.py` asks for the facts, and `pictures.py` for the picture that is made of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Attention
from mesh_attention.plan.read.draw import computed_cells
from mesh_attention.report.picture import (
    PALETTE,
    SCALE,
    Control,
    Picture,
    Variant,
    axis,
    colour_bar,
    heat_map,
    pass_control,
    picture_of,
)

MOST_PARTITIONS = 64  # of more, only every second, or fourth, ... is shown
_MOST_NUMBERED = 16  # partitions of a matrix whose cells have room for a number
_ORDINALS = {2: "second", 3: "third"}
MOST_HEADS = 4  # a matrix is shown for a head of each of so many head groups


@dataclass(frozen=True, slots=True)
class HeadMatrix:
    """`ranks[i][j]` computes Q partition i against KV partition j of those shown, for this query
    head; None where the mask shows nothing. Where ranks exchange tokens for heads, several of them
    share a cell but none shares a head, so there is a matrix for each head."""

    direction: Direction
    head: int
    ranks: tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, slots=True)
class AssignmentFacts:
    """Matrices of the chosen plan; for each rank its node and, by pass and kind of group (such as Q
    or KV), the number of its group. Kinds with a single group are left out. `num_head_groups` is
    that of the pass that has more of them, and `heads` has a head of each of the first ones."""

    partitions: tuple[int, ...]  # that are shown, evenly spaced
    heads: tuple[int, ...]
    num_head_groups: int
    matrices: tuple[HeadMatrix, ...]
    nodes: tuple[int, ...]
    groups: dict[Direction, dict[str, tuple[int, ...]]]

    def matrix(self, direction: Direction, head: int) -> HeadMatrix:
        return next(m for m in self.matrices if (m.direction, m.head) == (direction, head))


def assignment_facts(plan: Plan) -> AssignmentFacts:
    # A head of each head group of the pass that has more of them.
    heads = max((_first_heads(plan, pass_) for pass_ in plan.passes), key=len)
    shown = heads[:MOST_HEADS]
    step = -(-plan.num_ranks // MOST_PARTITIONS)
    return AssignmentFacts(
        tuple(range(0, plan.num_ranks, step)),
        shown,
        len(heads),
        tuple(_matrix(plan, pass_, head, step) for pass_ in plan.passes for head in shown),
        tuple(plan.node_of(rank) for rank in range(plan.num_ranks)),
        {pass_.direction: _groups(plan, pass_) for pass_ in plan.passes},
    )


def _first_heads(plan: Plan, pass_: Pass) -> tuple[int, ...]:
    """The first query head of each head group, which is the heads that the same ranks compute."""
    ranks_of: list[set[int]] = [set() for _ in range(plan.problem.num_heads)]
    for program in pass_.programs:
        buffers = program.buffer_table()
        for operation in program.operations:
            if isinstance(operation, Attention):
                for head in range(*operation.q.heads_of(buffers[operation.q.buffer])):
                    ranks_of[head].add(program.rank)
    first: dict[frozenset[int], int] = {}
    for head, ranks in enumerate(ranks_of):
        first.setdefault(frozenset(ranks), head)
    return tuple(first.values())


def _matrix(plan: Plan, pass_: Pass, head: int, step: int) -> HeadMatrix:
    cells = computed_cells(plan, pass_, head=head).to_json()[::step]
    rows = tuple(tuple(c[0] if isinstance(c, list) else c for c in row[::step]) for row in cells)
    return HeadMatrix(pass_.direction, head, rows)


def _groups(plan: Plan, pass_: Pass) -> dict[str, tuple[int, ...]]:
    kinds: dict[str, list[tuple[int, ...]]] = {}
    for name, ranks in pass_.groups.items():
        kinds.setdefault(re.split("[0-9]", name)[0], []).append(ranks)
    numbers = {}
    for kind, groups in kinds.items():
        number = {rank: at for at, ranks in enumerate(groups) for rank in ranks}
        if len(groups) > 1 and len(number) == plan.num_ranks:
            numbers[kind] = tuple(number[rank] for rank in range(plan.num_ranks))
    return numbers


def assignment_picture(
    assignment: AssignmentFacts, chosen: Mapping[Direction, str], num_nodes: int
) -> Picture:
    """The matrix of ranks, in colours of nodes, ranks or groups. `chosen`: the method of each
    pass."""
    shown, heads, ranks = assignment.partitions, assignment.heads, range(len(assignment.nodes))
    step = shown[1] if len(shown) > 1 else 1
    labels = {"node": "node"} if num_nodes > 1 else {}
    labels["rank"] = "rank"
    labels |= {kind: f"{kind} group" for groups in assignment.groups.values() for kind in groups}
    part = "" if step == 1 else f", every {_ORDINALS.get(step, f'{step}th')} partition"
    if len(heads) < assignment.num_head_groups:
        groups = f"{len(heads)} of {assignment.num_head_groups} head groups"
        part += f" (a head of each of the first {groups})"
    cells: dict[str, Any] = {"constrain": "domain", "showgrid": False, "zeroline": False}
    if len(shown) <= _MOST_NUMBERED:
        cells |= {"tick0": 0, "dtick": 1}
    turned = {"autorange": "reversed", "scaleanchor": "x", "constraintoward": "top"}
    layout = {
        "xaxis": axis("KV partition", **cells),
        "yaxis": axis("Q partition", **cells, **turned),
    }

    def make(direction: str, colour: str, head: str) -> Variant:
        matrix = assignment.matrix(Direction(direction), int(head)).ranks
        numbers = {"node": assignment.nodes, "rank": ranks}
        numbers |= assignment.groups[Direction(direction)]
        of_rank, what = numbers.get(colour, ranks), labels[colour]
        trace = heat_map(
            [*shown],
            [*shown],
            [[None if r is None else of_rank[r] for r in row] for row in matrix],
            "Q partition %{y}, KV partition %{x}<br>rank %{customdata}"
            f"<br>{what if colour in numbers else 'rank'} %{{z}}",
            gap=int(len(shown) <= 2 * _MOST_NUMBERED),
            customdata=matrix,
            **_category_colours(max(of_rank) + 1, what),
        )
        if len(shown) <= _MOST_NUMBERED:
            # Newer versions of plotly.js write the word null where there is no text.
            text = [["" if r is None else str(r) for r in row] for row in matrix]
            trace |= {"text": text, "texttemplate": "%{text}"}
        by = "the rank" if colour == "rank" else f"the {what} of the rank"
        missing = "" if colour in numbers else f" There are no {colour} groups in this pass."
        caption = (
            f"{chosen[Direction(direction)]} {direction}, head {head}{part}: each "
            f"cell is a Q partition against a KV partition, coloured by {by} that "
            f"computes it.{missing} Cells without colour hold nothing that the mask shows."
        )
        return Variant(caption, [trace], layout)

    controls = (
        pass_control(chosen),
        Control("colour", "Colour by", tuple(labels.items())),
        Control("head", "Head", tuple((str(head), f"head {head}") for head in heads)),
    )
    return picture_of("assignment", controls, make)


def _category_colours(number: int, title: str) -> dict[str, Any]:
    """A few categories have a colour each, many a scale."""
    if number > len(PALETTE):
        colours = {"colorscale": SCALE, "zmin": 0, "zmax": number - 1}
        return {**colours, "colorbar": colour_bar(title)}
    steps = [[at / number, PALETTE[i]] for i in range(number) for at in (i, i + 1)]
    bar = colour_bar(title, tickvals=list(range(number)))
    return {"colorscale": steps, "zmin": -0.5, "zmax": number - 0.5, "colorbar": bar}
