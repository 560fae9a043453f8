"""The target of a cluster: the kernels that its ranks would use, on its GPUs and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.kernel_facts import KINDS, PassRates
from mesh_attention.machine.load import a_cluster
from mesh_attention.machine.tables import ClusterError
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.passes.compile import PassCompiler
from mesh_attention.plan.passes.seconds import CallSeconds
from mesh_attention.plan.problem.layout import LayoutKind


def target_on(cluster: Cluster | str | Path, plan: Plan, kernel: str | None = None) -> Target:
    """`kernel`: one that does all that it can do; other kernels do the rest."""
    cluster = a_cluster(cluster)
    if kernel is not None and kernel not in cluster.kernels:
        known = ", ".join(cluster.kernels)
        raise ClusterError(f"kernel={kernel}: {cluster.name} has curves of {known}")
    padded = any(one.padded_tokens > one.num_tokens for one in (plan.q_layout, plan.kv_layout))
    scattered = padded or plan.kv_layout.kind is LayoutKind.STRIPED
    forward, backward = (
        _by_kind(cluster.passes(direction), kernel, scattered=scattered) for direction in Direction
    )
    return Target(
        *(cluster.name, cluster.gpu, cluster.kernels, forward, backward, cluster.links),
        own_stream=not cluster.host_driven,
        element_bytes=plan.problem.element_bytes,
        rectangles=tuple(
            direction
            for direction, by_kind in (("forward", forward), ("backward", backward))
            if kernel in by_kind.values() and by_kind.get("range") != kernel
        ),
    )


def _by_kind(
    kernels: Mapping[str, PassRates], forced: str | None, *, scattered: bool
) -> dict[str, str]:
    """The fastest for each kind of call, as the runtime would have it."""
    found: dict[str, str] = {}
    for kind in KINDS:
        takes = [name for name, rates in kernels.items() if _takes(rates, kind)]
        if forced in takes:
            takes = [forced]
        elif kind == "range":
            # Keys one by one, and rows that hold nothing, are refused by some.
            others = [n for n in takes if not (scattered and kernels[n].keys_in_runs)] or takes
            takes = [n for n in others if kernels[n].ranges] or others
        else:
            takes = [n for n in takes if not kernels[n].ranges] or takes
        if takes:
            found[kind] = max(takes, key=lambda name: _tflops(kernels[name], kind))
    return found


def _takes(rates: PassRates, kind: str) -> bool:
    return rates.ranges or rates.rate(kind) is not None


def _tflops(rates: PassRates, kind: str) -> float:
    rate = rates.rate(kind) or rates.range
    assert rate is not None
    return rate.tflops


def compiled_on(plan: Plan, one: Pass, cluster: Cluster, kernel: str | None = None) -> Compiled:
    """The plan and its pass as they are timed: compiled for the cluster, unless they are."""
    if plan.target is not None and kernel is not None:
        raise ClusterError(
            f"kernel={kernel}: the plan is compiled for {plan.target.name}; give it as it was"
        )
    if plan.target is not None:
        return Compiled(plan, one, CallSeconds(plan, one.direction, plan.target), {}, {})
    target = target_on(cluster, plan, kernel)
    compiler = PassCompiler(plan, one, target)
    programs = compiler.all_programs()
    compiled = replace(plan, passes=(programs,), target=target)
    return Compiled(compiled, programs, compiler.clock, compiler.waits, compiler.seconds)


class Compiled(NamedTuple):
    """`waits`: the operations that each must come after, by rank, as far as it is compiled;
    `seconds`: likewise those of collectives, by their places, as far as a pass asked for them."""

    plan: Plan
    one: Pass
    clock: CallSeconds
    waits: Mapping[int, tuple[tuple[int, ...], ...]]
    seconds: Mapping[int, Mapping[int, float]]
