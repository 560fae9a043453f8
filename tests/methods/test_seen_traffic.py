"""Only what is seen travels: bytes by `count` and at the transport, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mesh_attention import Mask, Plan, Problem, count, make_plan, verify
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import AllToAll, Communication, Merge
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.testing import run_local
from support.cases import Case

K = 1024
WINDOW = Mask(causal=True, window=(4 * K, 0))
HALO_BYTES = 4 * K * 8 * 128 * 2 * 2  # K and V of 8 heads in bf16


def plan_of(mask: Mask, ranks: int, tokens: int = 16 * K, **options: Any) -> Plan:
    """32:8 heads of 128, so many tokens a rank."""
    problem = Problem(ranks * tokens, 32, 128, num_kv_heads=8, mask=mask)
    return make_plan(problem, ranks, method="seen", **options)


def received(plan: Plan, direction: Direction) -> list[int]:
    return [rank.total.received_bytes for rank in count(plan)[direction].ranks]


@pytest.mark.parametrize(("layout", "halos"), [("contiguous", 1.5), ("zigzag", 2.5)])
def test_bytes_of_a_window_do_not_grow_with_the_ranks(layout: str, halos: float) -> None:
    few, many = (plan_of(WINDOW, ranks, layout=layout) for ranks in (8, 64))
    for direction, times in ((Direction.FORWARD, 1), (Direction.BACKWARD, 2)):
        most = max(received(many, direction))
        assert most == max(received(few, direction))
        # Backward as many rows of dK and dV come back as of K and V go.
        assert most <= times * halos * HALO_BYTES


def test_a_window_on_contiguous_shards_moves_its_halo_and_nothing_more() -> None:
    plan = plan_of(WINDOW, 8)
    assert plan.q_layout.kind is LayoutKind.CONTIGUOUS
    assert received(plan, Direction.FORWARD) == [0] + [HALO_BYTES] * 7
    assert received(plan, Direction.BACKWARD) == [HALO_BYTES] + [2 * HALO_BYTES] * 6 + [HALO_BYTES]


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(("layout", "halos"), [("contiguous", 1), ("zigzag", 2)])
def test_at_the_transport_a_window_is_a_halo_on_any_number_of_ranks(
    ranks: int, layout: str, halos: int
) -> None:
    mask = Mask(causal=True, window=(8, 0))
    options = {"method": "seen", "layout": layout}
    case = Case(ranks, 32 * ranks, 32 * ranks, mask=mask, dtype=torch.bfloat16, options=options)
    result = run_local(case.plan(), *case.tensors())
    halo_bytes = 8 * 2 * 8 * 2 * 2  # rows, KV heads, width, K and V, bf16
    for direction, times in (("forward", 1), ("backward", 2)):
        moved = [rank_traffic.total.received_bytes for rank_traffic in result.traffic[direction]]
        assert max(moved) == times * halos * halo_bytes


INSIDE = {
    "whole shards": (0, 16, 32, 48, 64),
    "of one token, and of none": (0, 1, 1, 16, 16, 30, 31, 32, 48, 63, 64, 64),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("documents", INSIDE)
def test_documents_whole_inside_a_rank_move_nothing(documents: str, causal: bool) -> None:
    mask = Mask(causal=causal, documents=INSIDE[documents])
    case = Case(4, 64, 64, mask=mask, options={"method": "seen", "layout": "contiguous"})
    plan = case.plan()
    assert verify(plan) == []
    for pass_ in plan.passes:
        assert pass_.groups == {}
        assert pass_.setting == {"tile": "1x4", "travels": "nothing"}
        operations = [op for program in pass_.programs for op in program.operations]
        assert not any(isinstance(op, Communication) for op in operations)
        assert not any(".wire" in buffer.name for p in pass_.programs for buffer in p.buffers)
    result = run_local(plan, *case.tensors())
    for ranks in result.traffic.values():
        assert all(rank.by_operation == {} for rank in ranks)


def test_all_ranks_take_part_where_one_document_crosses_but_only_its_rows_travel() -> None:
    mask = Mask(causal=True, documents=(0, 16, 30, 40, 48, 64))
    problem = Problem(64, 4, 8, num_kv_heads=2, mask=mask)
    plan = make_plan(problem, 4, method="seen", layout="contiguous")
    assert verify(plan) == []
    row_bytes = 2 * 8 * 2 * 2  # KV heads, width, K and V, bf16
    assert received(plan, Direction.FORWARD) == [0, 0, 2 * row_bytes, 0]
    assert received(plan, Direction.BACKWARD) == [0, 2 * row_bytes, 2 * row_bytes, 0]
    for pass_ in plan.passes:
        transfers = [
            {op.name for op in program.operations if isinstance(op, AllToAll)}
            for program in pass_.programs
        ]
        assert len(transfers[0]) == (1 if pass_.direction is Direction.FORWARD else 2)
        assert transfers == [transfers[0]] * 4
    # Ranks that gather nothing attend to their own rows where they lie.
    for rank, gathers in enumerate([False, False, True, False]):
        names = {buffer.name for buffer in plan.program(rank, "forward").buffers}
        assert ("k.0" in names) == gathers


def test_queries_that_see_nothing_and_keys_that_nobody_sees_cost_nothing() -> None:
    """Documents with queries and no keys, and with keys and no queries."""
    mask = Mask(documents=(0, 8, 8, 32), kv_documents=(0, 0, 20, 24))
    problem = Problem(32, 2, 8, kv_tokens=24, mask=mask)
    plan = make_plan(problem, 4, method="seen", layout="contiguous")
    assert verify(plan) == []
    program = plan.program(0, Direction.FORWARD)
    (merge,) = (op for op in program.operations if isinstance(op, Merge))
    assert (merge.name, merge.inputs) == ("C-0-0.empty", ())
    unseen = [
        merge.outputs[0]
        for merge in plan.program(0, Direction.BACKWARD).operations
        if isinstance(merge, Merge) and not merge.inputs and "grad_k" in merge.outputs[0].buffer
    ]
    assert [(piece.start, piece.stop) for piece in unseen] == [(0, 6)]


@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        (Mask(), "contiguous"),
        (Mask(causal=True, window=(9, 0)), "contiguous"),
        (Mask(causal=True, window=(9, None)), "contiguous"),
        (Mask(window=(9, 9)), "contiguous"),
        (Mask(causal=True), "zigzag"),
        (Mask(causal=True, window=(None, 0)), "zigzag"),
        (Mask(window=(9, None)), "zigzag"),
        (Mask(causal=True, documents=(0, 9, 64)), "zigzag"),
    ],
)
def test_windows_and_full_masks_lie_contiguous_unless_said_otherwise(
    mask: Mask, layout: str
) -> None:
    problem = Problem(64, 2, 8, mask=mask)
    assert make_plan(problem, 4, method="seen").kv_layout.kind == layout
    striped = make_plan(problem, 4, method="seen", layout="striped")
    assert striped.kv_layout.kind is LayoutKind.STRIPED


def test_stripes_that_would_be_thousands_of_messages_are_refused_with_those_that_are_not() -> None:
    words = "layout=striped: the keys lie in 8192 stretches.*stripe_block of at least 2, or layout"
    with pytest.raises(PlanError, match=words):
        make_plan(Problem(8192, 2, 8), 4, method="seen", layout="striped")
    for options in ({"layout": "striped", "stripe_block": 2}, {"layout": "zigzag"}):
        plan = make_plan(Problem(8192, 2, 8), 4, method="seen", **options)
        assert plan.num_ranks == 4
    rows = range(8192)
    listed = tuple(tuple((at, at + 1) for at in rows[rank::4]) for rank in range(4))
    with pytest.raises(PlanError, match=r"layout=listed.*list fewer and longer 'stretches'"):
        make_plan(Problem(8192, 2, 8), 4, method="seen", layout="listed", stretches=listed)
    # Two stretches of each rank are never too many.
    assert make_plan(Problem(20000, 2, 8), 5000, method="seen", layout="zigzag").num_ranks == 5000


def test_transfers_of_a_slice_of_heads_stand_before_the_attention_of_the_one_before() -> None:
    plan = plan_of(WINDOW, 8)
    assert plan.forward.setting["head_slices"] == "1+1+1+1+1+1+1+1"
    names = [op.name for op in plan.program(3, Direction.BACKWARD).operations]
    for part in range(7):
        assert names.index(f"AG-KV-{part + 1}") < names.index(f"C-{part}-{part}")
        assert names.index(f"RS-dKV-{part}") < names.index(f"C-{part + 1}-{part + 1}")
        assert names.index(f"C-{part + 1}-{part + 1}") < names.index(f"RS-dKV-{part}.sum")
    uncut = plan_of(WINDOW, 8, head_slices=(8, 8), backward_head_slices=(1, 4))
    assert "head_slices" not in uncut.forward.setting
    assert received(uncut, Direction.FORWARD) == received(plan, Direction.FORWARD)
    assert received(uncut, Direction.BACKWARD) == received(plan, Direction.BACKWARD)


def test_gradients_travel_in_the_callers_precision_and_are_added_in_a_wider_one() -> None:
    problem = Problem(64, 4, 8, mask=Mask(causal=True, window=(4, 0)))
    for element_bytes, wire in ((2, "grad_k.0.wire"), (4, "grad_k.0")):
        plan = make_plan(replace(problem, element_bytes=element_bytes), 4, method="seen")
        for program in plan.backward.programs[1:]:
            transfer = next(op for op in program.operations if op.name == "RS-dKV-0")
            assert isinstance(transfer, AllToAll)
            table = program.buffer_table()
            sent = {piece.buffer for pieces in transfer.sends for piece in pieces}
            assert wire in sent
            assert {table[name].precision.num_bytes(plan.problem) for name in sent} == {
                element_bytes
            }


@pytest.mark.parametrize("mask", [Mask(causal=True), WINDOW, Mask(window=(K, K))])
def test_with_a_tile_no_rank_receives_more_than_in_a_mesh_and_most_receive_less(mask: Mask) -> None:
    problem = Problem(8 * 16 * K, 32, 128, num_kv_heads=8, mask=mask)
    options: dict[str, Any] = {"tile": (2, 4), "layout": "zigzag"}
    seen, mesh = (
        count(make_plan(problem, 8, method=method, **options)) for method in ("seen", "mesh")
    )
    for direction in Direction:
        pairs = [
            (seen_rank.total.received_bytes, mesh_rank.total.received_bytes)
            for seen_rank, mesh_rank in zip(
                seen[direction].ranks, mesh[direction].ranks, strict=True
            )
        ]
        assert all(less <= all_of_it for less, all_of_it in pairs)
        assert sum(less < all_of_it for less, all_of_it in pairs) > 4


def test_queries_that_see_none_of_a_column_and_partials_of_nothing_do_not_travel() -> None:
    """Documents of two ranks on 2x2: ranks 0 and 1 share the queries of a tile row, and each
    column has keys of one of them."""
    mask = Mask(causal=True, documents=(0, 16, 32))
    problem = Problem(32, 2, 8, mask=mask)
    plan = make_plan(problem, 4, method="seen", layout="contiguous", tile=(2, 2))
    assert verify(plan) == []
    rows = {
        (source, rank): {
            piece.buffer.split(".")[0]: piece.num_rows
            for op in plan.program(rank, Direction.FORWARD).operations
            if isinstance(op, AllToAll)
            for piece in op.receives[source]
        }
        for source in range(4)
        for rank in range(4)
        if source != rank
    }
    # The queries of rank 1 see keys of rank 0, whose own see none of rank 1's.
    q, partial = {"q": 8}, {"out": 8, "lse": 8}
    expected = {(1, 0): q, (0, 1): partial, (3, 2): q, (2, 3): partial}
    assert {pair: row_counts for pair, row_counts in rows.items() if row_counts} == expected


def test_documents_whole_inside_a_rank_move_nothing_with_a_tile_either() -> None:
    mask = Mask(causal=True, documents=INSIDE["of one token, and of none"])
    problem = Problem(64, 4, 8, num_kv_heads=2, mask=mask)
    plan = make_plan(problem, 4, method="seen", layout="contiguous", tile=(2, 2))
    assert verify(plan) == []
    assert all(pass_.groups == {} for pass_ in plan.passes)
