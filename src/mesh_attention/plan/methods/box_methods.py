"""The methods that are boxes (`box.py`): the options of each, and the box that they make.

A method is a setting with a function `box`, which makes a box of the options. `table.py` lists the
settings by the names of the methods, with `box_plan` as their builder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mesh_attention.errors import PlanError
from mesh_attention.machine.rates import Costs, usual_costs
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.box import Directions, plan_box
from mesh_attention.plan.methods.parts.assignment import best_tile, factorisations, squarest
from mesh_attention.plan.methods.parts.head_group import chosen_degree, ulysses_degrees
from mesh_attention.plan.methods.parts.rotate import GradientRoute
from mesh_attention.plan.methods.parts.setting import (
    ChunkSetting,
    CombineSetting,
    CutSetting,
    DegreeSetting,
    RotationSetting,
    Setting,
    TileSetting,
    option,
)
from mesh_attention.plan.methods.parts.tile_plan import Box, Side
from mesh_attention.plan.problem.problem import Problem


class BoxSetting(Protocol):
    """A setting that says the box of its method for a problem and a number of ranks."""

    def box(self, problem: Problem, ranks: int) -> Box: ...


def box_plan(
    problem: Problem, ranks: int, setting: BoxSetting, directions: Directions = tuple(Direction)
) -> Plan:
    """The builder of every method here."""
    return plan_box(problem, ranks, setting.box(problem, ranks), directions)


@dataclass(frozen=True)
class MeshSetting(TileSetting, CutSetting):
    """2-D tiles of the query-key matrix."""

    backward_tile: tuple[int, int] | None = option(
        None, "the tile of the backward pass, if it differs", "AxB"
    )
    rotation: bool = option(
        True, "rotate KV partitions, as in the paper; without it KV comes by all-to-all"
    )
    costs: Costs = option(
        usual_costs(), "bandwidth, speed and latency that the scheduler assumes", ""
    )

    def box(self, problem: Problem, ranks: int) -> Box:
        return Box.of("mesh", self, tile=self.tile or best_tile(ranks, problem))


@dataclass(frozen=True)
class AllGatherKvSetting(CombineSetting, CutSetting):
    """Every rank gathers all KV, as Llama 3 training did: the mesh with a = 1."""

    def box(self, problem: Problem, ranks: int) -> Box:
        return Box.of("allgather-kv", self, tile=(1, ranks))


@dataclass(frozen=True)
class MeshUspSetting(MeshSetting, DegreeSetting):
    """As the mesh, on units of `ulysses` ranks."""

    even_chunks: bool = option(
        False,
        "each chunk of rows takes the same amount from both halves of a zigzag: under a causal "
        "mask chunks are then equal work on all ranks, which need not wait for each other",
    )
    short_start: bool = option(
        False,
        "cut the first chunk of keys once more, at a quarter: one exchange more, and computation "
        "begins sooner",
    )

    def box(self, problem: Problem, ranks: int) -> Box:
        degree = chosen_degree(problem, ranks, self.ulysses, self.ranks_per_node)
        tile = self.tile or best_tile(ranks // degree, problem)
        return Box.of("mesh-usp", self, ulysses=degree, tile=tile)


@dataclass(frozen=True)
class UlyssesSetting(ChunkSetting):
    """How finely rows and heads are exchanged. The degree is the number of ranks, at most the
    number of heads: all ranks are one unit. Uneven shares of heads (`head_group.py`) are exchanged
    at once. They may cut a KV group; kernels take the same number of query heads for each KV head,
    so such a share needs up to three attentions: of the rest of a group, of whole groups, and of
    the beginning of one."""

    def box(self, problem: Problem, ranks: int) -> Box:
        if ranks not in ulysses_degrees(problem):
            _check_uneven(problem, ranks, self)
        return Box.of("ulysses", self, ulysses=ranks, tile=(1, 1))


def _check_uneven(problem: Problem, ranks: int, setting: UlyssesSetting) -> None:
    if ranks > problem.num_heads:
        raise PlanError(
            f"{ranks} ranks are too many for {problem.num_heads} heads: with ulysses each needs "
            f"one; ranks that work: 1 to {problem.num_heads}. Method mesh-usp takes any number"
        )
    slices = setting.head_slices or setting.backward_head_slices
    if slices or any(c not in (None, (1, 1)) for c in (setting.chunks, setting.backward_chunks)):
        raise PlanError(
            f"{ranks} ranks do not divide {problem.num_heads} heads, and uneven heads are "
            "not cut; leave 'chunks' and 'head_slices' out"
        )


@dataclass(frozen=True)
class RingSetting(RotationSetting, ChunkSetting):
    """Keys rotate in one ring."""

    def box(self, problem: Problem, ranks: int) -> Box:
        return Box.of("ring", self, tile=(1, ranks), rotates=Side.KEYS, route=self.gradients)


@dataclass(frozen=True)
class UspSetting(RotationSetting, DegreeSetting, ChunkSetting):
    """Ulysses inside, a ring outside."""

    def box(self, problem: Problem, ranks: int) -> Box:
        degree = chosen_degree(problem, ranks, self.ulysses, self.ranks_per_node)
        ring = {"tile": (1, ranks // degree), "rotates": Side.KEYS, "route": self.gradients}
        return Box.of("usp", self, ulysses=degree, **ring)


@dataclass(frozen=True)
class DoubleRingSetting(DegreeSetting, ChunkSetting):
    """Rings of `inner` ranks, and one ring of such rings."""

    inner: int | None = option(
        None, "ranks of an inner ring; they divide all ranks. Left out: the ranks of a node"
    )

    def box(self, problem: Problem, ranks: int) -> Box:
        degree = chosen_degree(problem, ranks, self.ulysses or 1, self.ranks_per_node)
        units, inner = ranks // degree, self.inner
        if inner is None:
            inner = usual_inner(units, degree, self.ranks_per_node)
        if units % inner:
            fits = ", ".join(str(a) for a, _ in factorisations(units))
            raise PlanError(f"inner={inner} does not divide {units} ranks; sizes that do: {fits}")
        rings = {"tile": (1, units), "rotates": Side.KEYS, "inner": inner}
        return Box.of("double-ring", self, ulysses=degree, **rings)


def usual_inner(units: int, degree: int, ranks_per_node: int | None) -> int:
    """Inner rings as large as what a degree of Ulysses leaves of a node."""
    most = max((ranks_per_node or 8) // degree, 1)
    return max(size for size, _ in factorisations(units) if size <= most)


@dataclass(frozen=True)
class AgqRingKvSetting(TileSetting, RotationSetting):
    """A mesh whose Q is gathered and whose KV rotates inside the KV group."""

    def box(self, problem: Problem, ranks: int) -> Box:
        tile = self.tile or squarest(ranks)
        return Box.of("agq-ringkv", self, tile=tile, rotates=Side.KEYS, route=self.gradients)


@dataclass(frozen=True)
class AgkvRingQoSetting(TileSetting):
    """A mesh whose KV is gathered; Q with its partial output rotates inside the Q group. With
    outputs=travel each hop needs the outputs of the hop before, which limits overlap."""

    outputs: GradientRoute = option(
        GradientRoute.DIRECT,
        "O and dQ go `direct` to their owner, once from each node, or `travel` with their Q",
        "NAME",
    )

    def box(self, problem: Problem, ranks: int) -> Box:
        tile = self.tile or squarest(ranks)
        return Box.of("agkv-ringqo", self, tile=tile, rotates=Side.QUERIES, route=self.outputs)


@dataclass(frozen=True)
class RingQSetting(Setting):
    """Queries rotate in one ring; partial outputs reach their owners by all-to-all."""

    def box(self, problem: Problem, ranks: int) -> Box:
        return Box.of("ring-q", self, tile=(ranks, 1), rotates=Side.QUERIES, route=None)
