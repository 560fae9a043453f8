"""What a new mask costs a rank at every step: host time.

    python benchmarks/new_masks.py --json out.json  # on any computer
    python benchmarks/new_masks.py --gpu --json out.json  # the same beside a GPU

One rank of many, with new log-normal documents at every step: the choice of a setting, the plan and
this rank's programs for both passes, and what executors and kernels make of the mask. In
milliseconds of one core without a GPU; with one by the clock, the device idle before. How fast
attention under such masks then runs: `kernels_on_masks.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from one_rank import executor_alone, log_normal_pack, need_cuda
from script import host, provenance, save, script_parser

from mesh_attention import Mask, Problem
from mesh_attention.choose.ask import ask
from mesh_attention.choose.pack import Layer, Packer
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.question import Question
from mesh_attention.runtime.execute.call_masks import KnownRanges
from mesh_attention.runtime.execute.executor import CallShape, Executor
from mesh_attention.runtime.session.caches import Plans
from mesh_attention.runtime.session.rank_plan import RankPlan

K = 1024
DIM = 128
RANK = 3


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int
    heads: int
    kv_heads: int
    ranks: int
    means: tuple[int, ...]
    window: int | None = None
    in_one_piece: bool = False  # heads first; else the setting is chosen

    @property
    def layer(self) -> Layer:
        window = None if self.window is None else (self.window - 1, 0)
        mask = Mask(causal=True, window=window)
        problem = Problem(self.tokens, self.heads, DIM, num_kv_heads=self.kv_heads, mask=mask)
        if not self.in_one_piece:
            return Layer(problem, None)
        options: dict[str, Any] = {"layout": "contiguous", "chunks": (1, 1)}
        return Layer(problem, ask(problem, self.ranks, method="ulysses", **options))


CASES = (
    Case("64 heads on 64 ranks", 512 * K, 64, 64, 64, (32 * K, 8 * K, 4 * K, 2 * K)),
    Case("in one piece", 512 * K, 64, 64, 64, (32 * K, 8 * K, 2 * K), in_one_piece=True),
    Case("64:8 heads on 8 ranks", 128 * K, 64, 8, 8, (32 * K, 8 * K, 2 * K)),
    Case("64:8 heads on 64 ranks", 512 * K, 64, 8, 64, (4 * K,)),
    Case("window of 4,096 on 64 ranks", 512 * K, 64, 8, 64, (32 * K,), window=4096),
)


class Maker:
    """Makes one rank ready for masks, and keeps what the context of a process group would."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.layer = case.layer
        self.packer = Packer((self.layer,), case.ranks)
        self.shape = CallShape(1, torch.bfloat16, device)
        self.plans = Plans(2, RANK, case.ranks)
        self.bases = WeakKeyDictionary[RankPlan, dict[Direction, Executor]]()
        self.reason = ""

    def choose(self, documents: tuple[int, ...]) -> Question:
        pack = self.packer(documents)
        self.reason = pack.reason
        return pack.question(self.layer)

    def plan(self, question: Question) -> RankPlan:
        rank_plan = self.plans.of(question)
        for direction in Direction:
            rank_plan.plan.program(RANK, direction)
        assert rank_plan.key
        return rank_plan

    def prepare(self, rank_plan: RankPlan) -> None:
        known: KnownRanges = {}
        base, by_mask = rank_plan.base, rank_plan.by_mask
        executors = {}
        for direction in Direction:
            if base is None:
                executors[direction] = self._executor(rank_plan, direction, known)
                continue
            of_base = self.bases.setdefault(base, {})
            if direction not in of_base:
                of_base[direction] = self._executor(base, direction, {})
            executors[direction] = of_base[direction].for_mask(
                rank_plan.plan, known, by_mask=by_mask
            )
        for direction in reversed(Direction):  # what is made for backward may serve both
            executors[direction].attentions.prepare_kernels()

    def _executor(self, rank_plan: RankPlan, direction: Direction, known: KnownRanges) -> Executor:
        plan, shape = rank_plan.plan, self.shape
        return executor_alone(plan, direction, shape, rank=RANK, known_ranges=known)


def host_times(case: Case, mean: int, device: torch.device, steps: int) -> dict[str, Any]:
    """Medians of milliseconds."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    maker = Maker(case, device)
    every: list[list[float]] = []

    def timed(work: Callable[..., Any], *arguments: Any) -> Any:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = clock()
        result = work(*arguments)
        every[-1].append(1e3 * (clock() - begin))
        return result

    for step in range(steps + 1):
        documents = log_normal_pack(case.tokens, mean, seed=1000 * step + mean)
        every.append([])
        question = timed(maker.choose, documents)
        rank_plan = timed(maker.plan, question)
        timed(maker.prepare, rank_plan)
    del every[0]  # the first step makes what all others share
    medians = [statistics.median(column) for column in zip(*every, strict=True)]
    row: dict[str, Any] = {"case": case.name, "tokens": case.tokens, "mean": mean}
    row |= zip(("choice", "plan", "executors"), medians, strict=True)
    row["all"] = statistics.median(map(sum, every))
    return row | {"documents": len(documents) - 1, "reason": maker.reason}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="make masks there")
    parser.add_argument("--steps", type=int, default=10, help="masks of each kind")
    parser.add_argument("--match", default="", help="only cases with this in their name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.gpu:
        need_cuda()
    device = torch.device("cuda" if args.gpu else "cpu")
    rows: list[dict[str, Any]] = []
    for case in CASES:
        for mean in case.means if args.match in case.name else ():
            row = host_times(case, mean, device, args.steps)
            rows.append(row)
            parts = ", ".join(f"{name} {row[name]:.1f}" for name in ("choice", "plan", "executors"))
            print(
                f"{case.name}, {row['documents']} documents of {mean:,}: {parts}, "
                f"all {row['all']:.1f} ms [{row['reason'][:90]}]",
                flush=True,
            )
            result = provenance() | {
                "machine": torch.cuda.get_device_name() if args.gpu else host(),
                "what": "host ms of one rank for a new mask; medians",
                "rows": rows,
            }
            save(args.json, result)


if __name__ == "__main__":
    main()
