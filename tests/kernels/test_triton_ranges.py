"""Our Triton kernels against float64: on a machine without a GPU in Triton's interpreter.

Blocks are as small as matrix products allow, since the interpreter takes its time. It knows no
bf16 products; `tests/gpu/test_gpu_range_kernels.py` has those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
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
    causal,
    error,
    full,
    make_block,
    scattered,
    truth,
    union,
    window,
)
from torch import Tensor

from mesh_attention.kernels import (
    BackwardInputs,
    BlockSize,
    Full,
    MaskKind,
    Request,
    RowRange,
    choose,
    kernel_names,
)
from mesh_attention.kernels.launches import KernelTile
from mesh_attention.kernels.reference import Reference
from mesh_attention.kernels.rows import RowKernels, delta
from mesh_attention.kernels.triton_ranges import KernelTiles, TritonRanges, tiles_for
from mesh_attention.plan.language.plan import Direction

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A block is more than a tile here and there, so that every way to cut it is run.
TILES = KernelTiles(
    32, KernelTile(32, 16, 4, 1), KernelTile(16, 32, 4, 1), KernelTile(16, 32, 4, 1)
)
KERNEL = TritonRanges(tiles=TILES)
SMALL = Shape(S=40, T=40, H=2, G=1, D=16, E=16, B=1)
TINY = Shape(S=20, T=20, H=1, G=1, D=16, E=16, B=1)


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    """The interpreter puts its functions into Triton's modules, here once and not for every call.
    Triton 3.6 makes an int of an array with one element, which numpy 2.4 no longer does."""
    if DEVICE == "cuda":
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    modules = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    scope = interpreter._patch_lang(modules)
    scope.set_attr(language.tensor, "__index__", lambda x: int(x.handle.data.item()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
        yield
    scope.restore()


def run(block: Block, softcap: float = 0.0, kernel: Any = KERNEL) -> Result:
    """Called directly: the kernel refuses CPUs, where only tests want it."""
    of_kernel = block.of_kernel()._replace(softcap=softcap)
    out, lse = kernel.forward(of_kernel)
    inputs = BackwardInputs(block.grad_out, None, lse, delta(out, block.grad_out))
    return Result(out, lse, *kernel.backward(of_kernel, inputs))


def check(block: Block, softcap: float = 0.0, kernel: Any = KERNEL) -> Result:
    result = run(block, softcap, kernel)
    expected = run(block.to(torch.float64), softcap, Reference())
    assert_close(result, expected, TOLERANCE[block.q.dtype], block.mask)
    return result


@pytest.mark.parametrize("maker", [full, causal, *RANGES], ids=lambda f: f.__name__)
def test_any_mask_is_exact_on_strided_buffers_in_one_call(maker: MaskMaker) -> None:
    """Lists of rows are the same for all heads, so one will do where there are some."""
    shape = SMALL if maker in (full, causal, union) else replace(SMALL, H=1)
    check(make_block(shape, torch.float32, maker, device=DEVICE, strided=True))


@pytest.mark.parametrize(
    ("maker", "shape"),
    [
        (full, Shape(S=1, T=17, H=1, G=1, D=16, E=24, B=2)),
        (full, Shape(S=33, T=1, H=1, G=1, D=8, E=16, B=1)),
        (window, Shape(S=17, T=50, H=3, G=1, D=24, E=8, B=1)),
        (causal, Shape(S=64, T=64, H=1, G=1, D=16, E=16, B=1)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_odd_sizes_and_heads_are_exact_in_half_precision(maker: MaskMaker, shape: Shape) -> None:
    result = check(make_block(shape, torch.float16, maker, device=DEVICE, strided=True))
    assert result.out.dtype == result.dq.dtype == torch.float16
    assert result.lse.dtype == torch.float32


def test_padding_may_hold_anything() -> None:
    """Padded keys are at position -1, padded queries see nothing."""
    block = make_block(SMALL, torch.float32, window, device=DEVICE)
    assert isinstance(block.mask, RowRange)
    keys = torch.tensor([3, 4, 39], device=DEVICE)
    rows = torch.tensor([0, 17, 38, 39], device=DEVICE)
    lo, hi, position = (x.clone() for x in (block.mask.lo, block.mask.hi, block.mask.key_position))
    position[keys.to(position.device)] = -1
    lo[rows.to(lo.device)] = hi[rows.to(hi.device)] = 0
    block = replace(block, mask=RowRange(lo, hi, position))
    expected = check(block)
    for x, padded in ((block.k, keys), (block.v, keys), (block.q, rows), (block.grad_out, rows)):
        x[:, padded] = torch.nan
    result = run(block)
    for name in ("dq", "dk", "dv", "out", "lse"):
        assert torch.equal(getattr(result, name), getattr(expected, name)), name


def test_tiles_that_the_hardware_loads_by_descriptors_are_the_same() -> None:
    tile = KernelTile(16, 16, 4, 1, described=True)
    kernel = TritonRanges(tiles=KernelTiles(16, tile, tile, tile))
    for maker, shape in ((causal, TINY), (full, Shape(S=17, T=40, H=2, G=2, D=24, E=8, B=2))):
        check(make_block(shape, torch.float16, maker, device=DEVICE, strided=True), kernel=kernel)
    assert all(launch.described for launches in kernel._launches.values() for launch in launches)
    odd = make_block(Shape(S=17, T=20, H=1, G=1, D=7, E=8, B=1), torch.float16, device=DEVICE)
    check(odd, kernel=kernel)  # seven elements are not whole 16 bytes


def test_a_product_ahead_of_the_softmax_changes_nothing() -> None:
    tiles = TILES._replace(ahead=True)
    for maker in (causal, window):  # with whole blocks and without
        block = make_block(replace(SMALL, H=1), torch.float32, maker, device=DEVICE)
        results, expected = run(block, kernel=TritonRanges(tiles=tiles)), run(block)
        for name, x in results.named().items():
            assert torch.equal(x, expected.named()[name]), name


def test_results_are_written_where_they_are_wanted_and_nowhere_else() -> None:
    block = make_block(SMALL, torch.float16, window, device=DEVICE)
    expected = check(block)
    buffers = [
        torch.full((44, 1, x.shape[2] + 2, 16), torch.nan, dtype=x.dtype, device=DEVICE)
        for x in (expected.out, expected.dq, expected.dk, expected.dv)
    ]
    views = [buffer[3:-1, :, 1:-1].transpose(0, 1) for buffer in buffers]
    out, lse = KERNEL.forward(block.of_kernel()._replace(into=(views[0],)))
    inputs = BackwardInputs(block.grad_out, None, lse, delta(out, block.grad_out))
    grads = KERNEL.backward(block.of_kernel()._replace(into=tuple(views[1:])), inputs)
    wanted = (expected.out, expected.dq, expected.dk, expected.dv)
    for result, view, buffer, right in zip((out, *grads), views, buffers, wanted, strict=True):
        assert result is view
        assert torch.equal(result, right)
        assert int(buffer.isnan().sum()) == buffer.numel() - view.numel()
    narrow = views[0].float()  # of another dtype: not what was promised
    assert KERNEL.forward(block.of_kernel()._replace(into=(narrow,)))[0] is not narrow


def test_scores_are_capped_and_so_are_their_gradients() -> None:
    block = make_block(TINY, torch.float32, window, device=DEVICE)
    check(replace(block, scale=2.0), softcap=1.5)


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scales_that_turn_the_order_of_scores_round_are_exact(scale: float) -> None:
    check(replace(make_block(TINY, torch.float32, window, device=DEVICE), scale=scale))


def test_rows_that_see_nothing_give_zeros_and_no_nan() -> None:
    result = check(make_block(SMALL, torch.float32, scattered, device=DEVICE))
    unseen = result.lse[0, 0] == -torch.inf
    assert unseen.any()
    assert torch.all(result.out[:, unseen] == 0)
    assert torch.all(result.dq[:, unseen] == 0)
    # A row that saw nothing anywhere, and a block of which it could see all.
    block = make_block(Shape(32, 32, 1, 1), torch.float32, full, device=DEVICE)
    lse = torch.full((2, 1, 32), -torch.inf, device=DEVICE)
    nothing = torch.full_like(lse, torch.nan)
    inputs = BackwardInputs(block.grad_out, None, lse, nothing)
    for grad in KERNEL.backward(block.of_kernel(), inputs):
        assert torch.all(grad == 0)


@pytest.mark.parametrize("size", [(0, 8), (8, 0)])
def test_empty_blocks_give_zeros(size: tuple[int, int]) -> None:
    result = run(make_block(replace(TINY, S=size[0], T=size[1]), torch.float32, device=DEVICE))
    assert torch.all(result.lse == -torch.inf)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.all(result.named()[name] == 0)


def test_two_halves_of_the_keys_with_the_global_lse_add_up_to_the_whole() -> None:
    """lse and delta as the runtime has them: rows first, and a part of a larger buffer."""
    whole = make_block(SMALL, torch.float32, scattered, device=DEVICE)
    mask, rows = whole.mask, RowKernels()
    assert isinstance(mask, RowRange)
    cuts = slice(0, 18), slice(18, 40)
    halves = [
        whole.keys(c, replace(mask, key_position=mask.key_position[c], kept={})) for c in cuts
    ]
    out = torch.empty(whole.grad_out.shape, device=DEVICE)
    buffer = torch.full((44, 1, 3), torch.nan, device=DEVICE)
    lse = buffer[2:42, :, 1:].permute(1, 2, 0)
    for at, half in enumerate(halves):
        rows.merge_into(out, lse, *KERNEL.forward(half.of_kernel()), fresh=at == 0)
    delta_buffer = torch.full_like(buffer, torch.nan)
    delta_BHS = delta_buffer[2:42, :, 1:].permute(1, 2, 0).copy_(delta(out, whole.grad_out))
    inputs = BackwardInputs(whole.grad_out, None, lse, delta_BHS)
    (dq_a, dk_a, dv_a), (dq_b, dk_b, dv_b) = (
        KERNEL.backward(half.of_kernel(), inputs) for half in halves
    )
    result = Result(out, lse, dq_a + dq_b, torch.cat((dk_a, dk_b), 1), torch.cat((dv_a, dv_b), 1))
    assert_close(result, truth(whole), TOLERANCE[torch.float32], "halves")


def test_a_second_call_takes_the_lists_that_the_mask_kept() -> None:
    block = make_block(TINY, torch.float32, window, device=DEVICE)
    assert isinstance(block.mask, RowRange)
    first = KERNEL.forward(block.of_kernel())
    kept = dict(block.mask.kept)
    assert len(kept) == 1
    (lists,) = kept.values()
    # Another mask would give other results: so it is the lists that are read.
    lists.hi.copy_(lists.lo)
    out, lse = KERNEL.forward(block.of_kernel())
    assert not torch.equal(out, first[0])
    assert torch.all(lse == -torch.inf)
    assert block.mask.kept == kept


def test_it_is_asked_before_the_plain_kernel_and_runs_on_cuda_alone() -> None:
    names = kernel_names()
    assert names.index("triton") == names.index("blockwise") - 1
    for dtype in (torch.float32, torch.bfloat16):
        request = Request(
            *(Direction.FORWARD, "cpu", None, dtype, 64, 64, 8, 2, MaskKind.RANGE), softcap=True
        )
        choice = choose(request)
        assert choice.kernel.name == "blockwise"
        assert dict(choice.reasons)["triton"] == "runs on cuda, not on cpu"


def test_what_the_kernel_cannot_take_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fits = Request(
        *(Direction.BACKWARD, "cuda", (9, 0), torch.bfloat16, 192, 128, 8, 2, MaskKind.RANGE)
    )
    assert TritonRanges().refuses(fits) is None
    for change, reason in (
        ({"dtype": torch.float64}, "takes float16, bfloat16 and float32, not torch.float64"),
        ({"head_dim": 264}, "head sizes must be at most 256, not 264 and 128"),
        ({"capability": (7, 5)}, r"needs compute capability 8.0 or later, found (7, 5)"),
        ({"num_kv_heads": 3}, "8 heads are no multiple of 3 KV heads"),
        ({"intervals": 33}, "takes up to 32 intervals of keys for a query"),
    ):
        assert TritonRanges().refuses(replace(fits, **change)) == reason


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_divide_the_blocks_of_the_lists(
    capability: tuple[int, int], dtype: torch.dtype
) -> None:
    for head_dim, v_head_dim in ((16, 16), (64, 64), (96, 128), (192, 128), (192, 192), (256, 256)):
        block, *tiles, _ = tiles_for(capability, dtype, head_dim, v_head_dim)
        for tile in tiles:
            assert isinstance(tile, KernelTile)
            assert block % tile.rows == 0
            assert block % tile.keys == 0


def test_a_call_holds_what_it_says() -> None:
    block = make_block(TINY, torch.float16, full, device=DEVICE)
    size = BlockSize(20, 20, 1, 1, 16, 16, 2, 4)
    result = run(block)

    def held(*tensors: Tensor) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    assert KERNEL.scratch_bytes(Direction.FORWARD, size) == held(result.out, result.lse)
    statistics = 2 * 4 * TILES.block  # whole blocks of rows
    said = KERNEL.scratch_bytes(Direction.BACKWARD, size)
    assert said == held(result.dq, result.dk, result.dv) + statistics


def test_calls_of_one_kind_share_a_launch_and_others_do_not() -> None:
    kernel = TritonRanges(tiles=TILES)
    for seed in (0, 1):
        check(make_block(TINY, torch.float32, full, device=DEVICE, seed=seed), kernel=kernel)
    assert len(kernel._launches) == 2
    strided = make_block(TINY, torch.float32, full, device=DEVICE, strided=True)
    out, _ = kernel.forward(strided.of_kernel(Full()))
    assert error(out, truth(strided).out) <= TOLERANCE[torch.float32]
    assert len(kernel._launches) == 3
    several = make_block(TINY, torch.float32, union, device=DEVICE)
    kernel.forward(several.of_kernel())  # compiled for so many intervals
    assert len(kernel._launches) == 4
