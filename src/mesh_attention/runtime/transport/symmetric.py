"""Communication inside a node by copies between the ranks' blocks of symmetric memory.

A rank shows its data, tells its readers, fetches what it needs and tells the owners that it is
done. Copies between GPUs are done by copy engines, so attention keeps all its multiprocessors;
signals are kernels of one warp on the communication stream, and the host waits for nothing.

    staged copies | READY -> readers | per owner: wait READY, copy, DONE -> owner | wait DONE

An operation is over when all its readers are: then every memory it used may be used again.

Operations that leave the node go over the network. A ring that does so is cut at the node's edge:
each of its links goes the way it can.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Communication, SendRecv
from mesh_attention.runtime.device.streams import Marks
from mesh_attention.runtime.transport.copies import Copies, Dtypes, Steps, steps_of
from mesh_attention.runtime.transport.distributed import DistributedTransport
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Handle, Start, View
from mesh_attention.runtime.transport.regions import Owner
from mesh_attention.runtime.transport.shared_memory import SharedMemory
from mesh_attention.runtime.transport.symmetric_memory import DONE, READY, SymmetricBlock


class SymmetricTransport:
    """Near where all ranks of an operation share memory, `far` elsewhere, on the same stream."""

    def __init__(
        self,
        plan: Plan,
        one: Pass,
        rank: int,
        batch: int,
        dtypes: Dtypes,
        groups: Groups,
        memory: SharedMemory,
        stream: torch.cuda.Stream,
        far: DistributedTransport,
    ) -> None:
        self._one = one
        self._rank = rank
        self._dtypes = dtypes
        self._memory = memory
        self._stream = stream
        self._far = far
        self.in_order, self.own_stream = far.in_order, far.own_stream
        self.shows_workspace = True
        self._ranks = groups.global_ranks(plan, one, rank)
        self._owner = cache(lambda rank: Owner(plan, one, rank, batch))
        self._steps: dict[tuple[str, str], _Ready] = {}
        self._events: dict[tuple[str, str], torch.cuda.Event] = {}

    def prepare(self, op: Communication, view: View) -> Start:
        return self._far.counted(op, view, self._way(op, view))

    def _way(self, op: Communication, view: View) -> Start:
        ranks = self._ranks[op.group]
        if self._memory.covers(ranks):
            return partial(self._begin, op, view)
        if isinstance(op, SendRecv) and self._memory.block is not None:
            return self._by_link(op, ranks, view)
        return self._far.ready(op, view)

    def _by_link(self, op: SendRecv, ranks: list[int], view: View) -> Start:
        to_near = self._memory.covers([ranks[op.to_member]])
        from_near = self._memory.covers([ranks[op.from_member]])
        if to_near == from_near:
            return partial(self._begin, op, view) if to_near else self._far.ready(op, view)
        sending, receiving = replace(op, receives=()), replace(op, sends=())
        near, far = (sending, receiving) if to_near else (receiving, sending)
        far_start = self._far.ready(far, view)
        # The far half first: it needs no signal, so ranks at the edge keep nobody waiting.
        return lambda after: _Both(far_start(after), self._begin(near, view, after))

    def _begin(self, op: Communication, view: View, after: Marks) -> Handle:
        """What of an operation is among ranks that the memory covers."""
        key = (op.group, op.name)
        if key not in self._steps:
            self._steps[key] = self._worked_out(op)
            self._events[key] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        known = self._steps[key]
        block = self._memory.block
        assert block is not None
        with torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            copies = Copies(known.steps, view, self._dtypes, self._memory.staging_offset)
            copies.show(block.own)
            known.perform(block, copies)
            copies.finish()
            return _Recorded(self._stream, self._events[key])

    def _worked_out(self, op: Communication) -> _Ready:
        members = self._one.groups[op.group]
        ranks = self._ranks[op.group]
        near = [place for place, rank in enumerate(ranks) if self._memory.covers([rank])]
        owners = {place: self._owner(members[place]) for place in near}
        steps = steps_of(op, members.index(self._rank), len(members), owners)
        places = {place: self._memory.members.index(ranks[place]) for place in near}
        complete = len(steps.readers) == len(steps.pulls) == len(members) - 1
        return _Ready(steps, places, complete and set(ranks) == set(self._memory.members))


class _Ready:
    """An operation that has been worked out: its copies, and the signals around them."""

    def __init__(self, steps: Steps, places: dict[int, int], everybody: bool) -> None:
        self.steps = steps
        self._readers = [places[reader] for reader in steps.readers]
        self._pulls = [(places[owner], pulls) for owner, pulls in steps.pulls]
        self._everybody = everybody  # then one barrier does what signals to each would do

    def perform(self, block: SymmetricBlock, copies: Copies) -> None:
        if self._everybody:
            block.barrier()
            copies.keep()
            for owner, pulls in self._pulls:
                copies.fetch(pulls, block.of(owner))
            block.barrier()
            return
        for reader in self._readers:
            block.put(reader, READY)
        copies.keep()
        for owner, pulls in self._pulls:
            block.wait(owner, READY)
            copies.fetch(pulls, block.of(owner))
            block.put(owner, DONE)
        for reader in self._readers:
            block.wait(reader, DONE)


class _Recorded(Handle):
    """What is on the stream so far."""

    def __init__(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        self._device = stream.device
        self._event = event
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Both(Handle):
    def __init__(self, *handles: Handle) -> None:
        self._handles = handles

    def ready(self) -> bool:
        return all(handle.ready() for handle in self._handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
