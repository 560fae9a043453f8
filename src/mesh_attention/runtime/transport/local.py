"""All ranks in one process: an operation happens when the last member of its group arrives.

For tests, for study, and for the truth beside the real transports: the same executor and the same
programs, with plain copies in place of a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Communication,
    Move,
    Program,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.runtime.streams import Marks
from mesh_attention.runtime.transport.interface import Handle, UnpreparedTransport, View
from mesh_attention.runtime.transport.sizes import Meter

__all__ = ["LocalTransport", "LocalWorld"]


@dataclass(slots=True)
class _Meeting:
    """An operation whose members are arriving."""

    size: int
    arrived: dict[int, tuple[Communication, View]] = field(default_factory=dict)
    done: bool = False

    def ready(self) -> bool:
        return self.done

    def wait(self) -> None:
        assert self.done


class LocalWorld:
    """The shared place where the ranks of one process meet."""

    def __init__(self, groups: Mapping[str, tuple[int, ...]]) -> None:
        self._groups = groups
        self._meetings: dict[tuple[str, str], _Meeting] = {}

    def transport(self, program: Program) -> LocalTransport:
        return LocalTransport(self, program)

    def arrive(self, rank: int, op: Communication, view: View) -> _Meeting:
        members = self._groups[op.group]
        key = (op.group, op.name)
        meeting = self._meetings.setdefault(key, _Meeting(len(members)))
        meeting.arrived[members.index(rank)] = (op, view)
        if len(meeting.arrived) == meeting.size:
            del self._meetings[key]
            _perform([meeting.arrived[member] for member in range(meeting.size)])
            meeting.done = True
            meeting.arrived.clear()
        return meeting

    def members(self, group: str) -> tuple[int, ...]:
        return self._groups[group]


class LocalTransport(UnpreparedTransport):
    def __init__(self, world: LocalWorld, program: Program) -> None:
        self._world = world
        self._rank = program.rank
        self.meter = Meter(program.buffer_table())

    def start(self, op: Communication, view: View, after: Marks) -> Handle:
        members = self._world.members(op.group)
        self.meter.count(op, members.index(self._rank), len(members), view)
        return self._world.arrive(self._rank, op, view)


Arrived = list[tuple[Communication, View]]


def _perform(arrived: Arrived) -> None:
    match arrived[0][0]:
        case AllGather():
            _gather(arrived)
        case ReduceScatter():
            _reduce(arrived)
        case AllToAll():
            _exchange(arrived)
        case SendRecv():
            _shift(arrived)


def _gather(arrived: Arrived) -> None:
    first = arrived[0][0]
    assert isinstance(first, AllGather)
    for at, move in enumerate(first.moves):
        moves = [op.moves[at] for op, _ in arrived if isinstance(op, AllGather)]
        parts = [view(m.part) for m, (_, view) in zip(moves, arrived, strict=True)]
        whole = torch.cat([part[a:b] for a, b in pairwise(move.cuts) for part in parts])
        for m, (_, view) in zip(moves, arrived, strict=True):
            view(m.whole).copy_(whole)


def _reduce(arrived: Arrived) -> None:
    first = arrived[0][0]
    assert isinstance(first, ReduceScatter)
    for at, move in enumerate(first.moves):
        moves = [op.moves[at] for op, _ in arrived if isinstance(op, ReduceScatter)]
        # Summed in the order of the members and in the precision that travels, as a ring would.
        total = arrived[0][1](moves[0].whole).clone()
        for m, (_, view) in zip(moves[1:], arrived[1:], strict=True):
            total += view(m.whole)
        _scatter(total, move, [view(m.part) for m, (_, view) in zip(moves, arrived, strict=True)])


def _scatter(total: Tensor, move: Move, parts: list[Tensor]) -> None:
    done = 0
    for a, b in pairwise(move.cuts):
        for part in parts:
            part[a:b].copy_(total[done : done + b - a])
            done += b - a


def _exchange(arrived: Arrived) -> None:
    for member, (op, view) in enumerate(arrived):
        assert isinstance(op, AllToAll)
        for to, (other, other_view) in enumerate(arrived):
            assert isinstance(other, AllToAll)
            _copy(op.sends[to], view, other.receives[member], other_view)


def _shift(arrived: Arrived) -> None:
    for op, view in arrived:
        assert isinstance(op, SendRecv)
        other, other_view = arrived[op.to_member]
        assert isinstance(other, SendRecv)
        _copy(op.sends, view, other.receives, other_view)


def _copy(
    sends: tuple[Piece, ...], view: View, receives: tuple[Piece, ...], other_view: View
) -> None:
    for taken, given in zip(sends, receives, strict=True):
        other_view(given).copy_(view(taken))
