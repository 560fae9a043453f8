"""A plan with all that a call may be given beside it, held against attention by its definition."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from mesh_attention import Plan, count, verify
from mesh_attention.plan.language.text import parse_plan, plan_text
from mesh_attention.testing import run_local

__all__ = ["DenseCall", "check", "definition", "drawn_call"]

BOUND = {torch.float64: 1e-10, torch.float32: 2e-5}  # of the largest value, if that exceeds one


@dataclass(frozen=True)
class DenseCall:
    plan: Plan
    shown: Tensor  # (q_tokens, kv_tokens), true where the query sees the key
    batch: int
    scale: float | None
    softcap: float | None
    has_sinks: bool
    has_grad_lse: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.plan.problem.element_bytes == 8 else torch.float32

    def tensors(self) -> dict[str, Tensor]:
        p = self.plan.problem
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.batch, p.q_tokens, p.num_heads, p.head_dim),
            "k": (self.batch, p.keys, p.kv_heads, p.head_dim),
            "v": (self.batch, p.keys, p.kv_heads, p.v_dim),
            "grad_out": (self.batch, p.q_tokens, p.num_heads, p.v_dim),
        }
        if self.has_sinks:
            shapes["sinks"] = (p.num_heads,)
        if self.has_grad_lse:
            shapes["grad_lse"] = (self.batch, p.num_heads, p.q_tokens)
        chance = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(shape, generator=chance, dtype=torch.float64).to(self.dtype)
            for name, shape in shapes.items()
        }


def drawn_call(draw: Random, plan: Plan, shown: Tensor, *, has_delta: bool) -> DenseCall:
    """`has_delta`: the backward pass moves delta, without which lse has no gradient."""
    return DenseCall(
        plan,
        shown,
        batch=draw.choice((1, 1, 2)),
        scale=draw.choice((None, None, 0.3)),
        softcap=draw.choice((None, None, None, 1.5)),
        has_sinks=draw.randint(0, 3) == 3,
        has_grad_lse=has_delta and draw.randint(0, 4) == 4,
    )


def definition(
    arguments: dict[str, Tensor], shown: Tensor, scale: float | None, softcap: float | None
) -> dict[str, Tensor]:
    """Autograd through a dense softmax in float64, of which a sink is one more column."""
    wide = {name: x.double() for name, x in arguments.items()}
    leaves = {n: x.requires_grad_() for n, x in wide.items() if not n.startswith("grad")}
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(group, 2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~shown, -torch.inf)
    if "sinks" in leaves:
        column = leaves["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = (scores - finite[..., None]).exp()[..., : k.shape[1]]
    out = torch.einsum("bhst,bthe->bshe", weights, v.repeat_interleave(group, 2))
    loss = (out * wide["grad_out"]).sum()
    if "grad_lse" in wide:
        loss = loss + (finite * wide["grad_lse"]).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    named = {f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def check(call: DenseCall) -> None:
    """The plan is proven and parses back, results are exact, and what moved was counted."""
    plan, tensors = call.plan, call.tensors()
    assert verify(plan) == [], call
    assert parse_plan(plan_text(plan)) == plan, call
    options: dict[str, Any] = {"softmax_scale": call.scale, "softcap": call.softcap, **tensors}
    result = run_local(plan, **options)
    truths = definition(tensors, call.shown, call.scale, call.softcap)
    for name, truth in truths.items():
        results = getattr(result, name).double()
        finite = truth != -torch.inf
        assert torch.equal(results != -torch.inf, finite), (name, call)
        bound = BOUND[call.dtype] * torch.cat([truth[finite].abs(), torch.ones(1)]).max()
        assert ((results - truth)[finite].abs() <= bound).all(), (name, call)
    for direction, counted in count(plan).items():
        for rank in counted.ranks:
            moved = result.traffic[direction.value][rank.rank].total
            expected = rank.total.sent_bytes, rank.total.received_bytes
            assert (moved.sent_bytes, moved.received_bytes) == tuple(
                call.batch * each for each in expected
            ), call
