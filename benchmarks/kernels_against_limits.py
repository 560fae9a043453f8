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
All are timed in turns and without a pause, so that all see the same clocks (the GPU is at its power
limit throughout); medians are shown.
The last line is JSON. The host's own time is another question: `executor_host_time.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from provenance import taken
from tile_options import add_tile_options
from torch import Tensor

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.kernels import BackwardInputs, Block, BlockMask, Causal, Full
from mesh_attention.kernels.torch_ops import Cudnn
from mesh_attention.plan.language.buffers import Buffer, Kind, Role
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attend, AttendBackward, CallKind
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.executor import CallShape, run_to_end
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.transport.local import AloneTransport

PEAK_TFLOPS = 989.0  # dense bf16 of an H100 or H200, by its datasheet
CUTS: dict[str, dict[str, Any]] = {
    **{
        f"{kq}x{kkv}": {"chunks": (kq, kkv)} for kq, kkv in ((1, 1), (2, 2), (2, 4), (4, 2), (4, 4))
    },
    "2 to 8 heads": {"head_slices": (2, 8)},
}
DEVICE = torch.device("cuda", 0)
CALL_SHAPE = CallShape(1, torch.bfloat16, DEVICE)


@dataclass(frozen=True)
class Row:
    mask: str
    direction: str
    cut: str
    calls: int
    tile_ms: float
    one_stream_ms: float
    tile_tflops: float
    one_kernel_ms: float
    one_kernel_tflops: float
    percent_of_one_kernel: float
    percent_on_one_stream: float
    percent_of_peak: float
    goal_percent: float
    all_tile_ms: tuple[float, ...]

    @property
    def reached(self) -> bool:
        return self.percent_of_one_kernel >= self.goal_percent


class Stopwatch:
    """CUDA events around runs, read when all is done: nothing waits in between."""

    def __init__(self) -> None:
        self._runs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, work: Callable[[], object]) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        self._runs.append((begin, end))

    def milliseconds(self) -> list[float]:
        """Without the first two runs: compilation, then clocks."""
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in self._runs[2:]]


class Messages:
    """What messages might bring: random tokens, statistics of the right size. Later nothing, and
    what came first lies where it is."""

    def __init__(self) -> None:
        self.silent = False

    def __call__(self, buffer: Buffer, tensor: Tensor) -> None:
        if not self.silent:
            torch.cuda.synchronize()
            receive(buffer, tensor)
            torch.cuda.synchronize()


def receive(buffer: Buffer, tensor: Tensor) -> None:
    """What a message might bring: random tokens, statistics of the right size."""
    if buffer.kind is Kind.LSE:
        tensor.fill_(13.0)
    else:
        tensor.normal_(std=0.1 if buffer.kind is Kind.DELTA else 1.0)


def inputs_of(plan: Plan, direction: Direction, rank: int) -> dict[str, Tensor]:
    given = {}
    for buffer in plan.direction(direction).programs[rank].buffers:
        if buffer.role is Role.INPUT:
            shape = (buffer.num_rows, 1, buffer.num_heads, buffer.kind.width(plan.problem))
            given[buffer.name] = torch.empty(
                shape, dtype=CALL_SHAPE.dtype_of(buffer), device=DEVICE
            )
            receive(buffer, given[buffer.name])
    return given


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


def one_kernel(problem: Problem, rows: int, direction: Direction) -> Callable[[], object]:
    """One cuDNN call on as many queries and keys as the tile has."""
    q, k, v, out, grad = (
        torch.randn(1, rows, problem.num_heads, problem.head_dim, device=DEVICE).bfloat16()
        for _ in range(5)
    )
    mask: BlockMask = Causal() if problem.mask.causal else Full()
    block = Block(q, k, v, mask, problem.head_dim**-0.5)
    kernel = Cudnn()
    if direction is Direction.FORWARD:
        return lambda: kernel.forward(block)
    _, lse = kernel.forward(block)
    given = BackwardInputs(grad, out, lse.contiguous(), None)
    return lambda: kernel.backward(block, given)


