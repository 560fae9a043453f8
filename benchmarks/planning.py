"""How long planning and the readers of plans take on one core, beside their goals.

    python benchmarks/planning.py                    every table: 15 minutes
    python benchmarks/planning.py ready methods      some of them
    python benchmarks/planning.py --json             one line of JSON only

    ready    one rank until it can run: its plan, its programs of both passes, and the digests that
             ranks compare; no network
    ranks    programs of all ranks of a mesh; some rows also verify and count
    methods  programs of all 256 ranks by every method: ranks that do the same at a step share the
             work of planning it, or this would take minutes
    readers  simulate and verify large plans, planning included

Processor seconds, each measured in a process of its own. A plan that `verify` refuses is not timed.
Goals are for the machine of the stored results (2 cores of aarch64, Python 3.11); those of readers
are a fifth more than what the same plans took before ranks planned for themselves.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from script import host, provenance, script_parser

from mesh_attention.choose.ask import make_plan
from mesh_attention.cost import load_cluster, simulate
from mesh_attention.cost.planning import plan_on
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.agreement import meetings, question_digest
from mesh_attention.plan.read.count import count
from mesh_attention.plan.read.verify import verify

TABLES = ("ready", "ranks", "methods", "readers")
K = 1024
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    table: str
    ranks: int
    tokens: int
    goal: float
    reader: str = ""
    documents: int = 1
    causal: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        words = [f"{self.options.get('method', 'mesh')} on {self.ranks}", mask]
        words += [f"{self.documents} documents"] if self.documents > 1 else []
        for key, x in self.options.items():
            text = "x".join(map(str, x)) if isinstance(x, tuple) else x
            words += [f"{key} {text}"] if key != "method" else []
        words += [self.reader] if self.reader else []
        return ", ".join(words)

    @property
    def problem(self) -> Problem:
        cuts = None
        if self.documents > 1:
            inside = random.Random(0).sample(range(1, self.tokens), self.documents - 1)
            cuts = (0, *sorted(inside), self.tokens)
        mask = Mask(causal=self.causal, documents=cuts)
        heads = max(64, self.ranks) if self.options.get("method") == "ulysses" else 64
        return Problem(self.tokens, heads, 128, mask=mask)


@dataclass(frozen=True)
class Timing:
    table: str
    case: str
    parts: dict[str, float]
    total: float
    goal: float

    @property
    def met(self) -> bool:
        return self.total <= self.goal


def cases() -> list[Case]:
    ring = {"method": "ring"}
    ready = [
        Case("ready", 256, 512 * K, 0.5, options=ring),
        Case("ready", 1024, 1024 * K, 0.3),
        Case("ready", 4096, 2048 * K, 1.0),
        Case("ready", 64, 512 * K, 0.15, documents=1000),
        Case("ready", 64, 512 * K, 0.02, documents=128, options={"method": "seen"}),
    ]
    cut, uncut = {"chunks": (4, 4)}, {"chunks": (1, 1)}
    striped = cut | {"layout": "striped"}
    ranks = [
        Case("ranks", 256, 512 * K, 10.0, reader="verify, count", causal=causal, options=options)
        for causal, options in ((True, cut), (False, cut), (True, striped))
    ]
    ranks += [
        Case("ranks", 4096, 2048 * K, 10.0, causal=causal, options=options)
        for options in (uncut, cut)
        for causal in (True, False)
    ]
    methods = [
        Case("methods", 256, 512 * K, 10.0, options={"method": method}) for method in METHODS
    ]
    combined = {"combine": "reduce-scatter"}  # as plans were when the goals were set
    readers = [
        Case("readers", ranks, tokens, goal, reader, options=options)
        for ranks, tokens, goal, reader, options in (
            (4096, 2048 * K, 11.5, "simulate", uncut | combined),
            (4096, 2048 * K, 75.8, "simulate", combined),
            (256, 512 * K, 37.6, "simulate", ring),
            (4096, 2048 * K, 203.3, "verify", uncut | combined),
            (256, 512 * K, 111.3, "verify, count", ring),
            (4096, 2048 * K, 25.0, "simulate", uncut),
        )
    ]
    return [*ready, *ranks, *methods, *readers]


def measure(case: Case) -> Timing:
    parts: dict[str, float] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        result = work()
        parts[name] = round(time.process_time() - start, 3)
        return result

    problem = case.problem
    cluster = load_cluster("hgx-h100")
    cluster = replace(cluster, nodes=max(cluster.nodes, case.ranks // cluster.node.ranks))
    make = partial(plan_on, cluster) if "simulate" in case.reader else partial(make_plan)
    plan = timed("plan", lambda: make(problem, case.ranks, **{"method": "mesh", **case.options}))
    own = case.ranks // 3
    ranks = [own] if case.table == "ready" else range(case.ranks)
    timed("programs", lambda: [x.programs[rank] for x in plan.passes for rank in ranks])
    if case.table == "ready":
        timed("digests", lambda: (question_digest(plan), meetings(plan, own)))
    if "simulate" in case.reader:
        timed("simulate", lambda: [simulate(plan, cluster, x.direction) for x in plan.passes])
    if "verify" in case.reader:
        findings = timed("verify", lambda: verify(plan))
        if findings:
            raise SystemExit(f"{case}: not a plan: {findings[0]}")
    if "count" in case.reader:
        timed("count", lambda: count(plan))
    return Timing(case.table, str(case), parts, round(sum(parts.values()), 3), case.goal)


def least(case: Case, repeats: int) -> Timing:
    """The shortest of several runs, each in a new process: programs remember what they made."""
    with ProcessPoolExecutor(1, mp.get_context("spawn"), max_tasks_per_child=1) as pool:
        timings = [pool.submit(measure, case).result() for _ in range(repeats)]
    return min(timings, key=lambda timing: timing.total)


def row(timing: Timing) -> str:
    parts = " + ".join(f"{name} {seconds:.2f}" for name, seconds in timing.parts.items())
    met = "met" if timing.met else "MISSED"
    return f"{timing.case:<48}{timing.total:>8.2f}{timing.goal:>8.2f}  {met:<7}{parts}"


def main() -> int:
    parser = script_parser(__doc__, result=False)
    parser.add_argument("tables", nargs="*", metavar="|".join(TABLES), help="default: all")
    parser.add_argument("--json", action="store_true", help="print the line of JSON only")
    parser.add_argument("--repeats", type=int, default=1, help="of which the least counts")
    args = parser.parse_args()
    unknown = [name for name in args.tables if name not in TABLES]
    if unknown:
        parser.error(f"no table {unknown[0]!r}; there are: {', '.join(TABLES)}")
    timings: list[Timing] = []
    for case in cases():
        if args.tables and case.table not in args.tables:
            continue
        if not args.json and case.table not in {timing.table for timing in timings}:
            print(f"{case.table:<48} seconds    goal", flush=True)
        timings.append(least(case, args.repeats))
        if not args.json:
            print(row(timings[-1]), flush=True)
    result = provenance() | {
        "machine": host(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "repeats": args.repeats,
        "timings": [{**asdict(timing), "met": timing.met} for timing in timings],
    }
    print(json.dumps(result))
    return 0 if all(timing.met for timing in timings) else 1


if __name__ == "__main__":
    sys.exit(main())
