"""The task graph of a plan, read back from its programs.

An operation `RS-Q-0.merge` belongs to task `RS-Q-0`, what a task needs follows from the buffers it
reads, and its cost from its bytes and visible pairs, as the mean over all ranks.
"""

from __future__ import annotations

from collections import defaultdict

from mesh_attention.machine.rates import Costs
from mesh_attention.plan.language.computed_pairs import pairs_of_tasks
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Communication, Program, Task, reads, writes
from mesh_attention.plan.language.tasks import TaskGraph, TaskNode
from mesh_attention.plan.language.traffic import TrafficMeter

# The order in which builders name kinds, which settles ties (algorithm.md, section 5).
_KINDS = ("AG-KV", "AG-Q", "RS-Q", "RS-dQ", "RS-dKV")


def task_graph(plan: Plan, pass_: Pass, costs: Costs) -> TaskGraph:
    """The tasks of the schedule, with costs and needs read from the programs."""
    communication = {s.communication for s in pass_.schedule.steps if s.communication is not None}
    compute = {task for step in pass_.schedule.steps for task in step.compute}
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

    Compute tasks that share an accumulator may swap places.
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
