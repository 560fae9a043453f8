"""Bytes that one communication operation moves, as seen by one member of its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mesh_attention.plan.buffers import Buffer, Piece
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Communication,
    ReduceScatter,
    SendRecv,
)

__all__ = ["Traffic", "entering_bytes", "operation_traffic"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """`token_bytes` is the received part that is not statistics (LSE, delta)."""

    sent_bytes: int = 0
    received_bytes: int = 0
    token_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.token_bytes + other.token_bytes,
        )


def operation_traffic(
    op: Communication, member: int, num_members: int, table: Mapping[str, Buffer], problem: Problem
) -> Traffic:
    """What `member` sends and receives. A collective passes each part on once per other member."""
    others = num_members - 1
    total = Traffic()
    match op:
        case AllGather() | ReduceScatter():
            for move in op.moves:
                buffer = table[move.part.buffer]
                moved = others * move.part.num_bytes(buffer, problem)
                total += Traffic(moved, moved, 0 if buffer.kind.is_statistic else moved)
        case AllToAll():
            for m in range(num_members):
                if m != member:
                    total += _pieces(op.sends[m], op.receives[m], table, problem)
        case SendRecv():
            sends = op.sends if op.to_member != member else ()
            receives = op.receives if op.from_member != member else ()
            total += _pieces(sends, receives, table, problem)
    return total


def _pieces(
    sends: tuple[Piece, ...],
    receives: tuple[Piece, ...],
    table: Mapping[str, Buffer],
    problem: Problem,
) -> Traffic:
    received = [(table[p.buffer], p.num_bytes(table[p.buffer], problem)) for p in receives]
    return Traffic(
        sum(p.num_bytes(table[p.buffer], problem) for p in sends),
        sum(size for _, size in received),
        sum(size for buffer, size in received if not buffer.kind.is_statistic),
    )


def entering_bytes(
    op: Communication,
    member: int,
    nodes: tuple[int, ...],
    table: Mapping[str, Buffer],
    problem: Problem,
) -> tuple[int, int]:
    """Bytes that enter the node of `member` on its account, and the part of them that is tokens.

    `nodes` are the nodes of the group's members (algorithm.md, section 6). A gathered partition
    enters a node once, and is booked to the node's first member; a reduced partition arrives once
    from each other node; in all-to-all and point-to-point every piece that crosses counts.
    """
    here = nodes[member]
    times = 1
    match op:
        case AllGather():
            pieces = [move.part for move in op.moves]
            times = sum(node != here for node in nodes) if nodes.index(here) == member else 0
        case ReduceScatter():
            pieces = [move.part for move in op.moves]
            times = len(set(nodes)) - 1
        case AllToAll():
            crossing = (m for m, node in enumerate(nodes) if node != here)
            pieces = [piece for m in crossing for piece in op.receives[m]]
        case SendRecv():
            pieces = list(op.receives) if nodes[op.from_member] != here else []
    everything = tokens = 0
    for piece in pieces if times else ():
        buffer = table[piece.buffer]
        size = times * piece.num_bytes(buffer, problem)
        everything += size
        tokens += 0 if buffer.kind.is_statistic else size
    return everything, tokens