def measure(
    problem: Problem, ranks: int, tile: tuple[int, int], rank: int, repeats: int
) -> list[Row]:
    plans = {
        name: make_plan(problem, ranks, method="mesh", tile=tile, **cut)
        for name, cut in CUTS.items()
    }
    rows_in_tile = problem.q_tokens // ranks * tile[0]
    found = []
    for direction in Direction:
        workspace, messages = Workspace(), Messages()
        executors = {
            (name, two): make_executor(
                plan,
                plan.direction(direction),
                rank,
                AloneTransport(plan.direction(direction).programs[rank], messages),
                workspace,
                CALL_SHAPE,
                softmax_scale=problem.head_dim**-0.5,
                two_streams=two,
            )
            for name, plan in plans.items()
            for two in (True, False)
        }
        workspace.take(max(e.workspace_bytes for e in executors.values()), DEVICE)
        inputs = inputs_of(next(iter(plans.values())), direction, rank)
        alone = one_kernel(problem, rows_in_tile, direction)
        watches = {key: Stopwatch() for key in executors}
        alone_watch = Stopwatch()
        for _ in range(repeats + 2):
            for key, executor in executors.items():
                watches[key].time(lambda: run_to_end(executor.run(inputs)))  # noqa: B023
                alone_watch.time(alone)
            if not messages.silent:
                torch.cuda.synchronize()  # kernels were compiled; the rest runs without a pause
                messages.silent = True
        lone = statistics.median(alone_watch.milliseconds()[2 * len(executors) :])
        causal = problem.mask.causal
        lone_pairs = rows_in_tile * (rows_in_tile + 1) // 2 if causal else rows_in_tile**2
        lone_tflops = tflops(lone_pairs, problem, direction, lone)
        for name, plan in plans.items():
            runs, single = (watches[name, two].milliseconds() for two in (True, False))
            pairs, calls = pairs_of(plan, direction, rank)
            total, one_stream = statistics.median(runs), statistics.median(single)
            speed = tflops(pairs, problem, direction, total)
            found.append(
                Row(
                    mask="causal zigzag" if causal else "full",
                    direction=direction.value,
                    cut=name,
                    calls=calls,
                    tile_ms=total,
                    one_stream_ms=one_stream,
                    tile_tflops=speed,
                    one_kernel_ms=lone,
                    one_kernel_tflops=lone_tflops,
                    percent_of_one_kernel=100 * speed / lone_tflops,
                    percent_on_one_stream=100 * speed / lone_tflops * total / one_stream,
                    percent_of_peak=100 * speed / PEAK_TFLOPS,
                    goal_percent=90.0 if name == "4x4" else 95.0,
                    all_tile_ms=tuple(runs),
                )
            )
            print_row(found[-1])
    return found


def print_row(row: Row) -> None:
    verdict = "reached" if row.reached else "MISSED"
    print(
        f"{row.mask:13} {row.direction:8} {row.cut:12} {row.calls:3} calls"
        f" {row.tile_ms:8.2f} ms {row.tile_tflops:6.1f} TFLOP/s"
        f" | one kernel {row.one_kernel_ms:8.2f} ms {row.one_kernel_tflops:6.1f}"
        f" | {row.percent_of_one_kernel:5.1f} % of it ({row.percent_on_one_stream:5.1f} on one"
        f" stream), {row.percent_of_peak:4.1f} % of {PEAK_TFLOPS:.0f} |"
        f" goal {row.goal_percent:.0f} {verdict}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_tile_options(parser)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--json", type=Path, help="write the raw results here")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA GPU")
    tile = (given.tile[0], given.tile[1])
    torch.manual_seed(0)
    rows: list[Row] = []
    for causal in (False, True):
        problem = Problem(given.tokens, given.heads, given.head_dim, mask=Mask(causal=causal))
        rows += measure(problem, given.ranks, tile, given.rank, given.repeats)
    setting = {name: value for name, value in vars(given).items() if name != "json"}
    report = {
        **taken(),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "setting": setting,
        "rows": [asdict(row) for row in rows],
        "reached": all(row.reached for row in rows),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    short = {f"{r.mask} {r.direction} {r.cut}": round(r.percent_of_one_kernel, 1) for r in rows}
    print(json.dumps({"percent_of_one_kernel": short}))


if __name__ == "__main__":
    main()
