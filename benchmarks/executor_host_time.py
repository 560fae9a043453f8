"""The executor's own host time for each operation: kernels and messages do nothing.

    python benchmarks/executor_host_time.py --json results.json

One rank's program of a large plan (256 ranks, 512K tokens, 64 heads of 128, mesh 16x16) is run many
times with attention and row kernels that return their inputs and a transport that sends nothing.
What is left is what the library adds to the cost of launching: walking the program, events, views
of the caller's tensors, allocating results. Medians of many calls. Without a GPU it runs on the
CPU, where clearing rows that no call touches (causal, chunked, backward) is work of the same thread
and is counted, so no goal is set there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import taken
from tile_options import add_tile_options
from torch import Tensor

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.kernels import (
    BackwardInputs,
    BackwardNeeds,
    Block,
    BlockSize,
    Request,
    RowKernels,
    register,
    unregister,
)
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Free
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.executor import CallShape, run_to_end
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.transport.local import AloneTransport

GOAL = 15.0  # microseconds an operation
CUTS: dict[str, dict[str, Any]] = {
    "1x1": {"chunks": (1, 1)},
    "2x2": {"chunks": (2, 2)},
    "4x4": {"chunks": (4, 4)},
    "2 to 8 heads": {"head_slices": (2, 8)},
}


class NoWork(RowKernels):
    """Attention and row kernels that return their inputs: what is left is the host's own time."""

    name = "no_work"
    backward_needs = BackwardNeeds()

    def refuses(self, request: Request) -> str | None:
        return None

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        return 0

    def __init__(self) -> None:
        self._lse: dict[torch.Size, Tensor] = {}

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q = block.q
        if q.shape not in self._lse:
            B, S, H, _ = q.shape
            self._lse[q.shape] = q.new_zeros(B, H, S, dtype=torch.float32)
        return q, self._lse[q.shape]

    def backward(self, block: Block, given: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        return block.q, block.k, block.v

    def merge_into(self, *tensors: Any, **options: Any) -> None: ...

    def merge_all(self, *tensors: Any) -> None: ...

    def merge_lse(self, *tensors: Any) -> None: ...

    def rescale(self, *tensors: Any) -> None: ...

    def sum(self, parts: Sequence[Tensor], target: Tensor) -> None: ...

    def delta(self, *tensors: Any) -> None: ...

    def stand_in(self, grad_out: Tensor, delta: Tensor) -> Tensor:
        return grad_out

    def finite_lse(self, lse: Tensor) -> Tensor:
        return lse


def host_microseconds(
    plan: Plan, direction: Direction, device: torch.device, repeats: int
) -> tuple[float, int]:
    """For each operation of rank 0, and how many those are."""
    one, call_shape = plan.direction(direction), CallShape(1, torch.bfloat16, device)
    no_work = NoWork()
    register(no_work)
    try:
        executor = make_executor(
            *(plan, one, 0, AloneTransport(one.programs[0]), Workspace(), call_shape),
            softmax_scale=1.0,
            kernel=no_work.name,
            rows=no_work,
        )
    finally:
        unregister(no_work.name)
    shapes = {
        buffer.name: ((buffer.num_rows, 1, buffer.num_heads, buffer.kind.width(plan.problem)),)
        for buffer in one.programs[0].buffers
        if buffer.role is Role.INPUT
    }
    dtypes = {b.name: call_shape.dtype_of(b) for b in one.programs[0].buffers}
    inputs = {
        name: torch.zeros(*shape, dtype=dtypes[name], device=device)
        for name, shape in shapes.items()
    }
    count = sum(not isinstance(op, Free) for op in one.programs[0].operations)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run_to_end(executor.run(inputs))
        times.append((time.perf_counter() - begin) / count * 1e6)
    return statistics.median(times[repeats // 10 :]), count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_tile_options(parser)
    parser.add_argument("--repeats", type=int, default=300)
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=there, choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, help="write the raw results here")
    given = parser.parse_args()
    device = torch.device(given.device)
    rows = []
    for causal in (False, True):
        problem = Problem(given.tokens, given.heads, given.head_dim, mask=Mask(causal=causal))
        for name, cut in CUTS.items():
            plan = make_plan(problem, given.ranks, method="mesh", tile=tuple(given.tile), **cut)
            for direction in Direction:
                found, count = host_microseconds(plan, direction, device, given.repeats)
                mask = "causal" if causal else "full"
                verdict = f" (goal {GOAL:g}, {'reached' if found <= GOAL else 'MISSED'})"
                print(
                    f"{mask:6} {direction:8} {name:12} {count:3} operations: {found:5.1f} us each"
                    f"{verdict if given.device == 'cuda' else ''}",
                    flush=True,
                )
                rows.append(
                    {
                        "mask": mask,
                        "direction": direction.value,
                        "cut": name,
                        "operations": count,
                        "microseconds_per_operation": found,
                        "reached": found <= GOAL,
                    }
                )
    report = {
        **taken(),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "host": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "setting": {name: value for name, value in vars(given).items() if name != "json"},
        "rows": rows,
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
