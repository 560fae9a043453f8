"""Bytes that one communication operation moves, as seen by one member of its group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mesh_attention.plan.buffers import Buffer, Piece
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Communication,
    ReduceScatter,
    SendRecv,
    reads,
    writes,
)
from mesh_attention.plan.sizes import BufferSizes

__all__ = ["Flows", "Traffic", "TrafficMeter", "entering_bytes", "traffic_of"]


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


@dataclass(frozen=True, slots=True)
class Flows:
    """What passes between this rank and members of the group: bytes, and bytes of tokens.

    Of a collective, `received` holds one entry, the part that every member passes on.
    """

    sent: dict[int, int]
    received: dict[int, tuple[int, int]]


class TrafficMeter:
    """Sizes of operations. Ranks share operations, so each is measured once for like buffers."""

    def __init__(self, problem: Problem) -> None:
        self.sizes = BufferSizes(problem)
        self._known: dict[tuple[object, ...], Flows] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._alive: list[Communication] = []

    def flows(self, op: Communication, table: Mapping[str, Buffer]) -> Flows:
        if isinstance(op, SendRecv):  # never shared, and quick to measure
            return self._measure(op, table)
        names = self._names.get(id(op))
        if names is None:
            pieces = (*reads(op), *writes(op))
            names = self._names[id(op)] = tuple({piece.buffer for piece in pieces})
            self._alive.append(op)  # ids stay unique while we hold the object
        sizes = tuple((self.sizes.row(table[n]), table[n].heads) for n in names)
        key = (id(op), sizes)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._measure(op, table)
        return found

    def traffic(
        self, op: Communication, member: int, num_members: int, table: Mapping[str, Buffer]
    ) -> Traffic:
        return traffic_of(op, self.flows(op, table), member, num_members)

    def _measure(self, op: Communication, table: Mapping[str, Buffer]) -> Flows:
        def size(pieces: Iterable[Piece]) -> tuple[int, int]:
            everything = tokens = 0
            for piece in pieces:
                buffer = table[piece.buffer]
                row_bytes, statistic = self.sizes.row(buffer)
                first, last = piece.heads or buffer.heads
                num_bytes = (piece.stop - piece.start) * (last - first) * row_bytes
                everything += num_bytes
                tokens += 0 if statistic else num_bytes
            return everything, tokens

        match op:
            case AllGather() | ReduceScatter():
                return Flows({}, {0: size(move.part for move in op.moves)})
            case AllToAll():
                return Flows(
                    {m: size(pieces)[0] for m, pieces in enumerate(op.sends) if pieces},
                    {m: size(pieces) for m, pieces in enumerate(op.receives) if pieces},
                )
            case SendRecv():
                return Flows({op.to_member: size(op.sends)[0]}, {op.from_member: size(op.receives)})


def traffic_of(op: Communication, flows: Flows, member: int, num_members: int) -> Traffic:
    """What `member` sends and receives; its pieces to itself do not travel."""
    if isinstance(op, AllGather | ReduceScatter):
        # A collective passes each part on once per other member.
        moved, tokens = ((num_members - 1) * size for size in flows.received[0])
        return Traffic(moved, moved, tokens)
    if isinstance(op, SendRecv):
        received, tokens = flows.received[op.from_member] if op.from_member != member else (0, 0)
        sent = flows.sent[op.to_member] if op.to_member != member else 0
        return Traffic(sent, received, tokens)
    arriving = [flow for other, flow in flows.received.items() if other != member]
    return Traffic(
        sum(size for other, size in flows.sent.items() if other != member),
        sum(size for size, _ in arriving),
        sum(tokens for _, tokens in arriving),
    )


def entering_bytes(
    op: Communication, flows: Flows, member: int, nodes: tuple[int, ...]
) -> tuple[int, int]:
    """Bytes that enter the node of `member` on its account, and the part of them that is tokens.

    `nodes` are the nodes of the group's members (algorithm.md, section 6). A gathered partition
    enters a node once, and is booked to the node's first member; a reduced partition arrives once
    from each other node; in all-to-all and point-to-point every piece that crosses counts.
    """
    here = nodes[member]
    if isinstance(op, AllGather | ReduceScatter):
        if isinstance(op, AllGather):
            times = sum(node != here for node in nodes) if nodes.index(here) == member else 0
        else:
            times = len(set(nodes)) - 1
        everything, tokens = flows.received[0]
        return times * everything, times * tokens
    if isinstance(op, SendRecv):
        return flows.received[op.from_member] if nodes[op.from_member] != here else (0, 0)
    crossing = [flow for other, flow in flows.received.items() if nodes[other] != here]
    return sum(size for size, _ in crossing), sum(tokens for _, tokens in crossing)
