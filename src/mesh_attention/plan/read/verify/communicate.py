"""What each communication means on symbolic memory, for all members of its group at once.

The machine calls `communicate` when all members have arrived; sizes, kinds, tokens and heads that
do not fit raise `Broken`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from mesh_attention.plan.language.buffers import Kind, Piece
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Move,
    Operation,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.plan.read.verify.compute import check_scaled, check_summable, union
from mesh_attention.plan.read.verify.memory import Broken, Content, Memory, Partial


def communicate(memory: Memory, members: Sequence[int], operations: list[Operation]) -> None:
    """Run the communication that members meet in; `operations` has that of each."""
    match operations[0]:
        case AllGather():
            _all_gather(memory, members, cast(list[AllGather], operations))
        case ReduceScatter():
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


def _same_kinds(
    memory: Memory, members: Sequence[int], operations: Sequence[AllGather | ReduceScatter], at: int
) -> None:
    """The parts and wholes of all members, of one tensor: what each sends arrives at all others."""
    first = memory.buffer(members[0], operations[0].moves[at].part)
    for rank, op in zip(members, operations, strict=True):
        move = op.moves[at]
        for piece in (move.part, move.whole):
            memory.expect_same_kind(members[0], first, rank, memory.buffer(rank, piece))


def _owners_in_whole(move: Move, num_members: int) -> list[tuple[int, int, int]]:
    """(member, start, stop) of the part's rows, in the order in which the whole holds them."""
    return [(member, a, b) for a, b in pairwise(move.cuts) for member in range(num_members)]


def _all_gather(memory: Memory, members: Sequence[int], operations: list[AllGather]) -> None:
    _same_moves(members, operations)
    for at, move in enumerate(operations[0].moves):
        values: list[Content] = []
        labels: list[tuple[int, int]] = []
        _same_kinds(memory, members, operations, at)
        for member, a, b in _owners_in_whole(move, len(members)):
            rank, part = members[member], operations[member].moves[at].part.cut(a, b)
            values += memory.read(rank, part)
            labels += memory.labels(rank, part)
        for rank, op in zip(members, operations, strict=True):
            whole = op.moves[at].whole
            if memory.labels(rank, whole) != labels:
                raise Broken(rank, f"gathers other tokens or heads than {whole.buffer} holds")
            memory.write(rank, whole, values)


def _reduce_scatter(
    memory: Memory, members: Sequence[int], operations: list[ReduceScatter]
) -> None:
    _same_moves(members, operations)
    for at, move in enumerate(operations[0].moves):
        contributions = []
        labels = memory.labels(members[0], move.whole)
        _same_kinds(memory, members, operations, at)
        for rank, op in zip(members, operations, strict=True):
            whole = op.moves[at].whole
            if memory.labels(rank, whole) != labels:
                name = whole.buffer
                raise Broken(rank, f"{name} holds other tokens or heads than rank {members[0]}'s")
            contributions.append(memory.read(rank, whole))
        sums = _sums(memory, members[0], move.whole, contributions)
        done = 0
        for member, a, b in _owners_in_whole(move, len(members)):
            rank, part = members[member], operations[member].moves[at].part.cut(a, b)
            wanted = memory.labels(rank, part)
            stop = done + len(wanted)
            if wanted != labels[done:stop]:
                name = part.buffer
                raise Broken(rank, f"gets the sum of other tokens or heads than {name} holds")
            memory.write(rank, part, sums[done:stop])
            done = stop
        if done != len(labels):
            raise Broken(members[0], f"{move.whole.buffer} holds more than its owners receive")


def _sums(
    memory: Memory, owner: int, target: Piece, contributions: list[list[Content]]
) -> list[Content]:
    sums: list[Content] = []
    check_summable(owner, memory.buffer(owner, target).kind)
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
        expected = operations[op.to_member].from_member
        if expected != index:
            message = f"expects rank {members[expected]}, but rank {source} sends"
            raise Broken(members[op.to_member], message)
    for source, op in zip(members, operations, strict=True):
        _deliver(memory, source, op.sends, members[op.to_member], operations[op.to_member].receives)


def _deliver(
    memory: Memory, source: int, sends: tuple[Piece, ...], target: int, receives: tuple[Piece, ...]
) -> None:
    if len(sends) != len(receives):
        sent = f"rank {source}, which sends {len(sends)}"
        raise Broken(target, f"expects {len(receives)} pieces from {sent}")
    for taken, received in zip(sends, receives, strict=True):
        memory.transfer(source, taken, target, received)
