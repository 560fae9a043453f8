"""FlashAttention 4 from its own package (`flash_attn.cute`), where that is installed.

Used on Blackwell GPUs and only for the head sizes its authors list: on Hopper its backward is
younger than FlashAttention 3's and than cuDNN's. Signatures vary, see `probe.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels.dense import DenseKernel
from mesh_attention.kernels.interface import Request
from mesh_attention.kernels.probe import call_function, why_function_unusable, why_not_on_cuda
from mesh_attention.plan.plan import Direction

MODULE = "flash_attn.cute.interface"
FORWARD = "_flash_attn_fwd"
BACKWARD = "_flash_attn_bwd"
FORWARD_ARGUMENTS = ("q", "k", "v", "softmax_scale", "causal", "return_lse")
BACKWARD_ARGUMENTS = ("q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal")
HEAD_DIMS = (64, 96, 128)


class FlashAttn4(DenseKernel):
    name = "flash_attn4"

    def refuses(self, request: Request) -> str | None:
        reason = why_not_on_cuda(request)
        if reason is not None:
            return reason
        if request.capability is None or request.capability[0] not in (10, 11):
            return f"is for compute capability 10.x and 11.x, found {request.capability}"
        if request.head_dim != request.v_head_dim or request.head_dim not in HEAD_DIMS:
            dims = request.head_dim, request.v_head_dim
            return f"is used for equal head sizes of {HEAD_DIMS}, not {dims}"
        if request.direction is Direction.BACKWARD:
            return why_function_unusable(MODULE, BACKWARD, BACKWARD_ARGUMENTS, frozenset())
        return why_function_unusable(MODULE, FORWARD, FORWARD_ARGUMENTS, frozenset())

    def run_forward(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor, causal: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        values = (q_BSHD, k_BTGD, v_BTGE, softmax_scale, causal, True)
        arguments = dict(zip(FORWARD_ARGUMENTS, values, strict=True))
        with torch.no_grad():
            out, lse, *_ = call_function(MODULE, FORWARD, arguments, frozenset())
        return out, lse

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
        values = (q_BSHD, k_BTGD, v_BTGE, out_BSHE, grad_out_BSHE, lse_BHS, softmax_scale, causal)
        arguments = dict(zip(BACKWARD_ARGUMENTS, values, strict=True))
        with torch.no_grad():
            dq, dk, dv, *_ = call_function(MODULE, BACKWARD, arguments, frozenset())
        return dq, dk, dv
