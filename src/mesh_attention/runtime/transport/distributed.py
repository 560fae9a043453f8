"""torch.distributed as a transport: gloo or NCCL, on any ranks.

On CPU an operation is an asynchronous work that is waited for when its result is needed. On CUDA it
runs on a communication stream of its own: it follows the computation it depends on and nothing
else, and computation that needs it waits for its event; with NCCL the host never waits.

Functions such as `gather` begin one collective on its tensors: they add the works that are then in
flight, and the copies that must follow these works. They copy, or make landing places, only where
the library cannot read or write a tensor as it lies. The measurements of links use them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.program import AllGather, AllToAll, Communication, ReduceScatter
from mesh_attention.runtime.device import Marks
from mesh_attention.runtime.transport.exchange import (
    Begin,
    Exchange,
    LaterCopies,
    Messages,
    Works,
)
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Handle, Start, View, transfers
from mesh_attention.runtime.transport.piece_runs import runs_of

Ready = Sequence[Begin]


class CommunicationError(MeshAttentionError):
    """A communication did not come about, most often because another rank ended."""


@contextmanager
def communicating(failure: str) -> Iterator[None]:
    """Around calls of torch.distributed."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, dist.DistBackendError) as error:
        raise CommunicationError(f"{failure} ({str(error).splitlines()[0]})") from error


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Any:
    """Asynchronous; returns the work. torch 2.13 renames it and warns on the old name."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, part, group=group, async_op=True)


def reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(part, whole, group=group, async_op=True)


class CollectiveRows(NamedTuple):
    """One stretch of a collective. `rows` holds equal rows for each member; `order[member]` is the
    member's place in the group. They can be used as they lie if that is the order of the group."""

    part: Tensor
    rows: Tensor
    group: dist.ProcessGroup
    order: Sequence[int]

    @property
    def usable(self) -> bool:
        return list(self.order) == sorted(self.order) and self.rows.is_contiguous()

    def by_member(self, in_order_of_group: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of each member, and those of a tensor in the order of the process group."""
        size = len(self.order)
        places = in_order_of_group.tensor_split(size)
        return zip(self.rows.tensor_split(size), [places[at] for at in self.order], strict=True)


def gather(stretch: CollectiveRows, works: Works, finish: LaterCopies) -> None:
    part, rows, group, _ = stretch
    own = part.contiguous()  # a slice of rows is contiguous; of heads it is not
    if stretch.usable:
        works.append(all_gather(rows, own, group))
        return
    landing = torch.empty_like(rows, memory_format=torch.contiguous_format)
    works.append(all_gather(landing, own, group))
    finish += [partial(target.copy_, landed) for target, landed in stretch.by_member(landing)]


def reduce(stretch: CollectiveRows, works: Works, finish: LaterCopies) -> None:
    part, whole, group, _ = stretch
    own = part.contiguous()
    if not stretch.usable:
        whole = torch.empty_like(whole, memory_format=torch.contiguous_format)
        for rows, place in stretch.by_member(whole):
            place.copy_(rows)
    works.append(reduce_scatter(own, whole, group))
    if own is not part and own.data_ptr() != part.data_ptr():
        finish.append(partial(part.copy_, own))


def reduce_by_messages(stretch: CollectiveRows, works: Works, finish: LaterCopies) -> None:
    """Over gloo: each member sends the others their rows and adds up what it gets, wide. gloo's own
    in PyTorch is an all-reduce, with twice the bytes."""
    part, whole, group, order = stretch
    ranks = tuple([dist.get_global_rank(group, place) for place in order])
    landing = torch.empty(whole.shape, dtype=part.dtype, device="cpu")
    both = ((landing, False), (whole, True))
    messages = [Messages(rows, ranks, "rows", 0, sent) for rows, sent in both]
    Exchange(group, host_driven=True).ready(messages)(works, finish)
    by_member = landing.view(len(order), *part.shape)
    wide = torch.promote_types(part.dtype, torch.float32)
    finish.append(lambda: part.copy_(by_member.sum(0, dtype=wide)))


def gathers_by_messages(size: int, *, host_driven: bool) -> bool:
    """Whether an all-gather of so many ranks is an exchange. gloo's own (`host_driven`) sends
    before it says that it receives: the two directions of two ranks would take turns."""
    return host_driven and size == 2


@dataclass(frozen=True, slots=True)
class _InFlight(Handle):
    """Works in flight, and the copies that must follow them."""

    what: str
    limit: tuple[timedelta, ...]  # for the host to wait, if it does
    works: Works
    copies: LaterCopies

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait(*self.limit)
        except (RuntimeError, dist.DistBackendError) as error:
            raise CommunicationError(
                f"{self.what} failed: another rank has ended, or did not answer in time "
                f"({str(error).splitlines()[0]})"
            ) from error
        for copy in self.copies:
            copy()
        self.works.clear()
        self.copies.clear()


@dataclass(frozen=True, slots=True)
class OnStream(Handle):
    """What is on a communication stream up to an event, for which the compute stream waits.
    `driven`: what the host has to put there before, over gloo."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    driven: _InFlight | None = None

    def wait(self) -> None:
        if self.driven is not None:
            with torch.cuda.stream(self.stream):
                self.driven.wait()
                self.event.record(self.stream)
        torch.cuda.current_stream(self.stream.device).wait_event(self.event)


class _Known(NamedTuple):
    """What is known of an operation before it has tensors."""

    op: Communication
    what: str  # for errors
    bind: Callable[[View], Ready]
    event: torch.cuda.Event | None  # recorded in every call


class DistributedTransport:
    """`ranks`: the global ranks of each group of the pass that this rank is in (`global_ranks` of
    `Groups`). `stream`: for communications, where tensors are on CUDA."""

    def __init__(
        self,
        groups: Groups,
        ranks: Mapping[str, list[int]],
        timeout: timedelta | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._groups, self.ranks, self._stream = groups, ranks, stream
        # gloo needs the host to make progress and to copy back; NCCL works on streams alone.
        self._host_driven = groups.backend != dist.Backend.NCCL
        self._limit = (groups.timeout(timeout),) if self._host_driven else ()
        self._known: dict[int, _Known] = {}  # by identity; each holds its operation
        self.own_stream = stream is not None
        self.shows_workspace = False
        self.in_order = self.own_stream and not self._host_driven

    def prepare(self, op: Communication, view: View) -> Start:
        known = self._known.get(id(op))
        if known is None:
            what = f"{op.name} among ranks {self.ranks[op.group]}"
            event = None if self._stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._known[id(op)] = known = _Known(op, what, self._bind(op), event)
        if known.event is None or self._stream is None:
            return partial(self._begin, known.what, known.bind(view))
        return partial(self._begin_on, self._stream, known.event, known.what, known.bind(view))

    def _begin_on(
        self,
        stream: torch.cuda.Stream,
        event: torch.cuda.Event,
        what: str,
        ready: Ready,
        after: Marks,
    ) -> Handle:
        with torch.cuda.stream(stream):
            for mark in after:
                stream.wait_event(mark)
            in_flight = self._begin(what, ready)
            if self._host_driven:
                return OnStream(stream, event, in_flight)
            in_flight.wait()
            event.record(stream)
        return OnStream(stream, event)

    def _begin(self, what: str, ready: Ready, _: Marks = ()) -> _InFlight:
        works: Works = []
        copies: LaterCopies = []
        try:
            for begin in ready:
                begin(works, copies)
        except (RuntimeError, dist.DistBackendError) as error:
            raise CommunicationError(f"{what} could not begin: {error}") from error
        return _InFlight(what, self._limit, works, copies)

    def _bind(self, op: Communication) -> Callable[[View], Ready]:
        ranks = self.ranks[op.group]
        moved = transfers(op, len(ranks))
        collective = isinstance(op, AllGather | ReduceScatter)
        group = self._groups.of(ranks) if collective else self._groups.everybody()
        by_messages = gathers_by_messages(len(ranks), host_driven=self._host_driven)
        if not collective or (isinstance(op, AllGather) and by_messages):
            pack = isinstance(op, AllToAll)  # others have few pieces, which lie as they travel
            runs = runs_of(moved, ranks, joined=pack)
            exchange = Exchange(group, host_driven=self._host_driven, pack=pack)
            return lambda view: [exchange.bound(runs, view)]
        if isinstance(op, AllGather):
            call, parts, places = gather, moved.sends[0], moved.receives
        else:
            call = reduce_by_messages if self._host_driven else reduce
            parts, places = moved.receives[0], moved.sends
        order = [dist.get_group_rank(group, rank) for rank in ranks]
        # A call for each stretch: its places in the whole follow each other, member by member.
        wholes = [replace(a, stop=b.stop) for a, b in zip(places[0], places[-1], strict=True)]
        return lambda view: [
            partial(call, CollectiveRows(view(part), view(whole), group, order))
            for part, whole in zip(parts, wholes, strict=True)
        ]
