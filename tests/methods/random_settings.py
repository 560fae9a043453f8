"""Problems, and settings of a method: each option is drawn by itself, from all values that it may
have. Some settings are refused by the method."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from method_settings import listed, manners, shapes

from mesh_attention import Mask, Problem
from mesh_attention.plan.methods.table import Method

__all__ = ["random_problem", "random_setting"]

CHUNKS = (*[(1, 1)] * 6, (2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (2, 3))


def random_problem(draw: Random, ranks: int) -> Problem:
    tokens = draw.choice([2 * ranks, 4 * ranks, 3 * ranks + 1, 8 * ranks, max(1, 2 * ranks - 1)])
    kv_heads = draw.choice([1, 2, 3, ranks, 2 * ranks, 2 * ranks])
    heads = kv_heads * draw.choice([1, 1, 2, 4])
    mask = draw.choice(
        [
            Mask(),
            Mask(causal=True),
            Mask(causal=True),
            Mask(causal=True, window=(max(1, tokens // 4), 0)),
            Mask(causal=True, documents=tuple(sorted({0, draw.randint(0, tokens), tokens}))),
        ]
    )
    crossed = mask == Mask() and draw.random() < 0.3
    return Problem(
        tokens,
        heads,
        4,
        num_kv_heads=kv_heads,
        kv_tokens=draw.randint(1, 3 * ranks) if crossed else None,
        mask=mask,
        element_bytes=draw.choice([2, 8]),
    )


def random_slices(draw: Random, held: int) -> tuple[int, int] | None:
    """KV heads of the first slice and of the largest; one by one every other time."""
    if held < 2:
        return None
    largest = draw.choice([1, draw.randint(1, held - 1)])
    return draw.randint(1, largest), largest


def random_setting(draw: Random, method: Method, problem: Problem, ranks: int) -> dict[str, Any]:
    options = method.options()
    setting = draw.choice(shapes(method, problem, ranks)) | draw.choice(manners(method))
    if draw.random() < 0.7:
        setting["relayout"] = False  # it leaves out what most others combine
    held = max(1, problem.kv_heads // (setting.get("ulysses") or 1))
    exchanges = (setting.get("ulysses") or 1) > 1 and not setting["relayout"]
    drawn: dict[str, Callable[[], Any]] = {
        "chunks": lambda: draw.choice(CHUNKS),
        "backward_chunks": lambda: draw.choice(CHUNKS),
        "head_slices": lambda: random_slices(draw, held),
        "backward_head_slices": lambda: random_slices(draw, held),
        "backward_tile": lambda: draw.choice(shapes(method, problem, ranks)).get("tile"),
        "combine": lambda: draw.choice(["auto", "exchange", "nodes", "reduce-scatter"]),
        "even_chunks": lambda: exchanges and setting["layout"] == "zigzag",
        "short_start": lambda: exchanges,
        "max_memory_bytes": lambda: None if exchanges else draw.randint(1000, 200_000),
        "ranks_per_node": lambda: draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0]),
        "alpha": lambda: draw.choice([1, 2, 4]),
        "units_per_node": lambda: draw.choice([1, 2]),
        "gamma": lambda: draw.choice([0.5, 1.05, 2.0]),
        "stripe_block": lambda: draw.choice([1, 2, 3]),
    }
    often = {"head_slices": 0.7, "chunks": 0.7, "combine": 0.5, "ranks_per_node": 0.5}
    for name, value in drawn.items():
        if name in options and draw.random() < often.get(name, 0.12):
            setting[name] = value()
    if "ranks_per_node" not in setting:
        for name in ("alpha", "units_per_node"):
            setting.pop(name, None)
    if setting["layout"] != "striped":
        setting.pop("stripe_block", None)
    setting |= listed(setting, problem.q_tokens, ranks, draw.randint(0, 9))
    return setting
