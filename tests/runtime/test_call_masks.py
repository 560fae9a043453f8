"""What a kernel is told of the rows of a buffer, from a few numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mesh_attention import Mask, Problem
from mesh_attention.kernels import RowRange
from mesh_attention.kernels.visibility import dense_mask, interval_ends
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attention, CallKind, whole_call
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.runs import Run
from mesh_attention.runtime.execute.call_masks import _runs, masks_of, row_range
from support.cases import Case
from support.targets import SLOW_AND_ANY_MASK, with_calls

CPU = torch.device("cpu")
RANKS, SLOTS = 8, 6
TOKENS = RANKS * SLOTS
MASKS = {
    "documents": Mask(causal=True, documents=(0, 5, 6, 20, 41, TOKENS)),
    "window": Mask(causal=True, window=(7, 0)),
    "causal": Mask(causal=True),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_a_chunk_of_all_ranks_is_one_run_and_seen_as_one_by_one(kind: str, mask: Mask) -> None:
    layout = Layout(LayoutKind(kind), TOKENS, RANKS)
    chunk = tuple((rank * SLOTS, rank * SLOTS + SLOTS // 2) for rank in range(RANKS))
    runs = _runs(layout, chunk)
    one_by_one = tuple(run for span in chunk for run in layout.runs(*span))
    assert len(one_by_one) == RANKS
    assert len(runs) == 1  # a zigzag's first chunks lie in order too
    rows = Problem(TOKENS, 1, 8, mask=mask).rows
    queries = (Run(0, TOKENS),)
    message, looked = (row_range(rows, queries, keys, CPU) for keys in (runs, one_by_one))
    for name in ("lo", "hi", "key_position"):
        assert torch.equal(getattr(message, name), getattr(looked, name))
    assert message.ascending
    assert looked.ascending
    ends = interval_ends(message, CPU)
    row = torch.arange(len(message.key_position))
    edges = [torch.zeros(TOKENS, dtype=torch.int32), *ends]
    seen = sum(
        ((row >= a[:, None]) & (row < b[:, None])).int()
        for at, (a, b) in enumerate(pairwise(edges))
        if at % 2 == 0
    )
    expected = dense_mask(message, TOKENS, len(row), CPU)
    assert expected is not None
    assert torch.equal(seen, expected.int())


def test_rows_that_turn_back_or_are_padding_are_not_called_ascending() -> None:
    rows = Problem(10, 1, 8, mask=Mask(causal=True)).rows
    queries = (Run(0, 10),)
    assert row_range(rows, queries, (Run(0, 3), Run(5, 5)), CPU).ascending
    assert not row_range(rows, queries, (Run(5, 5), Run(0, 3)), CPU).ascending
    assert not row_range(rows, queries, (Run(5, 6),), CPU).ascending


def test_the_masks_of_a_program_are_made_once_for_the_same_rows() -> None:
    plan = Case(4, 64, 64, heads=(4, 4), mask=Mask(causal=True), dtype=torch.float32).plan()
    program = plan.program(1, Direction.FORWARD)
    program, chosen = with_calls(program, plan, Direction.FORWARD, SLOW_AND_ANY_MASK)
    assert chosen.cut == 0
    assert f"{chosen.whole} of {chosen.whole} attentions in one call" in str(chosen)
    table = program.buffer_table()
    by_rows: dict[tuple[object, ...], object] = {}
    for at, (mask,) in masks_of(plan, program, CPU, {}).items():
        op = program.operations[at]
        assert isinstance(op, Attention)
        assert op.calls == (whole_call(op, CallKind.RANGE).by("any_mask"),)
        rows = tuple(p.spans(table[p.buffer]) for p in (op.q, op.k))
        assert by_rows.setdefault(rows, mask) is mask


def test_without_a_mask_all_calls_of_a_size_share_one_wherever_their_rows_lie() -> None:
    """What kernels make of a mask can take megabytes, and is not in the count of a plan."""
    case = Case(4, 64, 64, mask=Mask(), dtype=torch.float32, options={"chunks": (2, 2)})
    plan = case.plan()
    for direction in Direction:
        program = plan.program(2, direction)
        program, _ = with_calls(program, plan, direction, SLOW_AND_ANY_MASK)
        masks = [mask for (mask,) in masks_of(plan, program, CPU, {}).values()]
        by_size = {(len(m.lo), len(m.key_position)): m for m in masks if isinstance(m, RowRange)}
        assert len(masks) > len(by_size)
        assert {id(mask) for mask in masks} == {id(mask) for mask in by_size.values()}
        for mask in by_size.values():
            assert not mask.lo.any()
            assert int(mask.hi.min()) > int(mask.key_position.max())
            assert mask.ascending


def test_padded_keys_are_at_no_position() -> None:
    plan = Case(4, 61, 61, mask=Mask(), dtype=torch.float32).plan()
    program = plan.program(3, Direction.FORWARD)
    program, _ = with_calls(program, plan, Direction.FORWARD, SLOW_AND_ANY_MASK)
    masks = [mask for (mask,) in masks_of(plan, program, CPU, {}).values()]
    lowest = [int(mask.key_position.min()) for mask in masks if isinstance(mask, RowRange)]
    assert min(lowest) == -1
