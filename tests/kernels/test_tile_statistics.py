"""Statistics in whole tiles, as cuDNN Frontend's first backward kernel would have written them: on
a machine without a GPU in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mesh_attention.kernels.fused.row_kernels import tile_statistics
from mesh_attention.kernels.rows import UNSEEN_LSE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def strided(x_BHS: Tensor) -> Tensor:
    """The same numbers as buffers have them: rows first, NaN between them."""
    B, H, S = x_BHS.shape
    whole = torch.full((S + 2, B, H + 3), torch.nan, device=DEVICE)
    view = whole[1:-1, :, 2:-1].permute(1, 2, 0)
    return view.copy_(x_BHS)


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "tiled", "width"),
    [(1, 3, 1, 64, 16), (2, 1, 128, 128, 80), (1, 2, 130, 192, 0), (2, 2, 300, 384, 80)],
)
def test_tiles_hold_delta_and_a_log_sum_exp_that_hides_what_saw_nothing(
    batch: int, heads: int, rows: int, tiled: int, width: int
) -> None:
    delta, lse = torch.randn(2, batch, heads, rows, device=DEVICE)
    lse[..., ::7] = -torch.inf
    made, scaled = torch.full((2, batch, heads, tiled), torch.nan, device=DEVICE)
    around = torch.full((batch * heads * tiled * width + 64,), torch.nan, device=DEVICE)
    grad_q = around[32:-32].view(batch, heads, tiled * width) if width else None

    tile_statistics(strided(delta), strided(lse), made, scaled, grad_q)

    assert torch.equal(made[..., :rows], delta)
    assert not made[..., rows:].any()
    expected = lse.masked_fill(lse == -torch.inf, UNSEEN_LSE) / math.log(2)
    torch.testing.assert_close(scaled[..., :rows], expected)
    # exp2(score - this) is zero for every score, and the difference is no NaN.
    assert (scaled[..., rows:] > 1e29).all()
    assert scaled.isfinite().all()
    if grad_q is not None:
        assert not grad_q.any()
    assert around[:32].isnan().all()
    assert around[-32:].isnan().all()
