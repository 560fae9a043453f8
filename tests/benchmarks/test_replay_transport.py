"""The replay's transport under the real executor, with a holder that only takes notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from replay.measure import ReplayTransport
from replay.rank import rank_to_replay
from replay.stand_in_data import Landing, fill, inputs_of

from mesh_attention import Mask, Problem
from mesh_attention.cost import load_cluster, simulate
from mesh_attention.cost.planning import plan_on
from mesh_attention.machine.kernel_facts import library_kernels
from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Communication
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.runtime.device import Marks, Workspace
from mesh_attention.runtime.execute.executor import CallShape, run_to_end
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.transport.interface import Handle, Start
from support.sample import sample


class Done(Handle):
    def wait(self) -> None: ...


class NotingHolder:
    """Fills at once and notes how long it would have lasted."""

    def __init__(self) -> None:
        self.held: list[float] = []

    def prepare(self, landings: Sequence[Landing], seconds: float) -> Start:
        def start(after: Marks) -> Handle:
            self.held.append(seconds)
            for buffer, tensor in landings:
                fill(buffer.kind, tensor)
            return Done()

        return start


@pytest.mark.parametrize(("method", "direction"), sample(product(METHODS, Direction), 3))
def test_every_communication_is_held_once_and_nothing_unwritten_is_read(
    method: str, direction: Direction
) -> None:
    cluster = replace(load_cluster("paper"), kernels=library_kernels("CPU"))
    problem = Problem(1024, 16, 16, element_bytes=4, mask=Mask(causal=True))
    plan = plan_on(cluster, problem, 16, method=method, directions=(direction,))
    part = rank_to_replay(simulate(plan, cluster, direction), 3)
    call_shape = CallShape(1, torch.float32, torch.device("cpu"))
    holder = NotingHolder()
    executor = make_executor(
        part.plan,
        part.pass_,
        0,
        ReplayTransport(part.program, part.seconds, holder),
        Workspace(poison=True),
        call_shape,
        CallOptions(softmax_scale=0.25),
    )
    for _ in range(2):
        holder.held.clear()
        outputs = run_to_end(executor.run(inputs_of(part.program, part.plan, call_shape)))
        communications = [
            seconds
            for op, seconds in zip(part.program.operations, part.seconds, strict=True)
            if isinstance(op, Communication)
        ]
        assert holder.held == communications
        assert outputs
        for name, x in outputs.items():
            assert x.isfinite().all(), name


def test_received_numbers_are_never_zeros_and_lse_is_that_of_a_long_sequence() -> None:
    torch.manual_seed(0)
    for kind, mean, spread in ((Kind.K, 0.0, 1.0), (Kind.LSE, 13.0, 0.1), (Kind.DELTA, 0.0, 0.1)):
        x = torch.zeros(4096)
        fill(kind, x)
        assert (x != 0).float().mean() > 0.99
        assert x.mean().item() == pytest.approx(mean, abs=0.1)
        assert x.std().item() == pytest.approx(spread, rel=0.1)
