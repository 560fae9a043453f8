"""Tokens exchanged for heads portion by portion, so that attention hides most of it (`slices.md`).

A portion is what one exchange carries: a slice of heads, or of it a chunk of queries or of keys. A
method says where in its program each portion must have come, and where its results can go, by the
tasks named here; what is then exchanged follows from the head group alone. Portions have buffers of
their own, which are freed when they are done with.

    EX-IN-2              the queries and keys of slice 2; EX-OUT-2 what belongs to them
    EX-Q-2, EX-KV-1      chunks of queries and of keys, where slices are chunked; EX-O-2, EX-dQ-2
                         and EX-dKV-1 what belongs to them

Where several head groups hold a KV head its owner adds what they send: EX-dKV-1.sum, which stands
behind the attention that hides the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache

from mesh_attention.plan.language.buffers import Kind, Piece
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import AllToAll, Merge, MergeRule, Operation, Task
from mesh_attention.plan.methods.parts.chunks import Chunk
from mesh_attention.plan.methods.parts.head_group import HeadGroup, PassCut
from mesh_attention.plan.methods.parts.kv_replicas import Holders
from mesh_attention.plan.problem.spans import Spans, clip_spans

_KEPT = 1024  # exchanges that are kept for the next mask: in training those of one rank
IN, OUT = "EX-IN", "EX-OUT"
_IN_CHUNKS = ("EX-Q", "EX-KV")
_OUT_CHUNKS = {Direction.FORWARD: ("EX-O", "EX-dKV"), Direction.BACKWARD: ("EX-dQ", "EX-dKV")}


def comes_by(cut: PassCut, key_side: bool, index: int) -> Task:
    """The exchange that brings a chunk."""
    return Task(IN if cut.chunks == (1, 1) else _IN_CHUNKS[key_side], (index,))


def goes_by(cut: PassCut, direction: Direction, key_side: bool, index: int) -> Task:
    """The exchange that takes away the results of a chunk."""
    return Task(OUT if cut.chunks == (1, 1) else _OUT_CHUNKS[direction][key_side], (index,))


SUM = "sum"


class Portions:
    """The exchanges of all units of a pass."""

    def __init__(
        self,
        head_groups: list[HeadGroup],
        direction: Direction,
        needs: tuple[Kind, ...],
        results: tuple[Kind, ...],
        holders: Holders,
    ) -> None:
        first = head_groups[0]
        assert first.cut is not None
        self._head_groups = head_groups
        self._kinds: dict[str, tuple[Kind, ...]] = {IN: needs, OUT: results}
        for names, kinds in ((_IN_CHUNKS, needs), (_OUT_CHUNKS[direction], results)):
            for side, name in enumerate(names):
                self._kinds[name] = tuple(kind for kind in kinds if kind.is_key_side == side)
        self._incoming = (IN, *_IN_CHUNKS)
        self._holders = holders
        self._chunks = [first.exchanged(kind) for kind in (Kind.Q, Kind.K)]
        self._slots_of = [first.slots(kind) for kind in (Kind.Q, Kind.K)]
        self._known_heads: dict[tuple[bool, bool], list[tuple[str, tuple[int, int]]]] = {}
        self._rows_held = lru_cache(maxsize=_KEPT)(self._make_rows_held)
        self._given = cache(self._make_given)
        self._held = lru_cache(maxsize=_KEPT)(self._make_held)
        self.operations = lru_cache(maxsize=_KEPT)(self._operations)

    def _operations(self, task: Task, unit: int, index: int) -> list[Operation]:
        """The exchange of this name, or (stage `sum`) sums of what several head groups have."""
        if task.stage:
            return list(self._sums(task))
        group = self._head_groups[index]
        rank = group.rank_of(unit)
        parts = group.q_layout.parts(rank), group.kv_layout.parts(rank)
        given, held = self._given(task, parts), self._held(task, unit)
        if task.kind in self._incoming:
            return [AllToAll(task, f"U{unit}", given, held)]
        return [AllToAll(task, f"U{unit}", held, given)]

    def _chunk(self, task: Task, kind: Kind) -> Chunk:
        return self._chunks[kind.is_key_side][task.index[0]]

    def _slots(self, task: Task, kind: Kind) -> Spans:
        """Of each member, those that belong to a portion; slices of heads have the same."""
        slots = self._slots_of[kind.is_key_side]
        return slots[task.index[0] % len(slots)]

    def _make_given(self, task: Task, parts: tuple[Spans, Spans]) -> tuple[tuple[Piece, ...], ...]:
        """A rank's own rows of a portion, for each head group its heads of them."""
        kinds = [(kind.value, kind.is_key_side) for kind in self._kinds[task.kind]]
        sides = {side: kind for kind in self._kinds[task.kind] for side in (kind.is_key_side,)}
        cuts = {
            side: [
                cut
                for stretch in self._slots(task, kind)
                for cut in clip_spans(parts[side], *stretch)
            ]
            for side, kind in sides.items()
        }
        heads = {side: self._heads_of(task, kind) for side, kind in sides.items()}
        return tuple(
            [
                tuple(
                    [
                        Piece(name + copy, a, b, own)
                        for name, side in kinds
                        for copy, own in (heads[side][index],)
                        for a, b in cuts[side]
                    ]
                )
                for index in range(len(self._head_groups))
            ]
        )

    def _heads_of(self, task: Task, kind: Kind) -> list[tuple[str, tuple[int, int]]]:
        """For each head group its heads of a portion in the tensors of their owner; results of a
        head that several head groups hold arrive in copies."""
        held = self._all_heads(kind.is_key_side, task.kind in self._incoming)
        inside = self._chunk(task, kind).heads
        if inside is None:
            return held
        return [(copy, (first + inside[0], first + inside[1])) for copy, (first, _) in held]

    def _all_heads(self, side: bool, incoming: bool) -> list[tuple[str, tuple[int, int]]]:
        """Of all portions together."""
        key = side, incoming
        if key not in self._known_heads:
            found = []
            for group in self._head_groups:
                copy, heads = "", group.heads(Kind.K if side else Kind.Q)
                if not incoming:
                    ((copy, heads, _),) = self._holders.parts(group)[side]
                found.append((copy, heads))
            self._known_heads[key] = found
        return self._known_heads[key]

    def _make_held(self, task: Task, unit: int) -> tuple[tuple[Piece, ...], ...]:
        """A head group's heads of a portion, for each member its rows: alike in all of them."""
        group = self._head_groups[0]
        sources = []
        for kind in self._kinds[task.kind]:
            chunk = self._chunk(task, kind)
            rows = self._rows_held(kind.is_key_side, unit, chunk.start, chunk.stop)
            sources.append((chunk.name(group.local(kind)), rows))
        return tuple(
            [
                tuple([Piece(name, a, b) for name, rows in sources for a, b in rows[member]])
                for member in range(group.degree)
            ]
        )

    def _make_rows_held(self, side: bool, unit: int, start: int, stop: int) -> list[Spans]:
        """Of each member, counted in a chunk of a unit's rows: tensors and slices share them."""
        members = self._head_groups[0].member_rows(Kind.K if side else Kind.Q, unit)
        return [
            tuple([(a - start, b - start) for a, b in clip_spans(rows, start, stop)])
            for rows in members
        ]

    def _sums(self, task: Task) -> Iterator[Operation]:
        for kind in self._kinds[task.kind]:
            for a, b in self._slots(task, kind) if kind.is_key_side else ():
                for total, copies in self._holders.sums:
                    parts = tuple(
                        Piece(f"{kind.value}.copy{copy}", a, b, heads)
                        for copy, heads in enumerate(copies)
                    )
                    end = Piece(kind.value, a, b, total)
                    yield Merge(task, MergeRule.SUM, parts, (end,))
