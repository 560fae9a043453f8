"""Plans on a cluster: asked for with its node size and rough costs, and the target of a plan.

The search, the command line and benchmarks ask for plans by `ask_on` and `plan_on`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.kernel_facts import KINDS
from mesh_attention.machine.load import a_cluster
from mesh_attention.machine.rates import costs_of
from mesh_attention.machine.tables import ClusterError
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.methods.parts.needed_rows import pairs_of_ranks
from mesh_attention.plan.methods.question import BOTH, Question, ask
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.problem import Problem


def plan_on(
    cluster: Cluster | str | Path, problem: Problem, num_ranks: int, **options: Any
) -> Plan:
    """The plan of `ask_on` with the same arguments."""
    return ask_on(cluster, problem, num_ranks, **options).plan()


def ask_on(
    cluster: Cluster | str | Path,
    problem: Problem,
    num_ranks: int,
    *,
    method: str,
    directions: tuple[Direction, ...] = BOTH,
    **options: Any,
) -> Question:
    """The question of `plan/methods/question.py`, for so many ranks of this cluster: with the size
    of its nodes and, for methods with a scheduler, its rough costs."""
    cluster, num_ranks = a_cluster(cluster), number("ranks", num_ranks)
    if num_ranks > cluster.num_ranks:
        raise ClusterError(
            f"{cluster.name} has {cluster.num_ranks} ranks ({cluster.nodes} nodes of "
            f"{cluster.node.ranks}), fewer than ranks={num_ranks}"
        )
    ranks_per_node = options.pop("ranks_per_node", None)
    if ranks_per_node not in (None, cluster.node.ranks):
        raise ClusterError(
            f"ranks_per_node={ranks_per_node}: a node of {cluster.name} has {cluster.node.ranks} "
            "ranks; leave it out, or describe another cluster in a file"
        )
    options["ranks_per_node"] = cluster.node.ranks
    question = ask(problem, num_ranks, method=method, directions=directions, **options)
    if options.get("costs") is None and hasattr(question.setting, "costs"):
        costs: dict[str, Any] = {"costs": costs_of(cluster, num_ranks)}
        question = replace(question, setting=replace(question.setting, **costs))
    return question


def default_layout(problem: Problem) -> LayoutKind:
    """Where tokens lie unless options say otherwise, whatever the method."""
    return LayoutKind.CONTIGUOUS if problem.mask.is_full else LayoutKind.ZIGZAG


def tokens_stay(plan: Plan, options: Mapping[str, Any]) -> bool:
    """Whether tokens lie where they do by default, or as the caller's options say: objects that
    share a batch, with other masks and so other plans, rely on it."""
    if options.get("relayout"):
        return True
    by_default = plan.q_layout.kind is default_layout(plan.problem)
    return by_default or options.get("layout") is not None


def setting_of(plan: Plan, pass_: Pass, options: Mapping[str, Any]) -> dict[str, Any]:
    """The setting of a pass as people read it: what the pass states, and the other options."""
    setting: dict[str, Any] = {**pass_.setting, "layout": plan.q_layout.kind.value}
    stated = {*setting, *(f"backward_{name}" for name in setting), "ranks_per_node", "costs"}
    for name, value in options.items():
        if name not in stated and value is not None:
            pair = isinstance(value, tuple)
            setting[name] = "x".join(map(str, value)) if pair else value
    if "tile" in setting:
        setting.setdefault("alpha", None)  # row by row
    return setting


@lru_cache(maxsize=16)  # both passes of a search ask for it
def num_pairs(problem: Problem) -> int:
    """Pairs of queries and keys that the mask shows, as if there were one head."""
    of_one_rank = Layout(LayoutKind.CONTIGUOUS, problem.q_tokens, 1)
    return int(pairs_of_ranks(of_one_rank, problem.rows)[0])


def target_on(cluster: Cluster | str | Path, plan: Plan, kernel: str | None = None) -> Target:
    """The kernels that ranks of a cluster would use. `kernel`: does all calls that it can do; other
    kernels do the rest."""
    cluster = a_cluster(cluster)
    if kernel is not None and kernel not in cluster.kernels:
        known = ", ".join(cluster.kernels)
        raise ClusterError(f"kernel={kernel}: {cluster.name} has curves of {known}")
    scattered = is_scattered((plan.q_layout, plan.kv_layout))
    by_kind = {
        direction: kernels_of_calls(cluster, direction, kernel, scattered=scattered)
        for direction in ("forward", "backward")
    }
    return Target(
        cluster.name,
        cluster.gpu,
        cluster.kernels,
        by_kind["forward"],
        by_kind["backward"],
        cluster.links,
        own_stream=not cluster.host_driven,
        element_bytes=plan.problem.element_bytes,
        rectangles=tuple(
            direction
            for direction, names in by_kind.items()
            if kernel in names.values() and names.get("range") != kernel
        ),
    )


def is_scattered(layouts: tuple[Layout, Layout]) -> bool:
    """Whether tensors have keys one by one, or rows that hold nothing, which some kernels
    refuse."""
    padded = any(layout.padded_tokens > layout.num_tokens for layout in layouts)
    return padded or layouts[1].kind is LayoutKind.STRIPED


@lru_cache(maxsize=64)  # batches of documents ask for the same
def kernels_of_calls(
    cluster: Cluster, direction: str, forced: str | None = None, *, scattered: bool
) -> dict[str, str]:
    """The kernel for each kind of call: the fastest, by the preferences of the runtime."""
    kernels, fastest = cluster.passes(direction), dict[str, str]()
    for kind in KINDS:
        curves = {name: curve for name, x in kernels.items() if (curve := x.curve(kind))}
        takes = [*curves]
        if forced in takes:
            takes = [forced]
        elif kind == "range":
            others = [n for n in takes if not (scattered and kernels[n].keys_in_runs)] or takes
            takes = [n for n in others if kernels[n].ranges] or others
        else:
            takes = [n for n in takes if not kernels[n].ranges] or takes
        if takes:
            fastest[kind] = max(takes, key=lambda name: curves[name].tflops)
    return fastest


_MANY_OBJECTS = 20_000


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's garbage collector. Planning and simulating make hundreds of thousands of
    small objects, none of them garbage: looking for cycles among them takes a third of the time. A
    search of 256 ranks holds half a GiB without the collector."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _count_as_old()
            gc.enable()


def _count_as_old() -> None:
    """Many objects that are left are what caches keep, and go to the oldest generation: to look at
    them as at young ones takes 15 to 30 ms. Not where the caller has frozen some, as they would
    thaw."""
    if gc.get_count()[0] > _MANY_OBJECTS and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
