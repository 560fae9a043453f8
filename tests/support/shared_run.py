"""A plan with all ranks in one process, moved by the copies of shared memory.

Every rank's block is a plain tensor that all can read, and an operation happens when the last
member arrives: what signals order between processes is ordered here by turns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mesh_attention import testing
from mesh_attention.plan.language.buffers import Precision
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Communication
from mesh_attention.runtime.execute.executor import CallShape
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.transport.copies import Copies, Owner, Steps, steps_of
from mesh_attention.runtime.transport.interface import Start, View

__all__ = ["run_shared"]

Prepared = tuple[Steps, Copies]


class _Meeting:
    def __init__(self) -> None:
        self.arrived: dict[int, Prepared] = {}
        self.ready = False

    def wait(self) -> None:
        assert self.ready


class _World:
    def __init__(self, plan: Plan, pass_: Pass, call_shape: CallShape) -> None:
        self.pass_ = pass_
        self.owners = [Owner(plan, pass_, rank, call_shape.batch) for rank in range(plan.num_ranks)]
        self.staging_offset = max(owner.workspace_bytes for owner in self.owners)
        staging = max(owner.staging_bytes for owner in self.owners)
        size = self.staging_offset + staging
        self.blocks = [torch.full((size,), 0xFF, dtype=torch.uint8) for _ in self.owners]
        self.dtypes = {
            Precision.ELEMENT: call_shape.dtype,
            Precision.ACCUMULATE: call_shape.accumulate_dtype,
        }
        self.meetings: dict[tuple[str, str], _Meeting] = {}

    def arrive(self, rank: int, op: Communication, view: View) -> _Meeting:
        members = self.pass_.groups[op.group]
        owners = {place: self.owners[member] for place, member in enumerate(members)}
        meeting = self.meetings.setdefault((op.group, op.name), _Meeting())
        steps = steps_of(op, members.index(rank), len(members), owners)
        copies = Copies(steps, view, self.dtypes, self.staging_offset)
        meeting.arrived[members.index(rank)] = (steps, copies)
        if len(meeting.arrived) == len(members):
            self._perform(meeting, [self.blocks[member] for member in members])
        return meeting

    def _perform(self, meeting: _Meeting, blocks: list[Tensor]) -> None:
        # Readers and owners name each other, or signals would be waited for in vain.
        inputs = {(m, r) for m, (steps, _) in meeting.arrived.items() for r in steps.readers}
        taken = {(o, m) for m, (steps, _) in meeting.arrived.items() for o, _ in steps.pulls}
        assert inputs == taken
        for member, (_, copies) in meeting.arrived.items():
            copies.show(blocks[member])
        for steps, copies in meeting.arrived.values():
            copies.keep()
            for owner, pulls in steps.pulls:
                copies.fetch(pulls, blocks[owner])
            copies.finish()
        meeting.ready = True


class _Transport:
    in_order = False
    own_stream = False
    shows_workspace = True

    def __init__(self, world: _World, rank: int) -> None:
        self._arrive: Callable[[int, Communication, View], _Meeting] = world.arrive
        self._rank = rank

    def prepare(self, op: Communication, view: View) -> Start:
        return lambda after: self._arrive(self._rank, op, view)


class _SharedRun(testing._Run):
    def all_ranks(
        self, direction: Direction, inputs: list[dict[str, Tensor]]
    ) -> list[dict[str, Tensor]]:
        pass_ = self.plan.direction(direction)
        world = _World(self.plan, pass_, self.call_shape)
        for workspace, block in zip(self.workspaces, world.blocks, strict=True):
            workspace.adopt(block[: world.staging_offset])
        runs = {
            rank: make_executor(
                self.plan,
                pass_,
                rank,
                _Transport(world, rank),
                self.workspaces[rank],
                self.call_shape,
                self.options,
            ).run(inputs[rank])
            for rank in range(self.plan.num_ranks)
        }
        return testing._in_turns(runs)


def run_shared(plan: Plan, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """Forward and backward; every byte that nobody wrote reads as NaN."""
    call_shape = CallShape(q.shape[0], q.dtype, q.device)
    run = _SharedRun(plan, call_shape, CallOptions(), True)
    inputs = [
        {name: run.shard(name, x, rank) for name, x in (("q", q), ("k", k), ("v", v))}
        for rank in range(plan.num_ranks)
    ]
    forward = run.all_ranks(Direction.FORWARD, inputs)
    for rank, local in enumerate(inputs):
        local |= forward[rank] | {"grad_out": run.shard("grad_out", grad_out, rank)}
    backward = run.all_ranks(Direction.BACKWARD, inputs)
    results = {name: run.join(name, backward) for name in ("grad_q", "grad_k", "grad_v")}
    results["out"] = run.join("out", forward)
    results["lse"] = run.join("lse", forward).squeeze(-1).transpose(1, 2)
    return results
