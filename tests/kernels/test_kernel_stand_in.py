"""The stand-in for the output: its row sums with dO are delta, and it is never NaN."""

from __future__ import annotations

import pytest
import torch

from mesh_attention.kernels.rows import RowKernels, delta

stand_in = RowKernels().stand_in


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.bfloat16, 3e-5),
        (torch.float16, 2e-6),
        (torch.float32, 1e-6),
        (torch.float64, 1e-14),
    ],
    ids=str,
)
def test_row_sums_are_delta(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    for E in (2, 8, 128):
        out, grad_out = (torch.randn(2, 301, 4, E).to(dtype) for _ in range(2))
        expected = delta(out, grad_out)
        result = delta(stand_in(grad_out, expected), grad_out)
        worst = ((result - expected).abs() / expected.abs().clamp(min=0.1)).max()
        assert worst <= tolerance, (E, worst)


def test_only_the_two_largest_entries_are_used() -> None:
    grad_out = torch.tensor([0.5, -4.0, 0.0, 3.0]).view(1, 1, 1, 4).to(torch.bfloat16)
    result = stand_in(grad_out, torch.tensor([[[1.2345]]]))
    assert result.flatten()[[0, 2]].tolist() == [0.0, 0.0]
    assert result.flatten()[1] == torch.tensor(1.2345 / -4.0).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_without_gradient_give_finite_zeros(dtype: torch.dtype) -> None:
    grad_out = torch.zeros(1, 3, 2, 8, dtype=dtype)
    grad_out[0, 1, 0, 5] = 2.0  # one entry only: there is no second largest
    grad_out[0, 2, 0, 3] = 1.0
    grad_out[0, 2, 0, 4] = torch.finfo(dtype).smallest_normal  # calls for more than fits
    results = stand_in(grad_out, torch.full((1, 2, 3), 0.7))
    assert torch.isfinite(results).all()
    assert torch.all(results[0, 0] == 0)
    assert torch.all(results[:, :, 1] == 0)
    sums = delta(results, grad_out)[0, 0, 1:]
    torch.testing.assert_close(sums, torch.full((2,), 0.7), rtol=5e-3, atol=0)


def test_a_head_of_size_one_and_an_empty_block_work() -> None:
    grad_out = torch.tensor([2.0, 0.0]).view(1, 2, 1, 1)
    result = stand_in(grad_out, torch.tensor([[[3.0, 0.0]]]))
    assert result.flatten().tolist() == [1.5, 0.0]
    assert stand_in(torch.empty(1, 0, 2, 4), torch.empty(1, 2, 0)).shape == (1, 0, 2, 4)
