"""The slow truth: softmax attention written out in float64, with the whole score matrix.

Every other kernel is tested against this one. It takes any mask, dtype and head sizes, and
memory that grows with S * T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels.interface import (
    BackwardInputs,
    BackwardNeeds,
    Block,
    BlockSize,
    Request,
)
from mesh_attention.kernels.rows import UNSEEN_LSE, accumulator_dtype, delta
from mesh_attention.kernels.visibility import Padding, cleared, dense_mask
from mesh_attention.plan.language.plan import Direction


class Reference:
    name = "reference"
    has_softcap = True
    takes_unions = True
    deterministic = True
    any_heads = True
    backward_needs = BackwardNeeds()

    def refuses(self, request: Request) -> str | None:
        if not request.dtype.is_floating_point:
            return f"takes floating point numbers, not {request.dtype}"
        if request.device_type == "mps":
            return "mps has no float64"
        return request.why_not_grouped()

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        """Matrices of scores in float64, as many as are alive at once, and inputs in float64."""
        matrices = 3 if direction is Direction.FORWARD else 5
        scores = block.num_heads * block.num_queries * block.num_keys * 8 * matrices
        return (
            block.result_bytes(Direction.FORWARD, 8)
            + 3 * block.result_bytes(Direction.BACKWARD, 8)
            + scores
        )

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        block = _without_padding(block)
        scores_BGRST = _scores(block)
        lse_BGRS = torch.logsumexp(scores_BGRST, dim=-1)
        p_BGRST = _weights(scores_BGRST, lse_BGRS)
        out_BSGRE = torch.einsum("bgrst,btge->bsgre", p_BGRST, block.v.double())
        dtype = block.q.dtype
        lse_BHS = lse_BGRS.flatten(1, 2).to(accumulator_dtype(dtype))
        return out_BSGRE.flatten(2, 3).to(dtype), lse_BHS

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        block = _without_padding(block)
        q_BSHD, k_BTGD, v_BTGE, *_ = block
        grad_out_BSHE, out_BSHE, lse_BHS, delta_BHS = inputs
        unseen = Padding.of(block.mask, q_BSHD.device).queries
        grad_out_BSHE = cleared(grad_out_BSHE, unseen)
        delta_BHS = None if delta_BHS is None else cleared(delta_BHS, unseen, dim=2)
        groups = k_BTGD.shape[2], -1
        if delta_BHS is None:
            assert out_BSHE is not None  # one of the two is there
            delta_BHS = delta(out_BSHE.double(), grad_out_BSHE.double())
        lse_BGRS, delta_BGRS = (
            torch.unflatten(x.double(), 1, groups) for x in (lse_BHS, delta_BHS)
        )
        grad_BSGRE = torch.unflatten(grad_out_BSHE.double(), 2, groups)
        q_BSGRD = torch.unflatten(q_BSHD.double(), 2, groups)
        k, v = k_BTGD.double(), v_BTGE.double()

        scores_BGRST = _scores(block)
        p_BGRST = _weights(scores_BGRST, lse_BGRS)
        dp_BGRST = torch.einsum("bsgre,btge->bgrst", grad_BSGRE, v)
        ds_BGRST = p_BGRST * (dp_BGRST - delta_BGRS[..., None]) * block.softmax_scale
        if block.softcap:  # the slope of tanh; hidden scores are -inf, and their weight is zero
            slope_BGRST = 1.0 - (scores_BGRST / block.softcap) ** 2
            ds_BGRST *= slope_BGRST.masked_fill(scores_BGRST == -torch.inf, 0.0)
        dq = torch.einsum("bgrst,btgd->bsgrd", ds_BGRST, k).flatten(2, 3)
        dk = torch.einsum("bgrst,bsgrd->btgd", ds_BGRST, q_BSGRD)
        dv = torch.einsum("bgrst,bsgre->btge", p_BGRST, grad_BSGRE)
        return dq.to(q_BSHD.dtype), dk.to(k_BTGD.dtype), dv.to(v_BTGE.dtype)


def _without_padding(block: Block) -> Block:
    queries, keys = Padding.of(block.mask, block.q.device)
    k, v = (cleared(x, keys) for x in (block.k, block.v))
    return block._replace(q=cleared(block.q, queries), k=k, v=v)


def _scores(block: Block) -> Tensor:
    q_BSHD, k_BTGD, _, mask, softmax_scale, softcap, *_ = block
    q_BSGRD = torch.unflatten(q_BSHD.double(), 2, (k_BTGD.shape[2], -1))
    scores = torch.einsum("bsgrd,btgd->bgrst", q_BSGRD, k_BTGD.double()) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible_ST = dense_mask(mask, q_BSHD.shape[1], k_BTGD.shape[1], q_BSHD.device)
    return scores if visible_ST is None else scores.masked_fill(~visible_ST, -torch.inf)


def _weights(scores_BGRST: Tensor, lse_BGRS: Tensor) -> Tensor:
    """Of the softmax; zero in rows that saw nothing, whose log-sum-exp is -inf."""
    seen_BGRS = lse_BGRS.masked_fill(lse_BGRS == -torch.inf, UNSEEN_LSE)
    return torch.exp(scores_BGRST - seen_BGRS[..., None])
