"""What every attention kernel of this package is asked and what it answers.

A kernel computes one block: some queries against some keys, whatever part of the whole
softmax that is. Blocks are joined by their log-sum-exp (`merge.py`), and the backward pass
of a block takes the log-sum-exp of the *whole* softmax (algorithm.md, section 4).

Shapes: B batch, S queries, T keys, H query heads, G key/value heads (head h uses h // (H//G)),
D head size of queries and keys, E of values. Tensors may be strided views, innermost stride 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Full:
    """Every query sees every key."""


@dataclass(frozen=True)
class Causal:
    """A square block (S == T) in which query i sees the keys 0 .. i."""


@dataclass(frozen=True, eq=False)
class RowRange:
    """Query i sees the keys j with `lo[i] <= key_position[j] < hi[i]`.

    Key positions need not be sorted. The three tensors may live on the CPU while the block is
    on a GPU: hidden parts are then skipped without waiting for the device.
    """

    lo: Tensor  # (S,) int64
    hi: Tensor  # (S,) int64
    key_position: Tensor  # (T,) int64


BlockMask = Full | Causal | RowRange


class MaskKind(StrEnum):
    FULL = "full"
    CAUSAL = "causal"
    RANGE = "range"


def kind_of(mask: BlockMask) -> MaskKind:
    match mask:
        case Full():
            return MaskKind.FULL
        case Causal():
            return MaskKind.CAUSAL
        case RowRange():
            return MaskKind.RANGE


@dataclass(frozen=True)
class Request:
    """All that decides whether a kernel can do a block; sequence lengths never do."""

    device_type: str
    capability: tuple[int, int] | None  # of a CUDA device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    num_heads: int
    num_kv_heads: int
    mask: MaskKind
    needs_backward: bool

    @classmethod
    def from_tensors(
        cls,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        mask: BlockMask,
        *,
        needs_backward: bool,
    ) -> Request:
        device = q_BSHD.device
        return cls(
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            dtype=q_BSHD.dtype,
            head_dim=q_BSHD.shape[3],
            v_head_dim=v_BTGE.shape[3],
            num_heads=q_BSHD.shape[2],
            num_kv_heads=k_BTGD.shape[2],
            mask=kind_of(mask),
            needs_backward=needs_backward,
        )


class Kernel(Protocol):
    """Attention on one block. Results may be in a wider dtype than the inputs."""

    @property
    def name(self) -> str: ...

    def refuses(self, request: Request) -> str | None:
        """None if the kernel can do it, otherwise one line that says why not."""
        ...

    def forward(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        *,
        mask: BlockMask,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """(out_BSHE, lse_BHS). A row that sees no key gives out = 0 and lse = -inf.

        lse is the natural log-sum-exp of the scaled scores, fp32 (fp64 for fp64 input).
        """
        ...

    def backward(
        self,
        grad_out_BSHE: Tensor,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        out_BSHE: Tensor | None,
        lse_BHS: Tensor,
        delta_BHS: Tensor | None,
        *,
        mask: BlockMask,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) that this block contributes.

        `lse`, `out` and `delta = rowsum(out * grad_out)` belong to the whole softmax, of which
        this block is a part. One of `out` and `delta` may be None. A row with lse = -inf
        contributes exact zeros.
        """
        ...
