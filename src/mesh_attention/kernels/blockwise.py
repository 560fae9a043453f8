"""Flash-style attention in plain PyTorch: any mask, device, dtype and head sizes, exact.

It holds one block of scores at a time and accumulates in fp32 (fp64 for fp64 input). It is
what runs row ranges (windows, documents, striped causal) where no faster kernel does, and
whatever the ready-made kernels refuse. Results stay in the accumulator's dtype, because they
are partial and will be added to others.

R is the number of query heads that share a key/value head; they are stacked as rows of one
matrix product, so keys and values are never repeated.
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
from mesh_attention.kernels.rows import accumulator_dtype
from mesh_attention.kernels.visibility import Padding, VisibleBlocks, cleared
from mesh_attention.plan.language.plan import Direction


class Blockwise:
    name = "blockwise"
    has_softcap = True
    takes_unions = True
    deterministic = True
    any_heads = True
    backward_needs = BackwardNeeds(delta=True, finite_lse=True)

    def __init__(self, *, query_block: int = 512, key_block: int = 1024) -> None:
        self._query_block = query_block
        self._key_block = key_block

    def refuses(self, request: Request) -> str | None:
        if request.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"takes float64, float32, bfloat16 and float16, not {request.dtype}"
        return request.why_not_grouped()

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        """Results in wide precision, a block of scores or two, and a last one not yet dropped."""
        wide, D, E = block.accumulate_bytes, block.head_dim, block.v_head_dim
        queries = min(self._query_block, block.num_queries)
        keys = min(self._key_block, block.num_keys)
        rows = queries * block.num_heads
        several = queries < block.num_queries or keys < block.num_keys
        matrices = (1 if direction is Direction.FORWARD else 2) + several
        of_queries, of_keys = rows * (3 * D + 3 * E + 8), keys * block.num_kv_heads * (D + E) * 2
        own = (rows * keys * matrices + of_queries + of_keys) * wide + 4 * queries * keys
        return block.result_bytes(direction, wide) + own

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q_BSHD, k_BTGD, v_BTGE, _, softmax_scale, softcap, *_ = block
        B, S, H, _ = q_BSHD.shape
        G, E = v_BTGE.shape[2:]
        dtype = accumulator_dtype(q_BSHD.dtype)
        out_BSHE = q_BSHD.new_empty(B, S, H, E, dtype=dtype)
        lse_BHS = q_BSHD.new_empty(B, H, S, dtype=dtype)
        blocks = self._blocks(block)
        padding = Padding.of(block.mask, q_BSHD.device)
        for number, queries in enumerate(blocks.queries):
            q_rows = _rows(cleared(q_BSHD, padding.queries, queries), G).to(dtype) * softmax_scale
            best = q_rows.new_full(q_rows.shape[:-1], -torch.inf)
            total = torch.zeros_like(best)
            acc = q_rows.new_zeros(*q_rows.shape[:-1], E)
            for keys, visible in blocks.keys_of(number):
                scores = q_rows @ cleared(k_BTGD, padding.keys, keys).permute(0, 2, 3, 1).to(dtype)
                if softcap:
                    _cap(scores, softcap)
                if visible is not None:
                    _hide(scores, visible)
                new_best = torch.maximum(best, scores.amax(dim=-1))
                # Rows that have seen nothing yet must not compute inf - inf.
                base = new_best.masked_fill(new_best == -torch.inf, 0.0)
                p = scores.sub_(base[..., None]).exp_()
                shrink = torch.exp(best - base)
                total = total * shrink + p.sum(dim=-1)
                acc = acc.mul_(shrink[..., None])
                acc = acc + p @ cleared(v_BTGE, padding.keys, keys).transpose(1, 2).to(dtype)
                best = new_best
            unseen = total == 0
            acc = acc / total.masked_fill(unseen, 1.0)[..., None]
            lse = best.masked_fill(unseen, 0.0) + total.log()
            out_BSHE[:, queries] = _unrows(acc, H)
            lse_BHS[:, :, queries] = lse.view(B, H, -1)
        return out_BSHE, lse_BHS

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        q_BSHD, k_BTGD, v_BTGE, _, softmax_scale, softcap, *_ = block
        grad_out_BSHE, _, lse_BHS, delta_BHS = inputs
        B, _, H, _ = q_BSHD.shape
        G = k_BTGD.shape[2]
        dtype = accumulator_dtype(q_BSHD.dtype)
        assert delta_BHS is not None  # as `backward_needs` says
        dq_BSHD = torch.zeros(q_BSHD.shape, dtype=dtype, device=q_BSHD.device)
        dk_BGTD, dv_BGTE = (
            torch.zeros(x.transpose(1, 2).shape, dtype=dtype, device=x.device)
            for x in (k_BTGD, v_BTGE)
        )
        blocks = self._blocks(block)
        padding = Padding.of(block.mask, q_BSHD.device)
        for number, queries in enumerate(blocks.queries):
            q_rows = _rows(cleared(q_BSHD, padding.queries, queries), G).to(dtype) * softmax_scale
            grad_rows = _rows(cleared(grad_out_BSHE, padding.queries, queries), G).to(dtype)
            lse_rows = lse_BHS[:, :, queries].reshape(B, G, -1, 1)
            delta_rows = cleared(delta_BHS, padding.queries, queries, 2).reshape(B, G, -1, 1)
            dq_rows = torch.zeros_like(q_rows)
            for keys, visible in blocks.keys_of(number):
                k = cleared(k_BTGD, padding.keys, keys).transpose(1, 2).to(dtype)
                v = cleared(v_BTGE, padding.keys, keys).transpose(1, 2).to(dtype)
                scores = q_rows @ k.mT
                slope = _cap(scores, softcap) if softcap else None
                if visible is not None:
                    _hide(scores, visible)
                p = scores.sub_(lse_rows).exp_()
                dv_BGTE[:, :, keys] += p.mT @ grad_rows
                ds = (grad_rows @ v.mT).sub_(delta_rows).mul_(p)
                if slope is not None:
                    ds.mul_(slope)
                dq_rows += ds @ k
                dk_BGTD[:, :, keys] += ds.mT @ q_rows
            dq_BSHD[:, queries] = _unrows(dq_rows, H)
        # q_rows carried the scale, so dk has it already; dq does not.
        return dq_BSHD.mul_(softmax_scale), dk_BGTD.transpose(1, 2), dv_BGTE.transpose(1, 2)

    def _blocks(self, block: Block) -> VisibleBlocks:
        S, T, device = block.q.shape[1], block.k.shape[1], block.q.device
        return VisibleBlocks(block.mask, S, T, self._query_block, self._key_block, device)


def _rows(x_BSHD: Tensor, num_groups: int) -> Tensor:
    """(B, G, R*S, D): the heads of a group one after another."""
    B, S, H, D = x_BSHD.shape
    return x_BSHD.transpose(1, 2).reshape(B, num_groups, H // num_groups * S, D)


def _unrows(rows: Tensor, num_heads: int) -> Tensor:
    """Back to (B, S, H, D)."""
    B, G, N, D = rows.shape
    return rows.view(B, num_heads, N * G // num_heads, D).transpose(1, 2)


def _cap(scores: Tensor, softcap: float) -> Tensor:
    """Cap the scores; returns what their gradients are multiplied by."""
    tanh = scores.div_(softcap).tanh_()
    slope = 1.0 - tanh**2
    scores.mul_(softcap)
    return slope


def _hide(scores: Tensor, visible_ST: Tensor) -> None:
    torch.unflatten(scores, 2, (-1, len(visible_ST))).masked_fill_(~visible_ST, -torch.inf)
