"""Chunks that have as much of both halves of a zigzag."""

from __future__ import annotations

from typing import Any

import pytest
from exchanged_plans import exchanged_plan

from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.program import Attention
from mesh_attention.plan.methods.parts.chunks import chunk_slots
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify

# Ranks, Ulysses degree, tile, chunks, heads and KV heads.
SHAPES = [
    (4, 2, (1, 2), (2, 2), 2, 2),
    (8, 2, (2, 2), (4, 4), 2, 2),
    (8, 4, (1, 2), (1, 3), 4, 4),
    (12, 2, (3, 2), (3, 2), 4, 2),
    (16, 4, (2, 2), (2, 4), 8, 2),
    (6, 2, (1, 3), (2, 2), 2, 2),
]


def plan_of(*shape: Any, **options: Any) -> Plan:
    return exchanged_plan(*shape, **{"even_chunks": True, **options})


@pytest.mark.parametrize("halves", [(0, 8, 16), (0, 7, 14), (0, 3, 6), (0, 1, 2), (0, 9)])
@pytest.mark.parametrize("count", range(1, 6))
def test_every_slot_is_in_one_chunk(halves: tuple[int, ...], count: int) -> None:
    chunks = chunk_slots(halves, count, even=True)
    slots = [slot for chunk in chunks for a, b in chunk for slot in range(a, b)]
    assert sorted(slots) == list(range(halves[-1]))
    if len(halves) == 3:
        assert len(chunks) == min(count, halves[1])
        for (a, b), (c, d) in chunks:
            assert (a, b) == (halves[-1] - d, halves[-1] - c)


@pytest.mark.parametrize("shape", SHAPES)
def test_programs_in_even_chunks_are_proven(shape: tuple[Any, ...]) -> None:
    plan = plan_of(*shape)
    assert all(pass_.setting["even_chunks"] == "on" for pass_ in plan.passes)
    assert verify(plan) == []


def test_each_attention_is_as_much_work_on_all_ranks() -> None:
    def most_over_least(*, even: bool) -> float:
        plan = plan_of(8, 2, (1, 4), (4, 4), 2, 2, even_chunks=even, one_call=False)
        work: dict[str, list[int]] = {}
        for program in plan.forward.programs:
            for op in program.operations:
                if isinstance(op, Attention):
                    work.setdefault(op.name, []).append(_pairs(plan, program.buffer_table(), op))
        assert sum(map(sum, work.values())) == _all_pairs(plan)
        return max(max(pairs) / max(1, min(pairs)) for pairs in work.values())

    assert most_over_least(even=True) < 1.3
    assert most_over_least(even=False) > 3


def _pairs(plan: Plan, table: dict[str, Any], op: Attention) -> int:
    """That an attention sees, by the positions of its rows."""
    sides = []
    for piece, layout in ((op.q, plan.q_layout), (op.k, plan.kv_layout)):
        places = [p for a, b in table[piece.buffer].rows for p in range(a, b)]
        runs = [layout.runs(p, p + 1)[0].start for p in places[piece.start : piece.stop]]
        sides.append(runs)
    heads = op.q.num_heads(table[op.q.buffer])
    return heads * sum(k <= q for q in sides[0] for k in sides[1])


def _all_pairs(plan: Plan) -> int:
    tokens = plan.problem.q_tokens
    return plan.problem.num_heads * tokens * (tokens + 1) // 2


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "contiguous"},
        {"layout": "striped"},
        {"layout": "contiguous", "chunks": (1, 1)},
        {"ulysses": 1, "tile": (2, 4)},
        {"relayout": True},
    ],
)
def test_other_layouts_and_rows_that_are_not_exchanged_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="even_chunks=True is for a zigzag that ranks exchange"):
        plan_of(8, 2, **{"tile": (2, 2), "chunks": (2, 2), "heads": 2, "kv_heads": 2, **options})


@pytest.mark.parametrize(
    ("chunks", "heads", "kv_heads", "tokens"),
    [
        ((1, 1), 2, 2, 256),  # a whole has both halves
        ((2, 1), 4, 1, 256),  # queries of one KV head are cut by heads, and each part has all rows
        ((4, 4), 2, 2, 5),  # fewer rows than chunks
        ((4, 4), 2, 2, 37),
    ],
)
def test_what_has_all_rows_is_even_and_short_batches_have_fewer_chunks(
    chunks: tuple[int, int], heads: int, kv_heads: int, tokens: int
) -> None:
    problem = Problem(tokens, heads, 4, num_kv_heads=kv_heads, mask=Mask(causal=True))
    options: dict[str, Any] = {"ulysses": 2, "tile": (2, 2), "chunks": chunks}
    plan = make_plan(problem, 8, method="mesh-usp", even_chunks=True, **options)
    assert verify(plan) == []


@pytest.mark.parametrize("value", [2, "maybe"])
def test_it_is_on_or_off(value: Any) -> None:
    with pytest.raises(PlanError, match="even_chunks"):
        plan_of(*SHAPES[0], even_chunks=value)
