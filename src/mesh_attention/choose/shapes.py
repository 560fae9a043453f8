"""Shapes worth trying, the most promising first.

A box exchanges tokens for heads among `degree` ranks, and on the units that this makes a tile a x b
gathers (or rotates) a parts of the queries and b of the keys. How long that takes is known without
a plan, about and at least (`shape_seconds.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_attention.choose.busiest import degree_and_tile
from mesh_attention.choose.shape_seconds import ShapeSeconds
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.needed_rows import usual_layout
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.problem import Problem


@dataclass(frozen=True)
class Shape:
    """A method and the options that are not about cuts. `held`: KV heads that a rank has.
    `moving_seconds`: of its transfers one by one, with the latency of each if nothing is cut."""

    name: str  # of the method
    options: dict[str, Any]
    degree: int
    tile: tuple[int, int]
    held: int
    least_seconds: float
    moving_seconds: float

    @property
    def box(self) -> str:
        """Shapes with the same programs in other words have the same, and so have those in which
        ranks lie on nodes in patches of another width."""
        method = METHODS[self.name]
        if not (method.is_plain_box or method.by_stretches):
            return setting_key(self.name, self.options)
        names = ("tile", "ulysses", "alpha")
        rest = sorted((k, v) for k, v in self.options.items() if k not in names)
        rotates = method.rotates and self.tile != (1, 1)
        return f"{method.by_stretches} {self.degree} {self.tile} {rotates} {rest}"

    @property
    def promise(self) -> tuple[float, float]:
        """About as long as it takes in four parts: the longer of attention and transfers hides all
        but a quarter of the shorter. Of equals the one that leaves less to hide."""
        shorter, longer = sorted((self.least_seconds, self.moving_seconds))
        return longer + shorter / 4, self.moving_seconds


def setting_key(method: str, options: Mapping[str, Any]) -> str:
    return f"{method} {sorted(options.items(), key=str)}"


def default_layout(problem: Problem) -> LayoutKind:
    return LayoutKind.CONTIGUOUS if problem.mask.is_full else LayoutKind.ZIGZAG


def shapes_of(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster,
    direction: Direction,
    methods: Sequence[str],
    options: Mapping[str, Any],
    layout: LayoutKind | None,
) -> list[Shape]:
    """Of all these methods, the most promising first. `options` are the caller's; `layout` becomes
    one where it is not the method's own."""
    seconds = ShapeSeconds(problem, num_ranks, cluster, direction)
    shapes: dict[str, Shape] = {}
    for name in methods:
        method, said = METHODS[name], dict(options)
        by_rows = method.by_stretches
        own_layout = usual_layout(problem.mask) if by_rows else default_layout(problem)
        if layout is not None and layout is not own_layout:
            said["layout"] = layout.value
        candidates = [
            candidate
            for candidate in method.candidates(problem, num_ranks, cluster.node.ranks)
            if all(options.get(option) in (None, x) for option, x in candidate.items())
        ]
        for candidate in candidates or [{}]:
            setting = candidate | said
            degree, tile = degree_and_tile(name, setting, problem, num_ranks)
            held = max(1, problem.kv_heads // degree)
            times = seconds.least_and_moving(name, setting, layout or own_layout, degree, tile)
            shapes[setting_key(name, setting)] = Shape(name, setting, degree, tile, held, *times)
    return sorted(shapes.values(), key=lambda shape: (shape.promise, len(shape.options)))
