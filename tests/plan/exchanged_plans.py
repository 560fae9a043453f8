"""Small causal plans whose ranks exchange rows for heads, in chunks."""

from __future__ import annotations

from typing import Any

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem


def exchanged_plan(
    ranks: int,
    degree: int,
    tile: tuple[int, int],
    chunks: tuple[int, int],
    heads: int,
    kv_heads: int,
    **options: Any,
) -> Plan:
    problem = Problem(
        64 * ranks, heads, 4, num_kv_heads=kv_heads, mask=Mask(causal=True), element_bytes=8
    )
    named = {"ulysses": degree, "tile": tile, "chunks": chunks}
    return make_plan(problem, ranks, method="mesh-usp", **{**named, **options})
