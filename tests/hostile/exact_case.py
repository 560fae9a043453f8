"""Cases of attention over real processes: all that a call may be given, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import torch
from method_settings import shapes
from random_settings import random_setting
from torch import Tensor

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.table import METHODS
from support.drawn_masks import drawn_mask, drawn_starts
from support.reference import visible

__all__ = ["ExactCase", "random_case"]

Face = Literal["object", "documents", "function"]


@dataclass(frozen=True)
class ExactCase:
    """
    face     an object that knows its sizes, one whose batch brings documents and length, or the
             function
    options  of the method, where it is named
    starts   of documents that the batch brings
    """

    face: Face
    problem: Problem
    shown: Tensor = field(repr=False)  # (q_tokens, kv_tokens), written pair by pair
    batch: int
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    starts: tuple[int, ...] = ()
    softmax_scale: float | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_grad_lse: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.problem.element_bytes == 8 else torch.float32

    def tensors(self) -> dict[str, Tensor]:
        """Whole, in float64."""
        p = self.problem
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.batch, p.q_tokens, p.num_heads, p.head_dim),
            "k": (self.batch, p.keys, p.kv_heads, p.head_dim),
            "v": (self.batch, p.keys, p.kv_heads, p.v_dim),
            "grad_out": (self.batch, p.q_tokens, p.num_heads, p.v_dim),
            "sinks": (p.num_heads,),
            "grad_lse": (self.batch, p.num_heads, p.q_tokens),
        }
        chance = torch.Generator().manual_seed(self.seed)
        drawn = {
            name: torch.randn(shape, generator=chance, dtype=torch.float64).to(self.dtype)
            for name, shape in shapes.items()
        }
        left_out = {"sinks": not self.has_sinks, "grad_lse": not self.has_grad_lse}
        return {name: x.double() for name, x in drawn.items() if not left_out.get(name)}


def random_case(draw: Random, ranks: int) -> ExactCase:
    """Settings that a method refuses are drawn again."""
    face: Face = draw.choice(("object", "object", "object", "documents", "function"))
    while True:
        case = _case(draw, ranks, face)
        try:
            make_plan(case.problem, ranks, **case.options)
        except PlanError:
            continue
        return case


def _case(draw: Random, ranks: int, face: Face) -> ExactCase:
    tokens = draw.choice((2 * ranks, 3 * ranks + 1, 4 * ranks, max(1, ranks - 1), 1, 7, 29))
    kv_heads = draw.choice((1, 2, 3, ranks, 2 * ranks))
    starts: tuple[int, ...] = ()
    if face == "object":
        drawn = drawn_mask(draw, tokens)
        mask, shown = drawn.mask, drawn.shown
    elif face == "documents":
        starts = drawn_starts(draw, tokens, draw.randint(1, 5))
        window = draw.choice((None, None, (draw.randint(0, 6), 0)))
        mask = Mask(causal=window is not None or draw.random() < 0.7, window=window)
        shown = visible(Mask(causal=mask.causal, window=window, documents=starts), tokens, tokens)
    else:
        tokens *= 2 * ranks  # every slot is a token
        mask = draw.choice((Mask(), Mask(causal=True), Mask(causal=True, window=(3, 0))))
        shown = visible(mask, tokens, tokens)
    head_dim = draw.choice((4, 8))
    problem = Problem(
        tokens,
        kv_heads * draw.choice((1, 1, 2, 3)),
        head_dim,
        num_kv_heads=kv_heads,
        v_head_dim=draw.choice((head_dim, head_dim, 12)),
        kv_tokens=shown.shape[1],
        mask=mask,
        element_bytes=draw.choice((8, 8, 4)),
    )
    options: dict[str, Any] = {}
    method = draw.choice([*METHODS.values()])
    if face == "object" and draw.random() < 0.85 and shapes(method, problem, ranks):
        options = {"method": method.name, **random_setting(draw, method, problem, ranks)}
    elif face == "function":
        options = draw.choice(({}, {"method": "ring"}, {"method": "allgather-kv"}))
    return ExactCase(
        face,
        problem,
        shown,
        batch=draw.choice((1, 1, 2)),
        seed=draw.randrange(1 << 30),
        options=options,
        starts=starts,
        softmax_scale=draw.choice((None, None, 0.3)),
        softcap=draw.choice((None, None, None, 1.5)),
        has_sinks=draw.randrange(4) == 0,
        # Without delta in the backward pass lse has no gradient.
        has_grad_lse=not options.get("gather_out") and draw.randrange(5) == 0,
    )
