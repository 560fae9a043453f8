"""Is the default ever slower than it need be? 140 questions, by our own simulator.

    python benchmarks/default_against_best.py --parts parts.jsonl --jobs 2 --json RESULT.json

The questions are those of `results/best_of_0.2.json`. For each: the default (what `auto` takes) and
its CPU seconds, the full search, and the best that version 0.2 found, whose settings are simulated
again by today's clock. The default leaves tokens where they are by default, so it is judged twice:
with the best that leaves them there too, and with the best of all. Each question is a line of
`--parts`: a run goes on where it was ended. Modelled, not measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from provenance import taken

from mesh_attention.choose.auto import PlanChoice, find_best, find_default
from mesh_attention.choose.scored import Scored
from mesh_attention.cost.planning import plan_on, tokens_stay
from mesh_attention.cost.simulator import simulate
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

YARDSTICK = Path(__file__).parent / "results" / "best_of_0.2.json"


def problem_of(asked: dict[str, Any]) -> Problem:
    mask = asked["mask"]
    return Problem(
        *(asked["tokens"], asked["heads"], asked["head_dim"]),
        num_kv_heads=asked["kv_heads"],
        mask=Mask(
            causal=mask["causal"],
            window=tuple(mask["window"]) if "window" in mask else None,
            documents=tuple(mask["documents"]) if "documents" in mask else None,
        ),
    )


class Judge:
    """One question."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.problem = asked, problem_of(asked)
        self.cluster: Cluster = load_cluster(asked["cluster"])

    def answer(self, *, search: bool) -> dict[str, Any]:
        begun = time.process_time()
        default = find_default(self.problem, self.asked["ranks"], self.cluster)
        cpu = time.process_time() - begun
        facts = self.facts(default.chosen) | {"cpu_seconds": cpu, "tried": default.tried}
        found: dict[str, Any] = {"name": self.asked["name"], "default": facts}
        found["yardstick"] = self.yardstick()
        if search:
            begun = time.process_time()
            best: PlanChoice = find_best(self.problem, self.asked["ranks"], self.cluster)
            cpu = time.process_time() - begun
            found["search"] = self.facts(best.chosen) | {"cpu_seconds": cpu, "tried": best.tried}
            found["unmoved"] = self.facts(best.unmoved)
        return found

    def facts(self, chosen: dict[Direction, Scored]) -> dict[str, Any]:
        seconds = {d.value: self.seconds(d, one.name, one.options) for d, one in chosen.items()}
        return {
            "seconds": sum(seconds.values()),
            "passes": seconds,
            "settings": {d.value: one.text for d, one in chosen.items()},
        }

    def seconds(self, direction: Direction, method: str, options: dict[str, Any]) -> float:
        how: dict[str, Any] = {"method": method, "directions": (direction,), **options}
        plan = plan_on(self.cluster, self.problem, self.asked["ranks"], **how)
        self.stays = tokens_stay(plan, {})
        return simulate(plan, self.cluster, direction).runtime_seconds

    def yardstick(self) -> dict[str, Any]:
        seconds, stays = {}, True
        for direction in Direction:
            one = self.asked["all"]["chosen"][direction.value]
            options = {k: tuple(x) if isinstance(x, list) else x for k, x in one["options"].items()}
            seconds[direction.value] = self.seconds(direction, one["method"], options)
            stays = stays and self.stays
        return {"seconds": sum(seconds.values()), "passes": seconds, "stays": stays}


def answer_of(asked: dict[str, Any], search: bool) -> dict[str, Any]:
    return Judge(asked).answer(search=search)


def judged(one: dict[str, Any]) -> dict[str, float]:
    """The default over the best, and over the best that leaves tokens where they are."""
    known = [one["yardstick"], *(one[name] for name in ("search", "unmoved") if name in one)]
    stay = [one[name] for name in ("unmoved",) if name in one]
    if one["yardstick"]["stays"]:
        stay.append(one["yardstick"])
    mine = one["default"]["seconds"]
    return {
        "over_best": mine / min(mine, *(x["seconds"] for x in known)),
        "over_unmoved": mine / min([mine, *(x["seconds"] for x in stay)]),
        "over_yardstick": mine / one["yardstick"]["seconds"],
    }


def table(found: list[dict[str, Any]], asked: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name in ("over_unmoved", "over_best", "over_yardstick"):
        ratios = sorted((judged(one)[name], one["name"]) for one in found)
        worst = ", ".join(f"{where} {ratio:.3f}" for ratio, where in ratios[:-6:-1])
        mean = sum(ratio for ratio, _ in ratios) / len(ratios)
        above = sum(ratio > 1.03 for ratio, _ in ratios)
        lines.append(f"{name}: mean {mean:.4f}, above 1.03: {above} of {len(ratios)}; {worst}")
    for ranks in sorted({one["ranks"] for one in asked.values()}):
        of = [one for one in found if asked[one["name"]]["ranks"] == ranks]
        if not of:
            continue
        cpu = [one["default"]["cpu_seconds"] for one in of]
        search = [one["search"]["cpu_seconds"] for one in of if "search" in one]
        told = ""
        if search:
            told = f", search {sum(search) / len(search):.1f}, {max(search):.1f} at most"
        lines.append(
            f"{ranks:5d} ranks: default {sum(cpu) / len(cpu):.2f} CPU s in the mean, "
            f"{max(cpu):.2f} at most{told}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=Path, required=True, help="a line for each question")
    parser.add_argument("--json", type=Path, help="write the result")
    parser.add_argument("--only", help="questions whose name contains this")
    parser.add_argument("--most-ranks", type=int, default=4096)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--no-search", action="store_true", help="the default alone")
    args = parser.parse_args()
    asked = {one["name"]: one for one in json.loads(YARDSTICK.read_text())["questions"]}
    wanted = [
        one
        for one in asked.values()
        if one["ranks"] <= args.most_ranks and (not args.only or args.only in one["name"])
    ]
    found = {}
    if args.parts.exists():
        for line in args.parts.read_text().splitlines():
            one = json.loads(line)
            found[one["name"]] = one
    missing = [one for one in wanted if one["name"] not in found]
    missing.sort(key=lambda one: -one["ranks"])  # the longest first
    search = not args.no_search
    with args.parts.open("a") as parts, ProcessPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(answer_of, one, search) for one in missing]
        for at, done in enumerate(as_completed(waiting), 1):
            answer = done.result()
            found[answer["name"]] = answer
            parts.write(json.dumps(answer) + "\n")
            parts.flush()
            told = " ".join(f"{name} {x:.3f}" for name, x in judged(answer).items())
            cpu = answer["default"]["cpu_seconds"]
            settings = " | ".join(answer["default"]["settings"].values())
            line = f"{at}/{len(missing)} {answer['name']} {told}, {cpu:.2f} CPU s: {settings}"
            print(line, file=sys.stderr, flush=True)
    every = [found[one["name"]] for one in wanted]
    print(table(every, asked))
    if args.json:
        result = {
            **taken(),
            "machine": platform.machine(),
            "questions": [one | judged(one) for one in every],
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
