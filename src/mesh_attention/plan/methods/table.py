"""All methods by name: the one place outside a builder that names them.

The command line, the tests and the support matrix read this table; adding a method is one builder
file and one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from mesh_attention.errors import PlanError
from mesh_attention.plan.arguments import flag, number, pair, real
from mesh_attention.plan.home import Combine
from mesh_attention.plan.methods.candidates import (
    Candidates,
    degrees,
    inner_rings,
    one,
    teams,
    tiles,
    unit_tiles,
)
from mesh_attention.plan.methods.frame import frame_of
from mesh_attention.plan.methods.head_slices import HeadsAtOnce
from mesh_attention.plan.methods.key_steps import Gradients
from mesh_attention.plan.methods.mesh import MeshSetting, Scheduler, plan_mesh
from mesh_attention.plan.methods.q_ring import AgkvRingQoSetting, RingQSetting, plan_q_ring
from mesh_attention.plan.methods.ring import (
    AgqRingKvSetting,
    DoubleRingSetting,
    RingSetting,
    plan_kv_ring,
)
from mesh_attention.plan.methods.setting import Setting
from mesh_attention.plan.methods.startrail import StarTrailSetting, plan_startrail
from mesh_attention.plan.methods.ulysses import (
    MeshUspSetting,
    UlyssesSetting,
    UspSetting,
    check_degree,
    plan_mesh_usp,
    plan_ulysses,
    plan_usp,
)
from mesh_attention.plan.plan import Direction, Plan, a_direction
from mesh_attention.plan.problem import Problem

__all__ = ["DEFAULT_METHOD", "METHODS", "Method", "make_plan"]

BOTH = (Direction.FORWARD, Direction.BACKWARD)
Directions = tuple[Direction, ...]


@dataclass(frozen=True, slots=True)
class AllGatherKvSetting(Setting):
    """Every rank gathers all KV, as Llama 3 training did: the mesh with a = 1."""

    chunks: tuple[int, int] = (1, 1)
    backward_chunks: tuple[int, int] | None = None
    heads_at_once: HeadsAtOnce | None = None
    backward_heads_at_once: HeadsAtOnce | None = None
    auto_cut: bool = False
    combine: Combine = Combine.AUTO
    scheduler: Scheduler = Scheduler.GREEDY
    max_buffer_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """`setting` is the dataclass of what a person can choose; `build` turns it into a plan.

    `candidates` are the settings worth trying when the best is looked for.
    """

    name: str
    summary: str
    setting: type
    build: Callable[[Problem, int, Any, Directions], Plan]
    candidates: Candidates

    def options(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.setting))


def _mesh(problem: Problem, ranks: int, setting: MeshSetting, directions: Directions) -> Plan:
    return plan_mesh(problem, ranks, setting, directions=directions)


def _all_gather_kv(
    problem: Problem, ranks: int, setting: AllGatherKvSetting, directions: Directions
) -> Plan:
    given = {f.name: getattr(setting, f.name) for f in fields(setting)}
    mesh = MeshSetting(tile=(1, max(ranks, 1)), **given)
    return plan_mesh(problem, ranks, mesh, directions=directions, method="allgather-kv")


def _ring(problem: Problem, ranks: int, setting: RingSetting, directions: Directions) -> Plan:
    frame = frame_of("ring", setting)
    return plan_kv_ring(problem, ranks, frame, directions, gradients=setting.gradients)


def _double_ring(
    problem: Problem, ranks: int, setting: DoubleRingSetting, directions: Directions
) -> Plan:
    check_degree(problem, ranks, setting.ulysses)
    units = ranks // setting.ulysses
    inner = setting.inner
    if inner is None:
        most = max((setting.ranks_per_node or 8) // setting.ulysses, 1)
        inner = max(size for size in range(1, min(most, units) + 1) if units % size == 0)
    frame = frame_of("double-ring", setting)
    return plan_kv_ring(problem, ranks, frame, directions, gradients=Gradients.DIRECT, inner=inner)


def _agq_ringkv(
    problem: Problem, ranks: int, setting: AgqRingKvSetting, directions: Directions
) -> Plan:
    frame = frame_of("agq-ringkv", setting)
    tile = setting.tile or _squarest(ranks)
    return plan_kv_ring(problem, ranks, frame, directions, tile=tile, gradients=setting.gradients)


def _ring_q(problem: Problem, ranks: int, setting: RingQSetting, directions: Directions) -> Plan:
    return plan_q_ring(problem, ranks, frame_of("ring-q", setting), directions)


def _agkv_ringqo(
    problem: Problem, ranks: int, setting: AgkvRingQoSetting, directions: Directions
) -> Plan:
    tile = setting.tile or _squarest(ranks)
    frame = frame_of("agkv-ringqo", setting)
    return plan_q_ring(problem, ranks, frame, directions, tile=tile, travel=True)


def _squarest(ranks: int) -> tuple[int, int]:
    a = max((a for a in range(1, ranks + 1) if ranks % a == 0 and a * a <= ranks), default=1)
    return a, max(1, ranks // a)


DEFAULT_METHOD = "mesh"
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("mesh", "2-D tiles a x b of the query-key matrix", MeshSetting, _mesh, tiles),
        Method("ring", "KV wanders in a ring (Ring-Attention)", RingSetting, _ring, one),
        Method("ring-q", "Q wanders in a ring, outputs go home last", RingQSetting, _ring_q, one),
        Method(
            "double-ring",
            "KV wanders in rings inside nodes and in one between them (LoongTrain)",
            DoubleRingSetting,
            _double_ring,
            inner_rings,
        ),
        Method(
            "allgather-kv",
            "every rank gathers all KV (Llama 3 training)",
            AllGatherKvSetting,
            _all_gather_kv,
            one,
        ),
        Method("ulysses", "ranks swap tokens for heads", UlyssesSetting, plan_ulysses, one),
        Method("usp", "Ulysses inside, a ring outside", UspSetting, plan_usp, degrees),
        Method(
            "startrail",
            "teams gather Q and KV, team blocks wander in sub-rings",
            StarTrailSetting,
            plan_startrail,
            teams,
        ),
        Method(
            "mesh-usp", "Ulysses inside, mesh outside", MeshUspSetting, plan_mesh_usp, unit_tiles
        ),
        Method(
            "agq-ringkv",
            "a mesh that gathers Q while KV wanders",
            AgqRingKvSetting,
            _agq_ringkv,
            tiles,
        ),
        Method(
            "agkv-ringqo",
            "a mesh that gathers KV while Q and its output wander",
            AgkvRingQoSetting,
            _agkv_ringqo,
            tiles,
        ),
    )
}


def make_plan(
    problem: Problem,
    num_ranks: int,
    *,
    method: str = DEFAULT_METHOD,
    directions: Directions = BOTH,
    **options: Any,
) -> Plan:
    """The plan of a method; every option is used, or refused by name.

    >>> plan = make_plan(Problem(q_tokens=64, num_heads=2, head_dim=8), 4, tile=(2, 2))
    >>> plan.num_ranks, plan.forward.setting["tile"]
    (4, '2x2')
    """
    if not isinstance(method, str) or method not in METHODS:
        raise PlanError(f"unknown method {method!r}; known methods: {', '.join(METHODS)}")
    num_ranks = number("ranks", num_ranks)
    if not isinstance(problem, Problem):
        raise PlanError(f"problem={problem!r}: must be a Problem")
    if isinstance(directions, str):
        raise PlanError(f"directions={directions!r}: must be a tuple of passes")
    directions = tuple(map(a_direction, directions))
    chosen = METHODS[method]
    unknown = [name for name in options if name not in chosen.options()]
    if unknown:
        raise PlanError(
            f"method {method} has no option {unknown[0]!r}; its options: "
            f"{', '.join(chosen.options())}"
        )
    kinds = get_type_hints(chosen.setting)
    given = {name: _as_declared(name, value, kinds[name]) for name, value in options.items()}
    return chosen.build(problem, num_ranks, chosen.setting(**given), directions)


def _as_declared(name: str, value: Any, kind: Any) -> Any:
    """An option as its setting declares it, or a refusal that names it."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if value is None and NoneType in kinds:
        return None
    declared = next(one for one in kinds if one is not NoneType)
    if get_origin(declared) is tuple:
        return pair(name, value)
    if declared is bool:
        return flag(name, value)
    if declared is int:
        return number(name, value)
    if declared is float:
        return real(name, value)
    if issubclass(declared, StrEnum):
        try:
            return declared(value)
        except ValueError:
            known = ", ".join(choice.value for choice in declared)
            raise PlanError(f"{name}={value!r} is unknown; known: {known}") from None
    if not isinstance(value, declared):
        raise PlanError(f"{name}={value!r}: must be a {declared.__name__}")
    return value
