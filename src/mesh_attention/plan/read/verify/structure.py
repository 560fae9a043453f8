"""The findings of `verify`, and its checks of a plan's form before it runs the plan symbolically.

Names must exist, pieces must lie inside their buffers, ranks must be members of their groups, and
tasks must follow the order of the schedule. `machine.py` calls `structure_findings` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision, Role
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Attention,
    Collective,
    Communication,
    Free,
    Operation,
    Program,
    ReduceScatter,
    SendRecv,
    Task,
    reads,
    writes,
)
from mesh_attention.plan.language.workspace import lifetimes
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.spans import Spans, joined


@dataclass(frozen=True, slots=True)
class Finding:
    """The rank and the operation at which a plan breaks, and how."""

    direction: str
    rank: int
    operation: str
    message: str

    def __str__(self) -> str:
        return f"{self.direction}, rank {self.rank}, {self.operation}: {self.message}"

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"pass": fields.pop("direction"), **fields}


def structure_findings(plan: Plan, pass_: Pass) -> list[Finding]:
    """What is wrong with the form of a pass; of each program only the first fault."""
    faults: list[tuple[int, str, str]] = []  # rank, operation and message
    ranks = list(range(plan.num_ranks))
    if [program.rank for program in pass_.programs] != ranks:
        faults.append((0, "programs", "there must be one program for each rank"))
    p = plan.problem
    for name, layout, tokens in (("q", plan.q_layout, p.q_tokens), ("kv", plan.kv_layout, p.keys)):
        if (layout.num_tokens, layout.num_ranks) != (tokens, plan.num_ranks):
            message = "is not one of the problem's tokens on the plan's ranks"
            faults.append((0, f"{name}_layout", message))
    if sorted(plan.devices) != ranks:
        faults.append((0, "devices", "must number every rank exactly once"))
    for name, members in pass_.groups.items():
        if len(set(members)) != len(members) or not set(members).issubset(ranks):
            faults.append((0, name, f"is not a group of ranks: {members}"))
    if not faults:
        for program in pass_.programs:
            fault = (
                _caller_fault(plan, pass_, program)
                or _program_fault(plan, pass_, program)
                or _place_fault(plan, program)
            )
            if fault:
                faults.append((program.rank, *fault))
    if not faults and (order_fault := _schedule_fault(pass_) or _meeting_fault(pass_)):
        faults = [order_fault]
    return [Finding(str(pass_.direction), *fault) for fault in faults]


# Kinds of the tensors that callers give, and of those that they get.
CALLER_KINDS = {
    Direction.FORWARD: ((Kind.Q, Kind.K, Kind.V), (Kind.OUT, Kind.LSE)),
    Direction.BACKWARD: (
        (Kind.Q, Kind.K, Kind.V, Kind.OUT, Kind.LSE, Kind.GRAD_OUT),
        (Kind.GRAD_Q, Kind.GRAD_K, Kind.GRAD_V),
    ),
}
_MAY_BE_KEPT = (Kind.Q, Kind.K, Kind.V, Kind.LSE)
_BETWEEN_PASSES = {Direction.FORWARD: Role.KEPT, Direction.BACKWARD: Role.RECALLED}


def _caller_fault(plan: Plan, pass_: Pass, program: Program) -> tuple[str, str] | None:
    """Each of the caller's tensors must be there once, as the whole partition of the rank with all
    heads. A backward program may leave out tensors that were kept, and recalls only kept ones."""
    direction = pass_.direction
    inputs, outputs = CALLER_KINDS[direction]
    kinds = [(Role.INPUT, kind) for kind in inputs] + [(Role.OUTPUT, kind) for kind in outputs]
    wanted = {(role, kind): _caller_buffer(plan, program.rank, kind) for role, kind in kinds}
    for buffer in program.buffers:
        if buffer.role is Role.WORKSPACE:
            continue
        if buffer.role is _BETWEEN_PASSES[direction]:
            if fault := _kept_fault(plan, pass_, program.rank, buffer):
                return buffer.name, fault
            continue
        want = wanted.pop((buffer.role, buffer.kind), None)
        if want is None:
            return buffer.name, f"is not an {buffer.role} of the {direction} pass, or is twice"
        if buffer.name != str(buffer.kind):  # callers give and get their tensors by name
            return buffer.name, f"must be called {buffer.kind}, as it is the caller's"
        if (buffer.rows, buffer.heads, buffer.precision) != want:
            return buffer.name, f"is not the whole {buffer.kind} partition of its rank"
    # Backward, what was kept need not come again; forward, a caller may not ask for a kept lse.
    spared = set(_MAY_BE_KEPT)
    if direction is Direction.FORWARD:
        spared = {b.kind for b in program.buffers if b.role is Role.KEPT} & {Kind.LSE}
    missing = [(role, kind) for role, kind in wanted if kind not in spared]
    if missing:
        role, kind = missing[0]
        return str(kind), f"the {role} is missing"
    return None


def _kept_fault(plan: Plan, pass_: Pass, rank: int, buffer: Buffer) -> str | None:
    if buffer.kind not in _MAY_BE_KEPT:
        return f"is {buffer.role} and holds {buffer.kind}, which no backward pass takes"
    if pass_.direction is Direction.FORWARD:
        return None
    if Direction.FORWARD not in [other.direction for other in plan.passes]:
        return None  # a plan of the backward pass alone says nothing about the forward pass
    kept = plan.program(rank, Direction.FORWARD).buffer_table().get(buffer.name)
    if kept is None or replace(kept, role=buffer.role, offset=buffer.offset) != buffer:
        return "is recalled, and the forward pass does not keep a buffer of its rows and heads"
    return None if kept.role is Role.KEPT else "is recalled, and the forward pass does not keep it"


def _caller_buffer(plan: Plan, rank: int, kind: Kind) -> tuple[Spans, tuple[int, int], Precision]:
    side = int(kind.is_key_side)
    layout = (plan.q_layout, plan.kv_layout)[side]
    rows: Spans = ((rank * layout.slots, (rank + 1) * layout.slots),)
    if plan.relayout:
        rows = _shard_places(plan.shards[side], layout, plan.devices[rank])
    heads = plan.problem.kv_heads if kind.is_key_side else plan.problem.num_heads
    return rows, (0, heads), kind.precision


@lru_cache(maxsize=1024)
def _shard_places(shards: Layout, layout: Layout, device: int) -> Spans:
    """The places in the layout of the positions of a shard, one by one."""
    places = _places(layout)[shards.positions(device)].tolist()
    return joined((place, place + 1) for place in places)


@lru_cache(maxsize=4)
def _places(layout: Layout) -> NDArray[np.int64]:
    """The place of every position."""
    return np.argsort(layout.positions_of(((0, layout.padded_tokens),)))


def _place_fault(plan: Plan, program: Program) -> tuple[str, str] | None:
    """In a compiled program, buffers that live at the same time must lie apart."""
    placed = {b.name: b for b in program.buffers if b.offset is not None}
    if not placed:
        return None
    lives = lifetimes(program)
    left_out = [name for name in lives if name not in placed]
    if left_out:
        return left_out[0], "has no place, though others have"
    alive: list[tuple[int, int, int, str]] = []  # freed, start, stop, name
    for name in sorted((n for n in placed if n in lives), key=lambda n: lives[n]):
        born, freed = lives[name]
        start = placed[name].offset or 0
        stop = start + placed[name].num_bytes(plan.problem)
        alive = [entry for entry in alive if entry[0] >= born]
        for _, other_start, other_stop, other in alive:
            if start < other_stop and other_start < stop:
                return name, f"lies where {other} lies at the same time"
        alive.append((freed, start, stop, name))
    return None


def _schedule_fault(pass_: Pass) -> tuple[int, str, str] | None:
    """The schedule that is drawn and simulated must be the order in which the programs run."""
    place = {task: at for at, task in enumerate(pass_.schedule.order())}
    for program in pass_.programs:
        last = -1
        begun: set[Task] = set()
        for op in program.operations:
            task = op.task.whole
            at = place.get(task)
            # Tasks begin in the order of the schedule; what needs their data may come later.
            if at is None or task in begun:
                continue
            begun.add(task)
            if at < last:
                return program.rank, op.name, "does not stand where the schedule has it"
            last = at
        for op in program.operations:
            if isinstance(op, Attention) and op.task not in place:
                return program.rank, op.name, "is not in the schedule"
    return None


def _meeting_fault(pass_: Pass) -> tuple[int, str, str] | None:
    """Members must come to the tasks of their group in the same order. This check names the odd
    rank, which a run could not when all of them wait. Of two ranks, the odd rank is the rank that
    does not follow the schedule."""
    place = {task: at for at, task in enumerate(pass_.schedule.order())}
    orders: dict[str, dict[tuple[Task, ...], list[int]]] = {name: {} for name in pass_.groups}
    for program in pass_.programs:
        met: dict[str, list[Task]] = {}
        for op in program.operations:
            if isinstance(op, Collective) and op.task in place:
                met.setdefault(op.group, []).append(op.task)
        for group, tasks in met.items():
            orders[group].setdefault(tuple(tasks), []).append(program.rank)

    def scheduled(order: tuple[Task, ...]) -> bool:
        return list(order) == sorted(order, key=place.__getitem__)

    for group, by_order in orders.items():
        usual = max(
            by_order, key=lambda order: (len(by_order[order]), scheduled(order)), default=()
        )
        for order, ranks in by_order.items():
            for here, there in zip(order, usual, strict=False):
                if here != there:
                    return ranks[0], str(here), f"others of group {group} come to {there} first"
    return None


def _program_fault(plan: Plan, pass_: Pass, program: Program) -> tuple[str, str] | None:
    """Buffers must have places, heads and names of their own; operations, pieces inside them."""
    table = program.buffer_table()
    if len(table) != len(program.buffers):
        return "buffers", "two buffers have the same name"
    for buffer in program.buffers:
        layout = plan.kv_layout if buffer.kind.is_key_side else plan.q_layout
        places = layout.slots * layout.num_ranks
        if any(not 0 <= start < stop <= places for start, stop in buffer.rows):
            return buffer.name, f"has rows outside the {places} places of all ranks"
        heads = plan.problem.kv_heads if buffer.kind.is_key_side else plan.problem.num_heads
        if not 0 <= buffer.heads[0] < buffer.heads[1] <= heads:
            return buffer.name, f"has heads {buffer.heads}, of which there are {heads}"
        if buffer.kind.is_statistic and buffer.precision is not Precision.ACCUMULATE:
            return buffer.name, f"holds {buffer.kind}, which would be lost in less than fp32"
    sizes = {name: (b.num_rows, b.num_heads) for name, b in table.items()}
    tasks: set[Task] = set()
    for op in program.operations:
        fault = _piece_fault(op, sizes)
        if fault is None and isinstance(op, Communication):
            fault = "occurs twice" if op.task in tasks else _group_fault(pass_, program.rank, op)
            tasks.add(op.task)
        if fault:
            return op.name, fault
    return None


def _piece_fault(op: Operation, sizes: dict[str, tuple[int, int]]) -> str | None:
    if isinstance(op, Free):
        missing = [name for name in op.buffers if name not in sizes]
        return f"frees the unknown buffer {missing[0]}" if missing else None
    taken, written = reads(op), writes(op)
    for piece in (*taken, *written):
        if piece.buffer not in sizes:
            return f"uses the unknown buffer {piece.buffer}"
        rows, heads = sizes[piece.buffer]
        if not 0 <= piece.start < piece.stop <= rows:
            return f"uses rows {piece.start}:{piece.stop} of {piece.buffer}, which has {rows}"
        if piece.heads and not 0 <= piece.heads[0] < piece.heads[1] <= heads:
            return f"uses heads {piece.heads} of {piece.buffer}, which has {heads}"
    if isinstance(op, Communication):
        return overlap_fault(taken, written)
    return None


def overlap_fault(taken: Sequence[Piece], written: Sequence[Piece]) -> str | None:
    """A communication must not receive into rows that it sends: it might send received data."""
    arriving: dict[str, list[Piece]] = {}
    for piece in written:
        arriving.setdefault(piece.buffer, []).append(piece)
    for piece in taken:
        if any(piece.overlaps(other) for other in arriving.get(piece.buffer, ())):
            return f"sends rows {piece.start}:{piece.stop} of {piece.buffer} and receives into them"
    return None


def _group_fault(pass_: Pass, rank: int, op: Communication) -> str | None:
    members = pass_.groups.get(op.group)
    if members is None:
        return f"uses the unknown group {op.group}"
    if rank not in members:
        return f"uses group {op.group}, which this rank is not in"
    size = len(members)
    if isinstance(op, AllToAll) and not len(op.sends) == len(op.receives) == size:
        return f"must name pieces for each of the {size} members of {op.group}"
    if isinstance(op, SendRecv) and not (0 <= op.to_member < size and 0 <= op.from_member < size):
        return f"names a member that group {op.group} does not have"
    if isinstance(op, AllGather | ReduceScatter):
        for move in op.moves:
            rows = move.part.num_rows
            rising = all(a < b for a, b in pairwise(move.cuts))
            if not rising or move.cuts[0] != 0 or move.cuts[-1] != rows:
                return f"cuts {move.cuts} do not divide the {rows} rows of {move.part.buffer}"
            if move.whole.num_rows != rows * size:
                return f"{move.whole.buffer} is not {size} times {move.part.buffer}"
    return None
