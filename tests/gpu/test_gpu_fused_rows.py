"""The fused row kernels against the plain ones and float64: odd sizes, strides, NaN, infinities.

Without a GPU this file can be run in Triton's interpreter:
`TRITON_INTERPRET=1 pytest --noconftest -m gpu tests/gpu/test_gpu_fused_rows.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mesh_attention.kernels.rows import RowKernels

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = torch.inf
PLAIN = RowKernels()
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (rows, batch, heads, width): odd in every direction, widths that are no power of two.
SHAPES = [(37, 2, 3, 80), (64, 1, 4, 128), (5, 3, 1, 96), (129, 1, 2, 64), (3, 1, 5, 1)]


@pytest.fixture(scope="module")
def fused() -> RowKernels:
    from mesh_attention.kernels.fused.rows import FusedRows

    return FusedRows()


def tokens(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """(B, S, H, E): a view of some rows and some heads of a larger buffer, NaN all around."""
    rows, batch, heads, width = shape
    whole = torch.full((rows + 4, batch, heads + 2, width), torch.nan, device=DEVICE, dtype=dtype)
    view = whole[3:-1, :, 1:-1]
    view.copy_(torch.randn(view.shape, device=DEVICE))
    return view.transpose(0, 1)


def statistics(shape: Sequence[int], spread: float = 3.0) -> Tensor:
    """(B, H, S), a strided view, with unseen rows and differences of 1e4."""
    rows, batch, heads, _ = shape
    whole = torch.full((rows + 4, batch, heads + 2), torch.nan, device=DEVICE)
    view = whole[3:-1, :, 1:-1]
    view.copy_(spread * torch.randn(view.shape, device=DEVICE))
    choice = torch.randint(0, 8, view.shape, device=DEVICE)
    view.masked_fill_(choice == 0, -INF)
    view.masked_fill_(choice == 1, 1e4)
    view.masked_fill_(choice == 2, -1e4)
    return view.permute(1, 2, 0)


def poison_unseen(out: Tensor, lse: Tensor) -> None:
    out.masked_fill_((lse == -INF).transpose(1, 2).unsqueeze(-1), torch.nan)


def surroundings_untouched(view: Tensor) -> bool:
    """The NaN around a view of `tokens` or `statistics` is still there, and none is inside it."""
    base = view._base
    assert base is not None
    return int(base.isnan().sum()) == base.numel() - view.numel() and not bool(view.isnan().any())


def close(result: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, check_dtype=False)


def rounding(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps


def widened(x: Tensor) -> Tensor:
    return x.double().clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merging_equals_the_plain_merge_and_float64(
    fused: RowKernels, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    acc_out, acc_lse = tokens(shape, torch.float32), statistics(shape)
    acc_out.fill_(torch.nan)
    acc_lse.fill_(torch.nan)
    truth_out, truth_lse = widened(acc_out), widened(acc_lse)
    plain_out, plain_lse = acc_out.clone(), acc_lse.clone()
    for step in range(3):
        out, lse = tokens(shape, dtype), statistics(shape)
        poison_unseen(out, lse)
        fresh = step == 0
        fused.merge_into(acc_out, acc_lse, out, lse, fresh=fresh)
        PLAIN.merge_into(plain_out, plain_lse, out, lse, fresh=fresh)
        PLAIN.merge_into(truth_out, truth_lse, out.double(), lse.double(), fresh=fresh)
        close(acc_out, plain_out)
        close(acc_lse, plain_lse)
        # An lse near 1e4 has steps of 1e-3 in fp32, and the weights of the next merge feel it.
        close(acc_out, truth_out, atol=2e-3, rtol=1e-5)
        close(acc_lse, truth_lse)
    assert surroundings_untouched(acc_out)
    assert surroundings_untouched(acc_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "loose"])
def test_merging_many_partials_equals_float64(
    fused: RowKernels, dtype: torch.dtype, shape: tuple[int, ...], stacked: bool
) -> None:
    torch.manual_seed(0)
    for count in (1, 2, 7):
        outs, lses = [], []
        for _ in range(count):
            outs.append(tokens(shape, dtype))
            lses.append(statistics(shape))
            poison_unseen(outs[-1], lses[-1])
        if stacked:
            outs = list(torch.stack(outs).unbind())
            lses = list(torch.stack(lses).unbind())
        else:  # as where a rank's own result has stayed in fp32
            outs = [out.clone() for out in outs]
            outs[0] = outs[0].float()
            lses = [lse.clone() for lse in lses]
        out, lse = tokens(shape, dtype), statistics(shape)
        out.fill_(torch.nan)
        fused.merge_all(outs, lses, out, lse)
        truth_out = torch.empty(out.shape, dtype=torch.float64, device=DEVICE)
        truth_lse = torch.empty(lse.shape, dtype=torch.float64, device=DEVICE)
        for at, (part, part_lse) in enumerate(zip(outs, lses, strict=True)):
            PLAIN.merge_into(truth_out, truth_lse, part.double(), part_lse.double(), fresh=at == 0)
        close(out, truth_out, rtol=rounding(dtype), atol=rounding(dtype))
        close(lse, truth_lse)
        assert surroundings_untouched(out)
        assert surroundings_untouched(lse)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "loose"])
def test_merging_many_statistics_equals_float64(
    fused: RowKernels, shape: tuple[int, ...], stacked: bool
) -> None:
    torch.manual_seed(0)
    for count in (1, 2, 16, 40):  # so many loose ones are left to PyTorch
        parts = [statistics(shape) for _ in range(count)]
        if stacked:
            parts = list(torch.stack(parts).unbind())
        target = statistics(shape)
        target.fill_(torch.nan)
        fused.merge_lse(parts, target)
        close(target, torch.logsumexp(torch.stack(parts).double(), dim=0))
        assert surroundings_untouched(target)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_equal_float64(fused: RowKernels, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for count in (1, 2, 5, 16):
        for stacked in (True, False):
            parts = [tokens(shape, dtype) for _ in range(count)]
            if stacked:
                parts = list(torch.stack(parts).unbind())
            else:
                parts[0] = parts[0].float()
            target = tokens(shape, dtype)
            target.fill_(torch.nan)
            fused.sum(parts, target)
            truth = sum(part.double() for part in parts)
            assert isinstance(truth, Tensor)
            close(target, truth, rtol=rounding(dtype), atol=rounding(dtype))
            assert surroundings_untouched(target)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accumulating_adds_and_stores_when_fresh(
    fused: RowKernels, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    acc, first, second = (tokens(shape, x) for x in (torch.float32, dtype, dtype))
    acc.fill_(torch.nan)
    fused.sum((first,), acc)
    assert torch.equal(acc, first.float())
    fused.sum((acc, second), acc)
    close(acc, first.float() + second.float(), rtol=0, atol=0)
    assert surroundings_untouched(acc)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rescaling_and_delta_equal_the_plain_versions(
    fused: RowKernels, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    out, grad_out, target = (tokens(shape, dtype) for _ in range(3))
    result, expected = statistics(shape), statistics(shape)
    fused.delta(out, grad_out, result)
    PLAIN.delta(out, grad_out, expected)
    close(result, expected)
    truth = (out.double() * grad_out.double()).sum(-1).transpose(1, 2)
    close(result, truth, atol=2e-5)
    assert surroundings_untouched(result)

    own, everywhere = statistics(shape), statistics(shape)
    everywhere.copy_(torch.logaddexp(own, everywhere))
    poison_unseen(out, own)
    target.fill_(torch.nan)
    fused.rescale(out, own, everywhere, target)
    wanted = torch.empty_like(target)
    PLAIN.rescale(out, own, everywhere, wanted)
    close(target, wanted, rtol=rounding(dtype), atol=rounding(dtype))
    assert surroundings_untouched(target)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_stand_in_has_the_row_sums_it_should(
    fused: RowKernels, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    out, grad_out = tokens(shape, dtype), tokens(shape, dtype)
    grad_out[:, :2] = 0.0
    delta = statistics(shape)
    PLAIN.delta(out, grad_out, delta)
    results = fused.stand_in(grad_out, delta)
    expected = PLAIN.stand_in(grad_out, delta)
    assert results.is_contiguous()
    assert results.dtype == dtype
    assert bool(results.isfinite().all())
    assert bool((results[:, :2] == 0).all())
    # Equal magnitudes may be taken in another order, so row sums are compared, not entries.
    for stand_in in (results, expected):
        sums = (stand_in.double() * grad_out.double()).sum(-1).transpose(1, 2)
        worst = (sums - delta.double()).abs() / delta.double().abs().clamp(min=0.1)
        assert float(worst.max()) <= (1e-4 if shape[3] > 1 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_finite_lse_hides_unseen_rows_only(fused: RowKernels, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    lse = statistics(shape)
    result = fused.finite_lse(lse)
    assert result.is_contiguous()
    assert torch.equal(result, PLAIN.finite_lse(lse))


def test_empty_views_are_left_alone(fused: RowKernels) -> None:
    nothing, none = tokens((0, 1, 2, 8), torch.bfloat16), statistics((0, 1, 2, 8))
    wide = tokens((0, 1, 2, 8), torch.float32)
    fused.merge_into(wide, none, nothing, none, fresh=True)
    fused.merge_all([nothing], [none], nothing, none)
    fused.sum((nothing, nothing, nothing), wide)
    fused.merge_lse((none, none), none)
    fused.delta(nothing, nothing, none)
    assert fused.stand_in(nothing, none).shape == nothing.shape
