"""How long planning and the readers of plans take on one core, beside their goals.

    python benchmarks/planning.py                    every table: 15 minutes
    python benchmarks/planning.py ready methods      some of them
    python benchmarks/planning.py --json             one line of JSON only

    ready    one rank until it can run: its plan, its programs of both passes, and the digests that
             ranks compare; no network
    ranks    programs of all ranks of a mesh; some rows also verify and count
    methods  programs of all 256 ranks by every method: ranks that do the same at a step share the
             work of planning it, or this would take minutes
    readers  simulate and verify large plans, planning included: at most a fifth more than before
             ranks planned for themselves. Today bf16 partials are combined in each node, in more
             operations: the plans of that time are asked for by name. A ring has no such choice,
             and a fifth more for each operation is allowed

Processor seconds, each measured in a process of its own. A plan that `verify` refuses is not timed.
`before` is what the same took at commit e701717, on the machine of the stored result (2 cores of
aarch64, Python 3.11).
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
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.agreement import meetings, question_digest
from mesh_attention.plan.read.count import count
from mesh_attention.plan.read.verify import verify

TABLES = ("ready", "ranks", "methods", "readers")
ALLOWED_GROWTH = 1.2
K = 1024
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    table: str
    ranks: int
    tokens: int
    goal: float
    before: float | None = None
    reader: str = ""
    documents: int = 1
    causal: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        words = [f"{self.options.get('method', 'mesh')} on {self.ranks}", mask]
        words += [f"{self.documents} documents"] if self.documents > 1 else []
        words += [f"{key} {_text(x)}" for key, x in self.options.items() if key != "method"]
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


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Timing:
    table: str
    case: str
    parts: dict[str, float]
    total: float
    goal: float
    before: float | None

    @property
    def met(self) -> bool:
        return self.total <= self.goal


def cases() -> list[Case]:
    ring = {"method": "ring"}
    ready = [
        Case("ready", 256, 512 * K, 0.5, 10.8, options=ring),
        Case("ready", 1024, 1024 * K, 0.3, 5.9),
        Case("ready", 4096, 2048 * K, 1.0, 44.8),
        Case("ready", 64, 512 * K, 0.15, 2.5, documents=1000),
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
    then = {"combine": "reduce-scatter"}
    more = 4091 / 3071  # operations of a rank of the ring
    readers = [
        Case("readers", ranks, tokens, ALLOWED_GROWTH * before, before, reader, options=options)
        for ranks, tokens, before, reader, options in (
            (4096, 2048 * K, 9.6, "simulate", uncut | then),
            (4096, 2048 * K, 63.2, "simulate", then),
            (256, 512 * K, 23.5 * more, "simulate", ring),
            (4096, 2048 * K, 169.4, "verify", uncut | then),
            (256, 512 * K, 69.6 * more, "verify, count", ring),
        )
    ]
    readers.append(Case("readers", 4096, 2048 * K, 25.0, reader="simulate", options=uncut))
    return [*ready, *ranks, *methods, *readers]


class Stopwatch:
    """Processor seconds by name."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        result = work()
        self.parts[name] = round(time.process_time() - start, 3)
        return result


def measure(case: Case) -> Timing:
    timed = Stopwatch()
    problem = case.problem
    cluster = load_cluster("hgx-h100")
    cluster = replace(cluster, nodes=max(cluster.nodes, case.ranks // cluster.node.ranks))
    make = partial(plan_on, cluster) if "simulate" in case.reader else partial(make_plan)
    plan = timed("plan", lambda: make(problem, case.ranks, **{"method": "mesh", **case.options}))
    if case.table == "ready":
        rank = case.ranks // 3
        timed("programs", lambda: [plan.program(rank, x.direction) for x in plan.passes])
        timed("digests", lambda: (question_digest(plan), meetings(plan, rank)))
    else:
        timed("programs", lambda: _all_programs(plan))
    if "simulate" in case.reader:
        timed("simulate", lambda: [simulate(plan, cluster, x.direction) for x in plan.passes])
    if "verify" in case.reader:
        findings = timed("verify", lambda: verify(plan))
        if findings:
            raise SystemExit(f"{case}: not a plan: {findings[0]}")
    if "count" in case.reader:
        timed("count", lambda: count(plan))
    total = round(sum(timed.parts.values()), 3)
    return Timing(case.table, str(case), timed.parts, total, round(case.goal, 2), case.before)


def _all_programs(plan: Plan) -> None:
    for pass_ in plan.passes:
        for rank in range(plan.num_ranks):
            pass_.programs[rank]


def least(case: Case, repeats: int) -> Timing:
    """The shortest of several runs, each in a new process: programs remember what they made."""
    with ProcessPoolExecutor(1, mp.get_context("spawn"), max_tasks_per_child=1) as pool:
        timings = [pool.submit(measure, case).result() for _ in range(repeats)]
    return min(timings, key=lambda timing: timing.total)


def row(timing: Timing) -> str:
    before = "" if timing.before is None else f"{timing.before:.1f}"
    parts = " + ".join(f"{name} {seconds:.2f}" for name, seconds in timing.parts.items())
    met = "met" if timing.met else "MISSED"
    return f"{timing.case:<48}{timing.total:>8.2f}{timing.goal:>8.2f}{before:>8}  {met:<7}{parts}"


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
            names = "".join(f"{name:>8}" for name in ("seconds", "goal", "before"))
            print(f"{case.table:<48}{names}", flush=True)
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
