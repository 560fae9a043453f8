"""What each communication means on symbolic memory, for all members of its group at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from mesh_attention.plan.buffers import Kind, Piece
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Communication,
    Move,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.plan.verify.compute import check_scaled, union
from mesh_attention.plan.verify.finding import Broken
from mesh_attention.plan.verify.memory import Memory, Partial, Value

__all__ = ["communicate"]


def communicate(memory: Memory, members: Sequence[int], operations: list[Communication]) -> None:
    match operations[0]:
        case AllGather():
            _same_moves(members, cast(list[AllGather], operations))
            _all_gather(memory, members, cast(list[AllGather], operations))
        case ReduceScatter():
            _same_moves(members, cast(list[ReduceScatter], operations))
            _reduce_scatter(memory, members, cast(list[ReduceScatter], operations))
        case AllToAll():
            _all_to_all(memory, members, cast(list[AllToAll], operations))
        case SendRecv():
            _send_recv(memory, members, cast(list[SendRecv], operations))


def _same_moves(members: Sequence[int], operations: Sequence[AllGather | ReduceScatter]) -> None:
    """Collectives move equal sizes: all members name parts, wholes and cuts of the same shape."""

    def shape(op: AllGather | ReduceScatter) -> list[tuple[object, ...]]:
        return [(m.part.num_rows, m.part.heads, m.whole.num_rows, m.cuts) for m in op.moves]

    first = shape(operations[0])
    for member, op in zip(members, operations, strict=True):
        if op is not operations[0] and shape(op) != first:
            raise Broken(member, f"moves other sizes than rank {members[0]}")


def _pieces_in_whole(move: Move, num_members: int, stretch: tuple[int, int], member: int) -> Piece:
    a, b = stretch
    first = move.whole.start + num_members * a + member * (b - a)
    return Piece(move.whole.buffer, first, first + b - a, move.whole.heads)


def _all_gather(memory: Memory, members: Sequence[int], operations: list[AllGather]) -> None:
    count = len(members)
    for at, move in enumerate(operations[0].moves):
        for stretch in pairwise(move.cuts):
            parts = []
            for member, op in zip(members, operations, strict=True):
                part = op.moves[at].part
                piece = Piece(
                    part.buffer, part.start + stretch[0], part.start + stretch[1], part.heads
                )
                parts.append((member, piece))
            for member, op in zip(members, operations, strict=True):
                for index, (source, piece) in enumerate(parts):
                    given = _pieces_in_whole(op.moves[at], count, stretch, index)
                    memory.transfer(source, piece, member, given)


def _reduce_scatter(memory: Memory, members: Sequence[int], operations: list[ReduceScatter]) -> None:
    count = len(members)
    results: list[tuple[int, Piece, list[Value]]] = []
    for at, move in enumerate(operations[0].moves):
        for stretch in pairwise(move.cuts):
            for index, (owner, op) in enumerate(zip(members, operations, strict=True)):
                part = op.moves[at].part
                target = Piece(
                    part.buffer, part.start + stretch[0], part.start + stretch[1], part.heads
                )
                contributions = []
                for source, other in zip(members, operations, strict=True):
                    taken = _pieces_in_whole(other.moves[at], count, stretch, index)
                    memory.expect_same(source, taken, owner, target)
                    contributions.append(memory.read(source, taken))
                results.append((owner, target, _sums(memory, owner, target, contributions)))
    for owner, target, values in results:
        memory.write(owner, target, values)


def _sums(
    memory: Memory, owner: int, target: Piece, contributions: list[list[Value]]
) -> list[Value]:
    sums: list[Value] = []
    for values in zip(*contributions, strict=True):
        partials = [value for value in values if isinstance(value, Partial)]
        if len(partials) != len(values):
            raise Broken(owner, f"sums input data into {target.buffer}")
        sums.append(union(owner, target.buffer, partials))
    if memory.buffer(owner, target).kind is Kind.OUT:
        check_scaled(owner, sums)
    return sums


def _all_to_all(memory: Memory, members: Sequence[int], operations: list[AllToAll]) -> None:
    for index, (source, op) in enumerate(zip(members, operations, strict=True)):
        for to, (target, other) in enumerate(zip(members, operations, strict=True)):
            _deliver(memory, source, op.sends[to], target, other.receives[index])


def _send_recv(memory: Memory, members: Sequence[int], operations: list[SendRecv]) -> None:
    for index, (source, op) in enumerate(zip(members, operations, strict=True)):
        other = operations[op.to_member]
        target = members[op.to_member]
        if other.from_member != index:
            raise Broken(target, f"expects rank {members[other.from_member]}, but rank {source} sends")
    # All sends read before anything is written: a shift may reuse the buffer it came from.
    taken = [
        [(piece, memory.read(source, piece)) for piece in op.sends]
        for source, op in zip(members, operations, strict=True)
    ]
    for index, (source, op) in enumerate(zip(members, operations, strict=True)):
        target, receives = members[op.to_member], operations[op.to_member].receives
        _same_number(source, op.sends, target, receives)
        for (piece, values), given in zip(taken[index], receives, strict=True):
            memory.expect_same(source, piece, target, given)
            memory.write(target, given, values)


def _deliver(
    memory: Memory,
    source: int,
    sends: tuple[Piece, ...],
    target: int,
    receives: tuple[Piece, ...],
) -> None:
    _same_number(source, sends, target, receives)
    for taken, given in zip(sends, receives, strict=True):
        memory.transfer(source, taken, target, given)


def _same_number(
    source: int, sends: tuple[Piece, ...], target: int, receives: tuple[Piece, ...]
) -> None:
    if len(sends) != len(receives):
        raise Broken(
            target, f"expects {len(receives)} pieces from rank {source}, which sends {len(sends)}"
        )
