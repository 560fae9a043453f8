"""Rows that have seen no key, and what the backward pass is told about a row.

Their log-sum-exp is -inf everywhere in this package. In the backward pass exp(score - lse)
would then be inf, so such rows get a log-sum-exp that makes it zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError

# exp(score - this) is zero for every score, and unlike inf it cannot meet another infinity.
UNSEEN_LSE = 1e30


def without_unseen(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, UNSEEN_LSE)


def unseen_from_flash2(lse: Tensor) -> Tensor:
    """FlashAttention 2 marks a row that saw nothing by +inf."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def require_delta(delta_BHS: Tensor | None) -> Tensor:
    if delta_BHS is None:
        raise MeshAttentionError("backward needs `out` or `delta`, and was given neither")
    return delta_BHS
