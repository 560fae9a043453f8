"""Operations and programs: the language that methods write and every reader reads (design.md).

A program is the operations of one rank, on named buffers. Dependencies follow from the buffers: an
operation waits for the last writer of what it reads. Communication runs in program order on one
stream, computation in program order on another.

All members of a group hold an operation of the same name, kind and group. Members are numbered by
their place in the group, so the members of many groups can share one operation object: a plan for
4,096 ranks is built and compared quickly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

from mesh_attention.plan.language.buffers import Buffer, Piece, Value, value
from mesh_attention.plan.language.member_pieces import MemberPieces


class CallKind(StrEnum):
    FULL = "full"  # every query of the rectangle sees every key
    CAUSAL = "causal"  # a square: query i sees keys 0..i
    RANGE = "range"  # by position: query i sees the keys inside its row range

    __hash__ = str.__hash__


@value
class Call(Value):
    """One kernel call: a rectangle of rows, counted inside the query and the key piece. In a
    compiled program also the kernel, and the SMs that the call leaves to transfers."""

    kind: CallKind
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kernel: str = ""
    leave_sms: int = 0

    def __str__(self) -> str:
        """As plan files have it: `full(0:512,0:1024)@flash_attn3-16`."""
        rows = f"{self.kind}({self.q_start}:{self.q_stop},{self.k_start}:{self.k_stop})"
        kernel = f"@{self.kernel}" if self.kernel else ""
        return rows + kernel + (f"-{self.leave_sms}" if self.leave_sms else "")

    @property
    def size(self) -> tuple[int, int]:
        """Rows of queries, and of keys."""
        return self.q_stop - self.q_start, self.k_stop - self.k_start

    @property
    def num_pairs(self) -> int | None:
        """Pairs of rows that it computes; None by position, where the mask decides."""
        height, width = self.size
        if self.kind is CallKind.FULL:
            return height * width
        return height * (height + 1) // 2 if self.kind is CallKind.CAUSAL else None

    def by(self, kernel: str, leave_sms: int = 0) -> Call:
        rows = self.q_start, self.q_stop, self.k_start, self.k_stop
        return Call(self.kind, *rows, kernel, leave_sms)


@value
class Task(Value):
    """The task of an operation: `RS-Q-0.merge` is stage "merge" of task RS-Q-0.

    kind   "AG-Q", "RS-dKV", "C", ...
    index  of the chunks or the step: (0,) for RS-Q-0, (0, 1) for C-0-1
    stage  of an operation that serves its task; empty for the task itself

    >>> str(Task("RS-Q", (0,), "merge")), Task.parse("C-0-1")
    ('RS-Q-0.merge', Task(kind='C', index=(0, 1), stage=''))
    """

    kind: str
    index: tuple[int, ...] = ()
    stage: str = ""

    def __str__(self) -> str:
        name = "-".join((self.kind, *map(str, self.index)))
        return f"{name}.{self.stage}" if self.stage else name

    def at(self, stage: str) -> Task:
        return Task(self.kind, self.index, stage)

    @property
    def whole(self) -> Task:
        """The task without the stage."""
        return Task(self.kind, self.index) if self.stage else self

    @staticmethod
    def parse(text: str) -> Task:
        name, _, stage = text.partition(".")
        kind, *index = re.split(r"-(?=[0-9]+(?:-|$))", name)
        if not _TASK.fullmatch(name) or (stage and not _TASK.fullmatch(stage)):
            raise ValueError(f"{text!r} is not a task such as AG-Q-0 or RS-Q-0.merge")
        return Task(kind, tuple(map(int, index)), stage)


_TASK = re.compile(r"[^\s,+.:]+")
_FREE = Task("free")


class _Named(Value):
    """The base of all operations: the text of its task is the name of an operation. Slots remember
    the names of its buffers."""

    __slots__ = ("_touched", "_written")

    @property
    def name(self) -> str:
        return str(self.task)  # type: ignore[attr-defined]

    @property
    def touched(self) -> tuple[str, ...]:
        """Names of the buffers that it reads or writes, each once: those that it reads first."""
        names: tuple[str, ...] | None = self._touched  # type: ignore[attr-defined]
        return self._find_names()[0] if names is None else names

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the buffers that it writes, each once, in order."""
        names: tuple[str, ...] | None = self._written  # type: ignore[attr-defined]
        return self._find_names()[1] if names is None else names

    def _find_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        op: Operation = self  # type: ignore[assignment]
        read, written = (dict.fromkeys(names) for names in _names(op))
        names = tuple(read | written), tuple(written)
        object.__setattr__(self, "_touched", names[0])
        object.__setattr__(self, "_written", names[1])
        return names


@value
class Move(Value):
    """One tensor of a gather or a reduce-scatter: the `part` that a member owns, and the `whole`.

    `cuts` divides the rows of the part. For each stretch between two cuts the whole holds that
    stretch of every member in turn, so that both halves of a zigzag partition arrive contiguous.
    """

    part: Piece
    whole: Piece
    cuts: tuple[int, ...]


@value
class AllGather(_Named):
    """Every member's part, to every member's whole."""

    task: Task
    group: str
    moves: tuple[Move, ...]


@value
class ReduceScatter(_Named):
    """The sum over the members' wholes, each part to the member that owns it."""

    task: Task
    group: str
    moves: tuple[Move, ...]


class _Exchange(_Named):
    """The base of exchanges, which may have hundreds of members and are shared by plans. A slot
    remembers results that readers compute from all pieces."""

    __slots__ = ("_known",)

    @property
    def known(self) -> dict[str, Any]:
        """Results of readers, by names that the readers choose."""
        known: dict[str, Any] | None = self._known  # type: ignore[attr-defined]
        if known is None:
            known = {}
            object.__setattr__(self, "_known", known)
        return known


