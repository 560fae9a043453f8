"""FlashAttention 3 from its own package (`flash_attn_interface`), where that is installed.

The fastest kernel on Hopper GPUs. Its low-level functions are used because the backward pass
must take the log-sum-exp of the whole softmax; their signatures vary, see `probe.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels.dense import DenseKernel
from mesh_attention.kernels.interface import Request
from mesh_attention.kernels.probe import call_function, why_function_unusable, why_not_on_cuda
from mesh_attention.plan.plan import Direction

MODULE = "flash_attn_interface"
FORWARD = "_flash_attn_forward"
BACKWARD = "_flash_attn_backward"
FORWARD_ARGUMENTS = ("q", "k", "v", "softmax_scale", "causal")
BACKWARD_ARGUMENTS = (
    *("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"),
    *("softmax_scale", "is_causal|causal"),
)
# Parameters of early releases that had no default and that dense attention leaves unset.
MAY_BE_NONE = frozenset(
    {
        *("k_new", "v_new", "qv", "out", "out_", "page_table", "kv_batch_idx", "leftpad_k"),
        *("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "max_seqlen_q", "max_seqlen_k"),
        *("seqused_q", "seqused_k", "sequed_q", "sequed_k"),
        *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
    }
)


class FlashAttn3(DenseKernel):
    name = "flash_attn3"

    def refuses(self, request: Request) -> str | None:
        reason = why_not_on_cuda(request)
        if reason is not None:
            return reason
        if request.capability is None or request.capability[0] != 9:
            return f"is for compute capability 9.x, found {request.capability}"
        if request.head_dim != request.v_head_dim or request.head_dim > 256:
            dims = request.head_dim, request.v_head_dim
            return f"is used for equal head sizes up to 256, not {dims}"
        if request.direction is Direction.BACKWARD:
            return why_function_unusable(MODULE, BACKWARD, BACKWARD_ARGUMENTS, MAY_BE_NONE)
        return why_function_unusable(MODULE, FORWARD, FORWARD_ARGUMENTS, MAY_BE_NONE)

    def run_forward(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor, causal: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        values = (q_BSHD, k_BTGD, v_BTGE, softmax_scale, causal)
        arguments = dict(zip(FORWARD_ARGUMENTS, values, strict=True))
        with torch.no_grad():
            out, lse, *_ = call_function(MODULE, FORWARD, arguments, MAY_BE_NONE)
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
        dq, dk, dv = (x.new_empty(x.shape) for x in (q_BSHD, k_BTGD, v_BTGE))
        values = (grad_out_BSHE, q_BSHD, k_BTGD, v_BTGE, out_BSHE, lse_BHS, dq, dk, dv)
        arguments = dict(zip(BACKWARD_ARGUMENTS, (*values, softmax_scale, causal), strict=True))
        with torch.no_grad():
            call_function(MODULE, BACKWARD, arguments, MAY_BE_NONE)
        return dq, dk, dv
