"""Causal work of every rank, read from its kernel calls (algorithm.md, section 7)."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attend, AttendBackward, Call, CallKind, Program
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.methods.parts.assignment import factorisations
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from support.listed import stretches_for

BLOCK = 3


def causal_plan(
    n: int,
    tile: tuple[int, int],
    *,
    tokens: int,
    layout: LayoutKind = LayoutKind.ZIGZAG,
    chunks: tuple[int, int] = (1, 1),
    direction: Direction = Direction.FORWARD,
) -> Plan:
    problem = Problem(tokens, num_heads=1, head_dim=4, mask=Mask(causal=True))
    stretches = stretches_for(layout, Random(n), tokens, n)
    setting = MeshSetting(tile=tile, layout=layout, chunks=chunks, stretches=stretches)
    return box_plan(problem, n, setting, directions=(direction,))


def calls_of(program: Program) -> list[Call]:
    attends = (op for op in program.operations if isinstance(op, Attend | AttendBackward))
    return [call for op in attends for call in op.calls]


def zigzag_pairs(call: Call) -> int:
    """Zigzag needs no row ranges, so the sizes of a call say how many pairs it computes."""
    height, width = call.q_stop - call.q_start, call.k_stop - call.k_start
    assert call.kind is not CallKind.RANGE
    return height * width if call.kind is CallKind.FULL else height * (height + 1) // 2


def work(plan: Plan, program: Program) -> int:
    """Visible pairs inside a rank's calls, whatever their kind, found by position."""
    table, total = program.buffer_table(), 0
    for op in program.operations:
        if isinstance(op, Attend):
            q = plan.q_layout.positions_of(op.q.spans(table[op.q.buffer]))
            k = plan.kv_layout.positions_of(op.k.spans(table[op.k.buffer]))
            for call in op.calls:
                keys = np.sort(k[call.k_start : call.k_stop])
                (lo,), (hi,) = plan.problem.rows.intervals(q[call.q_start : call.q_stop])
                total += int((np.searchsorted(keys, hi) - np.searchsorted(keys, lo)).sum())
    return total


@pytest.mark.parametrize(
    "n",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n > 20 and n not in (24, 31, 36, 64)))
        for n in range(1, 65)
    ],
)
def test_zigzag_gives_every_rank_2ab_block_pairs_of_causal_work_in_at_most_7_calls(n: int) -> None:
    """Two half diagonal blocks count as one block-pair, up to the B pairs on the diagonal."""
    for tile in factorisations(n):
        for program in causal_plan(n, tile, tokens=2 * n * BLOCK).forward.programs:
            calls = calls_of(program)
            assert sum(map(zigzag_pairs, calls)) == 2 * n * BLOCK**2 + BLOCK
            assert len(calls) <= 7
            squares = Counter(call.kind for call in calls)[CallKind.CAUSAL]
            assert squares == (2 if n > 1 else 1)  # one rank holds the whole square


@pytest.mark.parametrize("n", [8, 12])
@pytest.mark.parametrize("direction", Direction)
def test_zigzag_work_is_exactly_equal_when_chunked_too(n: int, direction: Direction) -> None:
    tokens = 2 * n * 12
    for tile in factorisations(n):
        for chunks in ((2, 2), (4, 2), (3, 3)):
            plan = causal_plan(n, tile, tokens=tokens, chunks=chunks, direction=direction)
            sums = {sum(map(zigzag_pairs, calls_of(p))) for p in plan.passes[0].programs}
            assert sums == {tokens * (tokens + 1) // (2 * n)}


@pytest.mark.parametrize("n", [4, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_striped_causal_work_is_within_5_percent_of_the_mean_on_every_rank(n: int) -> None:
    for tile in factorisations(n):
        plan = causal_plan(n, tile, tokens=64 * n, layout=LayoutKind.STRIPED)
        done = [work(plan, program) for program in plan.forward.programs]
        assert max(done) * n <= 1.05 * sum(done)


def test_contiguous_causal_work_is_uneven() -> None:
    plan = causal_plan(16, (4, 4), tokens=64 * 16, layout=LayoutKind.CONTIGUOUS)
    done = [work(plan, program) for program in plan.forward.programs]
    assert max(done) * 16 > 1.7 * sum(done)


@pytest.mark.parametrize("layout", LayoutKind)
def test_the_work_of_all_ranks_together_is_every_causal_pair_once(layout: LayoutKind) -> None:
    for tokens in (96, 101):
        for tile in factorisations(12):
            plan = causal_plan(12, tile, tokens=tokens, layout=layout, chunks=(2, 2))
            done = sum(work(plan, program) for program in plan.forward.programs)
            assert done == tokens * (tokens + 1) // 2
