"""Tokens exchanged for heads portion by portion: what travels, when, and in how much memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from mesh_attention import Mask, Problem, count, make_plan
from mesh_attention.cost import simulate
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.program import AllToAll, Attend
from mesh_attention.plan.language.text import parse_plan, plan_text
from mesh_attention.plan.read.verify import verify
from support.sample import sample

Options = dict[str, Any]
WHOLE: Options = {"chunks": (1, 1)}
SLICED: Options = {"head_slices": (1, 1)}
# Ranks, heads, KV heads, method, options: slices of heads; chunks of the rows of one head; of one
# KV head queries by heads, and by heads and rows; a KV head that several hold; around rings, double
# rings and tiles.
CUTS: list[tuple[int, int, int, str, dict[str, Any], dict[str, Any]]] = [
    (4, 16, 8, "ulysses", {}, {"head_slices": (1, 1)}),
    (3, 3, 3, "ulysses", {}, {"chunks": (4, 3)}),
    (4, 16, 4, "ulysses", {}, {"chunks": (4, 2)}),
    (4, 8, 2, "ulysses", {}, {"chunks": (4, 2), "backward_chunks": (1, 2)}),
    (6, 8, 8, "usp", {"ulysses": 2}, {"head_slices": (1, 2)}),
    (8, 4, 4, "usp", {"ulysses": 4, "gradients": "travel"}, {"chunks": (3, 2)}),
    (8, 8, 4, "double-ring", {"ulysses": 2, "inner": 2}, {"chunks": (2, 1), "head_slices": (1, 1)}),
    (8, 16, 4, "mesh-usp", {"ulysses": 2, "tile": (2, 2)}, {"head_slices": (1, 1)}),
    (8, 8, 2, "mesh-usp", {"ulysses": 2, "tile": (2, 2), "ranks_per_node": 4}, {"chunks": (4, 3)}),
    (4, 4, 4, "ring", {}, {"chunks": (2, 2), "head_slices": (1, 1)}),
]


@pytest.mark.parametrize(("ranks", "heads", "kv_heads", "method", "shape", "cut"), sample(CUTS, 2))
def test_portions_are_proven_and_move_the_same_bytes(
    ranks: int, heads: int, kv_heads: int, method: str, shape: dict[str, Any], cut: dict[str, Any]
) -> None:
    keep = "shards" if "backward_chunks" in cut or "backward_head_slices" in cut else "exchanged"
    for layout, causal in (("zigzag", True), ("contiguous", False), ("striped", True)):
        problem = Problem(61, heads, 8, num_kv_heads=kv_heads, mask=Mask(causal=causal))
        whole, plan = (
            make_plan(problem, ranks, method=method, layout=layout, keep=keep, **shape, **cuts)
            for cuts in (WHOLE, cut)
        )
        assert verify(plan) == []
        assert parse_plan(plan_text(plan)) == plan
        for pass_count, other in zip(count(whole).values(), count(plan).values(), strict=True):
            assert [r.total for r in pass_count.ranks] == [r.total for r in other.ranks]


def names(plan: Plan) -> list[str]:
    return [op.name for op in plan.forward.programs[0].operations]


def test_a_slice_comes_and_goes_beside_the_attention_of_others() -> None:
    plan = make_plan(Problem(64, 8, 8), 2, method="ulysses", head_slices=(1, 1))
    order = plan.forward.schedule.text().splitlines()
    assert order[:4] == ["1 EX-IN-0", "2 EX-IN-1 + C-0-0", "3 EX-IN-2", "4 RS-Q-0"]
    assert order[4:6] == ["5 EX-OUT-0 + C-1-1", "6 EX-IN-3"]
    op_names = names(plan)
    for slice_ in range(3):
        assert op_names.index(f"EX-IN-{slice_ + 1}") < op_names.index(f"C-{slice_}-{slice_}")
        assert op_names.index(f"EX-OUT-{slice_}") < op_names.index(f"C-{slice_ + 1}-{slice_ + 1}")


def test_in_a_ring_the_next_slice_comes_when_no_keys_travel() -> None:
    plan = make_plan(Problem(64, 8, 8), 4, method="usp", ulysses=2, head_slices=(2, 2))
    assert plan.forward.schedule.text().splitlines() == [
        "1 EX-IN-0",
        "2 KV-1 + C-0-0",
        "3 EX-IN-1 + C-0-1",
        "4 RS-Q-0",
        "5 KV-3",
        "6 EX-OUT-0 + C-1-2",
        "7 compute only C-1-3",
        "8 RS-Q-1",
        "9 EX-OUT-1",
    ]


def test_keys_come_before_queries_and_queries_by_chunks() -> None:
    problem = Problem(1 << 19, 8, 128, mask=Mask(causal=True))
    plan = make_plan(problem, 8, method="ulysses", chunks=(4, 1))
    op_names = names(plan)
    assert op_names.index("EX-KV-0") < op_names.index("EX-Q-0")
    for chunk in range(3):
        assert op_names.index(f"EX-Q-{chunk + 1}") < op_names.index(f"C-{chunk}-0")
        assert op_names.index(f"EX-O-{chunk}") < op_names.index("C-3-0")


def test_every_member_gives_and_gets_an_equal_part_of_every_portion() -> None:
    """Chunks of a unit's rows that few members own would keep the others' links idle."""
    for layout in ("zigzag", "contiguous", "striped"):
        plan = make_plan(
            Problem(64, 4, 8, mask=Mask(causal=True)), 4, method="ulysses", layout=layout,
            chunks=(4, 2),
        )  # fmt: skip
        for program in plan.forward.programs:
            for op in program.operations:
                if isinstance(op, AllToAll):
                    for side in (op.sends, op.receives):
                        assert len({sum(p.num_rows for p in pieces) for pieces in side}) == 1


def test_queries_of_one_kv_head_are_cut_by_heads_and_keep_all_their_rows() -> None:
    plan = make_plan(Problem(64, 16, 8, num_kv_heads=4), 4, method="ulysses", chunks=(4, 1))
    program = plan.forward.programs[1]
    table = program.buffer_table()
    attends = [op for op in program.operations if isinstance(op, Attend)]
    assert [table[op.q.buffer].heads for op in attends] == [(4, 5), (5, 6), (6, 7), (7, 8)]
    assert {op.q.num_rows for op in attends} == {64}


def test_portions_are_freed_when_they_are_done_with() -> None:
    problem = Problem(4096, 32, 8)
    cases: list[tuple[str, Options]] = [("ulysses", {}), ("usp", {"ulysses": 2})]
    for method, shape in cases:
        whole, sliced = (
            count(make_plan(problem, 4, method=method, **shape, **cut)).values()
            for cut in (WHOLE, SLICED)
        )
        for pass_count, other in zip(whole, sliced, strict=True):
            assert 2 * other.peak_buffer_bytes < pass_count.peak_buffer_bytes


def test_programs_of_one_call_are_the_same_under_every_mask() -> None:
    problem = Problem(1 << 18, 16, 64)
    options: dict[str, Any] = {"method": "ulysses", "one_call": True, "layout": "contiguous"}
    plans = [
        make_plan(replace(problem, mask=mask), 4, **options)
        for mask in (Mask(), Mask(causal=True), Mask(causal=True, documents=(0, 5, 1 << 18)))
    ]
    assert len(plans[0].forward.setting["head_slices"].split("+")) > 1
    for plan, other in pairwise(plans):
        assert [p.programs for p in plan.passes] == [p.programs for p in other.passes]


def test_exchanges_hide_behind_attention() -> None:
    """What stays open of them, by the simulator: with four slices less than half."""
    problem = Problem(1 << 17, 64, 128, mask=Mask(causal=True))
    for direction in ("forward", "backward"):
        whole, sliced = (
            simulate(make_plan(problem, 16, method="ulysses", **cut), "hgx-h100", direction)
            for cut in (WHOLE, SLICED)
        )
        assert sliced.runtime_seconds < whole.runtime_seconds
        assert 2 * sliced.exposed_communication_seconds < whole.exposed_communication_seconds


def test_uneven_shares_are_exchanged_at_once() -> None:
    problem = Problem(64, 8, 8)
    assert verify(make_plan(problem, 3, method="ulysses", **WHOLE)) == []
    with pytest.raises(
        PlanError, match=r"8 heads, and uneven.*leave 'chunks' and 'head_slices' out"
    ):
        make_plan(problem, 3, method="ulysses", head_slices=(1, 1))
