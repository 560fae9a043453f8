"""Kernels that take any row ranges in one call, on a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from block_cases import (
    RANGES,
    TOLERANCE,
    Block,
    MaskMaker,
    Result,
    Shape,
    assert_close,
    backward,
    causal,
    documents,
    full,
    make_block,
    run,
    scattered,
    window,
)
from torch import Tensor

from mesh_attention.kernels import BlockMask, Causal, Kernel, RowRange
from mesh_attention.kernels.cudnn_ranges import CudnnRanges
from mesh_attention.kernels.reference import Reference
from mesh_attention.kernels.rows import RowKernels, delta
from mesh_attention.kernels.triton_ranges import TritonRanges
from mesh_attention.plan.language.plan import Direction

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("kernel", [TritonRanges(), CudnnRanges()], ids=lambda k: k.name),
]

# One key for all queries: gradients are sums of a thousand numbers that should be zero.
GPU_TOLERANCE = TOLERANCE | {torch.float32: 5e-5}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (query heads, KV heads, head size of queries and keys, of values)
HEADS = [(4, 4, 64, 64), (8, 2, 128, 128), (3, 1, 80, 72), (4, 4, 192, 128), (2, 1, 256, 256)]
SIZES = [(1, 300), (300, 1), (17, 127), (127, 129), (256, 256), (300, 640)]


def gathered(num_queries: int, num_keys: int) -> BlockMask:
    """Causal, of a rank that has two pieces of the sequence, keys in pieces that came in any order:
    whole blocks, masked ones and hidden ones take turns."""
    piece = num_keys // 8
    order = (3, 0, 7, 5, 1, 6, 2, 4)
    keys = torch.cat([torch.arange(at * piece, (at + 1) * piece) for at in order])
    keys = torch.cat([keys, torch.arange(8 * piece, num_keys)])
    half = num_queries // 2
    queries = torch.cat([torch.arange(half) + piece, torch.arange(num_queries - half) + 5 * piece])
    return RowRange(torch.zeros_like(queries), queries + 1, keys)


@pytest.fixture(autouse=True)
def _installed(kernel: Kernel) -> None:
    request = make_block(Shape(2, 2, D=64, E=64), torch.bfloat16, window, device="cuda").request()
    why_not = kernel.refuses(request)
    if why_not is not None:
        pytest.skip(f"{kernel.name}: {why_not}")


def check(kernel: Kernel, block: Block, what: object = None, softcap: float = 0.0) -> Result:
    block = replace(block, mask=as_range(block))
    skip_if_refused(kernel, block)
    result = _run(kernel, block, softcap)
    expected = _run(Reference(), block.to(torch.float64), softcap)
    assert_close(result, expected, GPU_TOLERANCE[block.q.dtype], what)
    return result


def skip_if_refused(kernel: Kernel, block: Block) -> None:
    """By dtype and head sizes, in the kernel's own words."""
    for direction in Direction:
        why_not = kernel.refuses(block.request(direction))
        if why_not is not None:
            pytest.skip(f"{kernel.name}: {why_not}")


def as_range(block: Block) -> BlockMask:
    if isinstance(block.mask, RowRange):
        return block.mask
    row, key = torch.arange(block.q.shape[1]), torch.arange(block.k.shape[1])
    hi = row + 1 if isinstance(block.mask, Causal) else torch.full_like(row, len(key))
    return RowRange(torch.zeros_like(row), hi, key)


