"""Small plans on shipped clusters, simulated, for the tests of this folder."""

from __future__ import annotations

from typing import Any

from mesh_attention.cost import Cluster, Overlap, Timeline, load_cluster, simulate
from mesh_attention.cost.operation_costs import ClusterCosts, TimedCall, compiled_on
from mesh_attention.cost.planning import plan_on
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attention, Program
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

__all__ = ["compiled_rank", "problem_of", "timed_calls", "timeline_of"]


def problem_of(tokens: int = 4096, *, causal: bool = True, heads: int = 16) -> Problem:
    return Problem(tokens, heads, head_dim=64, mask=Mask(causal=causal))


def timeline_of(
    method: str,
    ranks: int = 8,
    *,
    cluster: str = "hgx-h100",
    direction: Direction = Direction.FORWARD,
    overlap: Overlap = Overlap.EVENTS,
    causal: bool = True,
    **options: Any,
) -> Timeline:
    described = load_cluster(cluster)
    plan = plan_on(
        described,
        problem_of(causal=causal),
        ranks,
        method=method,
        directions=(direction,),
        **options,
    )
    return simulate(plan, described, direction, overlap=overlap)


def timed_calls(plan: Plan, cluster: Cluster, direction: Direction) -> tuple[TimedCall, ...]:
    """Of rank 0's first attention, as a simulation has them."""
    program, costs = compiled_rank(plan, cluster, direction)
    op = next(op for op in program.operations if isinstance(op, Attention))
    return costs.compute(op, program.buffer_table())


def compiled_rank(
    plan: Plan, cluster: Cluster, direction: Direction
) -> tuple[Program, ClusterCosts]:
    """Rank 0's compiled program, and the costs of what it computes."""
    compiled = compiled_on(plan, direction, cluster)
    assert isinstance(compiled.costs, ClusterCosts)
    return compiled.pass_.programs[0], compiled.costs
