"""Who computes which tile of the chosen plan, a head at a time, and in which node and groups.

A rank's work is a box of heads x queries x keys. Where ranks exchange tokens for heads, several of
them share every cell of the matrix but none shares a head: so the matrix is that of one head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mesh_attention.plan.language.computed_pairs import heads_of
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Attention
from mesh_attention.plan.read.draw import computed_cells

MOST_PARTITIONS = 64  # of more, only every second, or fourth, ... is shown
MOST_HEADS = 4  # of head groups, one head each


@dataclass(frozen=True, slots=True)
class HeadMatrix:
    """`ranks[i][j]` computes Q partition i against KV partition j of those shown, for this query
    head; None where the mask shows nothing."""

    direction: Direction
    head: int
    ranks: tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, slots=True)
class AssignmentFacts:
    """By rank: its node, and for each pass and kind of group (such as Q or KV) the number of the
    group that it is in. Kinds with one group only are left out. `num_head_groups` is the larger
    of the passes'; `heads` are of the first of them."""

    partitions: tuple[int, ...]  # that are shown, evenly spaced
    heads: tuple[int, ...]
    num_head_groups: int
    matrices: tuple[HeadMatrix, ...]
    nodes: tuple[int, ...]
    groups: dict[Direction, dict[str, tuple[int, ...]]]

    def matrix(self, direction: Direction, head: int) -> HeadMatrix:
        return next(m for m in self.matrices if (m.direction, m.head) == (direction, head))


def assignment_facts(plan: Plan) -> AssignmentFacts:
    first_heads = {one.direction: _first_heads(plan, one) for one in plan.passes}
    # A head of each head group of the pass that has more of them.
    heads = max(first_heads.values(), key=len)
    shown = heads[:MOST_HEADS]
    step = -(-plan.num_ranks // MOST_PARTITIONS)
    return AssignmentFacts(
        tuple(range(0, plan.num_ranks, step)),
        shown,
        len(heads),
        tuple(_matrix(plan, one, head, step) for one in plan.passes for head in shown),
        tuple(plan.node_of(rank) for rank in range(plan.num_ranks)),
        {one.direction: _groups(plan, one) for one in plan.passes},
    )


def _first_heads(plan: Plan, one: Pass) -> tuple[int, ...]:
    """The first query head of each head group: of heads that the same ranks compute."""
    ranks_of: list[list[int]] = [[] for _ in range(plan.problem.num_heads)]
    for program in one.programs:
        table = program.buffer_table()
        mine = {
            head
            for op in program.operations
            if isinstance(op, Attention)
            for head in heads_of(op, table[op.q.buffer])
        }
        for head in mine:
            ranks_of[head].append(program.rank)
    first: dict[tuple[int, ...], int] = {}
    for head, ranks in enumerate(ranks_of):
        first.setdefault(tuple(ranks), head)
    return tuple(first.values())


def _matrix(plan: Plan, one: Pass, head: int, step: int) -> HeadMatrix:
    cells = computed_cells(plan, one, head=head).to_json()[::step]
    rows = tuple(tuple(c[0] if isinstance(c, list) else c for c in row[::step]) for row in cells)
    return HeadMatrix(one.direction, head, rows)


def _groups(plan: Plan, one: Pass) -> dict[str, tuple[int, ...]]:
    kinds: dict[str, list[tuple[int, ...]]] = {}
    for name, ranks in one.groups.items():
        letters = re.match(r"[^0-9]*", name)
        kinds.setdefault(letters[0] if letters else "", []).append(ranks)
    found = {}
    for kind, groups in kinds.items():
        number = {rank: at for at, ranks in enumerate(groups) for rank in ranks}
        if len(groups) > 1 and len(number) == plan.num_ranks:
            found[kind] = tuple(number[rank] for rank in range(plan.num_ranks))
    return found
