"""The methods that are boxes (`box.py`): the options of each, and the box that they make.

`table.py` lists these settings and functions by the name of the method.
"""

from __future__ import annotations

from dataclasses import dataclass

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

BOTH = (Direction.FORWARD, Direction.BACKWARD)


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


def plan_mesh(
    problem: Problem, ranks: int, setting: MeshSetting | None = None, directions: Directions = BOTH
) -> Plan:
    setting = setting or MeshSetting()
    box = Box.of("mesh", setting, tile=setting.tile or best_tile(ranks, problem))
    return plan_box(problem, ranks, box, directions)


@dataclass(frozen=True)
class AllGatherKvSetting(CombineSetting, CutSetting):
    """Every rank gathers all KV, as Llama 3 training did: the mesh with a = 1."""


def plan_all_gather_kv(
    problem: Problem, ranks: int, setting: AllGatherKvSetting, directions: Directions
) -> Plan:
    box = Box.of("allgather-kv", setting, tile=(1, ranks))
    return plan_box(problem, ranks, box, directions)


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


def plan_mesh_usp(
    problem: Problem, ranks: int, setting: MeshUspSetting, directions: Directions
) -> Plan:
    degree = chosen_degree(problem, ranks, setting.ulysses, setting.ranks_per_node)
    tile = setting.tile or best_tile(ranks // degree, problem)
    box = Box.of("mesh-usp", setting, ulysses=degree, tile=tile)
    return plan_box(problem, ranks, box, directions)


@dataclass(frozen=True)
class UlyssesSetting(ChunkSetting):
    """How finely rows and heads are exchanged. The degree is the number of ranks, at most the
    number of heads. Uneven shares of heads are exchanged at once."""


def plan_ulysses(
    problem: Problem, ranks: int, setting: UlyssesSetting, directions: Directions
) -> Plan:
    """One unit of all ranks. Uneven shares of heads (`head_group.py`) may cut a KV group. Kernels
    take the same number of query heads for each KV head, so such a share needs up to three
    attentions: of the rest of a group, of whole groups, and of the beginning of one."""
    if ranks not in ulysses_degrees(problem):
        _check_uneven(problem, ranks, setting)
    box = Box.of("ulysses", setting, ulysses=ranks, tile=(1, 1))
    return plan_box(problem, ranks, box, directions)


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


def plan_ring(problem: Problem, ranks: int, setting: RingSetting, directions: Directions) -> Plan:
    box = Box.of("ring", setting, tile=(1, ranks), rotates=Side.KEYS, route=setting.gradients)
    return plan_box(problem, ranks, box, directions)


@dataclass(frozen=True)
class UspSetting(RotationSetting, DegreeSetting, ChunkSetting):
    """Ulysses inside, a ring outside."""


def plan_usp(problem: Problem, ranks: int, setting: UspSetting, directions: Directions) -> Plan:
    degree = chosen_degree(problem, ranks, setting.ulysses, setting.ranks_per_node)
    ring = {"tile": (1, ranks // degree), "rotates": Side.KEYS, "route": setting.gradients}
    return plan_box(problem, ranks, Box.of("usp", setting, ulysses=degree, **ring), directions)


@dataclass(frozen=True)
class DoubleRingSetting(DegreeSetting, ChunkSetting):
    """Rings of `inner` ranks, and one ring of such rings."""

    inner: int | None = option(
        None, "ranks of an inner ring; they divide all ranks. Left out: the ranks of a node"
    )


def plan_double_ring(
    problem: Problem, ranks: int, setting: DoubleRingSetting, directions: Directions
) -> Plan:
    degree = chosen_degree(problem, ranks, setting.ulysses or 1, setting.ranks_per_node)
    units, inner = ranks // degree, setting.inner
    if inner is None:
        inner = usual_inner(units, degree, setting.ranks_per_node)
    if units % inner:
        fits = ", ".join(str(a) for a, _ in factorisations(units))
        raise PlanError(f"inner={inner} does not divide {units} ranks; sizes that do: {fits}")
    rings = {"tile": (1, units), "rotates": Side.KEYS, "inner": inner}
    box = Box.of("double-ring", setting, ulysses=degree, **rings)
    return plan_box(problem, ranks, box, directions)


def usual_inner(units: int, degree: int, ranks_per_node: int | None) -> int:
    """Inner rings as large as what a degree of Ulysses leaves of a node."""
    most = max((ranks_per_node or 8) // degree, 1)
    return max(size for size, _ in factorisations(units) if size <= most)


@dataclass(frozen=True)
class AgqRingKvSetting(TileSetting, RotationSetting):
    """A mesh whose Q is gathered and whose KV rotates inside the KV group."""


def plan_agq_ringkv(
    problem: Problem, ranks: int, setting: AgqRingKvSetting, directions: Directions
) -> Plan:
    tile = setting.tile or squarest(ranks)
    box = Box.of("agq-ringkv", setting, tile=tile, rotates=Side.KEYS, route=setting.gradients)
    return plan_box(problem, ranks, box, directions)


@dataclass(frozen=True)
class AgkvRingQoSetting(TileSetting):
    """A mesh whose KV is gathered; Q with its partial output rotates inside the Q group."""

    outputs: GradientRoute = option(
        GradientRoute.DIRECT,
        "O and dQ go `direct` to their owner, once from each node, or `travel` with their Q",
        "NAME",
    )


def plan_agkv_ringqo(
    problem: Problem, ranks: int, setting: AgkvRingQoSetting, directions: Directions
) -> Plan:
    """With outputs=travel each hop needs the outputs of the hop before, which limits overlap."""
    tile = setting.tile or squarest(ranks)
    box = Box.of("agkv-ringqo", setting, tile=tile, rotates=Side.QUERIES, route=setting.outputs)
    return plan_box(problem, ranks, box, directions)


@dataclass(frozen=True)
class RingQSetting(Setting):
    """Queries rotate in one ring; partial outputs reach their owners by all-to-all."""


def plan_ring_q(
    problem: Problem, ranks: int, setting: RingQSetting, directions: Directions
) -> Plan:
    box = Box.of("ring-q", setting, tile=(ranks, 1), rotates=Side.QUERIES, route=None)
    return plan_box(problem, ranks, box, directions)
