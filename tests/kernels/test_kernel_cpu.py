"""The kernels that run on a CPU against the float64 reference: outputs, LSE, all gradients."""

from __future__ import annotations

import pytest
import torch
from block_cases import (
    RANGES,
    TOLERANCE,
    Block,
    MaskMaker,
    Shape,
    assert_close,
    backward,
    causal,
    full,
    make_block,
    run,
    truth,
)
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import Causal, Kernel, RowRange
from mesh_attention.kernels.blockwise import Blockwise
from mesh_attention.kernels.reference import Reference
from mesh_attention.kernels.torch_ops import CpuFlash

SMALL_BLOCKS = Blockwise(query_block=8, key_block=16)
KERNELS: list[Kernel] = [CpuFlash(), SMALL_BLOCKS, Blockwise(), Reference()]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

FULL_SHAPES = [
    Shape(S=1, T=1),
    Shape(S=1, T=50),
    Shape(S=50, T=1),
    Shape(S=17, T=33, D=7, E=7),
    Shape(S=33, T=17, H=28, G=7),
    Shape(S=20, T=20, H=40, G=8, B=1),
    Shape(S=31, T=65, H=5, G=1),
]
CAUSAL_SHAPES = [
    Shape(S=1, T=1),
    Shape(S=37, T=37, H=28, G=7),
    Shape(S=65, T=65, H=5, G=1, D=9, E=9),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_dense_and_causal_blocks_agree_with_float64(kernel: Kernel, dtype: torch.dtype) -> None:
    cases = [(full, shape) for shape in FULL_SHAPES] + [(causal, shape) for shape in CAUSAL_SHAPES]
    for mask, shape in cases:
        for strided in (False, True):
            block = make_block(shape, dtype, mask, strided=strided)
            expected = truth(block)
            for delta_only in (False, True) if dtype.itemsize > 2 else (strided,):
                result = run(kernel, block, delta_only=delta_only)
                what = (mask.__name__, shape, strided, delta_only)
                assert_close(result, expected, TOLERANCE[dtype], what)


@pytest.mark.parametrize("kernel", [SMALL_BLOCKS, Reference()], ids=lambda k: k.name)
def test_value_heads_may_have_their_own_size(kernel: Kernel) -> None:
    for mask in (full, causal, *RANGES):
        for dims in ((24, 16), (16, 24), (5, 1)):
            shape = Shape(S=29, T=29, H=6, G=2, D=dims[0], E=dims[1])
            block = make_block(shape, torch.float64, mask, strided=True)
            assert_close(run(kernel, block), truth(block), 1e-10, (mask.__name__, dims))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", RANGES)
def test_row_ranges_agree_with_float64(mask: MaskMaker, dtype: torch.dtype) -> None:
    sizes = ((1, 2), (53, 53), (70, 31), (31, 70))  # in half precision only rounding differs
    for S, T in sizes[:: 1 if dtype.itemsize > 2 else 3]:
        block = make_block(Shape(S=S, T=T, H=6, G=2), dtype, mask)
        expected = truth(block)
        for kernel in (SMALL_BLOCKS, Blockwise(query_block=64, key_block=4), Blockwise()):
            for delta_only in (False, True):
                result = run(kernel, block, delta_only=delta_only)
                assert_close(result, expected, TOLERANCE[dtype], (mask.__name__, S, T))


def test_rows_that_see_nothing_give_zeros_and_minus_infinity() -> None:
    lo = torch.tensor([0, 5, 0, 99])
    hi = torch.tensor([3, 5, -1, 100])
    mask = RowRange(lo, hi, torch.tensor([2, 0, 1]))
    block = make_block(Shape(S=4, T=3), torch.float32, lambda S, T: mask)
    for kernel in (SMALL_BLOCKS, Reference()):
        result = run(kernel, block)
        assert torch.all(result.lse[:, :, 1:] == -torch.inf)
        assert torch.isfinite(result.lse[:, :, 0]).all()
        assert torch.all(result.out[:, 1:] == 0)
        assert torch.all(result.dq[:, 1:] == 0)
        assert_close(result, truth(block), 1e-5, kernel.name)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_backward_of_rows_that_the_whole_softmax_never_saw_is_zero(kernel: Kernel) -> None:
    for dtype in DTYPES:
        block = make_block(Shape(S=9, T=12), dtype)
        out, lse = kernel.forward(block.of_kernel())
        lse = lse.contiguous()
        lse[:, :, 4:] = -torch.inf
        out = out.contiguous()
        out[:, 4:] = 0

        def grads(
            out: Tensor | None,
            lse: Tensor,
            delta: Tensor | None,
            block: Block = block,
        ) -> tuple[Tensor, Tensor, Tensor]:
            return backward(kernel, block.of_kernel(), block.grad_out, out, lse, delta)

        for tensors in ((out, None), (None, torch.zeros_like(lse))):
            dq, dk, dv = grads(tensors[0], lse, tensors[1])
            assert torch.all(dq[:, 4:] == 0), dtype
            assert all(torch.isfinite(x).all() for x in (dq, dk, dv)), dtype
        lse[:] = -torch.inf
        for grad in grads(out, lse, None):
            assert torch.all(grad == 0), dtype


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_empty_blocks_give_empty_or_unseen_results(kernel: Kernel) -> None:
    for S, T in ((0, 5), (5, 0), (0, 0)):
        block = make_block(Shape(S=S, T=T, H=4, G=2), torch.float32)
        result = run(kernel, block)
        assert result.out.shape == block.q.shape
        assert result.lse.shape == (2, 4, S)
        assert torch.all(result.out == 0)
        assert torch.all(result.lse == -torch.inf)
        for grad, x in ((result.dq, block.q), (result.dk, block.k), (result.dv, block.v)):
            assert grad.shape == x.shape
            assert torch.all(grad == 0)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_no_result_holds_uninitialised_memory(kernel: Kernel) -> None:
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        assert torch.isnan(torch.empty(3)).all()
        for mask in (full, causal):
            for dtype in DTYPES:
                block = make_block(Shape(S=21, T=21, H=6, G=2), dtype, mask)
                for delta_only in (False, True):
                    for name, x in run(kernel, block, delta_only=delta_only).named().items():
                        assert torch.isfinite(x).all(), name
    finally:
        torch.use_deterministic_algorithms(False)


def test_large_scores_do_not_overflow() -> None:
    block = make_block(Shape(S=16, T=40), torch.float32)
    for kernel in (CpuFlash(), SMALL_BLOCKS):
        for scale in (300.0, 1e4):
            out, lse = kernel.forward(block.of_kernel(scale=scale))
            assert torch.isfinite(out).all()
            assert torch.isfinite(lse).all()


def test_a_causal_block_must_be_square() -> None:
    block = make_block(Shape(S=3, T=4), torch.float32)
    for kernel in KERNELS:
        with pytest.raises(MeshAttentionError, match="3 queries and 4 keys"):
            kernel.forward(block.of_kernel(Causal()))


def test_a_row_range_must_fit_its_block() -> None:
    block = make_block(Shape(S=3, T=4), torch.float32)
    row = torch.arange(3)
    mask = RowRange(row, row + 1, torch.arange(5))
    kernels: tuple[Kernel, ...] = (SMALL_BLOCKS, Reference())
    for kernel in kernels:
        with pytest.raises(MeshAttentionError, match="key_position has shape"):
            kernel.forward(block.of_kernel(mask))
        several = RowRange(torch.stack((row, row)), row + 1, torch.arange(4))
        with pytest.raises(MeshAttentionError, match=r"hi has shape \(3,\), not \(2, 3\)"):
            kernel.forward(block.of_kernel(several))
    with pytest.raises(MeshAttentionError, match="'cpu_flash' has no row-range"):
        CpuFlash().forward(block.of_kernel(mask))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_backward_wants_out_or_delta(kernel: Kernel) -> None:
    block = make_block(Shape(S=3, T=4), torch.float32)
    lse = torch.zeros(2, 4, 3)
    with pytest.raises(MeshAttentionError, match="`out` or `delta`"):
        backward(kernel, block.of_kernel(), block.grad_out, None, lse, None)
