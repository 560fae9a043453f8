"""Merging partial results: far apart, empty on either side, in any order."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from mesh_attention.kernels.rows import RowKernels, delta

INF = torch.inf
ROWS = RowKernels()


def merged(parts: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, lse = parts[0]
    acc_out = torch.full(out.shape, torch.nan, dtype=dtype)
    acc_lse = torch.full(lse.shape, -INF, dtype=dtype)
    for part in parts:
        ROWS.merge_into(acc_out, acc_lse, *part, fresh=False)
    return acc_out, acc_lse


def test_merge_survives_differences_of_ten_thousand_and_infinities() -> None:
    values = [-INF, -1e4, -3.0, 0.0, 2.0, 1e4]
    pairs = list(itertools.product(values, values))
    for dtype in (torch.float32, torch.float64):
        lse_a = torch.tensor([a for a, _ in pairs], dtype=dtype).view(1, 1, -1)
        lse_b = torch.tensor([b for _, b in pairs], dtype=dtype).view(1, 1, -1)
        out_a = torch.ones(1, len(pairs), 1, 3, dtype=dtype)
        out_b = torch.full_like(out_a, 2.0)
        # What a row without weight holds must not matter.
        out_a[0, :, 0][lse_a[0, 0] == -INF] = torch.nan
        out_b[0, :, 0][lse_b[0, 0] == -INF] = torch.nan
        out, lse = merged([(out_a, lse_a), (out_b, lse_b)], dtype)
        weight_b = torch.sigmoid(lse_b.double() - lse_a.double()).nan_to_num(0.0)[0, 0]
        unseen = (lse == -INF)[0, 0]
        expected = torch.where(unseen, 0.0, 1.0 + weight_b)[None, :, None, None].expand_as(out)
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
        assert unseen.sum() == 1
        torch.testing.assert_close(lse, torch.logaddexp(lse_a, lse_b))


def test_merge_accepts_lower_precision_partials() -> None:
    out = torch.randn(2, 5, 3, 4).to(torch.bfloat16)
    lse = torch.randn(2, 3, 5)
    acc_out, acc_lse = merged([(out, lse)], torch.float32)
    torch.testing.assert_close(acc_out, out.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(acc_lse, lse)


def test_merge_gives_the_same_in_any_order() -> None:
    torch.manual_seed(0)
    parts = [
        (torch.randn(2, 7, 3, 4, dtype=torch.float64), 50 * torch.randn(2, 3, 7).double())
        for _ in range(4)
    ]
    first = merged(parts, torch.float64)
    for order in itertools.permutations(parts):
        for result, expected in zip(merged(list(order), torch.float64), first, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_rescaled_partials_add_up_to_the_merged_output() -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(2, 7, 3, 4), 1e3 * torch.randn(2, 3, 7)) for _ in range(3)]
    parts[0][1][:, :, 2] = -INF
    parts[0][0][:, 2] = torch.nan
    for _, lse in parts:
        lse[:, :, 5] = -INF
    out, lse = merged(parts, torch.float32)
    whole = torch.full_like(lse, torch.nan)
    ROWS.merge_lse([lse for _, lse in parts], whole)
    torch.testing.assert_close(whole, lse)
    total = torch.zeros_like(out)
    for part, lse_part in parts:
        rescaled = torch.full_like(out, torch.nan)
        ROWS.rescale(part, lse_part, whole, rescaled)
        total += rescaled
    torch.testing.assert_close(total, out, rtol=1e-5, atol=1e-5)
    assert torch.all(out[:, 5] == 0)


def test_delta_is_the_row_sum_in_wide_precision() -> None:
    out, grad_out = (torch.randn(2, 5, 3, 64).to(torch.bfloat16) for _ in range(2))
    result = delta(out, grad_out)
    assert result.shape == (2, 3, 5)
    assert result.dtype == torch.float32
    expected = torch.einsum("bshe,bshe->bhs", out.double(), grad_out.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
