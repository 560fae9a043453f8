"""Who computes which tile of the chosen plan, a head at a time, and in which node and groups.

`facts.py` asks for it; the page draws it as a matrix of ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Attention
from mesh_attention.plan.read.draw import computed_cells

MOST_PARTITIONS = 64  # of more, only every second, or fourth, ... is shown
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
