"""A communication as one member carries it out over shared memory: it takes, and never gives.

Every member shows its data and fetches what it needs from the others' blocks, so all that is left
of an operation is a list of copies; a reduce-scatter adds up what the copies bring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Communication,
    Move,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.runtime.transport.regions import Owner, Region

__all__ = ["Own", "Pull", "Rows", "Steps", "steps_of"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a piece of this rank, counted inside the piece."""

    piece: Piece
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Pull:
    source: Region
    target: Rows


@dataclass(frozen=True, slots=True)
class Own:
    """What stays on this rank; a reduce-scatter begins its sums with it."""

    source: Rows
    target: Rows


@dataclass(frozen=True, slots=True)
class Steps:
    """`readers` and the members of `pulls` are places in the group of the operation."""

    staged: tuple[tuple[Piece, Region], ...]
    readers: tuple[int, ...]
    pulls: tuple[tuple[int, tuple[Pull, ...]], ...]
    own: tuple[Own, ...]
    adds: bool


def steps_of(op: Communication, member: int, size: int, owners: Mapping[int, Owner]) -> Steps:
    """`member` is one of `size`; `owners`, by place in the group: it and all that it reads from."""
    mine = owners[member]
    readers = _readers(op, member, size)
    shown = mine.regions(op) if readers else {}
    # Each begins with its neighbour, so that no member is asked by all the others at once.
    others = [(member + step) % size for step in range(1, size)]
    pulls = {
        other: tuple(_fetched(op, member, size, owners[other], other))
        for other in others
        if other in owners
    }
    return Steps(
        staged=tuple((piece, region) for piece, region in shown.items() if region.staged),
        readers=readers,
        pulls=tuple((other, fetched) for other, fetched in pulls.items() if fetched),
        own=tuple(_own(op, member, size)),
        adds=isinstance(op, ReduceScatter),
    )


def _readers(op: Communication, member: int, size: int) -> tuple[int, ...]:
    match op:
        case AllToAll():
            return tuple(to for to, pieces in enumerate(op.sends) if pieces and to != member)
        case SendRecv():
            return (op.to_member,) if op.sends and op.to_member != member else ()
    return tuple(other for other in range(size) if other != member)


def _fetched(op: Communication, member: int, size: int, owner: Owner, other: int) -> Iterator[Pull]:
    """What `member` takes from the member `other`."""
    theirs = owner.operation(op)
    shown = owner.regions(theirs)
    match op, theirs:
        case AllGather(), AllGather():
            for ours, given in zip(op.moves, theirs.moves, strict=True):
                for (a, b), at in _stretches(ours, size):
                    target = Rows(ours.whole, at + other * (b - a), at + (other + 1) * (b - a))
                    yield Pull(shown[given.part].rows(a, b), target)
        case ReduceScatter(), ReduceScatter():
            for ours, given in zip(op.moves, theirs.moves, strict=True):
                for (a, b), at in _stretches(ours, size):
                    start = at + member * (b - a)
                    yield Pull(shown[given.whole].rows(start, start + b - a), Rows(ours.part, a, b))
        case AllToAll(), AllToAll():
            for sent, received in zip(theirs.sends[member], op.receives[other], strict=True):
                yield Pull(shown[sent], _all(received))
        case SendRecv(), SendRecv():
            if op.from_member == other and op.receives:
                for sent, received in zip(theirs.sends, op.receives, strict=True):
                    yield Pull(shown[sent], _all(received))


def _own(op: Communication, member: int, size: int) -> Iterator[Own]:
    match op:
        case AllGather():
            for move in op.moves:
                for (a, b), at in _stretches(move, size):
                    start = at + member * (b - a)
                    yield Own(Rows(move.part, a, b), Rows(move.whole, start, start + b - a))
        case ReduceScatter():
            for move in op.moves:
                for (a, b), at in _stretches(move, size):
                    start = at + member * (b - a)
                    yield Own(Rows(move.whole, start, start + b - a), Rows(move.part, a, b))
        case AllToAll():
            for sent, received in zip(op.sends[member], op.receives[member], strict=True):
                yield Own(_all(sent), _all(received))
        case SendRecv():
            if op.to_member == op.from_member == member:
                for sent, received in zip(op.sends, op.receives, strict=True):
                    yield Own(_all(sent), _all(received))


def _stretches(move: Move, size: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Each stretch of the part between two cuts, and the row of the whole where its turn begins."""
    at = 0
    for a, b in pairwise(move.cuts):
        yield (a, b), at
        at += (b - a) * size


def _all(piece: Piece) -> Rows:
    return Rows(piece, 0, piece.num_rows)
