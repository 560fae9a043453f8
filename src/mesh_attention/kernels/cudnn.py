"""cuDNN attention through PyTorch's private op: the fastest dense kernel that ships with it.

The op takes (B, H, S, D) by stride, so (B, S, H, D) tensors go in as transposed views and its
output, laid out as q is, comes back the same way. It needs at least two queries and two keys;
thinner blocks go to the blockwise kernel (numbers.md, "PyTorch's private attention ops").
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mesh_attention.kernels.dense import DenseKernel
from mesh_attention.kernels.interface import BlockSize, Request
from mesh_attention.kernels.probe import aten, why_not_on_cuda, why_op_unusable
from mesh_attention.plan.plan import Direction

FORWARD = "_scaled_dot_product_cudnn_attention"
BACKWARD = "_scaled_dot_product_cudnn_attention_backward"


class Cudnn(DenseKernel):
    name = "cudnn"
    least_rows = 2

    def refuses(self, request: Request) -> str | None:
        reason = why_not_on_cuda(request)
        if reason is not None:
            return reason
        version = _cudnn_version()
        if version is None:
            return "this PyTorch has no cuDNN"
        dims = request.head_dim, request.v_head_dim
        if max(dims) > 128 and not (dims == (192, 128) and version >= 91100):
            return f"takes head sizes up to 128 (192 with 128 from cuDNN 9.11), not {dims}"
        inputs = ("query", "key", "value", "attn_bias", "dropout_p", "is_causal", "scale")
        results = ("grad_out", "out", "logsumexp", "philox_seed", "philox_offset")
        lengths = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
        if request.direction is Direction.BACKWARD:
            return why_op_unusable(BACKWARD, (*inputs, *results, *lengths))
        return why_op_unusable(FORWARD, (*inputs, "compute_log_sumexp", "return_debug_mask"))

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        """Measured with cuDNN 9.19 on an H200: an fp32 accumulator of dq and the row sums; where
        query heads share keys, dk and dv of every query head besides; rows in blocks of 64."""
        results = super().scratch_bytes(direction, block)
        if direction is Direction.FORWARD:
            return results
        rows, keys = (-(-length // 64) * 64 for length in (block.num_queries, block.num_keys))
        own = rows * block.num_heads * (block.head_dim + 1) * 4
        if block.num_heads != block.num_kv_heads:
            own += keys * block.num_heads * (block.head_dim + block.v_head_dim) * 2
        return results + own

    def run_forward(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor, causal: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward_op(q_BSHD, k_BTGD, v_BTGE, causal, softmax_scale)
        return out.transpose(1, 2), lse.reshape(lse.shape[:3])

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
        # Without dropout the random state is never read; it only has to be a tensor.
        unused = torch.empty((), dtype=torch.int64, device=q_BSHD.device)
        dq, dk, dv = aten(BACKWARD)(
            grad_out=grad_out_BSHE.transpose(1, 2),
            query=q_BSHD.transpose(1, 2),
            key=k_BTGD.transpose(1, 2),
            value=v_BTGE.transpose(1, 2),
            out=out_BSHE.transpose(1, 2),
            logsumexp=lse_BHS[..., None] if _lse_rank(q_BSHD.device) == 4 else lse_BHS,
            philox_seed=unused,
            philox_offset=unused,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q_BSHD.shape[1],
            max_k=k_BTGD.shape[1],
            dropout_p=0.0,
            is_causal=causal,
            scale=softmax_scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _cudnn_version() -> int | None:
    if torch.version.hip is not None:
        return None
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def _forward_op(
    q_BSHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor, causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """The op's own (out_BHSE, lse), the latter (B, H, S, 1) or (B, H, S)."""
    out, lse, *_ = aten(FORWARD)(
        query=q_BSHD.transpose(1, 2),
        key=k_BTGD.transpose(1, 2),
        value=v_BTGE.transpose(1, 2),
        attn_bias=None,
        compute_log_sumexp=True,
        dropout_p=0.0,
        is_causal=causal,
        return_debug_mask=False,
        scale=softmax_scale,
    )
    return out, lse


@cache
def _lse_rank(device: torch.device) -> int:
    """How the backward op wants its log-sum-exp: as the forward op of this PyTorch returns it."""
    x_BSHD = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16, device=device)
    _, lse = _forward_op(x_BSHD, x_BSHD, x_BSHD, False, 1.0)
    return lse.dim()
