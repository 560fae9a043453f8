"""Cases of distributed attention to try: sizes, mask and the choices of a plan, drawn by seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mesh_attention import Mask, Plan, Problem, make_plan
from mesh_attention.plan.methods.parts.assignment import factorisations
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem.layout import LayoutKind
from support.listed import stretches_for
from support.random_masks import random_mask

__all__ = ["HEADS", "Case", "random_case", "random_heads", "tiles"]

HEADS = ((4, 4), (4, 2), (28, 7), (40, 8), (8, 1))
CHUNKS = ((1, 1), (2, 2), (3, 2), (1, 4), (2, 1))
MOST_FOR_BOTH = 6  # ranks


@dataclass(frozen=True)
class Case:
    ranks: int
    q_tokens: int
    kv_tokens: int
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (8, 8)
    batch: int = 1
    mask: Mask = field(default_factory=Mask)
    dtype: torch.dtype = torch.float64
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        return Problem(
            q_tokens=self.q_tokens,
            kv_tokens=self.kv_tokens,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dims[0],
            v_head_dim=self.head_dims[1],
            element_bytes=self.dtype.itemsize,
            mask=self.mask,
        )

    def plan(self) -> Plan:
        return make_plan(self.problem, self.ranks, **({"method": "mesh"} | self.options))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, whole."""
        source = torch.Generator().manual_seed(self.seed)
        p = self.problem

        def draw(tokens: int, heads: int, width: int) -> Tensor:
            shape = (self.batch, tokens, heads, width)
            return torch.randn(shape, generator=source, dtype=torch.float64).to(self.dtype)

        return (
            draw(p.q_tokens, p.num_heads, p.head_dim),
            draw(p.keys, p.kv_heads, p.head_dim),
            draw(p.keys, p.kv_heads, p.v_dim),
            draw(p.q_tokens, p.num_heads, p.v_dim),
        )


def tiles(max_ranks: int = 16) -> list[tuple[int, tuple[int, int]]]:
    """Every tile of every number of ranks."""
    return [(n, tile) for n in range(1, max_ranks + 1) for tile in factorisations(n)]


def random_case(seed: int, ranks: int, tile: tuple[int, int]) -> Case:
    draw = random.Random(seed)
    q_tokens = draw.choice([1, 7, max(1, ranks - 1), 2 * ranks + 1, draw.randint(1, 40)])
    layout = draw.choice(list(LayoutKind))
    alike = layout is LayoutKind.LISTED or draw.random() < 0.7
    kv_tokens = q_tokens if alike else draw.randint(1, 40)
    head_dim, heads = draw.choice([8, 16]), draw.choice(HEADS)
    # Both multiply what a rank has to do: on many ranks one of them at a time.
    both = ranks <= MOST_FOR_BOTH
    sliced = both or draw.random() < 0.4
    chunks = CHUNKS if both or not sliced else CHUNKS[:1]
    return Case(
        ranks=ranks,
        q_tokens=q_tokens,
        kv_tokens=kv_tokens,
        heads=heads,
        head_dims=(head_dim, draw.choice([head_dim, head_dim, 12])),
        batch=draw.randint(1, 3),
        mask=random_mask(draw, q_tokens, kv_tokens),
        dtype=draw.choice([torch.float64, torch.float32]),
        seed=seed,
        options={
            "tile": tile,
            "backward_tile": draw.choice([None, tile[::-1]]),
            "rotation": draw.random() < 0.8,
            "chunks": draw.choice(chunks),
            "backward_chunks": draw.choice([None, *chunks]),
            "layout": layout,
            "stretches": stretches_for(layout, draw, q_tokens, ranks),
            "combine": draw.choice(list(Combine)),
            "gather_out": draw.random() < 0.3,
            **(random_heads(draw, heads[1]) if sliced else {}),
        },
    )


def random_heads(draw: random.Random, held: int) -> dict[str, tuple[int, int] | None]:
    """All heads at once, or slices of them, in each pass."""

    def some() -> tuple[int, int] | None:
        most = draw.randint(-(-held // 3), held)  # a few slices: each is as much to do again
        return draw.choice([None, None, (draw.randint(1, most), most)])

    return {"head_slices": some(), "backward_head_slices": some()}
