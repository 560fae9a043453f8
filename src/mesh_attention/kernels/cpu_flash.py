"""PyTorch's CPU flash attention, through its private op.

Facts found by trying (torch 2.13): float64, float32, bfloat16 and float16, fewer KV heads,
any S and T; D and E must agree; an empty S or T ends the whole process with a division by
zero; the log-sum-exp comes back as a view of (B, S, H).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels.dense import DenseKernel
from mesh_attention.kernels.interface import Request
from mesh_attention.kernels.probe import aten, why_not_dense, why_op_unusable
from mesh_attention.plan.plan import Direction

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


class CpuFlash(DenseKernel):
    name = "cpu_flash"

    def refuses(self, request: Request) -> str | None:
        if request.device_type != "cpu":
            return f"runs on cpu, not on {request.device_type}"
        if request.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"takes float64, float32, bfloat16 and float16, not {request.dtype}"
        if request.head_dim != request.v_head_dim:
            return f"needs D == E, not {request.head_dim} and {request.v_head_dim}"
        inputs = ("query", "key", "value", "dropout_p", "is_causal", "scale")
        results = ("grad_out", "out", "logsumexp")
        if request.direction is Direction.BACKWARD:
            return why_not_dense(request) or why_op_unusable(BACKWARD, (*inputs, *results))
        return why_not_dense(request) or why_op_unusable(FORWARD, inputs)

    def run_forward(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor, causal: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = aten(FORWARD)(
            query=q_BSHD.transpose(1, 2),
            key=k_BTGD.transpose(1, 2),
            value=v_BTGE.transpose(1, 2),
            dropout_p=0.0,
            is_causal=causal,
            scale=softmax_scale,
        )
        return out.transpose(1, 2), lse

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
        dq, dk, dv = aten(BACKWARD)(
            grad_out=grad_out_BSHE.transpose(1, 2),
            query=q_BSHD.transpose(1, 2),
            key=k_BTGD.transpose(1, 2),
            value=v_BTGE.transpose(1, 2),
            out=out_BSHE.transpose(1, 2),
            logsumexp=lse_BHS,
            dropout_p=0.0,
            is_causal=causal,
            scale=softmax_scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
