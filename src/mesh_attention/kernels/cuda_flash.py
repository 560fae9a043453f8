"""FlashAttention 2 as built into PyTorch, through its private op.

Slower than cuDNN on recent GPUs, but it takes head sizes up to 256 and runs where cuDNN is
missing. It works in (B, S, H, D) inside, so transposed views cost nothing; it takes fewer KV
heads as they are; its backward reads `logsumexp` as a contiguous (B, H, S).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels.dense import DenseKernel
from mesh_attention.kernels.interface import Request
from mesh_attention.kernels.probe import aten, why_not_on_cuda, why_op_unusable
from mesh_attention.plan.plan import Direction

FORWARD = "_scaled_dot_product_flash_attention"
BACKWARD = "_scaled_dot_product_flash_attention_backward"


class CudaFlash(DenseKernel):
    name = "cuda_flash"

    def refuses(self, request: Request) -> str | None:
        reason = why_not_on_cuda(request)
        if reason is not None:
            return reason
        assert request.capability is not None
        if request.head_dim != request.v_head_dim:
            return f"needs D == E, not {request.head_dim} and {request.v_head_dim}"
        if request.head_dim > 256:
            return f"takes head sizes up to 256, not {request.head_dim}"
        # These chips have too little shared memory for the largest backward tiles.
        small = request.capability in ((8, 6), (8, 9)) or request.capability >= (12, 0)
        backward = request.direction is Direction.BACKWARD
        if backward and request.head_dim > 192 and small:
            return f"has no backward for head size {request.head_dim} on {request.capability}"
        inputs = ("query", "key", "value", "dropout_p", "is_causal", "scale")
        results = ("grad_out", "out", "logsumexp", "philox_seed", "philox_offset")
        lengths = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
        if backward:
            return why_op_unusable(BACKWARD, (*inputs, *results, *lengths))
        return why_op_unusable(FORWARD, (*inputs, "return_debug_mask"))

    def run_forward(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor, causal: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten(FORWARD)(
            query=q_BSHD.transpose(1, 2),
            key=k_BTGD.transpose(1, 2),
            value=v_BTGE.transpose(1, 2),
            dropout_p=0.0,
            is_causal=causal,
            return_debug_mask=False,
            scale=softmax_scale,
        )
        # A row that saw nothing is marked by +inf there.
        return out.transpose(1, 2), lse.masked_fill(lse == torch.inf, -torch.inf)

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
        # Without dropout the random state is never read; shape and dtype are the forward's.
        rng_state = torch.empty(2, dtype=torch.uint64, device=q_BSHD.device)
        rng_offset = torch.empty((), dtype=torch.uint64, device=q_BSHD.device)
        dq, dk, dv = aten(BACKWARD)(
            grad_out=grad_out_BSHE.transpose(1, 2),
            query=q_BSHD.transpose(1, 2),
            key=k_BTGD.transpose(1, 2),
            value=v_BTGE.transpose(1, 2),
            out=out_BSHE.transpose(1, 2),
            logsumexp=lse_BHS,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q_BSHD.shape[1],
            max_k=k_BTGD.shape[1],
            dropout_p=0.0,
            is_causal=causal,
            philox_seed=rng_state,
            philox_offset=rng_offset,
            scale=softmax_scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
