"""One side (queries, or keys and values) of a program in which only needed rows travel.

`RankRows` says, for one rank, which rows it receives, sends and merges, by rows of its buffers. A
rank that needs rows of others gathers all that it works on, in order of position, its own rows too;
a rank that needs only its own rows reads them where they are. `NeededSide` turns this into pieces,
buffers and merges: needed rows arrive before the attention, partial results of them go back after
it, and the owner combines the partials of each of its rows. Used by `methods/needed_rows.py`.

Buffers: `k.0` holds the gathered keys of head slice 0, `grad_k.0` their partial gradients, `.wire`
the copy that is sent, `.in` the partials that arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision, Role
from mesh_attention.plan.language.program import Merge, MergeRule, Operation, Task
from mesh_attention.plan.methods.parts.head_group import HeadGroup
from mesh_attention.plan.methods.parts.needed_rows import NeededRows, Rows
from mesh_attention.plan.methods.parts.tile_side import SideKinds
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.spans import Spans, joined

ByRank = dict[int, Spans]  # the rows that are exchanged with each rank
Pieces = tuple[Piece, ...]
ByMember = dict[int, Pieces]


@dataclass(frozen=True, slots=True)
class Summand:
    """Partial results of own rows `start..stop`, which lie `shift` rows further on in the own
    partials, or in the stack of partials that arrive."""

    start: int
    stop: int
    shift: int
    arrives: bool


class RankRows:
    """The rows of one side that a rank exchanges.

    local     it works on its own rows only
    rows      the places of the rows that it works on; empty if it has nothing to do
    gathered  rows of them, by owner
    sent      own slots, by user
    stacked   rows of the stack in which partials of own rows arrive, by user
    stack     the places of that stack
    sums      own slots, in ranges with equal partials
    """

    def __init__(self, needed: NeededRows, layout: Layout, rank: int) -> None:
        received, sent, slots = needed.received(rank), needed.sent(rank), layout.slots
        self.rank, self.local, own = rank, not (received.ranks != rank).any(), rank * slots
        foreign = sent.ranks != rank
        others = Rows(sent.ranks[foreign], sent.slots[foreign], sent.sizes[foreign])
        arriving = _in_order(others)
        summands = [
            Summand(slot, slot + stop - start, start - slot, arrives=True)
            for slot, (start, stop) in zip(others.slots.tolist(), arriving, strict=True)
        ]
        self.stacked = _by_rank(others, arriving)
        self.stack = joined((own + partial.start, own + partial.stop) for partial in summands)
        if self.local:
            sent, self.gathered = others, ByRank()
            self.rows: Spans = ((own, own + slots),) if len(received.ranks) else ()
            own_summands = [Summand(0, slots, 0, arrives=False)] if self.rows else []
        else:
            spans, places = _in_order(received), received.ranks * slots + received.slots
            self.gathered = _by_rank(received, spans)
            self.rows = joined(
                zip(places.tolist(), (places + received.sizes).tolist(), strict=True)
            )
            own_summands = [
                Summand(slot, slot + stop - start, start - slot, arrives=False)
                for owner, slot, (start, stop) in zip(
                    received.ranks.tolist(), received.slots.tolist(), spans, strict=True
                )
                if owner == rank
            ]
        self.num_rows = sum(stop - start for start, stop in self.rows)
        ends = sent.slots + sent.sizes
        self.sent = _by_rank(sent, list(zip(sent.slots.tolist(), ends.tolist(), strict=True)))
        self.sums = _sums([*own_summands, *summands], slots)


def _sums(summands: list[Summand], slots: int) -> list[tuple[tuple[int, int], list[Summand]]]:
    """All slots, cut where a summand begins or ends; ranges that nobody works on have none."""
    cuts = sorted({0, slots}.union(*((partial.start, partial.stop) for partial in summands)))
    at = {cut: i for i, cut in enumerate(cuts)}
    by_range: list[list[Summand]] = [[] for _ in cuts[1:]]
    for partial in summands:
        for index in range(at[partial.start], at[partial.stop]):
            by_range[index].append(partial)
    return list(zip(pairwise(cuts), by_range, strict=True))


def _in_order(rows: Rows) -> list[tuple[int, int]]:
    """Where ranges lie in a buffer that holds them one after the other."""
    ends = np.cumsum(rows.sizes)
    return list(zip((ends - rows.sizes).tolist(), ends.tolist(), strict=True))


def _by_rank(rows: Rows, spans: Sequence[tuple[int, int]]) -> ByRank:
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for rank, span in zip(rows.ranks.tolist(), spans, strict=True):
        by_rank.setdefault(rank, []).append(span)
    return {rank: tuple(own) for rank, own in by_rank.items()}


class NeededSide:
    """Pieces, buffers and merges of one side. It knows nothing of the other side."""

    def __init__(
        self,
        head_group: HeadGroup,
        rows_of: Callable[[int], RankRows],
        slices: tuple[int, ...],
        kinds: SideKinds,
        *,
        travels: bool,
        keeps: bool,
    ) -> None:
        """`keeps`: what comes from other ranks stays for the backward pass."""
        self.head_group = head_group
        self.rows_of = rows_of  # of a rank
        self.travels = travels  # whether some rank works on rows of another
        self.inputs, self._together, self.rule, self.reduce_kind, _ = kinds
        self.partials = tuple([kind for group in self._together for kind in group])
        self.keeps_gathered = travels and keeps
        self._roles = kinds.gathered_as(keeps=keeps)
        self.moved = tuple([x for x in self.inputs if self._roles.get(x) is not Role.RECALLED])
        self.chunks = head_group.chunks(self.inputs[0], 1, slices)
        # Ranks exchange many rows alike, and share the pieces of them.
        self._pieces, self._piece = cache(_pieces), cache(Piece)

    # Operands of an attention.

    def operand(self, own: RankRows, kind: Kind, part: int) -> Piece:
        if own.local:
            return self.chunks[part].local(self.head_group.local(kind))
        return Piece(f"{kind}.{part}", 0, own.num_rows)

    def sums(self, own: RankRows, part: int) -> Pieces:
        return tuple(Piece(f"{kind}.{part}", 0, own.num_rows) for kind in self.partials)

    # What is sent and received, by member of the group.

    def gather(self, own: RankRows, part: int) -> tuple[ByMember, ByMember]:
        names = tuple([self.head_group.local(kind) for kind in self.moved])
        wholes = tuple([f"{kind}.{part}" for kind in self.moved])
        heads = self.chunks[part].heads
        return self._by_member(own.sent, names, heads), self._by_member(own.gathered, wholes)

    def reduce(self, own: RankRows, part: int) -> tuple[ByMember, ByMember]:
        """Partial results of rows of others, and theirs of own rows."""
        others = {member: rows for member, rows in own.gathered.items() if member != own.rank}
        wires = tuple([self._wire(own, kind, part) for kind in self.partials])
        stacks = tuple([f"{kind}.{part}.in" for kind in self.partials])
        return self._by_member(others, wires), self._by_member(own.stacked, stacks)

    def _by_member(
        self, rows: ByRank, names: tuple[str, ...], heads: tuple[int, int] | None = None
    ) -> ByMember:
        return {member: self._pieces(names, spans, heads) for member, spans in rows.items()}

    # Partial results for their owners.

    def to_wire(self, task: Task, own: RankRows, part: int) -> list[Operation]:
        names = [(f"{kind}.{part}", self._wire(own, kind, part)) for kind in self.partials]
        return [
            Merge(
                task.at("cast"),
                MergeRule.SUM,
                (Piece(total, 0, own.num_rows),),
                (Piece(wire, 0, own.num_rows),),
            )
            for total, wire in names
            if wire != total
        ]

    def merges(self, task: Task, own: RankRows, part: int) -> list[Operation]:
        """Into the results of own rows; without inputs where nobody has a partial."""
        heads = self.chunks[part].heads
        merges: list[Operation] = []
        for kinds in self._together:
            results = [self.head_group.local(kind) for kind in kinds]
            buffers = [(self._wire(own, kind, part), f"{kind}.{part}.in") for kind in kinds]
            for span, summands in own.sums:
                inputs = tuple(
                    [
                        self._piece(names[x.arrives], span[0] + x.shift, span[1] + x.shift)
                        for x in summands
                        for names in buffers
                    ]
                )
                outputs = tuple([Piece(result, *span, heads) for result in results])
                merges.append(Merge(task, self.rule, inputs, outputs))
        return merges

    def _wire(self, own: RankRows, kind: Kind, part: int) -> str:
        """The buffer from which partials are sent. A rank that sends none keeps them wide."""
        total = f"{kind}.{part}"
        return total if own.local else self.head_group.wire(kind, total)

    def buffers(self, own: RankRows) -> Iterator[Buffer]:
        """All buffers that a rank may use; its program keeps the ones it uses."""
        buffer = self.head_group.buffer
        for part, chunk in enumerate(self.chunks):
            for kind in self.inputs if not own.local else ():
                role = self._roles.get(kind, Role.WORKSPACE)
                yield buffer(f"{kind}.{part}", kind, own.rows, chunk, role=role)
            for kind in self.partials:
                name = f"{kind}.{part}"
                yield buffer(name, kind, own.rows, chunk, Precision.ACCUMULATE)
                if self._wire(own, kind, part) != name:
                    yield buffer(f"{name}.wire", kind, own.rows, chunk)
                if own.stack:
                    yield buffer(f"{name}.in", kind, own.stack, chunk)


def _pieces(names: tuple[str, ...], spans: Spans, heads: tuple[int, int] | None) -> Pieces:
    return tuple([Piece(name, a, b, heads) for name in names for a, b in spans])
