"""An independent referee: the two-lane problem given to CP-SAT, which proves its optimum.

One communication lane, one compute lane, precedence, nothing else; costs are integers. Run with
`-s` to see how far greedy is from the optimum.
"""

from __future__ import annotations

from random import Random

import pytest
from schedule_graphs import backward_graph, forward_graph

from mesh_attention.plan.language.tasks import TaskGraph
from mesh_attention.plan.schedule.search import search

SHAPES = [(2, 2), (3, 3), (2, 4)]
CASES = [
    *[("forward", shape, seed) for shape in SHAPES for seed in (0, 1)],
    *[("backward", shape, seed) for shape in SHAPES for seed in (0, 1)],
]


def optimum(graph: TaskGraph) -> int:
    """The least event makespan over all orders of both lanes, proven."""
    # Here and not above: GPU machines collect all tests, and need not have OR-Tools for it.
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = round(sum(task.cost for task in graph.tasks()))
    end = model.new_int_var(0, horizon, "end")
    starts = {task.task: model.new_int_var(0, horizon, str(task.task)) for task in graph.tasks()}
    costs = {task.task: round(task.cost) for task in graph.tasks()}
    for lane in (graph.communication, graph.compute):
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[t.task], costs[t.task], "") for t in lane]
        )
    for name, needs in graph.needs().items():
        model.add(end >= starts[name] + costs[name])
        for need in needs:
            model.add(starts[name] >= starts[need] + costs[need])
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = 20
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, "the referee itself ran out of time"
    return round(solver.objective_value)


@pytest.mark.parametrize(("direction", "shape", "seed"), CASES)
def test_search_is_within_two_percent_of_the_proven_optimum(
    direction: str, shape: tuple[int, int], seed: int
) -> None:
    rng = Random(f"{direction} {shape} {seed}")
    build = forward_graph if direction == "forward" else backward_graph
    # The odd seed has costs as under a causal mask: unequal, and some pairs empty.
    missing = 0.25 * seed
    graph = build(
        *shape,
        lambda name: float(rng.randint(5, 40)),
        lambda q, kv: None if rng.random() < missing else float(rng.randint(5, 40)),
    )
    result = search(graph)
    best = optimum(graph)
    gap, greedy_gap = result.makespan / best - 1, result.greedy_makespan / best - 1
    print(f"{direction} {shape}: optimum {best}, search +{gap:.1%}, greedy +{greedy_gap:.1%}")
    assert best <= result.makespan <= 1.02 * best
    assert result.lower_bound <= best * (1 + 1e-9)
