"""Communication inside a node by copies between the ranks' blocks of symmetric memory.

    staged copies | READY -> readers | per owner: wait READY, copy, DONE -> owner | wait DONE

Copies between GPUs are done by copy engines, so attention keeps all its multiprocessors; signals
are kernels of one warp on the communication stream, and the host waits for nothing. An operation is
over when all its readers are: then every memory it used may be used again.

Operations that leave the node go over the network. A ring that does so is cut at the node's edge:
each of its links goes the way it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Communication, SendRecv
from mesh_attention.runtime.device import Marks
from mesh_attention.runtime.transport.copies import Copies, Dtypes, Owner, Steps, steps_of
from mesh_attention.runtime.transport.distributed import DistributedTransport, OnStream
from mesh_attention.runtime.transport.interface import Handle, Start, View
from mesh_attention.runtime.transport.shared_memory import SharedMemory
from mesh_attention.runtime.transport.symmetric_memory import DONE, READY, SymmetricBlock

Perform = Callable[[SymmetricBlock, Copies], None]


class SymmetricTransport:
    """Copies where all ranks of an operation share memory; `far` carries the others, on the same
    stream."""

    def __init__(
        self,
        plan: Plan,
        pass_: Pass,
        rank: int,
        batch: int,
        dtypes: Dtypes,
        memory: SharedMemory,
        stream: torch.cuda.Stream,
        far: DistributedTransport,
    ) -> None:
        self._pass = pass_
        self._rank = rank
        self._dtypes = dtypes
        self._memory = memory
        self._stream = stream
        self._far = far
        self.in_order, self.own_stream = far.in_order, far.own_stream
        self.shows_workspace = True
        self._ranks = far.ranks
        self._owner = cache(lambda rank: Owner(plan, pass_, rank, batch))
        self._halves: dict[int, tuple[SendRecv, SendRecv, SendRecv]] = {}  # by id, which they hold
        # By group and name of an operation; a half of one has the same.
        self._near: dict[tuple[str, str], tuple[Steps, Perform, torch.cuda.Event]] = {}

    def prepare(self, op: Communication, view: View) -> Start:
        ranks = self._ranks[op.group]
        if self._memory.covers(ranks):
            return partial(self._begin, op, view)
        if isinstance(op, SendRecv) and self._memory.block is not None:
            return self._by_link(op, ranks, view)
        return self._far.prepare(op, view)

    def _by_link(self, op: SendRecv, ranks: list[int], view: View) -> Start:
        to_near = self._memory.covers([ranks[op.to_member]])
        from_near = self._memory.covers([ranks[op.from_member]])
        if to_near == from_near:
            near_start = partial(self._begin, op, view)
            return near_start if to_near else self._far.prepare(op, view)
        if id(op) not in self._halves:  # made once: what `far` knows of operations it knows by id
            self._halves[id(op)] = op, replace(op, receives=()), replace(op, sends=())
        _, sending, receiving = self._halves[id(op)]
        near, far = (sending, receiving) if to_near else (receiving, sending)
        far_start = self._far.prepare(far, view)
        # The far half first: it needs no signal, so ranks at the edge keep nobody waiting.
        return lambda after: _Both(far_start(after), self._begin(near, view, after))

    def _begin(self, op: Communication, view: View, after: Marks) -> Handle:
        """Start an operation, or its half, among ranks that share memory."""
        key = (op.group, op.name)
        if key not in self._near:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._near[key] = *self._worked_out(op), event
        steps, perform_copies, event = self._near[key]
        block = self._memory.block
        assert block is not None
        with torch.cuda.stream(self._stream):
            for mark in after:
                self._stream.wait_event(mark)
            copies = Copies(steps, view, self._dtypes, self._memory.staging_offset)
            copies.show(block.own)
            perform_copies(block, copies)
            copies.finish()
            event.record(self._stream)
        return OnStream(self._stream, event)

    def _worked_out(self, op: Communication) -> tuple[Steps, Perform]:
        members = self._pass.groups[op.group]
        ranks = self._ranks[op.group]
        near = [place for place, rank in enumerate(ranks) if self._memory.covers([rank])]
        owners = {place: self._owner(members[place]) for place in near}
        steps = steps_of(op, members.index(self._rank), len(members), owners)
        places = {place: self._memory.members.index(ranks[place]) for place in near}
        complete = len(steps.readers) == len(steps.pulls) == len(members) - 1
        everybody = complete and set(ranks) == set(self._memory.members)
        return steps, partial(perform, steps, places, everybody)


def perform(
    steps: Steps, places: Mapping[int, int], everybody: bool, block: SymmetricBlock, copies: Copies
) -> None:
    """The copies of an operation, and the signals around them. `places`: where each member of the
    group is in the block. If `everybody` reads from all others, a barrier does what signals to each
    would do."""
    if everybody:
        block.barrier()
        copies.keep()
        for owner, pulls in steps.pulls:
            copies.fetch(pulls, block.of(places[owner]))
        block.barrier()
        return
    for reader in steps.readers:
        block.put(places[reader], READY)
    copies.keep()
    for owner, pulls in steps.pulls:
        block.wait(places[owner], READY)
        copies.fetch(pulls, block.of(places[owner]))
        block.put(places[owner], DONE)
    for reader in steps.readers:
        block.wait(places[reader], DONE)


@dataclass(frozen=True, slots=True)
class _Both(Handle):
    far: Handle
    near: Handle

    def wait(self) -> None:
        self.far.wait()
        self.near.wait()
