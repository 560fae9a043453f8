"""torch.distributed as a transport: gloo or NCCL, on any ranks.

On CPU an operation is an asynchronous work that is waited for when its result is needed. On CUDA it
runs on a communication stream of its own: it follows the computation it depends on and nothing
else, and computation that needs it waits for its event; with NCCL the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
from mesh_attention.runtime.collectives import all_gather, reduce_scatter
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Handle, View
from mesh_attention.runtime.transport.sizes import Meter

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

    def __init__(self, started: _Started, stream: torch.cuda.Stream, *, lazy: bool) -> None:
        self._started = started
        self._stream = stream
        self._event: torch.cuda.Event | None = None
        if not lazy:
            self._finish()

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        if self._event is None:
            self._finish()
        assert self._event is not None
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def _finish(self) -> None:
        with torch.cuda.stream(self._stream):
            self._started.wait()
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(self._stream)


class DistributedTransport:
    def __init__(
        self,
        plan: Plan,
        one: Pass,
        rank: int,
        groups: Groups,
        stream: torch.cuda.Stream | None = None,
        look_around: Callable[[], None] | None = None,
    ) -> None:
        self._look_around = look_around
        self._one = one
        self._rank = rank
        self._groups = groups
        self._stream = stream
        self._global = {
            name: [groups.global_rank(plan, member) for member in members]
            for name, members in one.groups.items()
            if rank in members
        }
        # gloo needs the host to make progress and to copy back; NCCL works on streams alone.
        self._host_driven = dist.get_backend(groups.parent) != dist.Backend.NCCL
        self.meter = Meter(one.programs[rank].buffer_table())

    def start(self, op: Communication, view: View, after: object) -> Handle:
        members = self._one.groups[op.group]
        self.meter.count(op, members.index(self._rank), len(members), view)
        return self.begin(op, view, after)

    def begin(self, op: Communication, view: View, after: object) -> Handle:
        """`start` for an operation, or a part of one, that has been counted."""
        if self._stream is None:
            return self._hand_over(op, view)
        with torch.cuda.stream(self._stream):
            assert isinstance(after, tuple)
            for event in after:
                self._stream.wait_event(event)
            started = self._hand_over(op, view)
        return _OnStream(started, self._stream, lazy=self._host_driven)

    def _hand_over(self, op: Communication, view: View) -> _Started:
        works: list[Any] = []
        finish: list[Callable[[], object]] = []
        ranks = self._global[op.group]
        what = f"{op.name} among ranks {ranks}"
        try:
            match op:
                case AllGather():
                    self._collect(op.moves, ranks, view, works, finish, gather=True)
                case ReduceScatter():
                    self._collect(op.moves, ranks, view, works, finish, gather=False)
                case AllToAll():
                    pairs = zip(ranks, op.sends, op.receives, strict=True)
                    self._exchange(list(pairs), view, works, finish)
                case SendRecv():
                    to, source = ranks[op.to_member], ranks[op.from_member]
                    self._exchange(
                        [(to, op.sends, ()), (source, (), op.receives)], view, works, finish
                    )
        except (RuntimeError, dist.DistBackendError) as error:
            raise CommunicationError(f"{what} could not begin: {error}") from error
        # Collectives on the CPU can be waited for in turns; point-to-point would break off.
        turns = isinstance(op, AllGather | ReduceScatter) and self._stream is None
        return _Started(what, works, finish, self._look_around if turns else None)

    def _collect(
        self,
        moves: tuple[Move, ...],
        ranks: list[int],
        view: View,
        works: list[Any],
        finish: list[Callable[[], object]],
        *,
        gather: bool,
    ) -> None:
        group = self._groups.of(ranks)
        order = [dist.get_group_rank(group, rank) for rank in ranks]
        in_order = order == sorted(order)
        for move in moves:
            part, whole = view(move.part), view(move.whole)
            done = 0
            for a, b in pairwise(move.cuts):
                rows = whole[done : done + (b - a) * len(ranks)]
                done += len(rows)
                own = part[a:b].contiguous()  # a slice of rows is contiguous; of heads it is not
                usable = in_order and rows.is_contiguous()
                given = rows if usable else _permuted(rows, order, gather)
                if gather:
                    works.append(all_gather(given, own, group))
                    if given is not rows:
                        finish.append(_Unpermute(rows, given, order))
                else:
                    works.append(reduce_scatter(own, given, group))
                    if own.data_ptr() != part[a:b].data_ptr():
                        finish.append(_Copy(part[a:b], own))

    def _exchange(
        self,
        peers: list[tuple[int, tuple[Piece, ...], tuple[Piece, ...]]],
        view: View,
        works: list[Any],
        finish: list[Callable[[], object]],
    ) -> None:
        me = self._groups.global_rank_of_self
        operations: list[dist.P2POp] = []
        own_sends: list[Tensor] = []
        own_receives: list[Tensor] = []
        for peer, sends, receives in peers:
            if peer == me:
                own_sends += map(view, sends)
                own_receives += map(view, receives)
                continue
            # Both sides number the pieces between them alike; gloo matches messages by this tag.
            for tag, piece in enumerate(sends):
                message = self._sendable(view(piece))
                operations.append(dist.P2POp(dist.isend, message, peer, self._groups.parent, tag))
            for tag, piece in enumerate(receives):
                target = view(piece)
                landing = self._landing(target)
                operations.append(dist.P2POp(dist.irecv, landing, peer, self._groups.parent, tag))
                if landing is not target:
                    finish.append(_Copy(target, landing))
        if operations:
            works += dist.batch_isend_irecv(operations)
        for source, target in zip(own_sends, own_receives, strict=True):
            target.copy_(source)

    def _sendable(self, x: Tensor) -> Tensor:
        # gloo's point-to-point reads host memory only; its collectives take CUDA tensors.
        return x.cpu().contiguous() if self._host_driven else x.contiguous()

    def _landing(self, target: Tensor) -> Tensor:
        """Where a message is received: the target itself if the transport can write to it."""
        device = "cpu" if self._host_driven else target.device
        if target.is_contiguous() and target.device.type == torch.device(device).type:
            return target
        return torch.empty(target.shape, dtype=target.dtype, device=device)


class _Copy:
    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source = target, source

    def __call__(self) -> None:
        self._target.copy_(self._source)


def _permuted(rows: Tensor, order: list[int], gather: bool) -> Tensor:
    """A buffer in the order of the process group, where the plan's order of members differs."""
    if gather:
        return torch.empty_like(rows, memory_format=torch.contiguous_format)
    size = len(rows) // len(order)
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for member, place in enumerate(order):
        result[place * size : (place + 1) * size] = rows[member * size : (member + 1) * size]
    return result


class _Unpermute:
    def __init__(self, rows: Tensor, given: Tensor, order: list[int]) -> None:
        self._rows, self._given, self._order = rows, given, order

    def __call__(self) -> None:
        size = len(self._rows) // len(self._order)
        for member, place in enumerate(self._order):
            source = self._given[place * size : (place + 1) * size]
            self._rows[member * size : (member + 1) * size].copy_(source)
