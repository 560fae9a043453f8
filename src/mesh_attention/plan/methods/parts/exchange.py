"""The exchanges around a method: tokens for heads, and shards for the layout of the method.

All rows are exchanged at once, before the first operation of a method and after its last; or, where
the head group is cut, chunk by chunk, so that attention hides most of it (`chunks.py`). A chunk is
what one exchange carries: a slice of heads, or of it a chunk of queries or of keys. A method says,
by the tasks named here, where each chunk must have come and where its results can go; the rows and
heads of an exchange follow from the head group alone. Chunks have buffers of their own.

    EX-IN-2              the queries and keys of slice 2; EX-OUT-2 their results
    EX-Q-2, EX-KV-1      chunks of queries and of keys, where slices are chunked; EX-O-2, EX-dQ-2
                         and EX-dKV-1 their results

Where several head groups hold a KV head, its owner adds what they send: EX-dKV-1.sum, which follows
the attention that hides the exchange. Used by `assemble.py`; the orders of tasks use the names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from weakref import proxy

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Role
from mesh_attention.plan.language.member_pieces import Holders, MemberPieces, MovedTensor
from mesh_attention.plan.language.plan import Direction, OnDemand
from mesh_attention.plan.language.program import AllToAll, Merge, MergeRule, Operation, Task
from mesh_attention.plan.methods.parts.chunks import Chunk
from mesh_attention.plan.methods.parts.exchanged_rows import (
    Cuts,
    KvReplicas,
    RelayoutRows,
    UnitRows,
    kv_replicas,
)
from mesh_attention.plan.methods.parts.head_group import HeadGroup, PassCut
from mesh_attention.plan.problem.spans import Spans, clip_spans

TO_HEADS, TO_TOKENS = Task("EX-IN", (0,)), Task("EX-OUT", (0,))
SUM = "sum"  # the stage of the sums of replicas
_IN_CHUNKS = ("EX-Q", "EX-KV")
_OUT_CHUNKS = {Direction.FORWARD: ("EX-O", "EX-dKV"), Direction.BACKWARD: ("EX-dQ", "EX-dKV")}
_INCOMING = (TO_HEADS.kind, *_IN_CHUNKS)
# Operations that are kept for the next mask: in training those of one rank. All exchanges share
# the last: other cuts, tiles and passes of a search have many that are equal.
_KEPT, _KEPT_CHUNKS, _SHARED = 48, 1024, 256
_INPUTS = (Kind.Q, Kind.K, Kind.V)
_OUTPUTS = {
    Direction.FORWARD: (Kind.OUT, Kind.LSE),
    Direction.BACKWARD: (Kind.GRAD_Q, Kind.GRAD_K, Kind.GRAD_V),
}


def comes_by(cut: PassCut, key_side: bool, index: int) -> Task:
    """The exchange that brings a chunk."""
    return Task(TO_HEADS.kind if cut.chunks == (1, 1) else _IN_CHUNKS[key_side], (index,))


def goes_by(cut: PassCut, direction: Direction, key_side: bool, index: int) -> Task:
    """The exchange that takes away the results of a chunk."""
    chunked = _OUT_CHUNKS[direction][key_side]
    return Task(TO_TOKENS.kind if cut.chunks == (1, 1) else chunked, (index,))


def exchange_of(
    head_group: HeadGroup, direction: Direction, needs: tuple[Kind, ...]
) -> HeadExchange:
    """The exchange around all head groups of a pass. It does not depend on the mask, so all masks
    share it."""
    problem = head_group.problem.of_any_mask
    return _exchange_of(replace(head_group, problem=problem, index=0), direction, needs)


@lru_cache(maxsize=8)
def _exchange_of(group: HeadGroup, direction: Direction, needs: tuple[Kind, ...]) -> HeadExchange:
    return HeadExchange(group, direction, needs)


class HeadExchange:
    """What stands around a method: the caller's tensors, delta, and the rows that are exchanged."""

    def __init__(self, first: HeadGroup, direction: Direction, needs: tuple[Kind, ...]) -> None:
        """`first`: the first of the head groups."""
        self._first = first
        self._head_groups = OnDemand(first.degree, lambda index: replace(first, index=index))
        self._outputs = _OUTPUTS[direction]
        self._inputs: tuple[Kind, ...] = _INPUTS
        kept, role = first.kept if first.is_exchanged else (), Role.KEPT
        # The tensors of which a unit has rows of its own.
        self._held = dict.fromkeys((*needs, *self._outputs), Role.WORKSPACE)
        if direction is Direction.BACKWARD:
            needs, role = tuple(kind for kind in needs if kind not in kept), Role.RECALLED
            taken = tuple(kind for kind in (*_INPUTS, Kind.LSE) if kind in needs)
            self._inputs = (*taken, Kind.OUT, Kind.GRAD_OUT)
        self._held |= {kind: role for kind in kept if kind in self._held}
        self._needs = needs
        self._rows = UnitRows(first) if first.shards is None else RelayoutRows(first, first.shards)
        self._shards = first.shards or (first.q_layout, first.kv_layout)
        self.groups = self._rows.groups
        self._replicas = kv_replicas(first.problem, first.degree)
        self._kinds = {TO_HEADS.kind: needs, TO_TOKENS.kind: self._outputs}
        for names, kinds in ((_IN_CHUNKS, needs), (_OUT_CHUNKS[direction], self._outputs)):
            for side, name in enumerate(names):
                self._kinds[name] = tuple(kind for kind in kinds if kind.is_key_side == side)
        self._at_once = first.is_exchanged and first.cut is None
        self._delta: list[Operation] = []
        if Kind.DELTA in needs:
            kinds, rows = (Kind.OUT, Kind.GRAD_OUT, Kind.DELTA), self._shards[0].slots
            out, grad, delta = (Piece(kind.value, 0, rows) for kind in kinds)
            self._delta.append(Merge(Task("delta"), MergeRule.DELTA, (out, grad), (delta,)))
        cached = lru_cache(maxsize=_KEPT if first.cut is None else _KEPT_CHUNKS)
        own = proxy(self)  # in a cycle with its caches it would outlive its plan
        self.operations = cached(partial(HeadExchange._operations, own))
        # Ranks whose own rows are cut alike share these.
        self._sent = cached(partial(HeadExchange._find_sent, own))
        self._held_rows = cached(partial(HeadExchange._find_held, own))

    def buffers(self, unit: int, index: int) -> dict[str, Buffer]:
        head_group = self._head_groups[index]
        rank = unit * head_group.degree + index
        roles = dict.fromkeys(self._inputs, Role.INPUT) | dict.fromkeys(self._outputs, Role.OUTPUT)
        if self._delta:
            roles[Kind.DELTA] = Role.WORKSPACE
        problem, made = self._first.problem, dict[str, Buffer]()
        for kind, role in roles.items():
            count = problem.kv_heads if kind.is_key_side else problem.num_heads
            rows, name = self._rows.shard(kind.is_key_side, rank), kind.value
            made[name] = Buffer(name, kind, rows, (0, count), kind.precision, role)
        if self._first.is_exchanged:
            for kind, role in self._held.items():
                local = head_group.local_buffers(kind, unit, role)
                made.update((buffer.name, buffer) for buffer in local)
            for kind in self._outputs:
                rows = made[kind.value].rows
                for copy, heads in enumerate(self._replicas.copies if kind.is_key_side else ()):
                    name = f"{kind.value}.copy{copy}"
                    made[name] = Buffer(name, kind, rows, heads, kind.precision)
        return made

    def before(self, unit: int, index: int) -> list[Operation]:
        """What precedes the operations of a method."""
        if not self._at_once:
            return self._delta
        # Rows that no shard has are padding, and must hold the values of padding.
        empty = TO_HEADS.at("empty")
        unfilled, local = self._rows.unfilled(unit), self._head_groups[index].local
        fills = [
            Merge(
                empty,
                MergeRule.LSE if kind is Kind.LSE else MergeRule.SUM,
                inputs=(),
                outputs=(Piece(local(kind), a, b),),
            )
            for kind in self._needs
            for a, b in unfilled[kind.is_key_side]
        ]
        return [*self._delta, *fills, *self.operations(TO_HEADS, unit, index)]

    def after(self, unit: int, index: int) -> list[Operation]:
        """What follows the operations of a method."""
        if not self._at_once:
            return []
        tasks = (TO_TOKENS, TO_TOKENS.at(SUM))
        return [op for task in tasks for op in self.operations(task, unit, index)]

    def _operations(self, task: Task, unit: int, index: int) -> list[Operation]:
        """The exchange of this name, or (stage `sum`) the sums of replicas that it brought."""
        if task.stage:
            return list(self._sums(task))
        if not self._kinds[task.kind]:
            return []  # all that it would bring was kept
        sent = self._sent(task, self._rows.sent(unit, index))
        # Head groups with equally many heads name their rows alike.
        index = 0 if self._first.cut is not None else index
        held = self._held_rows(task, self._rows.like(unit), index)
        return [_exchange(task, self._rows.group(unit), sent, held)]

    def _chunk(self, task: Task, key_side: bool) -> Chunk:
        """The chunk that an exchange carries."""
        return self._first.sides[key_side].exchanged[task.index[0]]

    def _slots(self, task: Task, key_side: bool) -> Spans:
        """The slots of each member that an exchange carries; slices of heads have the same."""
        if self._first.shards is not None:
            return ((0, self._shards[key_side].slots),)
        slots = self._first.sides[key_side].slots
        return slots[task.index[0] % len(slots)]

    def _find_sent(self, task: Task, sent: tuple[Cuts, ...]) -> tuple[MovedTensor, ...]:
        """Rows of this rank's own tensors, by the units that work on them."""
        replicas, incoming, tensors = self._replicas, task.kind in _INCOMING, []
        for kind in self._kinds[task.kind]:
            side = kind.is_key_side
            chunk, slots = self._chunk(task, side), self._slots(task, side)
            rows = tuple(
                [
                    tuple([cut for span in slots for cut in clip_spans(cuts[side], *span)])
                    for cuts in sent
                ]
            )
            heads = _caller_heads(replicas, chunk.heads, incoming=incoming, keys=side)
            tensors.append(MovedTensor(kind.value, rows, heads))
        return tuple(tensors)

    def _find_held(self, task: Task, unit: int, index: int) -> tuple[MovedTensor, ...]:
        """A head group's heads of the rows of its unit, by the members that own them."""
        parts, tensors = self._replicas.of(task.kind in _INCOMING)[index], []
        for kind in self._kinds[task.kind]:
            side = kind.is_key_side
            chunk, here = self._chunk(task, side), tuple([part.here for part in parts[side]])
            rows, heads = self._rows.in_unit(unit, chunk, keys=side), _unit_heads(here)
            tensors.append(MovedTensor(chunk.name(self._first.local(kind)), rows, heads))
        return tuple(tensors)

    def _sums(self, task: Task) -> Iterator[Operation]:
        for kind in self._kinds[task.kind]:
            for a, b in self._slots(task, True) if kind.is_key_side else ():
                for total, copies in self._replicas.sums:
                    parts = tuple(
                        Piece(f"{kind.value}.copy{copy}", a, b, heads)
                        for copy, heads in enumerate(copies)
                    )
                    end = Piece(kind.value, a, b, total)
                    yield Merge(task, MergeRule.SUM, parts, (end,))


