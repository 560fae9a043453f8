"""torch.distributed as a transport: gloo or NCCL, on any ranks.

On CPU an operation is an asynchronous work that is waited for when its result is needed. On CUDA it
runs on a communication stream of its own: it follows the computation it depends on and nothing
else, and computation that needs it waits for its event; with NCCL the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Communication,
    Move,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.runtime.streams import Marks
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Handle, Start, View
from mesh_attention.runtime.transport.messages import Exchange, Gather, Message, Reduce
from mesh_attention.runtime.transport.sizes import Counted, Meter

__all__ = ["CommunicationError", "DistributedTransport"]


_LOOK_AROUND_AFTER = timedelta(seconds=1)


class CommunicationError(MeshAttentionError):
    """A communication did not come about, most often because another rank ended."""


class _Started:
    """Works under way, and the copies that must follow them."""

    def __init__(
        self,
        what: str,
        works: list[Any],
        finish: list[Callable[[], object]],
        look_around: Callable[[], None] | None,
    ) -> None:
        self._what = what
        self._works = works
        self._finish = finish
        self._look_around = look_around

    def ready(self) -> bool:
        return True  # other processes make progress by themselves

    def wait(self) -> None:
        try:
            for work in self._works:
                self._wait(work)
        except (RuntimeError, dist.DistBackendError) as error:
            raise CommunicationError(
                f"{self._what} failed: another rank has ended, or did not answer in time "
                f"({str(error).splitlines()[0]})"
            ) from error
        for copy in self._finish:
            copy()
        self._works, self._finish = [], []

    def _wait(self, work: Any) -> None:
        while self._look_around is not None:
            try:
                work.wait(_LOOK_AROUND_AFTER)
                return
            except RuntimeError as error:
                if "Operation timed out" not in str(error):  # not ours: the group's own timeout
                    raise
            self._look_around()
        work.wait()


class _OnStream:
    """The same on a communication stream; what waits is the compute stream, through an event."""

    def __init__(
        self, started: _Started, stream: torch.cuda.Stream, event: torch.cuda.Event
    ) -> None:
        self._started: _Started | None = started
        self._stream = stream
        self._event = event

    def ready(self) -> bool:
        return True

    def finish(self) -> None:
        """On the communication stream, which must be the current one."""
        assert self._started is not None
        self._started.wait()
        self._started = None
        self._event.record(self._stream)

    def wait(self) -> None:
        if self._started is not None:  # gloo: the host has to drive it
            with torch.cuda.stream(self._stream):
                self.finish()
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)


class DistributedTransport:
    def __init__(
        self,
        plan: Plan,
        one: Pass,
        rank: int,
        groups: Groups,
        timeout: timedelta | None = None,
        stream: torch.cuda.Stream | None = None,
        look_around: Callable[[], None] | None = None,
    ) -> None:
        self._look_around = look_around
        self._one = one
        self._rank = rank
        self._groups = groups
        self._timeout = timeout
        self._stream = stream
        self._global = groups.global_ranks(plan, one, rank)
        # gloo needs the host to make progress and to copy back; NCCL works on streams alone.
        self._host_driven = dist.get_backend(groups.parent) != dist.Backend.NCCL
        # By group and name of the operation; recorded in every call.
        self._events: dict[tuple[str, str], torch.cuda.Event] = {}
        self.own_stream = stream is not None
        self.in_order = self.own_stream and not self._host_driven
        self.meter = Meter(one.programs[rank].buffer_table())

    def prepare(self, op: Communication, view: View) -> Start:
        members = self._one.groups[op.group]
        traffic = self.meter.measure(op, members.index(self._rank), len(members), view)
        return Counted(self.ready(op, view), self.meter, op, traffic)

    def ready(self, op: Communication, view: View) -> Start:
        """`prepare` for an operation, or a part of one, that is counted elsewhere."""
        ready = self._ready(op, view)
        if self._stream is None:
            return partial(self._start, op, ready)
        key = (op.group, op.name)
        if key not in self._events:
            self._events[key] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return partial(self._start_on_stream, op, ready, self._stream, self._events[key])

    def _start(
        self, op: Communication, ready: Sequence[Gather | Reduce | Exchange], after: Marks
    ) -> _Started:
        works: list[Any] = []
        finish: list[Callable[[], object]] = []
        what = f"{op.name} among ranks {self._global[op.group]}"
        try:
            for one in ready:
                one.begin(works, finish)
        except (RuntimeError, dist.DistBackendError) as error:
            raise CommunicationError(f"{what} could not begin: {error}") from error
        # Collectives on the CPU can be waited for in turns; point-to-point would break off.
        turns = isinstance(op, AllGather | ReduceScatter) and self._stream is None
        return _Started(what, works, finish, self._look_around if turns else None)

    def _start_on_stream(
        self,
        op: Communication,
        ready: Sequence[Gather | Reduce | Exchange],
        stream: torch.cuda.Stream,
        event: torch.cuda.Event,
        after: Marks,
    ) -> Handle:
        with torch.cuda.stream(stream):
            for mark in after:
                stream.wait_event(mark)
            handle = _OnStream(self._start(op, ready, ()), stream, event)
            if not self._host_driven:
                handle.finish()
        return handle

    def _ready(self, op: Communication, view: View) -> Sequence[Gather | Reduce | Exchange]:
        ranks = self._global[op.group]
        match op:
            case AllGather():
                return self._collectives(Gather, op.moves, ranks, view)
            case ReduceScatter():
                return self._collectives(Reduce, op.moves, ranks, view)
            case AllToAll():
                return [self._exchange(zip(ranks, op.sends, op.receives, strict=True), view)]
            case SendRecv():
                to, source = ranks[op.to_member], ranks[op.from_member]
                return [self._exchange([(to, op.sends, ()), (source, (), op.receives)], view)]

    def _collectives(
        self,
        kind: type[Gather | Reduce],
        moves: tuple[Move, ...],
        ranks: list[int],
        view: View,
    ) -> list[Gather | Reduce]:
        group = self._groups.of(ranks, self._timeout)
        order = [dist.get_group_rank(group, rank) for rank in ranks]
        ready = []
        for move in moves:
            part, whole = view(move.part), view(move.whole)
            done = 0
            for a, b in pairwise(move.cuts):
                rows = whole[done : done + (b - a) * len(ranks)]
                done += len(rows)
                ready.append(kind(part[a:b], rows, group, order))
        return ready

    def _exchange(
        self, peers: Iterable[tuple[int, tuple[Piece, ...], tuple[Piece, ...]]], view: View
    ) -> Exchange:
        me = self._groups.global_rank_of_self
        messages: list[Message] = []
        own_sends: list[Piece] = []
        own_receives: list[Piece] = []
        for peer, sends, receives in peers:
            if peer == me:
                own_sends += sends
                own_receives += receives
                continue
            # gloo matches the messages between two ranks by these tags.
            messages += [Message(view(p), peer, tag, sent=True) for tag, p in enumerate(sends)]
            messages += [Message(view(p), peer, tag, sent=False) for tag, p in enumerate(receives)]
        own = [
            (view(source), view(target))
            for source, target in zip(own_sends, own_receives, strict=True)
        ]
        return Exchange(messages, own, self._groups.parent, host_driven=self._host_driven)
