"""torch.distributed as a transport: gloo or NCCL, on any ranks.

On CPU an operation is an asynchronous work that is waited for when its result is needed. On CUDA it
runs on a communication stream of its own: it follows the computation it depends on and nothing
else, and computation that needs it waits for its event; with NCCL the host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import AllGather, Communication, ReduceScatter
from mesh_attention.runtime.device.streams import Marks
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Handle, Meter, Start, View
from mesh_attention.runtime.transport.torch_operations import (
    Copies,
    Exchange,
    PointToPoint,
    Stretch,
    Works,
    gather_kind,
    reduce_kind,
)
from mesh_attention.runtime.transport.transfers import Pieces, Transfers, transfers

Ready = Stretch | Exchange


class CommunicationError(MeshAttentionError):
    """A communication did not come about, most often because another rank ended."""


class _Started(Handle):
    """Works in flight, and the copies that must follow them."""

    def __init__(self, what: str, works: Works, finish: Copies) -> None:
        self._what, self._works, self._finish = what, works, finish

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except (RuntimeError, dist.DistBackendError) as error:
            raise CommunicationError(
                f"{self._what} failed: another rank has ended, or did not answer in time "
                f"({str(error).splitlines()[0]})"
            ) from error
        for copy in self._finish:
            copy()
        self._works, self._finish = [], []


class _OnStream(Handle):
    """The same on a communication stream; what waits is the compute stream, through an event."""

    def __init__(
        self, started: _Started, stream: torch.cuda.Stream, event: torch.cuda.Event
    ) -> None:
        self._started: _Started | None = started
        self._stream = stream
        self._event = event

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
    ) -> None:
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
        self.shows_workspace = False
        self.in_order = self.own_stream and not self._host_driven
        self.meter = Meter(one.programs[rank].buffer_table())

    def prepare(self, op: Communication, view: View) -> Start:
        return self.counted(op, view, self.ready(op, view))

    def counted(self, op: Communication, view: View, start: Start) -> Start:
        """`start`, with the bytes of the operation added up whenever it is made."""
        member = self._one.groups[op.group].index(self._rank)
        traffic = self.meter.measure(op, self._moved(op), member, view)
        return self.meter.counted(start, op, traffic)

    def ready(self, op: Communication, view: View) -> Start:
        """`prepare` for an operation, or a part of one, that is counted elsewhere."""
        ready = self._ready(op, view)
        if self._stream is None:
            return partial(self._start, op, ready)
        key = (op.group, op.name)
        if key not in self._events:
            self._events[key] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return partial(self._start_on_stream, op, ready, self._stream, self._events[key])

    def _start(self, op: Communication, ready: Sequence[Ready], after: Marks) -> _Started:
        works: Works = []
        finish: Copies = []
        what = f"{op.name} among ranks {self._global[op.group]}"
        try:
            for one in ready:
                one.begin(works, finish)
        except (RuntimeError, dist.DistBackendError) as error:
            raise CommunicationError(f"{what} could not begin: {error}") from error
        return _Started(what, works, finish)

    def _start_on_stream(
        self,
        op: Communication,
        ready: Sequence[Ready],
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

    def _moved(self, op: Communication) -> Transfers:
        return transfers(op, len(self._one.groups[op.group]))

    def _ready(self, op: Communication, view: View) -> Sequence[Ready]:
        ranks, moved = self._global[op.group], self._moved(op)
        match op:
            case AllGather():
                kind = gather_kind(len(ranks), host_driven=self._host_driven)
                return self._collectives(kind, moved.sends[0], moved.receives, ranks, view)
            case ReduceScatter():
                kind = reduce_kind(host_driven=self._host_driven)
                return self._collectives(kind, moved.receives[0], moved.sends, ranks, view)
        return [self._exchange(moved, ranks, view)]

    def _collectives(
        self,
        kind: type[Stretch],
        parts: Pieces,
        places: tuple[Pieces, ...],
        ranks: list[int],
        view: View,
    ) -> list[Stretch]:
        """One for each stretch: its places in the whole follow each other, member by member."""
        group = self._groups.of(ranks, self._timeout)
        order = [dist.get_group_rank(group, rank) for rank in ranks]
        wholes = (replace(a, stop=b.stop) for a, b in zip(places[0], places[-1], strict=True))
        return [
            kind(view(part), view(whole), group, order)
            for part, whole in zip(parts, wholes, strict=True)
        ]

    def _exchange(self, moved: Transfers, ranks: list[int], view: View) -> Exchange:
        me, group = self._groups.global_rank_of_self, self._groups.everybody(self._timeout)
        tensors: list[PointToPoint] = []
        own: list[tuple[Tensor, Tensor]] = []
        for peer, sends, receives in zip(ranks, moved.sends, moved.receives, strict=True):
            if peer == me:
                own += [(view(a), view(b)) for a, b in zip(sends, receives, strict=True)]
                continue
            # gloo matches the tensors between two ranks by these tags.
            for sent, pieces in ((True, sends), (False, receives)):
                tensors += [PointToPoint(view(p), peer, tag, sent) for tag, p in enumerate(pieces)]
        return Exchange(tensors, own, group, host_driven=self._host_driven)
