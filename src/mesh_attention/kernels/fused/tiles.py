"""Statistics of rows as cuDNN Frontend's backward kernels take them: in whole tiles of a head."""

from __future__ import annotations

import triton
from torch import Tensor

from mesh_attention.kernels.fused.addressing import row_stride
from mesh_attention.kernels.fused.statistics import tiled_statistics_kernel
from mesh_attention.kernels.rows import UNSEEN_LSE

_ROWS = 128
_STEP = 2048


def tile_statistics(
    delta_BHS: Tensor,
    lse_BHS: Tensor,
    tiled_delta: Tensor,
    tiled_lse: Tensor,
    grad_q: Tensor | None,
) -> None:
    """Into contiguous (B, H, whole tiles of rows): delta, zero where there is no row, and the
    log-sum-exp to the base of two, which hides rows that saw nothing and those that are none. The
    accumulator of dq, (B, H, rows * width), is cleared on the way."""
    B, H, S = delta_BHS.shape
    num_tiled = tiled_delta.shape[2]
    width = 0 if grad_q is None else grad_q.shape[2] // num_tiled
    tiled_statistics_kernel[(triton.cdiv(num_tiled, _ROWS), B * H)](
        *(delta_BHS, lse_BHS, tiled_delta, tiled_lse, tiled_delta if grad_q is None else grad_q),
        *((row_stride(delta_BHS), row_stride(lse_BHS)), H, S, num_tiled),
        UNSEEN=UNSEEN_LSE,
        WIDTH=width,
        ROWS=_ROWS,
        STEP=_STEP,
    )