# All tensors of a side share holders, and so do the passes, tiles and cuts of a search.
@lru_cache(maxsize=_SHARED)
def _caller_heads(
    replicas: KvReplicas, heads: tuple[int, int] | None, *, incoming: bool, keys: bool
) -> Holders:
    """What each head group has of the heads of a chunk. Results of a head that several head groups
    hold arrive in copies."""
    first, last = heads or (0, 0)
    return Holders(
        [
            [
                (x.copy, (x.there[0] + first, x.there[0] + last) if last else x.there)
                for x in of_group[keys]
            ]
            for of_group in replicas.of(incoming)
        ]
    )


@lru_cache(maxsize=_SHARED)
def _unit_heads(heads: tuple[tuple[int, int] | None, ...]) -> Holders:
    """Of a buffer inside the method."""
    return Holders([[("", part) for part in heads]])


_side = lru_cache(maxsize=_SHARED)(MemberPieces)  # units and tasks share them


@lru_cache(maxsize=_SHARED)
def _exchange(
    task: Task, group: str, sent: tuple[MovedTensor, ...], held: tuple[MovedTensor, ...]
) -> AllToAll:
    caller, unit = _side(sent), _side(held)
    return AllToAll(task, group, *((caller, unit) if task.kind in _INCOMING else (unit, caller)))
