"""Attention on one device, with which ranks are compared before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention.measure.ranks import Ranks
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes of an element
LIMIT = {torch.bfloat16: 1e-2, torch.float32: 2e-6}  # of relative errors


def largest_error(ranks: Ranks, results: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative difference of all results, on any rank."""
    errors = [
        float((a.double() - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True)
    ]
    return ranks.longest(max(x if x == x else float("inf") for x in errors))


def tensors(problem: Problem, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of out: (1, tokens, heads, head_dim), the same on all ranks."""
    chance = torch.Generator(device).manual_seed(0)
    heads = (problem.num_heads, problem.kv_heads, problem.kv_heads, problem.num_heads)
    shapes = [(1, problem.q_tokens, number, problem.head_dim) for number in heads]
    dtype = DTYPES[problem.element_bytes]
    return [torch.randn(shape, generator=chance, device=device).to(dtype) for shape in shapes]


def truth(
    whole: list[Tensor], mask: Mask, dtype: torch.dtype = torch.float64, pairs: int = 1 << 27
) -> list[Tensor]:
    """Out and gradients, a block of queries at a time: not all pairs may fit. `pairs`: of queries
    and keys of all heads in a block."""
    q, k, v, grad = (x.to(dtype).transpose(1, 2) for x in whole)
    tokens = q.shape[2]
    rows = max(1, pairs // (q.shape[1] * tokens))
    outs, q_grads, kv_grads = [], [], [torch.zeros_like(x) for x in (k, v)]
    for first in range(0, tokens, rows):
        end = min(first + rows, tokens)
        last = end if mask.causal else tokens  # of the keys that they see
        visible = (q[:, :, first:end], k[:, :, :last], v[:, :, :last])
        leaves = [x.detach().requires_grad_() for x in visible]
        queries, keys, values = leaves
        seen = keys_seen(mask, torch.arange(tokens, device=q.device), first, end, last)
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, grad[:, :, first:end])
        outs.append(out.detach())
        q_grads.append(grads[0])
        for total, part in zip(kv_grads, grads[1:], strict=True):
            total[:, :, :last] += part
    results = [torch.cat(outs, 2), torch.cat(q_grads, 2), *kv_grads]
    return [x.transpose(1, 2) for x in results]


def keys_seen(mask: Mask, at: Tensor, first: int, end: int, last: int) -> Tensor | None:
    """Which of the first keys the queries from `first` to `end` see; None: all."""
    rows, columns = at[first:end, None], at[:last]
    seen = columns <= rows if mask.causal else None
    if mask.window is not None and seen is not None:
        seen = seen & (columns >= rows - (mask.window[0] or 0))
    if mask.documents is not None:
        cuts = torch.tensor(mask.documents, device=at.device)
        document = torch.bucketize(at, cuts, right=True)
        same = document[first:end, None] == document[:last]
        seen = same if seen is None else seen & same
    return seen
