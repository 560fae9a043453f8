"""torch.distributed as a transport: gloo or NCCL, on any ranks.

On CPU an operation is an asynchronous work that is waited for when its result is needed. On CUDA it
runs on a communication stream of its own: it follows the computation it depends on and nothing
else, and computation that needs it waits for its event; with NCCL the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import AllGather, Communication, ReduceScatter
from mesh_attention.runtime.device import Marks
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import (
    Handle,
    Meter,
    Pieces,
    Start,
    Started,
    Transfers,
    View,
    transfers,
)
from mesh_attention.runtime.transport.torch_operations import (
    Copies,
    Exchange,
    Gather,
    Messages,
    PointToPoint,
    Reduce,
    ReduceByMessages,
    Works,
    gathers_by_messages,
    messages,
    reduce_kind,
)

Collective = Gather | Reduce | ReduceByMessages
Bind = Callable[[View], Sequence[Collective | Exchange]]


class CommunicationError(MeshAttentionError):
    """A communication did not come about, most often because another rank ended."""


@dataclass(frozen=True, slots=True)
class _InFlight(Handle):
    """Works in flight, and the copies that must follow them."""

    what: str
    works: Works
    finish: Copies
    limit: tuple[timedelta, ...]  # for the host to wait, if it does

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait(*self.limit)
        except (RuntimeError, dist.DistBackendError) as error:
            raise CommunicationError(
                f"{self.what} failed: another rank has ended, or did not answer in time "
                f"({str(error).splitlines()[0]})"
            ) from error
        for copy in self.finish:
            copy()
        self.works.clear()
        self.finish.clear()


class _OnStream(Handle):
    """The same on a communication stream; what waits is the compute stream, through an event."""

    def __init__(
        self, in_flight: _InFlight, stream: torch.cuda.Stream, event: torch.cuda.Event
    ) -> None:
        self._in_flight: _InFlight | None = in_flight
        self._stream, self._event = stream, event

    def finish(self) -> None:
        """On the communication stream, which must be the current one."""
        assert self._in_flight is not None
        self._in_flight.wait()
        self._in_flight = None
        self._event.record(self._stream)

    def wait(self) -> None:
        if self._in_flight is not None:  # gloo: the host has to drive it
            with torch.cuda.stream(self._stream):
                self.finish()
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)


class _Known(NamedTuple):
    """What is known of an operation before it has tensors."""

    what: str  # for errors
    bind: Bind
    event: torch.cuda.Event | None  # recorded in every call
    each: Started  # bytes of a start


class DistributedTransport:
    def __init__(
        self,
        plan: Plan,
        pass_: Pass,
        rank: int,
        groups: Groups,
        timeout: timedelta | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._pass = pass_
        self._rank = rank
        self._groups = groups
        self._stream = stream
        self._global = groups.global_ranks(plan, pass_, rank)
        # gloo needs the host to make progress and to copy back; NCCL works on streams alone.
        self._host_driven = dist.get_backend(groups.parent) != dist.Backend.NCCL
        self._limit = (groups.timeout(timeout),) if self._host_driven else ()
        self._known: dict[Communication, _Known] = {}
        self.own_stream = stream is not None
        self.shows_workspace = False
        self.in_order = self.own_stream and not self._host_driven
        self.meter = Meter(pass_.programs[rank].buffer_table())

    def prepare(self, op: Communication, view: View, *, counted: bool = True) -> Start:
        """`counted=False`: the bytes of the operation are counted elsewhere."""
        known = self._known.get(op) or self._work_out(op, view)
        return partial(self._start, known, known.bind(view), counted)

    def measure(self, op: Communication, view: View) -> Started:
        members = self._pass.groups[op.group]
        moved = transfers(op, len(members))
        return self.meter.measure(op, moved, members.index(self._rank), view)

    def _start(
        self, known: _Known, ready: Sequence[Collective | Exchange], counted: bool, after: Marks
    ) -> Handle:
        if counted:
            self.meter.counters.starts[known.each] += 1
        if known.event is None or self._stream is None:
            return self._begin(known.what, ready)
        with torch.cuda.stream(self._stream):
            for mark in after:
                self._stream.wait_event(mark)
            handle = _OnStream(self._begin(known.what, ready), self._stream, known.event)
            if not self._host_driven:
                handle.finish()
        return handle

    def _begin(self, what: str, ready: Sequence[Collective | Exchange]) -> _InFlight:
        works: Works = []
        finish: Copies = []
        try:
            for communication in ready:
                communication.begin(works, finish)
        except (RuntimeError, dist.DistBackendError) as error:
            raise CommunicationError(f"{what} could not begin: {error}") from error
        return _InFlight(what, works, finish, self._limit)

    def _work_out(self, op: Communication, view: View) -> _Known:
        ranks = self._global[op.group]
        what = f"{op.name} among ranks {ranks}"
        event = None if self._stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._known[op] = known = _Known(what, self._bind(op), event, self.measure(op, view))
        return known

    def _bind(self, op: Communication) -> Bind:
        ranks = self._global[op.group]
        moved = transfers(op, len(ranks))
        if not isinstance(op, AllGather | ReduceScatter):
            everybody = self._groups.everybody()
            return partial(self._exchange, self._messages(moved, ranks), ranks, everybody)
        group = self._groups.of(ranks)
        order = [dist.get_group_rank(group, rank) for rank in ranks]
        if isinstance(op, ReduceScatter):
            kind = reduce_kind(host_driven=self._host_driven)
            return partial(_collectives, kind, moved.receives[0], moved.sends, group, order)
        if gathers_by_messages(len(ranks), host_driven=self._host_driven):
            return partial(self._exchange, self._messages(moved, ranks), ranks, group)
        return partial(_collectives, Gather, moved.sends[0], moved.receives, group, order)

    def _messages(self, moved: Transfers, ranks: list[int]) -> Messages:
        return messages(moved, ranks.index(self._groups.global_rank_of_self))

    def _exchange(
        self, known: Messages, ranks: list[int], group: dist.ProcessGroup, view: View
    ) -> list[Exchange]:
        tensors = [
            PointToPoint(m.tensor(view), tuple(ranks[p] for p in m.members), m.tag, m.sent)
            for m in known.between
        ]
        own = [(view(a), view(b)) for a, b in known.own]
        return [Exchange(tensors, own, group, host_driven=self._host_driven)]


def _collectives(
    kind: type[Collective],
    parts: Pieces,
    places: tuple[Pieces, ...],
    group: dist.ProcessGroup,
    order: list[int],
    view: View,
) -> list[Collective]:
    """One for each stretch: its places in the whole follow each other, member by member."""
    wholes = (replace(a, stop=b.stop) for a, b in zip(places[0], places[-1], strict=True))
    return [
        kind(view(part), view(whole), group, order)
        for part, whole in zip(parts, wholes, strict=True)
    ]
