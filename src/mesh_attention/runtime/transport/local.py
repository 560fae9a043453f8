"""All ranks in one process: an operation happens when the last member of its group arrives.

For tests, for study, and for the truth beside the real transports: the same executor and the same
programs with plain copies in place of a network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from mesh_attention.plan.language.plan import Pass
from mesh_attention.plan.language.program import Communication
from mesh_attention.runtime.device import Marks
from mesh_attention.runtime.transport.interface import Handle, Start, Transfers, View, transfers


@dataclass(slots=True)
class _Meeting:
    """An operation whose members are arriving."""

    arrived: dict[int, tuple[Transfers, View]] = field(default_factory=dict)
    ready: bool = False

    def wait(self) -> None:
        assert self.ready


Meetings = dict[tuple[str, str], _Meeting]  # by group and name of the operation


class LocalTransport:
    """The transport of one rank of a pass. `meetings`: where its ranks meet, empty at first and the
    same for all of them."""

    in_order = False
    own_stream = False
    shows_workspace = False

    def __init__(self, pass_: Pass, rank: int, meetings: Meetings) -> None:
        self._groups, self._rank, self._meetings = pass_.groups, rank, meetings

    def prepare(self, op: Communication, view: View) -> Start:
        return partial(self.start, op, view)

    def start(self, op: Communication, view: View, after: Marks) -> Handle:
        members, meetings = self._groups[op.group], self._meetings
        member, moved = members.index(self._rank), transfers(op, len(members))
        meeting = meetings.setdefault((op.group, op.name), _Meeting())
        meeting.arrived[member] = (moved, view)
        if len(meeting.arrived) == len(members):
            del meetings[op.group, op.name]
            _perform([meeting.arrived[member] for member in range(len(members))])
            meeting.ready = True
            meeting.arrived.clear()
        return meeting


def _perform(arrived: list[tuple[Transfers, View]]) -> None:
    for sender, (theirs, their_view) in enumerate(arrived):
        shown = {piece: their_view(piece) for piece in set(chain.from_iterable(theirs.sends))}
        for receiver, (moved, view) in enumerate(arrived):
            for piece, place in zip(theirs.sends[receiver], moved.receives[sender], strict=True):
                if moved.adds and sender > 0:  # in the precision that travels, as a ring would
                    view(place).add_(shown[piece])
                else:
                    view(place).copy_(shown[piece])
