"""Slices of the heads: their sizes, their order, and what they save."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from mesh_attention import Mask, Problem, count, make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.program import AllGather, Attend, AttendBackward
from mesh_attention.plan.language.tasks import Schedule, follow_each_other
from mesh_attention.plan.methods.parts.chunks import (
    slice_sizes,
    suggested_cut,
    suggested_ring_cut,
    usual_heads,
)
from mesh_attention.plan.read.verify import verify

LONG = Problem(1 << 19, 64, 128)


def test_sizes_add_up_and_begin_and_end_small() -> None:
    for held in range(1, 70):
        for most in range(1, held + 1):
            for first in range(1, most + 1):
                sizes = slice_sizes(held, first, most)
                assert sum(sizes) == held
                assert min(sizes) >= 1
                assert max(sizes) <= most
                assert max(sizes[0], sizes[-1]) <= first or held < 3 * first
                for size, other in pairwise(sizes):  # each hides the gather of the next
                    assert other <= 2 * size + 1


def test_slices_follow_each_other() -> None:
    slices = [Schedule.parse(f"1 AG-{h}\n2 compute only C-{h}\n3 RS-{h}") for h in range(3)]
    together = follow_each_other(slices)
    assert together.text().splitlines() == [
        "1 AG-0",
        "2 AG-1 + C-0",
        "3 AG-2",
        "4 RS-0 + C-1",
        "5 RS-1 + C-2",
        "6 RS-2",
    ]
    assert follow_each_other(slices[:1]) == slices[0]


def test_what_begins_inside_a_slice_stays_there() -> None:
    first = Schedule.parse("1 AG-0\n2 AG-1 + C-0\n3 RS-0 + C-1\n4 RS-1")
    second = Schedule.parse("1 AG-2\n2 AG-3 + C-2\n3 RS-2 + C-3\n4 RS-3")
    assert [str(task) for task in follow_each_other([first, second]).order()] == [
        *("AG-0", "AG-2", "AG-1", "C-0", "RS-0", "C-1"),
        *("RS-1", "AG-3", "C-2", "RS-2", "C-3", "RS-3"),
    ]


def peaks(plan: Plan) -> list[int]:
    return [pass_count.peak_buffer_bytes for pass_count in count(plan).values()]


@pytest.mark.parametrize("causal", [False, True])
def test_slices_move_the_same_bytes_in_a_fraction_of_the_memory(causal: bool) -> None:
    problem = Problem(4096, 16, 8, num_kv_heads=8, mask=Mask(causal=causal))
    whole, sliced = (
        make_plan(problem, 4, method="mesh", tile=(2, 2), head_slices=heads)
        for heads in (None, (1, 1))
    )
    assert verify(sliced) == []
    for pass_count, other in zip(count(whole).values(), count(sliced).values(), strict=True):
        assert [r.total for r in pass_count.ranks] == [r.total for r in other.ranks]
    for small, large in zip(peaks(sliced), peaks(whole), strict=True):
        assert 4 * small < 3 * large


def test_queries_meet_keys_of_their_own_heads() -> None:
    plan = make_plan(
        Problem(96, 8, 8, num_kv_heads=4), 6, method="mesh", tile=(3, 2), head_slices=(1, 2)
    )
    for pass_ in plan.passes:
        assert pass_.setting["head_slices"] == "1+2+1"
        for program in pass_.programs:
            table = program.buffer_table()
            attentions = [
                op for op in program.operations if isinstance(op, Attend | AttendBackward)
            ]
            assert len(attentions) == 3
            for op in attentions:
                q, k = table[op.q.buffer].heads, table[op.k.buffer].heads
                assert q == (2 * k[0], 2 * k[1])


def test_the_next_slice_is_fetched_before_this_one_is_computed() -> None:
    plan = make_plan(Problem(64, 4, 8), 4, method="mesh", tile=(2, 2), head_slices=(1, 1))
    names = [op.name for op in plan.forward.programs[0].operations]
    gathers = [op.name for op in plan.forward.programs[0].operations if isinstance(op, AllGather)]
    assert gathers[:4] == ["AG-KV-0", "AG-Q-0", "AG-KV-1", "AG-Q-1"]
    for slice_ in range(3):
        assert names.index(f"AG-KV-{slice_ + 1}") < names.index(f"C-{slice_}-{slice_}")


@pytest.mark.parametrize("heads", [(0, 1), (2, 1), (1, 5), (5, 5)])
def test_impossible_slices_are_refused_with_what_is_possible(heads: tuple[int, int]) -> None:
    problem = Problem(64, 8, 8, num_kv_heads=4)
    with pytest.raises(PlanError, match=r"head_slices=.*<= largest <= 4 KV heads"):
        make_plan(problem, 4, method="mesh", head_slices=heads)


def test_with_ulysses_a_rank_holds_fewer_heads() -> None:
    problem = Problem(64, 8, 8, num_kv_heads=4)
    plan = make_plan(problem, 4, method="mesh-usp", ulysses=2, head_slices=(1, 1))
    assert plan.forward.setting["head_slices"] == "1+1"
    with pytest.raises(PlanError, match="2 KV heads that a rank holds with ulysses=2"):
        make_plan(problem, 4, method="mesh-usp", ulysses=2, head_slices=(1, 3))


def test_a_cut_is_suggested_by_size() -> None:
    assert usual_heads(LONG) == (2, 8)
    assert suggested_cut(LONG, 256, (16, 16), 1) == ((1, 1), (2, 8))
    one_head = Problem(1 << 19, 64, 128, num_kv_heads=1)
    assert suggested_cut(one_head, 256, (16, 16), 1) == ((4, 4), None)
    short = Problem(1024, 64, 128)  # too few rows to fill a GPU with a few heads
    assert suggested_cut(short, 16, (4, 4), 1) == ((1, 1), None)
    assert suggested_cut(LONG, 1, (1, 1), 1) == ((1, 1), None)  # nothing travels
    # What is exchanged is hidden too; of one head a half at a time.
    assert suggested_cut(LONG, 8, (1, 1), 8) == ((1, 1), (1, 1))
    assert suggested_cut(LONG, 256, (2, 2), 64) == ((2, 2), None)
    assert suggested_cut(short, 16, (1, 1), 16) == ((1, 1), None)
    grouped = Problem(1 << 19, 64, 128, num_kv_heads=8)
    assert suggested_cut(grouped, 64, (8, 8), 1) == ((1, 1), (1, 1))
    plan = make_plan(LONG, 64, method="mesh")
    assert plan.forward.setting["head_slices"].startswith("2+3+5")


def test_a_ring_is_cut_where_its_exchange_leaves_the_node_and_its_keys_stay_whole() -> None:
    assert suggested_ring_cut(LONG, 64, 8, 8) == ((1, 1), None)
    assert suggested_ring_cut(LONG, 64, 8, 4) == ((1, 1), (1, 1))
    assert suggested_ring_cut(LONG, 256, 64, 8) == ((2, 1), None)
    assert suggested_ring_cut(LONG, 64, 64, 8) == ((2, 2), None)  # one unit: no ring is left


@pytest.mark.parametrize(("rows", "heads"), [(8448, (1, 4)), (8447, None), (33792, (1, 1))])
def test_heads_are_cut_where_two_slices_fill_a_gpu(
    rows: int, heads: tuple[int, int] | None
) -> None:
    """Of eight heads four fill it with 8448 rows: 2 * 132 multiprocessors of 128 rows."""
    assert suggested_cut(Problem(4 * rows, 8, 128), 4, (1, 4), 1) == ((1, 1), heads)


@pytest.mark.parametrize(("rows", "chunks"), [(4095, 1), (8192, 2), (16383, 3), (65536, 4)])
def test_rows_of_one_head_are_cut_into_chunks_of_4096_or_more_and_no_more_than_four(
    rows: int, chunks: int
) -> None:
    problem = Problem(4 * rows, 8, 128, num_kv_heads=1)
    assert suggested_cut(problem, 4, (1, 4), 1) == ((chunks, 4 if rows > 4095 else 3), None)


@pytest.mark.parametrize("name", ["chunks", "backward_chunks"])
def test_where_a_cut_is_given_nothing_is_chosen(name: str) -> None:
    options: dict[str, Any] = {name: (2, 2)}
    plan = make_plan(LONG, 64, method="mesh", **options)
    assert plan.backward.setting["chunks"] == "2x2"
    assert plan.forward.setting["chunks"] == ("2x2" if name == "chunks" else "1x1")
    for pass_ in plan.passes:
        assert "head_slices" not in pass_.setting
    with_slices = make_plan(LONG, 64, method="mesh", head_slices=(64, 64))
    assert {pass_.setting["chunks"] for pass_ in with_slices.passes} == {"1x1"}


def test_a_chosen_cut_keeps_to_a_cap_by_smaller_slices() -> None:
    problem = Problem(1 << 15, 32, 64)
    free = make_plan(problem, 4, method="mesh", tile=(2, 2))
    largest = max(peaks(free))
    for share in (2, 3):
        plan = make_plan(problem, 4, method="mesh", tile=(2, 2), max_memory_bytes=largest // share)
        assert max(peaks(plan)) <= largest // share
        assert verify(plan) == []
        assert {pass_.setting["scheduler"] for pass_ in plan.passes} == {"greedy"}
    tight = peaks(make_plan(problem, 4, method="mesh", tile=(2, 2), head_slices=(1, 1)))
    under = make_plan(problem, 4, method="mesh", tile=(2, 2), max_memory_bytes=max(tight) * 9 // 10)
    assert {pass_.setting["scheduler"] for pass_ in under.passes} == {"capped"}
    assert max(peaks(under)) <= max(tight) * 9 // 10
    with pytest.raises(PlanError, match="smallest cap"):
        make_plan(problem, 4, method="mesh", tile=(2, 2), max_memory_bytes=1 << 20)


def test_the_option_that_is_wrong_is_named() -> None:
    with pytest.raises(PlanError, match="backward_head_slices=1x9"):
        make_plan(Problem(64, 8, 8), 4, method="mesh", backward_head_slices=(1, 9))
