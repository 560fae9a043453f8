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

import statistics
import time
from typing import Any

import torch
from one_rank import executor_alone
from replay.stand_in_data import inputs_of
from script import add_tile_options, host, provenance, save, script_parser
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
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Free
from mesh_attention.runtime.execute.executor import CallShape, run_to_end

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

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        return block.q, block.k, block.v

    def _do_nothing(self, *tensors: Any, **options: Any) -> None: ...

    merge_into = merge_all = merge_lse = rescale = sum = delta = _do_nothing

    def stand_in(self, grad_out: Tensor, delta: Tensor) -> Tensor:
        return grad_out

    def finite_lse(self, lse: Tensor) -> Tensor:
        return lse


def host_microseconds(
    plan: Plan, direction: Direction, device: torch.device, repeats: int
) -> tuple[float, int]:
    """For each operation of rank 0, and how many those are."""
    shape, kernels = CallShape(1, torch.bfloat16, device), NoWork()
    register(kernels)
    try:
        executor = executor_alone(plan, direction, shape, kernel=kernels.name, rows=kernels)
    finally:
        unregister(kernels.name)
    program = plan.direction(direction).programs[0]
    inputs = inputs_of(program, plan, shape)
    count = sum(not isinstance(op, Free) for op in program.operations)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run_to_end(executor.run(inputs))
        times.append((time.perf_counter() - begin) / count * 1e6)
    return statistics.median(times[repeats // 10 :]), count


def main() -> None:
    parser = script_parser(__doc__)
    add_tile_options(parser)
    parser.add_argument("--repeats", type=int, default=300)
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=usual, choices=("cuda", "cpu"))
    args = parser.parse_args()
    rows = []
    for causal in (False, True):
        problem = Problem(args.tokens, args.heads, args.head_dim, mask=Mask(causal=causal))
        mask = "causal" if causal else "full"
        for cut, options in CUTS.items():
            plan = make_plan(problem, args.ranks, method="mesh", tile=tuple(args.tile), **options)
            for direction in Direction:
                device = torch.device(args.device)
                microseconds, count = host_microseconds(plan, direction, device, args.repeats)
                reached = microseconds <= GOAL
                line = f"{mask:6} {direction:8} {cut:12} {count:3} operations: "
                line += f"{microseconds:5.1f} us each"
                if args.device == "cuda":
                    line += f" (goal {GOAL:g}, {'reached' if reached else 'MISSED'})"
                print(line, flush=True)
                rows.append(
                    {
                        "mask": mask,
                        "direction": direction.value,
                        "cut": cut,
                        "operations": count,
                        "microseconds_per_operation": microseconds,
                        "reached": reached,
                    }
                )
    result = provenance() | {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "host": host(),
        "torch": torch.__version__,
        "setting": {name: value for name, value in vars(args).items() if name != "json"},
        "rows": rows,
    }
    save(args.json, result)


if __name__ == "__main__":
    main()
