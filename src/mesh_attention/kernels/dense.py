"""What every ready-made kernel is surrounded by: the checks before it is called.

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
    BackwardInputs,
    BackwardNeeds,
    Block,
    BlockSize,
    Causal,
    Full,
    Request,
    RowRange,
)
from mesh_attention.kernels.rows import accumulator_dtype, delta
from mesh_attention.kernels.visibility import check_mask
from mesh_attention.plan.language.plan import Direction


class DenseKernel(ABC):
    name: str
    backward_needs = BackwardNeeds(out=True, finite_lse=True)
    least_rows = 1  # of queries and of keys; the blockwise kernel does blocks with fewer

    @abstractmethod
    def refuses(self, request: Request) -> str | None: ...

    @abstractmethod
    def run_forward(self, block: Block, causal: bool) -> tuple[Tensor, Tensor]:
        """(out_BSHE, lse_BHS) of a block that is not empty."""

    @abstractmethod
    def run_backward(
        self, block: Block, grad_out_BSHE: Tensor, out_BSHE: Tensor, lse_BHS: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); grad_out, out and lse are contiguous and lse is finite."""

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        return block.result_bytes(direction, block.element_bytes)

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q_BSHD, k_BTGD, v_BTGE, *_ = block
        causal = not isinstance(block.mask, Full) and self._is_causal(block)
        if q_BSHD.numel() == 0 or k_BTGD.numel() == 0:
            B, S, H, _ = q_BSHD.shape
            dtype = accumulator_dtype(q_BSHD.dtype)
            out_BSHE = q_BSHD.new_zeros(B, S, H, v_BTGE.shape[3])
            return out_BSHE, q_BSHD.new_full((B, H, S), -torch.inf, dtype=dtype)
        if min(q_BSHD.shape[1], k_BTGD.shape[1]) < self.least_rows:
            return Blockwise().forward(block)
        return self.run_forward(block, causal)

    def backward(self, block: Block, given: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        q_BSHD, k_BTGD, v_BTGE, *_ = block
        grad_out_BSHE, out_BSHE, lse_BHS, _ = given
        assert out_BSHE is not None  # as `backward_needs` says
        causal = not isinstance(block.mask, Full) and self._is_causal(block)
        if q_BSHD.numel() == 0 or k_BTGD.numel() == 0:
            zeros = torch.zeros_like
            return zeros(q_BSHD), zeros(k_BTGD), zeros(v_BTGE)
        if min(q_BSHD.shape[1], k_BTGD.shape[1]) < self.least_rows:
            given = given._replace(delta=delta(out_BSHE, grad_out_BSHE))
            return Blockwise().backward(block, given)
        # Contiguous always: PyTorch has cached cuDNN's plans by the layouts of q, k and v alone,
        # and a plan made for one layout of `out` would silently misread another.
        grad_out, out = (x.to(q_BSHD.dtype).contiguous() for x in (grad_out_BSHE, out_BSHE))
        return self.run_backward(block, grad_out, out, lse_BHS, causal)

    def _is_causal(self, block: Block) -> bool:
        if isinstance(block.mask, RowRange):
            raise MeshAttentionError(f"kernel {self.name!r} has no row-range mask")
        check_mask(block.mask, block.q.shape[1], block.k.shape[1])
        return isinstance(block.mask, Causal)
