"""How long planning takes on one core, beside its goal.

    python benchmarks/planning.py            the table
    python benchmarks/planning.py --json     one line of JSON only

Two goals of 10 seconds: plan, verify and count both passes for 256 ranks, 512K tokens and 4x4
chunks; and plan both passes alone for 4,096 ranks. A plan that `verify` refuses is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TypeVar

from mesh_attention.plan.count import count
from mesh_attention.plan.layout import LayoutKind
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.mesh import MeshSetting, plan_mesh
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.verify import verify

GOAL_SECONDS = 10.0
HEADS, HEAD_DIM = 64, 128
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    ranks: int
    tokens: int
    chunks: tuple[int, int]
    causal: bool
    layout: LayoutKind
    prove: bool  # verify and count too

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.ranks} ranks, {self.chunks[0]}x{self.chunks[1]} chunks, {mask}, {self.layout}"
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """Processor seconds; `total` is what the goal is about."""

    case: str
    plan: float
    verify: float | None
    count: float | None
    total: float
    goal: float

    @property
    def met(self) -> bool:
        return self.total < self.goal


def cases() -> Iterator[Case]:
    tokens = 512 * 1024
    for causal, layout in (
        (True, LayoutKind.ZIGZAG),
        (False, LayoutKind.CONTIGUOUS),
        (True, LayoutKind.STRIPED),
    ):
        yield Case(256, tokens, (4, 4), causal, layout, prove=True)
    for chunks in ((1, 1), (4, 4)):
        for causal, layout in ((True, LayoutKind.ZIGZAG), (False, LayoutKind.CONTIGUOUS)):
            yield Case(4096, 4 * tokens, chunks, causal, layout, prove=False)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    result = work()
    return result, round(time.process_time() - start, 2)


def measure(case: Case) -> Timing:
    problem = Problem(case.tokens, HEADS, HEAD_DIM, mask=Mask(causal=case.causal))
    setting = MeshSetting(chunks=case.chunks, layout=case.layout)
    plan, plan_seconds = timed(lambda: plan_mesh(problem, case.ranks, setting))
    if not case.prove:
        return Timing(str(case), plan_seconds, None, None, plan_seconds, GOAL_SECONDS)
    findings, verify_seconds = timed(lambda: verify(plan))
    if findings:
        raise SystemExit(f"{case}: not a plan: {findings[0]}")
    _, count_seconds = timed(lambda: count(plan))
    total = round(plan_seconds + verify_seconds + count_seconds, 2)
    return Timing(str(case), plan_seconds, verify_seconds, count_seconds, total, GOAL_SECONDS)


def row(timing: Timing) -> str:
    def cell(seconds: float | None) -> str:
        return f"{'-' if seconds is None else format(seconds, '.2f'):>8}"

    numbers = "".join(map(cell, (timing.plan, timing.verify, timing.count, timing.total)))
    return f"{timing.case:<48}{numbers}{cell(timing.goal)}  {'met' if timing.met else 'MISSED'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the line of JSON only")
    args = parser.parse_args()
    if not args.json:
        names = "".join(f"{name:>8}" for name in ("plan", "verify", "count", "total", "goal"))
        print(f"{'processor seconds, both passes':<48}{names}")
    timings = []
    for case in cases():
        timings.append(measure(case))
        if not args.json:
            print(row(timings[-1]), flush=True)
    result = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "timings": [{**asdict(timing), "met": timing.met} for timing in timings],
    }
    print(json.dumps(result))
    return 0 if all(timing.met for timing in timings) else 1


if __name__ == "__main__":
    sys.exit(main())