def _run(
    kernel: Kernel, block: Block, softcap: float = 0.0, *, deterministic: bool = False
) -> Result:
    of_kernel = block.of_kernel()._replace(softcap=softcap, deterministic=deterministic)
    out, lse = kernel.forward(of_kernel)
    row_sums = delta(out, block.grad_out)
    return Result(out, lse, *backward(kernel, of_kernel, block.grad_out, out, lse, row_sums))


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        *((torch.bfloat16, heads) for heads in HEADS),
        *((torch.float16, heads) for heads in HEADS[::2]),
        *((torch.float32, heads) for heads in ((4, 4, 64, 64), (3, 1, 40, 24))),
    ],
    ids=str,
)
def test_every_mask_and_size_is_exact_on_strided_buffers(
    kernel: Kernel, dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> None:
    H, G, D, E = heads
    for maker in (full, causal, *RANGES, gathered):
        for S, T in SIZES:
            if maker is causal:
                T = S
            if T < 2 and maker not in (full, causal):
                continue
            shape = Shape(S=S, T=T, H=H, G=G, D=D, E=E)
            block = make_block(shape, dtype, maker, device="cuda", strided=True)
            check(kernel, block, (maker.__name__, shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("maker", [causal, window, documents, gathered], ids=lambda f: f.__name__)
def test_longer_blocks_are_exact(kernel: Kernel, dtype: torch.dtype, maker: MaskMaker) -> None:
    size = 64 if dtype == torch.float32 else 128
    shape = Shape(S=2048, T=2048, H=4, G=2, D=size, E=size, B=1)
    check(kernel, make_block(shape, dtype, maker, device="cuda"), maker.__name__)


def test_it_takes_what_is_given_through_the_runtime(kernel: Kernel) -> None:
    for maker in (full, causal, *RANGES):
        block = make_block(Shape(S=300, T=300, D=64, E=64), torch.bfloat16, maker, device="cuda")
        block = replace(block, mask=as_range(block))
        for delta_only in (False, True):
            result = run(kernel, block, delta_only=delta_only)
            assert_close(result, _run(Reference(), block.to(torch.float64)), 3e-2, maker.__name__)


def test_positions_may_be_on_the_device(kernel: Kernel) -> None:
    block = make_block(Shape(S=300, T=280, D=64, E=64), torch.bfloat16, scattered, device="cuda")
    mask = block.mask
    assert isinstance(mask, RowRange)
    moved = RowRange(mask.lo.cuda(), mask.hi.cuda(), mask.key_position.cuda())
    check(kernel, replace(block, mask=moved))


def test_rows_that_see_nothing_give_zeros(kernel: Kernel) -> None:
    shape = Shape(S=300, T=280, D=128, E=128)
    block = make_block(shape, torch.bfloat16, scattered, device="cuda", strided=True)
    result = check(kernel, block)
    unseen = result.lse[0, 0] == -torch.inf
    assert unseen.any()
    assert torch.all(result.out[:, unseen] == 0)
    assert torch.all(result.dq[:, unseen] == 0)
    for S, T in ((0, 64), (64, 0)):
        block = make_block(Shape(S=S, T=T, D=64, E=64), torch.bfloat16, device="cuda")
        empty = _run(kernel, replace(block, mask=as_range(block)))
        assert torch.all(empty.lse == -torch.inf)
        assert all(torch.all(x == 0) for x in (empty.out, empty.dq, empty.dk, empty.dv))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_parts_of_the_keys_with_the_global_lse_add_up_to_the_whole(
    kernel: Kernel, dtype: torch.dtype
) -> None:
    size = 64 if dtype == torch.float32 else 128
    shape = Shape(S=300, T=640, H=8, G=2, D=size, E=size)
    for maker in (window, scattered, gathered):
        whole = make_block(shape, dtype, maker, device="cuda", strided=True)
        skip_if_refused(kernel, whole)
        mask = whole.mask
        assert isinstance(mask, RowRange)
        cuts = slice(0, 200), slice(200, 640)
        masks = [RowRange(mask.lo, mask.hi, mask.key_position[cut]) for cut in cuts]
        parts = [whole.keys(cut, part) for cut, part in zip(cuts, masks, strict=True)]
        out = torch.empty(whole.grad_out.shape, device="cuda")
        lse, delta_BHS = _statistics(shape), _statistics(shape)
        for at, part in enumerate(parts):
            result = kernel.forward(part.of_kernel())
            RowKernels().merge_into(out, lse, *result, fresh=at == 0)
        delta_BHS.copy_(delta(out, whole.grad_out))
        grads = [
            backward(kernel, part.of_kernel(), whole.grad_out, None, lse, delta_BHS)
            for part in parts
        ]
        dq = grads[0][0].float() + grads[1][0].float()
        dk, dv = (torch.cat([grad[at] for grad in grads], dim=1) for at in (1, 2))
        expected = _run(Reference(), whole.to(torch.float64))
        results = Result(out, lse, dq, dk, dv)
        assert_close(results, expected, 2 * GPU_TOLERANCE[dtype], maker.__name__)


def _statistics(shape: Shape) -> Tensor:
    """(B, H, S) as the runtime has them: rows first, and a part of a larger buffer."""
    buffer = torch.full((shape.S + 5, shape.B, shape.H + 2), torch.nan, device="cuda")
    return buffer[3:-2, :, 1:-1].permute(1, 2, 0)


def test_capped_scores_are_exact(kernel: Kernel) -> None:
    if not getattr(kernel, "has_softcap", False):
        pytest.skip(f"{kernel.name} has no softcap, and says so")
    for dtype in DTYPES:
        for maker in (causal, window, gathered):
            shape = Shape(S=300, T=300, H=4, G=2, D=64, E=64)
            block = make_block(shape, dtype, maker, device="cuda")
            check(kernel, replace(block, scale=1.0), maker.__name__, softcap=2.0)


def test_results_are_the_same_every_time(kernel: Kernel) -> None:
    if not getattr(kernel, "deterministic", False):
        pytest.skip(f"{kernel.name} does not promise it")
    shape = Shape(S=1000, T=1000, H=8, G=2, D=128, E=128)
    block = make_block(shape, torch.bfloat16, documents, device="cuda")
    first = _run(kernel, block, deterministic=True)
    for _ in range(3):
        for name, x in _run(kernel, block, deterministic=True).named().items():
            assert torch.equal(x, first.named()[name]), name


def test_offsets_beyond_32_bits_are_exact(kernel: Kernel) -> None:
    """A few rows of a long sequence with many heads lie 2**31 elements and more apart."""
    shape = Shape(S=270, T=270, H=2, G=2, D=64, E=64, B=1)
    block = make_block(shape, torch.bfloat16, causal, device="cuda")
    buffer = torch.full((270, 8_000_000), torch.nan, device="cuda", dtype=torch.bfloat16)
    apart: dict[str, Any] = {}
    for at, name in enumerate(("q", "k", "v", "grad_out")):
        view = buffer[:, 128 * at : 128 * (at + 1)].view(1, 270, 2, 64)
        apart[name] = view.copy_(getattr(block, name))
    check(kernel, replace(block, **apart))


def test_another_alignment_of_the_same_shape_is_another_launch(kernel: Kernel) -> None:
    shape = Shape(S=256, T=256, H=2, G=2, D=64, E=64, B=1)
    block = make_block(shape, torch.bfloat16, causal, device="cuda")
    check(kernel, block)
    for elements in (1, 8):
        moved: dict[str, Any] = {}
        for name in ("q", "k", "v", "grad_out"):
            x = getattr(block, name)
            buffer = torch.full((x.numel() + elements,), torch.nan, device="cuda", dtype=x.dtype)
            moved[name] = buffer[elements:].view(x.shape).copy_(x)
        check(kernel, replace(block, **moved), elements)
    check(kernel, block)


def test_a_warm_call_can_be_captured_in_a_graph(kernel: Kernel) -> None:
    shape = Shape(S=512, T=512, H=4, G=2, D=128, E=128, B=1)
    block = make_block(shape, torch.bfloat16, window, device="cuda")
    expected = _run(kernel, block)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _run(kernel, block)
    graph.replay()
    torch.cuda.synchronize()
    for name, x in results.named().items():
        assert_close_to(x, expected.named()[name])


def assert_close_to(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
