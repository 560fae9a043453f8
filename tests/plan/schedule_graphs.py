"""Task graphs for the schedule tests: forward and backward shapes, equal or random costs.

A compute cost of None means the task does not exist (a fully masked pair of chunks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import Schedule, TaskGraph, TaskNode
from mesh_attention.plan.methods.parts.greedy import MemoryModel

Cost = Callable[[str], float]
ComputeCost = Callable[[int, int], float | None]
Builder = Callable[[int, int, Cost, ComputeCost], TaskGraph]
Touches = dict[Task, tuple[tuple[str, ...], ...]]


def tasks(*names: str) -> tuple[Task, ...]:
    return tuple(map(Task.parse, names))


def communication(name: str, cost: float, *needs: str) -> TaskNode:
    return TaskNode(Task.parse(name), cost, tasks(*needs))


def compute(name: str, cost: float, *needs: str) -> TaskNode:
    return TaskNode(Task.parse(name), cost, tasks(*needs))


def forward_graph(kq: int, kkv: int, cost: Cost, compute_cost: ComputeCost) -> TaskGraph:
    """AG-KV, AG-Q, C, RS-Q; `cost` is asked by task name, `compute_cost` by (q, kv)."""
    compute_tasks = _compute(kq, kkv, compute_cost)
    return TaskGraph(
        (
            *_gathers("AG-KV", kkv, cost),
            *_gathers("AG-Q", kq, cost),
            *_reductions(
                "RS-Q", [[c for c in compute_tasks if c.index[0] == i] for i in range(kq)], cost
            ),
        ),
        compute_tasks,
    )


def backward_graph(kq: int, kkv: int, cost: Cost, compute_cost: ComputeCost) -> TaskGraph:
    """As forward, with RS-dQ a row and RS-dKV a column of compute tasks."""
    compute_tasks = _compute(kq, kkv, compute_cost)
    rows = [[c for c in compute_tasks if c.index[0] == i] for i in range(kq)]
    columns = [[c for c in compute_tasks if c.index[1] == j] for j in range(kkv)]
    return TaskGraph(
        (
            *_gathers("AG-KV", kkv, cost),
            *_gathers("AG-Q", kq, cost),
            *_reductions("RS-dQ", rows, cost),
            *_reductions("RS-dKV", columns, cost),
        ),
        compute_tasks,
    )


def golden_graph() -> TaskGraph:
    """The 3 x 3 example of the specification."""
    return forward_graph(
        3, 3, lambda name: 1.0 if name.startswith("AG-KV") else 0.5, lambda q, kv: 0.5
    )


def random_graph(rng: Random, *, largest: int = 4, integer: bool = False) -> TaskGraph:
    """Any shape and any costs: zero costs, empty tasks and missing reductions included."""
    build = rng.choice((forward_graph, backward_graph))
    empty_share = rng.choice((0.0, 0.3))
    scale = rng.choice((0.3, 1.0, 3.0))

    def cost(name: str) -> float:
        drawn = rng.choice((0.0, 1.0, rng.uniform(0.1, 4.0), rng.uniform(0.1, 4.0)))
        return float(round(10 * drawn)) if integer else drawn

    def compute_cost(q: int, kv: int) -> float | None:
        return None if rng.random() < empty_share else scale * cost("")

    return build(rng.randint(1, largest), rng.randint(1, largest), cost, compute_cost)


def random_memory(rng: Random, graph: TaskGraph) -> MemoryModel:
    """Gathered chunks with staging, accumulators that live until their reduction, scratch."""
    sizes: dict[str, int] = {}
    touches: Touches = {}

    def buffer(name: str) -> str:
        sizes.setdefault(name, rng.randint(0, 9))
        return name

    for task in graph.communication:
        if task.needs:
            accumulator = buffer(f"acc {task.kind} {task.index}")
            touches[task.task] = ((accumulator, buffer(f"send {task.task}")),)
        else:
            staging, chunk = buffer(f"staging {task.task}"), buffer(f"chunk {task.task}")
            touches[task.task] = ((staging,), (staging, chunk))
    for c in graph.compute:
        chunks = tuple(buffer(f"chunk {need}") for need in c.needs)
        accumulators = tuple(
            buffer(f"acc {task.kind} {task.index}")
            for task in graph.communication
            if c.task in task.needs
        )
        scratch = buffer(f"scratch {c.task}")
        touches[c.task] = ((*chunks, scratch), (scratch, *accumulators))
    return MemoryModel(sizes, touches)


def chunk_memory(graph: TaskGraph, *, q_bytes: int, kv_bytes: int) -> MemoryModel:
    """Equal chunks: 16-bit inputs and sends, accumulators of twice their size."""
    sizes: dict[str, int] = {}
    touches: Touches = {}
    for task in graph.communication:
        chunk_bytes = kv_bytes if task.kind.endswith("KV") else q_bytes
        if task.needs:
            sizes |= {f"acc {task.task}": 2 * chunk_bytes, f"send {task.task}": chunk_bytes}
            touches[task.task] = (
                (f"acc {task.task}", f"send {task.task}"),
                (f"send {task.task}",),
            )
        else:
            sizes[f"chunk {task.task}"] = chunk_bytes
            touches[task.task] = ((f"chunk {task.task}",),)
    for c in graph.compute:
        inputs = tuple(f"chunk {need}" for need in c.needs)
        results = tuple(f"acc {t.task}" for t in graph.communication if c.task in t.needs)
        touches[c.task] = ((*inputs, *results),)
    return MemoryModel(sizes, touches)


def _compute(kq: int, kkv: int, compute_cost: ComputeCost) -> tuple[TaskNode, ...]:
    compute_tasks: list[TaskNode] = []
    for q in range(kq):
        for kv in range(kkv):
            cost = compute_cost(q, kv)
            if cost is not None:
                compute_tasks.append(compute(f"C-{q}-{kv}", cost, f"AG-Q-{q}", f"AG-KV-{kv}"))
    return tuple(compute_tasks)


def _gathers(kind: str, count: int, cost: Cost) -> list[TaskNode]:
    return [communication(f"{kind}-{i}", cost(f"{kind}-{i}")) for i in range(count)]


def _reductions(kind: str, inputs: list[list[TaskNode]], cost: Cost) -> list[TaskNode]:
    """A chunk with nothing computed has nothing to reduce."""
    return [
        TaskNode(Task(kind, (i,)), cost(f"{kind}-{i}"), tuple(c.task for c in row))
        for i, row in enumerate(inputs)
        if row
    ]


def strict_makespan(graph: TaskGraph, schedule: Schedule) -> float:
    """Sum over steps of the longer of the communication and the compute in it."""
    check_schedule(graph, schedule, strict=True)
    costs = {node.task: node.cost for node in (*graph.communication, *graph.compute)}
    total = 0.0
    for step in schedule.steps:
        communication = 0.0 if step.communication is None else costs[step.communication]
        total += max(communication, sum(costs[name] for name in step.compute))
    return total


def check_schedule(graph: TaskGraph, schedule: Schedule, *, strict: bool) -> None:
    """Raise ValueError unless every task runs exactly once and after what it needs.

    strict: its needs were done when its step began (the paper's steps, as `greedy` makes them).
    Otherwise they only have to appear earlier in `order()`, as event execution asks for.
    """
    communication = {node.task for node in graph.communication}
    needs = graph.needs()
    counts = Counter(schedule.order())
    for task in needs:
        if counts[task] != 1:
            raise ValueError(f"task {task} is scheduled {counts[task]} times, not once")
    for task in counts:
        if task not in needs:
            raise ValueError(f"task {task} is scheduled but is not in the graph")
    done: set[Task] = set()
    for number, step in enumerate(schedule.steps, 1):
        for task in step.compute:
            if task in communication:
                raise ValueError(f"step {number} lists communication task {task} as compute")
        if step.communication is not None and step.communication not in communication:
            raise ValueError(f"step {number} lists compute task {step.communication} first")
        begun = frozenset(done)
        for task in step.tasks():
            missing = [need for need in needs[task] if need not in (begun if strict else done)]
            if missing:
                raise ValueError(f"step {number} starts {task} before {missing[0]} is done")
            done.add(task)
