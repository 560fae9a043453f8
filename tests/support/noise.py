"""What is in one document must not touch any other, not even in the last bit."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mesh_attention import Mask, Plan, Problem
from mesh_attention.choose.ask import ask
from mesh_attention.choose.pack import Layer, Packer
from mesh_attention.testing import run_local

__all__ = ["WAYS", "check_apart", "plan_of_batch"]

WAYS = ("chosen", "ulysses", "seen", "mesh")

RESULTS = ("out", "lse", "grad_q", "grad_k", "grad_v")


def plan_of_batch(
    way: str, starts: list[int], ranks: int, dtype: torch.dtype, mask: Mask, head_dim: int = 8
) -> Plan:
    """As `ContextParallel.documents` has it made, for an object with a method or without."""
    problem = Problem(
        9, 4, head_dim, num_kv_heads=2, element_bytes=dtype.itemsize, mask=mask
    )  # a batch brings its own length
    question = None if way == "chosen" else ask(problem, ranks, method=way)
    layer = Layer(problem, question)
    return Packer((layer,), ranks)(starts).question(layer).plan()


def check_apart(
    plan: Plan,
    starts: list[int],
    dtype: torch.dtype,
    noise: float,
    device: str = "cpu",
    kernel: str | None = None,
) -> None:
    """Each document in turn is filled with `noise` of either sign in q, k, v and grad_out; of all
    others every result stays bit by bit as it was."""
    p = plan.problem
    chance = torch.Generator().manual_seed(0)
    heads = (p.num_heads, p.kv_heads, p.kv_heads, p.num_heads)
    widths = (p.head_dim, p.head_dim, p.v_dim, p.v_dim)
    tensors = [
        torch.randn(2, starts[-1], *shape, generator=chance).to(device, dtype)
        for shape in zip(heads, widths, strict=True)
    ]
    before = _results(plan, tensors, kernel)
    for first, last in pairwise(starts):
        changed = [x.clone() for x in tensors]
        for x in changed:
            sign = torch.randn(x[:, first:last].shape, generator=chance).sign()
            x[:, first:last] = (noise * sign).to(device, dtype)
        others = torch.ones(starts[-1], dtype=torch.bool, device=device)
        others[first:last] = False
        after = _results(plan, changed, kernel)
        for name, old, new in zip(RESULTS, before, after, strict=True):
            assert torch.equal(old[:, others], new[:, others]), (name, first, last)


def _results(plan: Plan, inputs: list[Tensor], kernel: str | None) -> list[Tensor]:
    """With tokens second."""
    result = run_local(plan, *inputs, kernel=kernel)
    tensors = [getattr(result, name) for name in RESULTS]
    return [x.transpose(1, 2) if x.ndim == 3 else x for x in tensors]
