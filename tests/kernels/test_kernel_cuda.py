"""The CUDA kernels against float64, in bf16 and fp16.

A kernel may be off by twice as much as attention written out in the same dtype is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_cases import (
    RANGES,
    Block,
    MaskMaker,
    Result,
    Shape,
    backward,
    causal,
    error,
    full,
    make_block,
    run,
    truth,
)
from torch import Tensor

from mesh_attention.kernels import Full, Kernel, RowRange, choose
from mesh_attention.kernels.blockwise import Blockwise
from mesh_attention.kernels.flash_attn import FlashAttn3, FlashAttn4
from mesh_attention.kernels.rows import RowKernels, delta
from mesh_attention.kernels.torch_ops import CudaFlash, Cudnn
from mesh_attention.kernels.visibility import dense_mask

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
KERNELS = [Cudnn(), CudaFlash(), Blockwise(query_block=128, key_block=192)]
CASES: list[tuple[MaskMaker, Shape]] = [
    (full, Shape(S=256, T=256, D=64, E=64)),
    (full, Shape(S=333, T=129, H=28, G=7, D=128, E=128, B=1)),
    (full, Shape(S=64, T=515, H=40, G=8, D=128, E=128, B=1)),
    (full, Shape(S=77, T=200, H=8, G=1, D=72, E=72)),
    (full, Shape(S=1, T=70, D=64, E=64)),
    (full, Shape(S=70, T=1, D=64, E=64)),
    (causal, Shape(S=256, T=256, H=8, G=2, D=128, E=128)),
    (causal, Shape(S=451, T=451, H=4, G=1, D=64, E=64)),
]


def plain(block: Block) -> Result:
    """Attention written out in the dtype of the inputs, differentiated by autograd."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (block.q, block.k, block.v))
    repeats = q.shape[2] // k.shape[2]
    k_BTHD, v_BTHE = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k_BTHD) * block.scale
    visible = dense_mask(block.mask, q.shape[1], k.shape[1], q.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    p = scores.softmax(dim=-1)
    out = torch.einsum("bhst,bthe->bshe", p, v_BTHE)
    grads = torch.autograd.grad(out, (q, k, v), block.grad_out)
    lse = scores.float().logsumexp(dim=-1).detach()
    return Result(out.detach(), lse, *grads)


def assert_as_good_as_plain(result: Result, block: Block, what: object) -> None:
    expected, baseline = truth(block).named(), plain(block).named()
    # Where plain attention happens to be exact, an eighth of a rounding step is allowed still.
    floor = torch.finfo(block.q.dtype).eps / 8
    for name, tensor in result.named().items():
        allowed = 2 * error(baseline[name], expected[name]) + floor
        measured = error(tensor, expected[name])
        assert measured <= allowed, f"{name} off by {measured:.2e} > {allowed:.2e}: {what}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_blocks_are_as_good_as_plain_attention(kernel: Kernel, dtype: torch.dtype) -> None:
    for mask, shape in CASES:
        for strided in (False, True):
            block = make_block(shape, dtype, mask, device="cuda", strided=strided)
            for delta_only in (False, True):
                result = run(kernel, block, delta_only=delta_only)
                what = (mask.__name__, shape, strided, delta_only)
                assert_as_good_as_plain(result, block, what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_pieces_with_the_global_lse_are_as_good_as_plain(
    kernel: Kernel, dtype: torch.dtype
) -> None:
    shape = Shape(S=300, T=640, H=8, G=2, D=128, E=128)
    for strided in (False, True):
        whole = make_block(shape, dtype, device="cuda", strided=strided)
        pieces = [whole.keys(cut, Full()) for cut in (slice(0, 100), slice(100, 640))]
        for delta_only in (False, True):
            result = run_in_pieces(kernel, pieces, delta_only)
            assert_as_good_as_plain(result, whole, (strided, delta_only))


def run_in_pieces(kernel: Kernel, pieces: list[Block], delta_only: bool) -> Result:
    first = pieces[0]
    out = torch.full_like(first.grad_out, torch.nan, dtype=torch.float32)
    lse = torch.full_like(out[..., 0], -torch.inf).transpose(1, 2).contiguous()
    for piece in pieces:
        part = kernel.forward(piece.of_kernel(Full()))
        RowKernels().merge_into(out, lse, *part, fresh=False)
    dq = torch.zeros(first.q.shape, device="cuda")
    dk: list[Tensor] = []
    dv: list[Tensor] = []
    delta_BHS = delta(out, first.grad_out)
    for piece in pieces:
        state = (None, lse, delta_BHS) if delta_only else (out, lse, None)
        grads = backward(kernel, piece.of_kernel(Full()), piece.grad_out, *state)
        dq_part, dk_part, dv_part = grads
        dq += dq_part
        dk.append(dk_part)
        dv.append(dv_part)
    return Result(out, lse, dq, torch.cat(dk, dim=1), torch.cat(dv, dim=1))


@pytest.mark.parametrize("kernel", KERNELS[:2], ids=lambda k: k.name)
def test_changing_layouts_between_calls_of_one_shape_changes_nothing(kernel: Kernel) -> None:
    """Plans are cached by shape and layout; a stale one would misread the second call."""
    shape = Shape(S=128, T=128, H=4, G=2, D=64, E=64)
    block = make_block(shape, torch.bfloat16, device="cuda")
    expected = run(kernel, block)
    lse_sliced = torch.nn.functional.pad(expected.lse, (7, 9))[:, :, 7:-9]
    grad_seq_last = block.grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    out_seq_last = expected.out.transpose(1, 2).contiguous().transpose(1, 2)
    for grad_out in (block.grad_out, grad_seq_last):
        for out in (expected.out, out_seq_last):
            for lse in (expected.lse, lse_sliced):
                results = backward(kernel, block.of_kernel(), grad_out, out, lse, None)
                # Not bit for bit: dq is summed in whatever order blocks finish.
                for name, grad in zip(("dq", "dk", "dv"), results, strict=True):
                    assert error(grad, expected.named()[name].double()) < 1e-2, name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_unseen_rows_and_empty_blocks_give_finite_zeros(kernel: Kernel) -> None:
    block = make_block(Shape(S=96, T=128, D=64, E=64), torch.bfloat16, device="cuda")
    result = run(kernel, block)
    lse, out = result.lse.contiguous().clone(), result.out.contiguous().clone()
    lse[:, :, 40:] = -torch.inf
    out[:, 40:] = 0
    for tensors in ((out, None), (None, torch.zeros_like(lse))):
        state = (tensors[0], lse, tensors[1])
        dq, dk, dv = backward(kernel, block.of_kernel(), block.grad_out, *state)
        assert torch.all(dq[:, 40:] == 0)
        assert all(torch.isfinite(x).all() for x in (dq, dk, dv))
    for S, T in ((0, 64), (64, 0)):
        empty = run(kernel, make_block(Shape(S=S, T=T, D=64, E=64), torch.bfloat16, device="cuda"))
        assert torch.all(empty.out == 0)
        assert torch.all(empty.lse == -torch.inf)
        assert all(torch.all(x == 0) for x in (empty.dq, empty.dk, empty.dv))


@pytest.mark.parametrize("kernel", KERNELS[:2], ids=lambda k: k.name)
def test_no_result_holds_uninitialised_memory_on_a_gpu(kernel: Kernel) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for mask, shape in CASES:
            block = make_block(shape, torch.bfloat16, mask, device="cuda")
            for name, tensor in run(kernel, block, delta_only=True).named().items():
                assert torch.isfinite(tensor).all(), (name, shape)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("on_host", [True, False], ids=["positions-on-host", "on-device"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_row_ranges_on_a_gpu_are_exact(dtype: torch.dtype, on_host: bool) -> None:
    kernel = Blockwise(query_block=64, key_block=96)
    for maker in RANGES:
        shape = Shape(S=300, T=280, H=8, G=2, D=64, E=32)
        block = make_block(shape, dtype, maker, device="cuda", strided=True)
        if not on_host and isinstance(block.mask, RowRange):
            lo, hi, keys = block.mask.lo, block.mask.hi, block.mask.key_position
            block = replace(block, mask=RowRange(lo.cuda(), hi.cuda(), keys.cuda()))
        for delta_only in (False, True):
            results = run(kernel, block, delta_only=delta_only)
            expected = truth(block).named()
            for name, tensor in results.named().items():
                # The delta-only run rounds nothing either: sums are kept in fp32 throughout.
                assert error(tensor, expected[name]) <= 1e-5, (name, maker.__name__)


def test_cudnn_takes_value_heads_of_their_own_size() -> None:
    for D, E in ((128, 64), (64, 128), (192, 128)):
        shape = Shape(S=256, T=384, H=4, G=4, D=D, E=E)
        block = make_block(shape, torch.bfloat16, device="cuda")
        for delta_only in (False, True):
            assert_as_good_as_plain(run(Cudnn(), block, delta_only=delta_only), block, (D, E))


def test_flash_takes_large_heads() -> None:
    for D in (8, 160, 256):
        shape = Shape(S=200, T=264, H=4, G=2, D=D, E=D)
        block = make_block(shape, torch.bfloat16, device="cuda")
        assert_as_good_as_plain(run(CudaFlash(), block), block, D)


@pytest.mark.parametrize("kernel", [FlashAttn3(), FlashAttn4()], ids=lambda k: k.name)
def test_installed_flash_attention_packages_are_as_good_as_plain(kernel: Kernel) -> None:
    for mask, shape in ((full, Shape(S=256, T=384, H=8, G=2, D=128, E=128)), CASES[6]):
        block = make_block(shape, torch.bfloat16, mask, device="cuda")
        reason = kernel.refuses(block.request())
        if reason is not None:
            pytest.skip(reason)
        for delta_only in (False, True):
            assert_as_good_as_plain(run(kernel, block, delta_only=delta_only), block, shape)


def test_a_dense_bf16_block_on_this_gpu_is_not_left_to_the_slow_kernels() -> None:
    shape = Shape(S=64, T=64, D=128, E=128)
    request = make_block(shape, torch.bfloat16, device="cuda").request()
    assert choose(request).kernel.name in ("flash_attn4", "flash_attn3", "cudnn", "cuda_flash")
