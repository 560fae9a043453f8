"""The order of a plan's tasks beside greedy's and the best that can be found.

`mesh-attention plan` shows it. The graph of tasks is read back from the programs of any method: an
operation `RS-Q-0.merge` belongs to task `RS-Q-0`, what a task needs follows from the buffers it
reads, and its cost from its bytes and visible pairs, as the mean over all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.machine.rates import Costs, usual_costs
from mesh_attention.plan.language.computed_pairs import pairs_of_tasks
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Communication, Program, Task, reads, writes
from mesh_attention.plan.language.tasks import TaskGraph, TaskNode
from mesh_attention.plan.language.traffic import TrafficMeter
from mesh_attention.plan.schedule.search import event_makespan, search

# The order in which builders name kinds, which settles ties (algorithm.md, section 5).
_KINDS = ("AG-KV", "AG-Q", "RS-Q", "RS-dQ", "RS-dKV")


@dataclass(frozen=True, slots=True)
class ScheduleComparison:
    """Seconds under the planner's rough costs: compare them, but do not take them for times."""

    plan_seconds: float
    greedy_seconds: float
    best_seconds: float
    lower_bound_seconds: float
    proven_optimal: bool

    @property
    def greedy_excess(self) -> float:
        """How much longer greedy takes than the best found: 0.1 is 10 %."""
        return self.greedy_seconds / self.best_seconds - 1 if self.best_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"greedy_excess": self.greedy_excess}

    def text(self) -> str:
        proof = "which is optimal" if self.proven_optimal else "not proven optimal"
        plan = self.plan_seconds / self.best_seconds - 1 if self.best_seconds else 0.0
        return (
            f"greedy is {self.greedy_excess:.1%} over the best order found ({proof}); "
            f"this plan {plan:.1%}"
        )


def compare_schedulers(plan: Plan, pass_: Pass, costs: Costs | None = None) -> ScheduleComparison:
    graph = task_graph(plan, pass_, costs or usual_costs())
    best = search(graph)
    own = event_makespan(graph, pass_.schedule)
    return ScheduleComparison(
        own,
        best.greedy_makespan,
        min(best.makespan, own),
        best.lower_bound,
        best.proven_optimal,
    )


def task_graph(plan: Plan, pass_: Pass, costs: Costs) -> TaskGraph:
    """The tasks of the schedule, with costs and needs read from the programs."""
    communication = {s.communication for s in pass_.schedule.steps if s.communication is not None}
    compute = {task for step in pass_.schedule.steps for task in step.compute}
    for task in compute:
        if (task.kind, len(task.index)) != ("C", 2):
            raise PlanError(
                f"{task} is not a task such as C-0-1: there are no schedulers to compare"
            )
    needs: dict[Task, dict[Task, None]] = defaultdict(dict)
    for program in pass_.programs:
        _add_needs(program, communication, compute, needs)
    seconds = _communication_seconds(plan, pass_, costs)
    pairs: dict[Task, float] = defaultdict(float)
    for _, task, count in pairs_of_tasks(plan, pass_):
        pairs[task] += count
    backward = pass_.direction is Direction.BACKWARD
    seconds = {task: total / plan.num_ranks for task, total in seconds.items()}
    for task in compute:
        flops = plan.problem.flops(round(pairs[task]), backward=backward)
        seconds[task] = costs.compute_seconds(flops / plan.num_ranks)
    in_order = sorted(communication, key=_priority), sorted(compute, key=lambda task: task.index)
    transfers, computations = (
        tuple(TaskNode(task, seconds.get(task, 0.0), tuple(needs[task])) for task in tasks)
        for tasks in in_order
    )
    return TaskGraph(transfers, computations)


def _add_needs(
    program: Program,
    communication: set[Task],
    compute: set[Task],
    needs: dict[Task, dict[Task, None]],
) -> None:
    """A task needs the tasks of the other stream that wrote rows it reads.

    Compute tasks that share an accumulator may swap places; transfers that feed each other may not.
    """
    written: dict[str, list[tuple[int, int, Task]]] = defaultdict(list)
    for op in program.operations:
        task = op.task.whole
        other = compute if task in communication else communication
        for piece in reads(op):
            for start, stop, writer in written[piece.buffer]:
                if not (start < piece.stop and piece.start < stop):
                    continue
                if writer in other:
                    needs[task][writer] = None
                elif task in communication and writer in communication and writer != task:
                    raise PlanError(
                        f"{task} passes on what {writer} brought: the order of this plan's "
                        "transfers is fixed, so there are no schedulers to compare"
                    )
        for piece in writes(op):
            written[piece.buffer].append((piece.start, piece.stop, task))


def _communication_seconds(plan: Plan, pass_: Pass, costs: Costs) -> dict[Task, float]:
    """Summed over all ranks."""
    seconds: dict[Task, float] = defaultdict(float)
    for program in pass_.programs:
        meter = TrafficMeter(plan.problem, program.buffer_table())
        for op in program.operations:
            if isinstance(op, Communication):
                members = pass_.members[op.group]
                traffic = meter.traffic(op, members[program.rank], len(members))
                task = op.task.whole
                seconds[task] += costs.communication_seconds(traffic.received_bytes)
    return seconds


def _priority(task: Task) -> tuple[int, str, tuple[int, ...]]:
    return (_KINDS.index(task.kind) if task.kind in _KINDS else len(_KINDS)), task.kind, task.index
