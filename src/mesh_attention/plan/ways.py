"""Which method for which layer of a batch of documents, and in which layout: by predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_attention.plan.build.head_group import ulysses_degrees
from mesh_attention.plan.layout import LayoutKind, Stretches
from mesh_attention.plan.problem import Problem

Starts = tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """A method with its options, as `ask` takes them, but for the layout."""

    method: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Chosen:
    """For each layer a way, in one layout for all."""

    layout: LayoutKind
    stretches: Stretches | None
    ways: tuple[Way, ...]
    reason: str


def choose_ways(
    layers: Sequence[Problem],
    num_ranks: int,
    documents: Starts,
    kv_documents: Starts,
    *,
    layout: tuple[LayoutKind, Stretches | None] | None = None,
) -> Chosen:
    """`layout`: where the tensors are cut already."""
    kind, stretches = layout or (LayoutKind.ZIGZAG, None)
    ways = [
        Way("ulysses" if num_ranks in ulysses_degrees(problem, num_ranks) else "mesh")
        for problem in layers
    ]
    return Chosen(kind, stretches, tuple(ways), ", ".join(way.method for way in ways))
