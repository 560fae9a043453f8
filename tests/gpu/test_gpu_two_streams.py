"""Kernel calls that take turns on two streams compute what one stream computes.

One rank of a larger plan runs with messages of known random content, and what it hands to the
others is compared: with one stream, with two, and again and again with two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Communication, Program, reads, writes
from mesh_attention.runtime.device import Marks, Workspace
from mesh_attention.runtime.execute.executor import CallShape, run_to_end
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.transport.interface import Handle, Start, View

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
CALL_SHAPE = CallShape(1, torch.bfloat16, DEVICE)
TOKENS, HEADS, KV_HEADS, DIM = 32768, 16, 8, 128
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "slices": (16, {"tile": (4, 4), "head_slices": (1, 2), "combine": "reduce-scatter"}),
    "chunks": (16, {"tile": (4, 4), "chunks": (2, 2)}),
    "own queries": (8, {"tile": (1, 8), "chunks": (2, 2), "head_slices": (2, 4)}),
    "ring": (4, {"method": "ring"}),
    "mesh of units": (16, {"method": "mesh-usp", "ulysses": 4, "tile": (2, 2)}),
}


def draw(kind: Kind, shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
    source = torch.Generator(DEVICE).manual_seed(seed)
    drawn = torch.randn(shape, generator=source, device=DEVICE)
    return (drawn * (0.1 if kind.is_statistic else 1.0) + 10 * (kind is Kind.LSE)).to(dtype)


class Noted:
    """Brings known random messages, and notes what is sent. The device rests before and after."""

    in_order = True
    shows_workspace = False

    def __init__(self, program: Program, *, own_stream: bool) -> None:
        self.own_stream = own_stream
        self._table = program.buffer_table()
        self.sent: list[Tensor] = []

    def prepare(self, op: Communication, view: View) -> Start:
        def start(after: Marks) -> Handle:
            torch.cuda.synchronize()
            self.sent += [view(piece).clone() for piece in reads(op)]
            for at, piece in enumerate(writes(op)):
                target = view(piece)
                kind = self._table[piece.buffer].kind
                target.copy_(draw(kind, target.shape, target.dtype, 1000 + at))
            torch.cuda.synchronize()
            return Arrived()

        return start


class Arrived:
    ready = True

    def wait(self) -> None: ...


def sent(plan: Plan, direction: Direction, rank: int, *, two_streams: bool) -> list[Tensor]:
    pass_ = plan.direction(direction)
    program = pass_.programs[rank]
    transport = Noted(program, own_stream=two_streams)
    executor = make_executor(
        *(plan, pass_, rank, transport, Workspace(poison=True), CALL_SHAPE),
        CallOptions(),
    )
    arguments = {}
    for at, buffer in enumerate(program.buffers):
        if buffer.role.is_filled:
            shape = (buffer.num_rows, 1, buffer.num_heads, buffer.kind.width(plan.problem))
            arguments[buffer.name] = draw(
                buffer.kind, torch.Size(shape), CALL_SHAPE.dtype_of(buffer), seed=at
            )
    run_to_end(executor.run(arguments))
    torch.cuda.synchronize()
    return transport.sent


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_two_streams_compute_what_one_computes(
    name: str, causal: bool, direction: Direction
) -> None:
    ranks, options = SETTINGS[name]
    problem = Problem(TOKENS, HEADS, DIM, num_kv_heads=KV_HEADS, mask=Mask(causal=causal))
    plan = make_plan(problem, ranks, directions=(direction,), **({"method": "mesh"} | options))
    rank = ranks - 1
    expected = sent(plan, direction, rank, two_streams=False)
    assert any(x.isfinite().any() for x in expected)
    for _ in range(3):
        results = sent(plan, direction, rank, two_streams=True)
        assert len(results) == len(expected)
        for first, other in zip(results, expected, strict=True):
            assert not first.isnan().any()
            # Gradients of queries are summed by the kernel in no fixed order.
            torch.testing.assert_close(first, other, rtol=0.02, atol=0.02)
