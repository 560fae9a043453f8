"""Methods side by side, and the order of a plan's tasks beside the best that can be found.

`compare`: all methods, each at its best setting, counted from real plans, as `mesh-attention volume
--compare` shows it. No cluster is simulated: the best setting has the fewest bytes into a node
(within one node, the fewest bytes) in the forward pass, then the fewest bytes in all.

`compare_schedulers`, as `mesh-attention plan` shows it: the graph of tasks is read back from the
programs of any method. An operation `RS-Q-0.merge` belongs to task `RS-Q-0`, what a task needs
follows from the buffers it reads, and its cost from its bytes and visible pairs, as the mean over
all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.machine.rates import Costs, usual_costs
from mesh_attention.plan.language.computed_pairs import pairs_of_tasks
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import (
    Communication,
    Program,
    SendRecv,
    Task,
    reads,
    writes,
)
from mesh_attention.plan.language.tasks import TaskGraph, TaskNode
from mesh_attention.plan.language.traffic import TrafficMeter
from mesh_attention.plan.methods.question import ask
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import PassCount, count
from mesh_attention.plan.schedule.search import event_makespan, search

# The order in which builders name kinds, which settles ties (algorithm.md, section 5).
_KINDS = ("AG-KV", "AG-Q", "RS-Q", "RS-dQ", "RS-dKV")


@dataclass(frozen=True, slots=True)
class Counts:
    """Bytes of a rank, the largest over all ranks (or nodes)."""

    total_bytes: int
    inter_node_bytes: float
    peak_buffer_bytes: int
    collectives: int
    point_to_point: int

    @staticmethod
    def of(counted: PassCount) -> Counts:
        shifts = max(rank.times.get(SendRecv.__name__, 0) for rank in counted.ranks)
        numbers = counted.to_json()
        return Counts(
            numbers["bytes_per_rank"]["max"],
            numbers["inter_node_bytes_per_rank"]["max"],
            counted.peak_buffer_bytes,
            numbers["communications_per_rank"]["max"] - shifts,
            shifts,
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """A method at its best setting, or the reason why it cannot run here."""

    method: str
    setting: dict[str, Any]
    counts: dict[Direction, Counts]
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        passes = {direction.value: asdict(counts) for direction, counts in self.counts.items()}
        return {"method": self.method, "setting": self.setting, "reason": self.reason} | passes


def compare(
    problem: Problem,
    num_ranks: int,
    ranks_per_node: int | None,
    options: dict[str, Any] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Compared]:
    """`options` go to every method that has them, such as the layout."""
    nodes = {"ranks_per_node": ranks_per_node} if ranks_per_node else {}
    shared = (options or {}) | nodes
    tries = {
        name: method.candidates(problem, num_ranks, ranks_per_node)
        for name, method in METHODS.items()
    }
    total, done = sum(map(len, tries.values())), 0
    rows = []
    several = bool(ranks_per_node and ranks_per_node < num_ranks)

    def counts_of(method: str, direction: Direction, options: dict[str, Any]) -> Counts:
        plan = ask(problem, num_ranks, method=method, directions=(direction,), **options).plan()
        return Counts.of(count(plan)[direction])

    for name, settings in tries.items():
        usable = {key: x for key, x in shared.items() if key in METHODS[name].options()}
        best: tuple[tuple[float, float], dict[str, Any], Counts] | None = None
        reason = None
        for setting in settings:
            try:
                counts = counts_of(name, Direction.FORWARD, usable | setting)
            except PlanError as error:
                reason = reason or str(error)
            else:
                score = _score(counts, several)
                if best is None or score < best[0]:
                    best = (score, setting, counts)
            done += 1
            if progress:
                progress(done, total)
        if best is None:
            rows.append(Compared(name, {}, {}, reason))
        else:
            _, setting, counts = best
            back = counts_of(name, Direction.BACKWARD, usable | setting)
            both = {Direction.FORWARD: counts, Direction.BACKWARD: back}
            rows.append(Compared(name, setting, both))
    return rows


def _score(counts: Counts, several_nodes: bool) -> tuple[float, float]:
    crossing, moved = counts.inter_node_bytes, float(counts.total_bytes)
    return (crossing, moved) if several_nodes else (moved, crossing)


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


def compare_schedulers(plan: Plan, pass_: Pass) -> ScheduleComparison:
    graph = task_graph(plan, pass_, usual_costs())
    best = search(graph)
    own = event_makespan(graph, pass_.schedule)
    return ScheduleComparison(
        own, best.greedy_makespan, min(best.makespan, own), best.lower_bound, best.proven_optimal
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
    for _, task, number in pairs_of_tasks(plan, pass_):
        pairs[task] += number
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
