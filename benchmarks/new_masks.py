"""What a new mask costs one rank, and what attention under it runs at: documents of every batch.

    python benchmarks/new_masks.py                        # host time, on any computer
    python benchmarks/new_masks.py --gpu --json out.json  # the same beside a GPU, and its speed

One rank of many, with new log-normal documents at every step: the choice of a way, the plan and
this rank's programs for both passes, and what executors and kernels make of the mask. In
milliseconds of one core without a GPU; with one by the clock, the device idle before. Nothing is
sent: communication is silent, so what is measured on the GPU is attention with what is around it,
beside the bare kernel on tensors of the same shape.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device_times import in_turns
from kernels_on_masks import by_kernel, log_normal_pack, only_mask
from provenance import taken

from mesh_attention import Mask, Problem
from mesh_attention.choose.ask import ask
from mesh_attention.choose.pack import Layer, Packer
from mesh_attention.kernels import RowRange
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.question import Question
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.call_masks import KnownRanges
from mesh_attention.runtime.execute.executor import CallShape, Executor, run_to_end
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.session.rank_plan import RankPlan
from mesh_attention.runtime.transport.local import AloneTransport

K = 1024
DIM = 128


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int
    heads: int
    kv_heads: int
    ranks: int
    means: tuple[int, ...]
    window: int | None = None
    given: tuple[tuple[str, Any], ...] = ()  # options; without any the way is chosen

    @property
    def layer(self) -> Layer:
        options = dict(self.given)
        given = ask(self.problem, self.ranks, **options) if options else None
        return Layer(self.problem, given)

    @property
    def problem(self) -> Problem:
        window = None if self.window is None else (self.window - 1, 0)
        mask = Mask(causal=True, window=window)
        return Problem(self.tokens, self.heads, DIM, num_kv_heads=self.kv_heads, mask=mask)


CASES = (
    Case("64 heads on 64 ranks", 512 * K, 64, 64, 64, (32 * K, 8 * K, 4 * K, 2 * K)),
    Case(
        *("64 heads on 64 ranks, heads first in one piece", 512 * K, 64, 64, 64),
        means=(32 * K, 8 * K, 2 * K),
        given=(("method", "ulysses"), ("layout", "contiguous"), ("chunks", (1, 1))),
    ),
    Case("64:8 heads on 8 ranks", 128 * K, 64, 8, 8, (32 * K, 8 * K, 2 * K)),
    Case("64:8 heads on 64 ranks", 512 * K, 64, 8, 64, (4 * K,)),
    Case("window of 4,096 on 64 ranks", 512 * K, 64, 8, 64, (32 * K,), window=4096),
)
RANK = 3


class Maker:
    """Makes one rank ready for masks, and keeps what the context of a process group would."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.layer = case.layer
        self.packer = Packer((self.layer,), case.ranks)
        self.shape = CallShape(1, torch.bfloat16, device)
        self.bases: dict[Question, tuple[RankPlan, dict[Direction, Executor]]] = {}
        self.reason = ""

    def choose(self, documents: tuple[int, ...]) -> Question:
        pack = self.packer(documents)
        self.reason = pack.reason
        return pack.question(self.layer)

    def plan(self, question: Question) -> RankPlan:
        base = question.of_any_mask
        if base is None:
            mine = RankPlan(question.plan(), RANK)
        else:
            if base not in self.bases:
                self.bases[base] = RankPlan(base.plan(), RANK), {}
            mine = self.bases[base][0].for_mask(question.problem)
        for direction in Direction:
            mine.plan.program(RANK, direction)
        assert mine.key
        return mine

    def executors(self, question: Question, mine: RankPlan) -> dict[Direction, Executor]:
        known: KnownRanges = {}
        base = question.of_any_mask
        found = {}
        for direction in Direction:
            if base is None:
                found[direction] = self._executor(mine.plan, direction, known)
            else:
                made = self.bases[base][1]
                if direction not in made:
                    made[direction] = self._executor(self.bases[base][0].plan, direction, {})
                found[direction] = made[direction].for_mask(mine.plan, known)
        for direction in reversed(Direction):  # what is made for backward may serve both
            found[direction].prepare_kernels()
        return found

    def _executor(self, plan: Plan, direction: Direction, known: KnownRanges) -> Executor:
        one = plan.direction(direction)
        return make_executor(
            *(plan, one, RANK, AloneTransport(one.programs[RANK]), Workspace(), self.shape),
            softmax_scale=DIM**-0.5,
            known_ranges=known,
        )


