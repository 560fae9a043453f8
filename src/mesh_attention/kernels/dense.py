"""The frame around every ready-made kernel: what is checked before it is called.

Ready-made kernels are dense or causal, insist on an `out` tensor in the backward pass, assume
tight layouts of it, and crash or disagree on empty blocks and on rows that saw nothing. An
adapter then only says what it refuses and how its library is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.blockwise import Blockwise
from mesh_attention.kernels.interface import (
    BackwardNeeds,
    BlockMask,
    BlockSize,
    Causal,
    Request,
    RowRange,
)
from mesh_attention.kernels.plain_rows import accumulator_dtype, delta
from mesh_attention.kernels.visibility import check_mask
from mesh_attention.plan.plan import Direction


class DenseKernel(ABC):
    name: str
    backward_needs = BackwardNeeds(out=True, finite_lse=True)
    least_rows = 1  # of queries and of keys; the blockwise kernel does blocks with fewer

    @abstractmethod
    def refuses(self, request: Request) -> str | None: ...

    @abstractmethod
    def run_forward(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor, causal: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """(out_BSHE, lse_BHS) of a block that is not empty."""

    @abstractmethod
    def run_backward(
        self,
        grad_out_BSHE: Tensor,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        out_BSHE: Tensor,
        lse_BHS: Tensor,
        causal: bool,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); grad_out, out and lse are contiguous and lse is finite."""

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        return block.result_bytes(direction, block.element_bytes)

    def forward(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        *,
        mask: BlockMask,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        causal = self._is_causal(mask, q_BSHD, k_BTGD)
        if q_BSHD.numel() == 0 or k_BTGD.numel() == 0:
            B, S, H, _ = q_BSHD.shape
            dtype = accumulator_dtype(q_BSHD.dtype)
            out_BSHE = q_BSHD.new_zeros(B, S, H, v_BTGE.shape[3])
            return out_BSHE, q_BSHD.new_full((B, H, S), -torch.inf, dtype=dtype)
        if min(q_BSHD.shape[1], k_BTGD.shape[1]) < self.least_rows:
            return Blockwise().forward(
                q_BSHD, k_BTGD, v_BTGE, mask=mask, softmax_scale=softmax_scale
            )
        return self.run_forward(q_BSHD, k_BTGD, v_BTGE, causal, softmax_scale)

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
        assert out_BSHE is not None  # as `backward_needs` says
        causal = self._is_causal(mask, q_BSHD, k_BTGD)
        if q_BSHD.numel() == 0 or k_BTGD.numel() == 0:
            zeros = torch.zeros_like
            return zeros(q_BSHD), zeros(k_BTGD), zeros(v_BTGE)
        if min(q_BSHD.shape[1], k_BTGD.shape[1]) < self.least_rows:
            state = (None, lse_BHS, delta(out_BSHE, grad_out_BSHE))
            return Blockwise().backward(
                *(grad_out_BSHE, q_BSHD, k_BTGD, v_BTGE, *state),
                mask=mask,
                softmax_scale=softmax_scale,
            )
        # Contiguous always: PyTorch has cached cuDNN's plans by the layouts of q, k and v alone,
        # and a plan made for one layout of `out` would silently misread another.
        return self.run_backward(
            grad_out_BSHE.to(q_BSHD.dtype).contiguous(),
            *(q_BSHD, k_BTGD, v_BTGE),
            out_BSHE.to(q_BSHD.dtype).contiguous(),
            *(lse_BHS, causal, softmax_scale),
        )

    def _is_causal(self, mask: BlockMask, q_BSHD: Tensor, k_BTGD: Tensor) -> bool:
        if isinstance(mask, RowRange):
            raise MeshAttentionError(f"kernel {self.name!r} has no row-range mask")
        check_mask(mask, q_BSHD.shape[1], k_BTGD.shape[1])
        return isinstance(mask, Causal)
