"""`same_bits=True`: n ranks give the bits that one rank gives, in both passes.

Each head is whole on one rank, its rows are in the order of the tokens, and one call of a kernel
computes it, as on one rank. In the backward pass delta is made from the rows of a shard, so the
kernel must be one that is given it. For reinforcement learning, whose trainer must equal a sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.methods.table import AUTO
from mesh_attention.plan.problem.arguments import flag
from mesh_attention.plan.problem.problem import Problem

_OPTIONS: dict[str, Any] = {
    "method": "ulysses",
    "layout": "contiguous",
    "chunks": (1, 1),
    "deterministic": True,
    "differentiable_lse": True,
}


def wants_same_bits(arguments: Mapping[str, Any]) -> bool:
    value = arguments.get("same_bits")
    return value is not None and flag("same_bits", value)


def with_same_bits(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with all that `same_bits` asks for."""
    if not wants_same_bits(arguments):
        return arguments
    left_to_us = {"method": AUTO, "deterministic": False, "differentiable_lse": False}
    for name in ("plan", "tuned", "head_slices", "relayout"):
        if arguments.get(name):
            raise _refused(f"{name}={arguments[name]!r} says otherwise; leave it out")
    for name, wanted in _OPTIONS.items():
        value = arguments.get(name)
        if value not in (None, wanted) and value != left_to_us.get(name):
            raise _refused(f"{name} must be {wanted!r}, not {value!r}; leave it out")
    return arguments | _OPTIONS


def check_same_bits(problem: Problem, num_ranks: int) -> None:
    """Raises where a head, or what shares a KV head, would be on several ranks; and for masks whose
    calls are cut by the shards they come from, which adds up in another order."""
    mask = problem.mask
    for name, value in (("window", mask.window), ("prefix", mask.prefix), ("slices", mask.slices)):
        if value:
            raise _refused(f"the mask has {name}; causal and full ones, with documents or without")
    for name in ("num_heads", "num_kv_heads"):
        heads = getattr(problem, name)
        if heads % num_ranks:
            raise _refused(
                f"{name}={heads} does not divide by {num_ranks} ranks, and each head must be whole "
                "on one rank; use fewer ranks in the group"
            )


def _refused(reason: str) -> MeshAttentionError:
    return MeshAttentionError(f"same_bits=True: {reason}")
