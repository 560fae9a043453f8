"""What people may write, usual and strange: it is planned or refused in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch

from mesh_attention import Mask, MeshAttentionError, Problem, make_plan
from mesh_attention.choose.pack import Layer, Packer
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import METHODS

__all__ = ["check_batch", "check_plan"]

NUMBERS: Sequence[Any] = (0, 1, 2, 3, 7, 7, 12, 12, np.int64(12), -1, None, 2.0, 1.5, True, "3")


def some(draw: Random, *usual: Any) -> Any:
    """One of the usual values, now and then a strange one."""
    return draw.choice(usual) if draw.randint(0, 24) < 24 else draw.choice(NUMBERS)


def starts(draw: Random) -> Any:
    cuts = [some(draw, *range(13)) for _ in range(draw.randint(0, 4))]
    if draw.randint(0, 3) < 3:
        cuts = sorted(cut for cut in cuts if type(cut) is int)
    offsets: Any = [0, *cuts, 12] if draw.randint(0, 5) < 5 else cuts
    match draw.randint(0, 9):
        case 0 if all(type(cut) is int for cut in offsets):
            return draw.choice((np.array(offsets), torch.tensor(offsets), list(np.array(offsets))))
        case 1:
            return [offsets, [0, 12]]
        case 2:
            return draw.choice((None, 12, "0, 12", [], [[]], [None], {0: 12}, [[0, 12], 5]))
    return offsets


def stretches(draw: Random, ranks: int) -> Any:
    return [
        [(some(draw, 0, 3, 6), some(draw, 3, 6, 12)) for _ in range(draw.randint(0, 2))]
        for _ in range(draw.choice((ranks, ranks, ranks, 1)))
    ]


def any_mask(draw: Random) -> Mask:
    def pair() -> Any:
        return some(draw, 0, 2, 5), some(draw, 8, 12)

    match draw.randint(0, 6):
        case 0:
            return Mask.tree(
                [some(draw, None, 0, 1) for _ in range(3)], [some(draw, 4, 0) for _ in range(3)]
            )
        case 1:
            return Mask.block_causal(12, some(draw, 1, 5), frames_seen=some(draw, None, 2))
        case 2:
            window = some(draw, 3), some(draw, 0, None)
            return Mask.with_global_tokens(12, some(draw, 0, 4), window)
        case 3:
            kinds = ("full", "causal", "inverse_causal", "bicausal", "full", 2)
            return Mask(slices=[(pair(), pair(), some(draw, *kinds)) for _ in range(3)])  # type: ignore[arg-type]
    mask_options: dict[str, Any] = {"causal": some(draw, True, True, False)}
    if draw.randint(0, 2) == 0:
        mask_options["window"] = some(draw, (3, 0), (None, 2), (1, None), (some(draw, 1), 2))
    if draw.randint(0, 4) == 0:
        mask_options["prefix"] = some(draw, 0, 3)
    if draw.randint(0, 2) == 0:
        mask_options["documents"] = starts(draw)
    if draw.randint(0, 8) == 0:
        mask_options["kv_documents"] = starts(draw)
    return Mask(**mask_options)


def problem(draw: Random, mask: Mask) -> Problem:
    return Problem(
        q_tokens=some(draw, 12),
        kv_tokens=some(draw, None, None, 12),
        num_heads=some(draw, 4, 6),
        num_kv_heads=some(draw, None, 2),
        head_dim=some(draw, 2),
        element_bytes=some(draw, 2, 4, 8),
        mask=mask,
    )


def options(draw: Random, method: str, ranks: int) -> dict[str, Any]:
    usual: dict[str, tuple[Any, ...]] = {
        "layout": ("contiguous", "zigzag", "striped", "listed"),
        "stripe_block": (1, 5),
        "stretches": (stretches(draw, ranks),),
        "one_call": (True, False),
        "ranks_per_node": (1, 2, 3),
        "ulysses": (1, 2, 3),
        "inner": (1, 2, 3),
        "team": (1, 2, 4),
        "tile": ((1, ranks), (2, 2), (2, 3), (ranks, 1)),
        "chunks": ((1, 1), (2, 1), (9, 9)),
        "head_slices": ((1, 1), (1, 2), (2, 1)),
        "max_memory_bytes": (1, 10**6),
        "combine": ("exchange", "nodes", "reduce-scatter"),
    }
    known = [name for name in usual if name in METHODS[method].options()]
    chosen = draw.sample(known, draw.randint(0, 3))
    return {name: some(draw, *usual[name]) for name in chosen}


def refused_or(make: Any) -> None:
    refusal = "made as asked"
    try:
        make()
    except MeshAttentionError as error:
        refusal = str(error)
    assert " " in refusal


def check_plan(draw: Random) -> None:
    def make() -> None:
        method, ranks = draw.choice(list(METHODS)), draw.choice((1, 2, 3, 4, 6))
        plan = make_plan(
            problem(draw, any_mask(draw)), ranks, method=method, **options(draw, method, ranks)
        )
        for direction in Direction:
            plan.program(ranks - 1, direction)

    refused_or(make)


def check_batch(draw: Random) -> None:
    def make() -> None:
        masks = Mask(causal=True), Mask(), Mask(window=(2, 0)), any_mask(draw)
        asked = [problem(draw, draw.choice(masks)) for _ in range(draw.randint(1, 2))]
        layers = tuple(map(Layer, asked))
        ranks = draw.choice((1, 2, 3, 5))
        kv_starts = starts(draw) if draw.randint(0, 7) == 0 else None
        pack = Packer(layers, ranks)(starts(draw), kv_starts)
        plan = pack.question(layers[-1]).plan()
        plan.program(0, Direction.BACKWARD)

    refused_or(make)