@value
class AllToAll(_Exchange):
    """`sends[m]` goes to member m, `receives[m]` comes from member m; own pieces are copied.
    Sizes may differ, and tuples may be empty. Either side is a tuple, or `MemberPieces`."""

    task: Task
    group: str
    sends: Sequence[tuple[Piece, ...]]
    receives: Sequence[tuple[Piece, ...]]

    def __hash__(self) -> int:
        """Of the first member's pieces: all would take long, and most exchanges differ there."""
        return hash((self.task, self.group, self.sends[:1], self.receives[:1]))


@value
class SendRecv(_Named):
    """Point-to-point: pieces to one member and from one member (a ring shift, a placement)."""

    task: Task
    group: str
    to_member: int
    sends: tuple[Piece, ...]
    from_member: int
    receives: tuple[Piece, ...]


@value
class Attend(_Named):
    """The calls compute attention of q against k, v and merge it by softmax into (out, lse).

    `fresh`: out and lse hold nothing yet; rows that no call touches become 0 and -inf.
    """

    task: Task
    q: Piece
    k: Piece
    v: Piece
    out: Piece
    lse: Piece
    calls: tuple[Call, ...]
    fresh: bool


@value
class AttendBackward(_Named):
    """The calls compute gradients with the global lse and add them to (grad_q, grad_k, grad_v).

    Either the global `out` or `delta = rowsum(out * grad_out)` is given.
    `fresh_q`, `fresh_kv`: the gradients hold nothing yet; rows that no call touches become 0.
    """

    task: Task
    q: Piece
    k: Piece
    v: Piece
    grad_out: Piece
    lse: Piece
    out: Piece | None
    delta: Piece | None
    grad_q: Piece
    grad_k: Piece
    grad_v: Piece
    calls: tuple[Call, ...]
    fresh_q: bool
    fresh_kv: bool


class MergeRule(StrEnum):
    SOFTMAX = "softmax"  # (out, lse, out, lse, ...) -> (out, lse); of nothing: (0, -inf)
    LSE = "lse"  # (lse, lse, ...) -> (lse); of nothing: -inf
    RESCALE = "rescale"  # (out, its lse, global lse) -> (out), ready for a plain sum
    SUM = "sum"  # (x, x, ...) -> (x), also a copy or a change of precision; of nothing: 0
    DELTA = "delta"  # (out, grad_out) -> (delta)

    __hash__ = str.__hash__


@value
class Merge(_Named):
    """Combines rows of the inputs by a rule. The outputs are overwritten."""

    task: Task
    rule: MergeRule
    inputs: tuple[Piece, ...]
    outputs: tuple[Piece, ...]


@value
class Free(_Named):
    """No later operation uses these buffers."""

    buffers: tuple[str, ...]

    @property
    def task(self) -> Task:
        return _FREE


Collective = AllGather | ReduceScatter | AllToAll
Communication = Collective | SendRecv
Attention = Attend | AttendBackward
Operation = Communication | Attention | Merge | Free


def whole_call(op: Attention, kind: CallKind) -> Call:
    """One call for all rows of both sides."""
    return Call(kind, 0, op.q.num_rows, 0, op.k.num_rows)


def _names(op: Operation) -> tuple[Iterable[str], Iterable[str]]:
    """Names of the buffers that an operation reads, and of those that it writes."""
    if isinstance(op, AllToAll):
        sends, receives = map(_names_of_side, (op.sends, op.receives))
        return sends, receives
    return [piece.buffer for piece in reads(op)], [piece.buffer for piece in writes(op)]


def _names_of_side(side: Sequence[tuple[Piece, ...]]) -> Iterable[str]:
    if isinstance(side, MemberPieces):
        return side.names()
    return [piece.buffer for pieces in side for piece in pieces]


def reads(op: Operation) -> tuple[Piece, ...]:
    match op:
        case Merge():
            return op.inputs
        case AllToAll():
            return tuple(chain.from_iterable(op.sends))
        case SendRecv():
            return op.sends
        case AllGather():
            return tuple(move.part for move in op.moves)
        case ReduceScatter():
            return tuple(move.whole for move in op.moves)
        case Attend():
            return (op.q, op.k, op.v) if op.fresh else (op.q, op.k, op.v, op.out, op.lse)
        case AttendBackward():
            statistics = (piece for piece in (op.out, op.delta) if piece is not None)
            pieces = (op.q, op.k, op.v, op.grad_out, op.lse, *statistics)
            pieces = pieces if op.fresh_q else (*pieces, op.grad_q)
            return pieces if op.fresh_kv else (*pieces, op.grad_k, op.grad_v)
        case Free():
            return ()


def writes(op: Operation) -> tuple[Piece, ...]:
    match op:
        case Merge():
            return op.outputs
        case AllToAll():
            return tuple(chain.from_iterable(op.receives))
        case SendRecv():
            return op.receives
        case AllGather():
            return tuple(move.whole for move in op.moves)
        case ReduceScatter():
            return tuple(move.part for move in op.moves)
        case Attend():
            return (op.out, op.lse)
        case AttendBackward():
            return (op.grad_q, op.grad_k, op.grad_v)
        case Free():
            return ()


@dataclass(frozen=True, slots=True)
class Program:
    """The buffers and operations of one rank."""

    rank: int
    buffers: tuple[Buffer, ...]
    operations: tuple[Operation, ...]

    def __hash__(self) -> int:
        """Of the names in its operations: all would take long, and most programs differ there."""
        return hash((self.rank, tuple([op.touched for op in self.operations])))

    def buffer_table(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}
