"""Bytes that one communication operation moves, as seen by one member of its group.

Counts, the agreement of ranks, the passes and the simulator size transfers with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece
from mesh_attention.plan.language.member_pieces import MemberPieces
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Communication,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.plan.problem.problem import Problem


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
    """Bytes between this rank and each member of the group; received ones with their token bytes.

    For a collective, `received` has one entry: the part that every member passes on.
    """

    sent: dict[int, int]
    received: dict[int, tuple[int, int]]


class TrafficMeter:
    """Sizes of operations on one table of buffers."""

    def __init__(
        self,
        problem: Problem,
        table: Mapping[str, Buffer],
        kinds: Collection[Kind] = tuple(Kind),
    ) -> None:
        """`kinds`: what buffers of other kinds hold counts as no bytes."""
        self._problem, self._table, self._kinds = problem, table, kinds
        self._known: dict[str, tuple[int, int, bool]] = {}  # of buffers

    def flows(self, op: Communication) -> Flows:
        """What this rank sends and receives in an operation, by member."""
        match op:
            case SendRecv():
                ((sent, _),), received = self._sizes([op.sends]), self._sizes([op.receives])
                return Flows({op.to_member: sent}, {op.from_member: received[0]})
            case AllToAll():
                return self._of_exchange(op)
            case _:
                return Flows({}, {0: self._sizes([[move.part for move in op.moves]])[0]})

    def traffic(self, op: Communication, member: int, num_members: int) -> Traffic:
        return traffic_of(op, self.flows(op), member, num_members)

    def _of_exchange(self, op: AllToAll) -> Flows:
        """Remembered for buffers like these: plans share exchanges."""
        known = self._known
        held = [known[name] if name in known else self._rows_of(name) for name in op.touched]
        before: tuple[object, Flows] | None = op.known.get("flows")
        if before is not None and before[0] == held:
            return before[1]
        sent, received = map(self._by_member, (op.sends, op.receives))
        flows = Flows({member: size for member, (size, _) in sent.items()}, received)
        op.known["flows"] = held, flows
        return flows

    def _by_member(self, side: Sequence[tuple[Piece, ...]]) -> dict[int, tuple[int, int]]:
        """The sizes of each member that has pieces."""
        if isinstance(side, MemberPieces):
            return side.num_bytes(self._rows_of)
        filled = [member for member, pieces in enumerate(side) if pieces]
        return dict(zip(filled, self._sizes([side[member] for member in filled]), strict=True))

    def _sizes(self, members: Iterable[Sequence[Piece]]) -> list[tuple[int, int]]:
        """Of the pieces of each member the bytes, and the part of them that is not statistics."""
        sizes, known = [], self._known
        for pieces in members:
            everything = tokens = 0
            for piece in pieces:
                name, of = piece.buffer, piece.heads
                heads, row_bytes, counts = known[name] if name in known else self._rows_of(name)
                rows = piece.stop - piece.start
                num_bytes = rows * row_bytes * (heads if of is None else of[1] - of[0])
                everything += num_bytes
                if counts:
                    tokens += num_bytes
            sizes.append((everything, tokens))
        return sizes

    def _rows_of(self, name: str) -> tuple[int, int, bool]:
        """Heads of a buffer, bytes of a row and head, and whether it holds tokens; remembered,
        because an exchange with hundreds of ranks asks for every piece."""
        buffer = self._table[name]
        row_bytes = buffer.row_bytes(self._problem) if buffer.kind in self._kinds else 0
        known = self._known[name] = buffer.num_heads, row_bytes, not buffer.kind.is_statistic
        return known


class SharedFlows:
    """Flows of the operations of a pass. What programs with buffers alike have in common is worked
    out once, and equal flows are one object."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._meters: dict[int, TrafficMeter] = {}
        # By identity: ranks share most operations, and to look at the pieces takes as long.
        self._known: dict[tuple[int, int], tuple[Communication, Flows]] = {}
        self._equal: dict[tuple[object, ...], Flows] = {}

    def of(self, op: Communication, number: int, table: Mapping[str, Buffer]) -> Flows:
        """`number`: equal for tables that are alike."""
        known = self._known.get((number, id(op)))
        if known is None:
            if number not in self._meters:
                self._meters[number] = TrafficMeter(self._problem, table)
            flows = self._meters[number].flows(op)
            key = (*flows.sent.items(), None, *flows.received.items())
            known = self._known[number, id(op)] = op, self._equal.setdefault(key, flows)
        return known[1]


def traffic_of(op: Communication, flows: Flows, member: int, num_members: int) -> Traffic:
    """What `member` sends and receives; its pieces to itself do not travel."""
    if isinstance(op, AllGather | ReduceScatter):
        # A collective passes each part on once per other member.
        moved, tokens = ((num_members - 1) * size for size in flows.received[0])
        return Traffic(moved, moved, tokens)
    arriving = [flow for other, flow in flows.received.items() if other != member]
    return Traffic(
        sum(size for other, size in flows.sent.items() if other != member),
        sum(size for size, _ in arriving),
        sum(tokens for _, tokens in arriving),
    )


def far_bytes(op: Communication, flows: Flows, far: Sequence[bool]) -> int:
    """Bytes that a member receives from the members that are far."""
    if isinstance(op, AllGather | ReduceScatter):
        return sum(far) * flows.received[0][0]
    return sum(size for other, (size, _) in flows.received.items() if far[other])


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
    crossing = [flow for other, flow in flows.received.items() if nodes[other] != here]
    return sum(size for size, _ in crossing), sum(tokens for _, tokens in crossing)
