"""A softmax cut into pieces by keys, merged, and sent back with the global log-sum-exp."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_cases import (
    TOLERANCE,
    Block,
    Result,
    Shape,
    assert_close,
    backward,
    causal,
    make_block,
    truth,
)
from torch import Tensor

from mesh_attention.kernels import Causal, Full, Kernel, RowRange
from mesh_attention.kernels.blockwise import Blockwise
from mesh_attention.kernels.reference import Reference
from mesh_attention.kernels.rows import RowKernels, accumulator_dtype, delta
from mesh_attention.kernels.torch_ops import CpuFlash

KERNELS = [CpuFlash(), Blockwise(query_block=8, key_block=16), Reference()]


def run_in_pieces(kernel: Kernel, pieces: list[Block], *, delta_only: bool) -> Result:
    """All pieces share queries; their keys together are the whole."""
    first = pieces[0]
    wide = accumulator_dtype(first.q.dtype)
    out = torch.full(first.grad_out.shape, torch.nan, dtype=wide)
    lse = torch.full_like(out[..., 0], -torch.inf).transpose(1, 2).contiguous()
    for piece in pieces:
        part = kernel.forward(piece.of_kernel())
        RowKernels().merge_into(out, lse, *part, fresh=False)
    delta_BHS = delta(out, first.grad_out)
    dq = torch.zeros(first.q.shape, dtype=wide)
    dk: list[Tensor] = []
    dv: list[Tensor] = []
    for piece in pieces:
        state = (None, lse, delta_BHS) if delta_only else (out, lse, None)
        grads = backward(kernel, piece.of_kernel(), piece.grad_out, *state)
        dq_part, dk_part, dv_part = grads
        dq += dq_part
        dk.append(dk_part)
        dv.append(dv_part)
    return Result(out, lse, dq, torch.cat(dk, dim=1), torch.cat(dv, dim=1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_pieces_of_a_dense_block_add_up_to_the_whole(kernel: Kernel, dtype: torch.dtype) -> None:
    whole = make_block(Shape(S=23, T=61, H=6, G=2), dtype, strided=True)
    cuts = [slice(0, 7), slice(7, 7), slice(7, 40), slice(40, 61)]
    pieces = [whole.keys(cut, Full()) for cut in cuts]
    for delta_only in (False, True):
        result = run_in_pieces(kernel, pieces, delta_only=delta_only)
        assert_close(result, truth(whole), TOLERANCE[dtype], delta_only)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_causal_block_is_two_triangles_and_a_rectangle(kernel: Kernel) -> None:
    whole = make_block(Shape(S=40, T=40, H=6, G=2), torch.float64, causal)
    expected = truth(whole)
    lo, hi = slice(0, 20), slice(20, 40)

    def rows(block: Block, part: slice) -> Block:
        return replace(block, q=block.q[:, part], grad_out=block.grad_out[:, part])

    upper = run_in_pieces(kernel, [rows(whole.keys(lo, Causal()), lo)], delta_only=True)
    pieces = [rows(whole.keys(lo, Full()), hi), rows(whole.keys(hi, Causal()), hi)]
    lower = run_in_pieces(kernel, pieces, delta_only=True)
    dk, dv = lower.dk.clone(), lower.dv.clone()
    dk[:, lo] += upper.dk
    dv[:, lo] += upper.dv
    result = Result(
        torch.cat([upper.out, lower.out], dim=1),
        torch.cat([upper.lse, lower.lse], dim=2),
        torch.cat([upper.dq, lower.dq], dim=1),
        dk,
        dv,
    )
    assert_close(result, expected, 1e-10, kernel.name)


@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda k: k.name)
def test_pieces_in_which_some_rows_see_nothing_add_up(kernel: Kernel) -> None:
    row = torch.arange(30)
    mask = RowRange(torch.zeros_like(row), row - 4, torch.arange(30))
    whole = make_block(Shape(S=30, T=30, H=6, G=2), torch.float64, lambda S, T: mask)
    cuts = [slice(20, 30), slice(0, 20)]
    masks = [RowRange(mask.lo, mask.hi, mask.key_position[cut]) for cut in cuts]
    pieces = [whole.keys(cut, part) for cut, part in zip(cuts, masks, strict=True)]
    for delta_only in (False, True):
        result = run_in_pieces(kernel, pieces, delta_only=delta_only)
        result = replace(result, dk=result.dk.roll(20, dims=1), dv=result.dv.roll(20, dims=1))
        assert_close(result, truth(whole), 1e-10, delta_only)
