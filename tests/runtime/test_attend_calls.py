"""One kernel call for an attention: whatever the mask, the layout and the order of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mesh_attention import Mask, Problem, make_plan, register_kernel, unregister_kernel
from mesh_attention.kernels import BackwardInputs, Block, Kernel, MaskKind, Request, RowRange
from mesh_attention.kernels.cudnn_ranges import CudnnRanges
from mesh_attention.kernels.flash_attn import FlashAttn3
from mesh_attention.kernels.reference import Reference
from mesh_attention.plan.plan import Direction
from mesh_attention.runtime.attend_calls import FasterCalls, faster_calls, whole_call
from mesh_attention.runtime.call_masks import masks_of
from mesh_attention.testing import run_local
from support.cases import Case

CPU = torch.device("cpu")


class AnyMask(Reference):
    """Takes row ranges only, and remembers what it was asked."""

    name = "any_mask"

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.softcaps: set[float] = set()

    def refuses(self, request: Request) -> str | None:
        return None if request.mask is MaskKind.RANGE else "takes row ranges"

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        assert isinstance(block.mask, RowRange)
        self.seen.append((block.q.shape[1], block.k.shape[1]))
        self.softcaps.add(block.softcap)
        return super().forward(block)

    def backward(self, block: Block, given: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(block.mask, RowRange)
        self.seen.append((block.q.shape[1], block.k.shape[1]))
        return super().backward(block, given)


@pytest.fixture
def any_mask() -> Iterator[AnyMask]:
    kernel = AnyMask()
    register_kernel(kernel)
    yield kernel
    unregister_kernel("any_mask")


MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(causal=True, window=(7, None)),
    Mask(window=(5, 3)),
    Mask(causal=True, prefix=9),
    Mask(causal=True, documents=(0, 1, 1, 20, 61, 83)),
    Mask(documents=(0, 40, 83)),
]


@pytest.mark.parametrize("mask", MASKS, ids=Mask.describe)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_one_call_for_each_attention_is_exact(any_mask: AnyMask, layout: str, mask: Mask) -> None:
    """83 tokens on 6 ranks: the last shards hold padding."""
    case = Case(6, 83, 83, mask=mask, dtype=torch.float64, options={"layout": layout})
    plan, tensors = case.plan(), case.tensors()
    found = run_local(plan, *tensors)
    truth = run_local(plan, *tensors, kernel="reference")
    for name in ("out", "lse", "grad_q", "grad_k", "grad_v"):
        torch.testing.assert_close(getattr(found, name), getattr(truth, name))
    cut_otherwise = sum(
        len(op.calls) > 1
        for direction in Direction
        for program in plan.direction(direction).programs
        for op in program.operations
        if hasattr(op, "calls")
    )
    assert len(any_mask.seen) >= max(cut_otherwise, 1)


def test_the_masks_of_a_program_are_made_once_for_the_same_rows(any_mask: AnyMask) -> None:
    plan = Case(4, 64, 64, heads=(4, 4), mask=Mask(causal=True), dtype=torch.float32).plan()
    program = plan.program(1, Direction.FORWARD)
    kernels = {MaskKind.RANGE: any_mask, MaskKind.FULL: Reference(), MaskKind.CAUSAL: Reference()}
    chosen = faster_calls(program, plan, kernels, Direction.FORWARD)
    assert chosen.cut == 0
    assert f"{chosen.whole} of {chosen.whole} attentions in one call" in str(chosen)
    masks = masks_of(plan, chosen.program, kernels, CPU, {})
    by_rows: dict[tuple[object, ...], object] = {}
    for at, (mask,) in masks.items():
        op = chosen.program.operations[at]
        assert op.calls == (whole_call(op),)  # type: ignore[union-attr, arg-type]
        table = chosen.program.buffer_table()
        rows = tuple(p.spans(table[p.buffer]) for p in (op.q, op.k))  # type: ignore[union-attr]
        assert by_rows.setdefault(rows, mask) is mask


def test_without_a_mask_all_calls_of_a_size_share_one_wherever_their_rows_lie(
    any_mask: AnyMask,
) -> None:
    """What kernels make of a mask can take megabytes, and is not in the count of a plan."""
    case = Case(4, 64, 64, mask=Mask(), dtype=torch.float32, options={"chunks": (2, 2)})
    plan = case.plan()
    kernels = {MaskKind.RANGE: any_mask, MaskKind.FULL: Reference(), MaskKind.CAUSAL: Reference()}
    for direction in Direction:
        program = faster_calls(plan.program(2, direction), plan, kernels, direction).program
        masks = [mask for (mask,) in masks_of(plan, program, kernels, CPU, {}).values()]
        by_size = {(len(m.lo), len(m.key_position)): m for m in masks if isinstance(m, RowRange)}
        assert len(masks) > len(by_size)
        assert {id(mask) for mask in masks} == {id(mask) for mask in by_size.values()}
        for mask in by_size.values():
            assert not mask.lo.any()
            assert int(mask.hi.min()) > int(mask.key_position.max())
            assert mask.ascending


def test_rectangles_stay_where_they_are_predicted_to_be_faster(any_mask: AnyMask) -> None:
    """The reference is slow enough here that a kernel nobody knows is preferred to it; a dense one
    of the same rate is not given up for one call."""
    plan = Case(4, 64, 64, mask=Mask(causal=False), dtype=torch.float32).plan()
    program = plan.program(0, Direction.FORWARD)
    same = dict.fromkeys(MaskKind, any_mask)
    assert faster_calls(program, plan, same, Direction.FORWARD).program is program
    none = faster_calls(program, plan, dict.fromkeys(MaskKind, Reference()), Direction.FORWARD)
    assert "no kernel takes any mask" in str(none)
    assert none == FasterCalls(program, 0, 0, 0.0, 0.0)


@pytest.mark.parametrize(("longest", "in_one"), [(11309, True), (16384, False)])
def test_several_calls_must_be_worth_it(longest: int, in_one: bool) -> None:
    """Three calls of a kernel with a higher rate are predicted to be 0.6 % faster than one; where a
    document is all there is, its one dense call is chosen for 4 %."""
    starts = (0, *(x for x in (585, 5075) if x <= 16384 - longest), 16384)
    problem = Problem(16384, 16, 128, mask=Mask(causal=True, documents=starts))
    plan = make_plan(problem, 1, method="mesh", chunks=(1, 1))
    kernels: dict[MaskKind, Kernel] = {kind: FlashAttn3() for kind in MaskKind}
    kernels[MaskKind.RANGE] = CudnnRanges()
    found = faster_calls(plan.program(0, Direction.FORWARD), plan, kernels, Direction.FORWARD)
    assert found.seconds_cut < found.seconds_whole
    assert (found.whole, found.cut) == ((1, 0) if in_one else (0, 1))
    assert ("several calls must be 2% faster than one" in str(found)) is in_one


def test_what_is_said_of_a_kernel_that_takes_some_rectangles_is_true() -> None:
    plan = make_plan(Problem(16384, 16, 128, mask=Mask(causal=True)), 4, method="ring")
    kernels: dict[MaskKind, Kernel] = {MaskKind.FULL: FlashAttn3(), MaskKind.RANGE: CudnnRanges()}
    found = faster_calls(plan.program(3, Direction.FORWARD), plan, kernels, Direction.FORWARD)
    assert found.whole
    assert found.cut
    assert f"{found.whole} of {found.whole + found.cut} attentions" in str(found)
    assert str(found).endswith("the kernel asked for does not take the rectangles of all")


def test_padded_keys_are_at_no_position(any_mask: AnyMask) -> None:
    plan = Case(4, 61, 61, mask=Mask(), dtype=torch.float32).plan()
    kernels = {MaskKind.RANGE: any_mask, MaskKind.FULL: Reference(), MaskKind.CAUSAL: Reference()}
    chosen = faster_calls(plan.program(3, "forward"), plan, kernels, Direction.FORWARD)
    masks = [mask for (mask,) in masks_of(plan, chosen.program, kernels, CPU, {}).values()]
    lowest = [int(mask.key_position.min()) for mask in masks if isinstance(mask, RowRange)]
    assert min(lowest) == -1


def test_a_softcap_reaches_the_kernel_and_is_exact(any_mask: AnyMask) -> None:
    case = Case(3, 40, 40, mask=Mask(causal=True), dtype=torch.float64)
    plan, (q, k, v, grad_out) = case.plan(), case.tensors()
    found = run_local(plan, 5 * q, k, v, grad_out, softcap=2.0)
    assert any_mask.softcaps == {2.0}
    with_grad = [x.clone().requires_grad_() for x in (5 * q, k, v)]
    scores = torch.einsum("bshd,bthd->bhst", with_grad[0], _spread(with_grad[1], q))
    scores = 2.0 * torch.tanh(scores * q.shape[-1] ** -0.5 / 2.0)
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("bhst,bthe->bshe", weights, _spread(with_grad[2], q))
    torch.testing.assert_close(found.out, out.detach())
    expected = torch.autograd.grad(out, with_grad, grad_out)
    for name, x in zip(("grad_q", "grad_k", "grad_v"), expected, strict=True):
        torch.testing.assert_close(getattr(found, name), x)


def _spread(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)
