"""One rank's computation against one kernel of the same mask area, on a GPU.

    python benchmarks/kernels_against_limits.py --json results.json

The tile of one rank of a large plan (256 ranks, 512K tokens, 64 heads of 128, mesh 16x16) is run by
the real executor, real operations and real kernels; only communications are left out (random data
is put where messages would land, once). Time is that of the whole run between two CUDA events:
attention, merges, casts, and all gaps. Calls take turns on two streams, as they do in use; the same
on one stream stands beside it. Its limit is one cuDNN call on as many queries and keys: without a
mask the same pairs, with a causal mask a square causal call of the same size, compared by TFLOP/s
(their pairs differ by less than 1 %).

FLOP are counted by mask area: 4 * pairs * heads * head size forward, 2.5 times that backward.
All take turns, each with calls that follow each other, so that all see the same clocks (the GPU is
at its power limit throughout); medians are shown.
The last line is JSON. The host's own time is another question: `executor_host_time.py`.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from one_rank import Work, bare_pass, executor_alone, in_turns, need_cuda
from replay.stand_in_data import fill, inputs_of
from script import add_tile_options, provenance, save, script_parser
from torch import Tensor

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.kernels import Causal, Full
from mesh_attention.kernels.torch_ops import Cudnn
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attend, AttendBackward, CallKind
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.executor import CallShape, Executor, run_to_end

PEAK_TFLOPS = 989.0  # dense bf16 of an H100 or H200, by its datasheet
CHUNKS = ((1, 1), (2, 2), (2, 4), (4, 2), (4, 4))
CUTS: dict[str, dict[str, Any]] = {
    **{f"{of_q}x{of_kv}": {"chunks": (of_q, of_kv)} for of_q, of_kv in CHUNKS},
    "2 to 8 heads": {"head_slices": (2, 8)},
}


Row = dict[str, Any]


class Messages:
    """What messages might bring: random data at first, later nothing, and the first stays there."""

    def __init__(self) -> None:
        self.silent = False

    def __call__(self, buffer: Buffer, tensor: Tensor) -> None:
        if not self.silent:
            torch.cuda.synchronize()
            fill(buffer.kind, tensor)
            torch.cuda.synchronize()


def pairs_of(plan: Plan, direction: Direction, rank: int) -> tuple[float, int]:
    """Visible pairs of a rank's calls, as if each had all heads, and the number of calls."""
    total, calls = 0.0, 0
    program = plan.direction(direction).programs[rank]
    table = program.buffer_table()
    for op in program.operations:
        if isinstance(op, Attend | AttendBackward):
            share = table[op.q.buffer].num_heads / plan.problem.num_heads
            for call in op.calls:
                rows, keys = call.q_stop - call.q_start, call.k_stop - call.k_start
                pairs = rows * (rows + 1) // 2 if call.kind is CallKind.CAUSAL else rows * keys
                total += share * pairs
                calls += 1
    return total, calls


def tflops(pairs: float, problem: Problem, direction: Direction, ms: float) -> float:
    factor = 4 if direction is Direction.FORWARD else 10
    return factor * pairs * problem.num_heads * problem.head_dim / ms / 1e9


def run(executor: Executor, inputs: dict[str, Tensor]) -> None:
    run_to_end(executor.run(inputs))


def measure(
    problem: Problem, ranks: int, tile: tuple[int, int], rank: int, repeats: int
) -> list[Row]:
    device, causal = torch.device("cuda", 0), problem.mask.causal
    shape = CallShape(1, torch.bfloat16, device)
    plans = {
        name: make_plan(problem, ranks, method="mesh", tile=tile, **cut)
        for name, cut in CUTS.items()
    }
    tokens = problem.q_tokens // ranks * tile[0]
    rows = []
    for direction in Direction:
        workspace, messages = Workspace(), Messages()
        options: dict[str, Any] = {"rank": rank, "workspace": workspace, "receive": messages}
        executors = {
            (name, two): executor_alone(plan, direction, shape, two_streams=two, **options)
            for name, plan in plans.items()
            for two in (True, False)
        }
        workspace.take(max(e.workspace_bytes for e in executors.values()), device)
        first = next(iter(plans.values()))
        inputs = inputs_of(first.direction(direction).programs[rank], first, shape)
        tensors = [
            torch.randn(1, tokens, problem.num_heads, problem.head_dim, device=device).bfloat16()
            for _ in range(4)
        ]
        limit = bare_pass(Cudnn(), direction, tensors, Causal() if causal else Full())
        works: dict[str, Work] = {"limit": limit}
        for (name, two), executor in executors.items():
            works[f"{name} {two}"] = partial(run, executor, inputs)
            run(executor, inputs)  # compiles kernels, and messages bring their data
        messages.silent = True
        times = in_turns(works, rounds=repeats, calls=2)
        limit_ms = times["limit"]
        limit_pairs = tokens * (tokens + 1) // 2 if causal else tokens**2
        limit_tflops = tflops(limit_pairs, problem, direction, limit_ms)
        for name, plan in plans.items():
            tile_ms, one_stream_ms = times[f"{name} True"], times[f"{name} False"]
            pairs, calls = pairs_of(plan, direction, rank)
            speed = tflops(pairs, problem, direction, tile_ms)
            percent, goal = 100 * speed / limit_tflops, 90.0 if name == "4x4" else 95.0
            row = {
                "mask": "causal zigzag" if causal else "full",
                "direction": direction.value,
                "cut": name,
                "calls": calls,
                "tile_ms": tile_ms,
                "one_stream_ms": one_stream_ms,
                "tile_tflops": speed,
                "one_kernel_ms": limit_ms,
                "one_kernel_tflops": limit_tflops,
                "percent_of_one_kernel": percent,
                "percent_on_one_stream": percent * tile_ms / one_stream_ms,
                "percent_of_peak": 100 * speed / PEAK_TFLOPS,
                "goal_percent": goal,
                "reached": percent >= goal,
            }
            rows.append(row)
            print(line_of(row), flush=True)
    return rows


def line_of(row: Row) -> str:
    return (
        f"{row['mask']:13} {row['direction']:8} {row['cut']:12} {row['calls']:3} calls"
        f" {row['tile_ms']:8.2f} ms {row['tile_tflops']:6.1f} TFLOP/s"
        f" | one kernel {row['one_kernel_ms']:8.2f} ms {row['one_kernel_tflops']:6.1f}"
        f" | {row['percent_of_one_kernel']:5.1f} % of it ({row['percent_on_one_stream']:5.1f} on"
        f" one stream), {row['percent_of_peak']:4.1f} % of {PEAK_TFLOPS:.0f}"
        f" | goal {row['goal_percent']:.0f} {'reached' if row['reached'] else 'MISSED'}"
    )


def main() -> None:
    parser = script_parser(__doc__)
    add_tile_options(parser)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=6)
    args = parser.parse_args()
    need_cuda()
    torch.manual_seed(0)
    rows: list[Row] = []
    for causal in (False, True):
        problem = Problem(args.tokens, args.heads, args.head_dim, mask=Mask(causal=causal))
        rows += measure(problem, args.ranks, tuple(args.tile), args.rank, args.repeats)
    result = provenance() | {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "setting": {name: value for name, value in vars(args).items() if name != "json"},
        "rows": rows,
        "reached": all(row["reached"] for row in rows),
    }
    save(args.json, result)
    percents = {
        f"{r['mask']} {r['direction']} {r['cut']}": round(r["percent_of_one_kernel"], 1)
        for r in rows
    }
    print(json.dumps({"percent_of_one_kernel": percents}))


if __name__ == "__main__":
    main()