def host_times(case: Case, mean: int, device: torch.device, steps: int) -> tuple[Any, Maker]:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    maker = Maker(case, device)
    found: list[tuple[float, ...]] = []
    last: dict[Direction, Executor] = {}
    for step in range(steps + 1):
        documents = log_normal_pack(case.tokens, mean, seed=1000 * step + mean)
        times: list[float] = []

        def timed(work: Callable[..., Any], *given: Any, times: list[float] = times) -> Any:
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = clock()
            made = work(*given)
            times.append(1e3 * (clock() - begin))
            return made

        question = timed(maker.choose, documents)
        mine = timed(maker.plan, question)
        last = timed(maker.executors, question, mine)
        if step:  # the first one makes what all others share
            found.append(tuple(times))
    middle = [statistics.median(column) for column in zip(*found, strict=True)]
    row = dict(zip(("choice", "plan", "executors"), middle, strict=True))
    row["all"] = statistics.median(sum(times) for times in found)
    return row | {"documents": len(documents) - 1, "reason": maker.reason, "last": last}, maker


def speeds(case: Case, executors: dict[Direction, Executor], repeats: int) -> dict[str, Any]:
    """Milliseconds of both passes through the executor and of the bare kernel, in turns, with calls
    that follow each other; and how long the host takes to launch one."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    program = executors[Direction.BACKWARD].program
    buffers = {b.name: b for b in program.buffers if b.role is Role.INPUT}
    inputs = {
        name: torch.randn(b.num_rows, 1, b.num_heads, DIM, device=device, dtype=dtype)
        for name, b in buffers.items()
        if name in ("q", "k", "v", "grad_out")
    }
    found: dict[str, Any] = {}
    for at, direction in enumerate(Direction):
        executor = executors[direction]

        def work(executor: Executor = executor) -> Any:
            return run_to_end(executor.run(inputs))

        made = work()
        found[f"{direction} host ms"] = _host_milliseconds(work)
        works: dict[str, Callable[[], Any]] = {"": work}
        if isinstance(only_mask(executor), RowRange):
            works["bare "], flops = _bare(case, executor, at)
        for name, ms in in_turns(works, repeats).items():
            found[f"{name}{direction} ms"] = ms
            if name:
                found[f"{name}{direction} TFLOP/s"] = (2.5 if at else 1.0) * flops / ms / 1e9
        inputs.update(made if direction is Direction.FORWARD else {})
        found[f"{direction} kernels"] = sorted(
            {choice.kernel.name for choice in executor.choices.values()}
        )
    return found


def _host_milliseconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def _bare(case: Case, executor: Executor, at: int) -> tuple[Callable[[], Any], float]:
    """The kernel that the executor chose, on tensors of the same shape, and its operations."""
    mask = next(iter(executor._compute.masks.values()))[0]
    assert isinstance(mask, RowRange)
    heads = -(-case.heads // case.ranks)
    kv_heads = max(1, case.kv_heads // case.ranks)
    tokens = len(mask.key_position)
    tensors = [
        torch.randn(1, tokens, h, DIM, device="cuda", dtype=torch.bfloat16)
        for h in (heads, kv_heads, kv_heads, heads)
    ]
    flops = 4.0 * DIM * heads * int((mask.hi - mask.lo).clamp(min=0).sum(dtype=torch.int64))
    kernel = next(iter(executor.choices.values())).kernel
    return by_kernel(kernel, tensors, replace(mask, kept={}))[at], flops


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="make masks there, and run them")
    parser.add_argument("--steps", type=int, default=10, help="masks of each kind")
    parser.add_argument("--match", default="", help="only cases with this in their name")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if given.gpu else "cpu")
    if given.gpu and not torch.cuda.is_available():
        parser.error("--gpu: there is no CUDA device here")
    machine = torch.cuda.get_device_name() if given.gpu else platform.processor() or "CPU"
    rows: list[dict[str, Any]] = []
    for case in (one for one in CASES if given.match in one.name):
        for mean in case.means:
            times, _ = host_times(case, mean, device, given.steps)
            last = times.pop("last")
            row = {"case": case.name, "tokens": case.tokens, "mean": mean} | times
            if given.gpu:
                row |= speeds(case, last, 7)
            rows.append(row)
            print(_line(row), flush=True)
            if given.json:
                what = "host ms of one rank for a new mask; medians"
                report = taken() | {"machine": machine, "what": what, "rows": rows}
                given.json.write_text(json.dumps(report, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    words = f"{row['case']}, {row['documents']} documents of {row['mean']:,}: "
    words += ", ".join(f"{name} {row[name]:.1f}" for name in ("choice", "plan", "executors"))
    words += f", all {row['all']:.1f} ms"
    for direction in Direction:
        ms, bare = row.get(f"{direction} ms"), row.get(f"bare {direction} ms")
        if ms is not None:
            words += f"; {direction} {ms:.2f} ms"
        if ms is not None and bare is not None:
            rate = row[f"bare {direction} TFLOP/s"]
            words += f", bare {bare:.2f} ({rate:.0f} TFLOP/s, {100 * bare / ms:.0f} %)"
    return f"{words} [{row['reason'][:90]}]"


if __name__ == "__main__":
    main()
