"""What contestants of `against_peers.py` compute, how they are called, and what is right.

Attention on one device, with which ranks are compared before anything is timed, is at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.measure.ranks import Ranks
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

MASKS = ("causal", "full", "window", "packed")
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes of an element
LIMIT = {torch.bfloat16: 1e-2, torch.float32: 2e-6}  # of relative errors


@dataclass(frozen=True)
class Cell:
    """What is computed: all contestants of a cell get the same tensors."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    mask_name: str  # of MASKS
    dtype: torch.dtype

    @property
    def problem(self) -> Problem:
        return Problem(
            self.tokens,
            self.heads,
            self.dim,
            num_kv_heads=self.kv_heads,
            element_bytes=self.dtype.itemsize,
            mask=self.mask,
        )

    @property
    def mask(self) -> Mask:
        """A window of an eighth of the tokens; documents of four lengths, each a multiple of a
        sixteenth of the tokens, because peers want them to divide."""
        if self.mask_name == "window":
            return Mask(causal=True, window=self.window)
        if self.mask_name == "packed":
            documents = tuple(self.tokens * x // 16 for x in (0, 1, 6, 8, 16))
            return Mask(causal=True, documents=documents)
        return Mask(causal=self.causal)

    @property
    def causal(self) -> bool:
        return self.mask_name != "full"

    @property
    def window(self) -> tuple[int, int]:
        """Keys before and after a query's own, as flash-attn counts; -1: all."""
        return (self.tokens // 8 - 1, 0) if self.mask_name == "window" else (-1, -1)

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def name(self) -> str:
        return f"{self.tokens}-{self.heads}x{self.kv_heads}x{self.dim}-{self.mask_name}"

    def refuse(self, *masks: str, because: str) -> None:
        if self.mask_name in masks:
            raise PlanError(because)


@dataclass(frozen=True)
class Surroundings:
    """Where a contestant runs: `cluster` was profiled on these ranks, `folder` has the truth."""

    ranks: Ranks
    cluster: Cluster
    folder: Path


class Contestant:
    """One that takes part, on one rank. Tensors come as (1, tokens, heads, head_dim) and are cut by
    `shard`: into contiguous parts, unless a contestant cuts them in another way."""

    setting = ""  # in words
    # Bytes, forward and backward, once both have run and where they can be counted.
    received: tuple[float, float] | None = None
    predicted: float | None = None  # seconds of both passes, by the simulator

    def __init__(self, cell: Cell, here: Surroundings) -> None:
        self._cell, self._n, self._rank = cell, here.ranks.size, here.ranks.rank

    def shard(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._n, 1)[self._rank].clone()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def around(self) -> AbstractContextManager[None]:
        """Entered before a call is timed, left after its backward pass."""
        return nullcontext()

    def key(self) -> str:
        """Contestants with the same do the same; empty: like nobody else."""
        return ""

    def check(self) -> None:
        """Raises if a call went wrong, and counts the bytes of one where it can."""

    def close(self) -> None:
        pass


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
