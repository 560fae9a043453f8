"""Is the default ever slower than it need be? 140 questions, by our own simulator.

    python benchmarks/default_against_best.py --parts parts.jsonl --jobs 2 --json RESULT.json

The questions are those of `results/best_of_0.2.json`, made by `best_of_0.2.py.txt` beside it. For
each: the default (what `auto` takes) and its CPU seconds, the full search, and the best that
version 0.2 found, whose settings are simulated again by today's clock. The default leaves tokens
where they are by default, so it is judged twice: with the best that leaves them there too, and with
the best of all. Each question is a line of `--parts`: a run goes on where it was ended.
`--searched RESULT.json` takes what the search found from an earlier result, which may be of another
commit: the full search takes 17 times as long as the default. Modelled, not measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from script import host, provenance, save, script_parser

from mesh_attention.choose.auto import PlanChoice, find_best, find_default
from mesh_attention.choose.scored import Scored
from mesh_attention.cost.planning import plan_on, tokens_stay
from mesh_attention.cost.simulator import simulate
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

YARDSTICK = Path(__file__).parent / "results" / "best_of_0.2.json"
RATIOS = ("over_unmoved", "over_best", "over_yardstick")
Facts = dict[str, Any]


class Judge:
    """Asks the default and the search a question, and simulates what they and 0.2 chose."""

    def __init__(self, question: Facts) -> None:
        self.question, self.cluster = question, load_cluster(question["cluster"])
        self.problem = Problem(
            question["tokens"],
            question["heads"],
            question["head_dim"],
            num_kv_heads=question["kv_heads"],
            mask=Mask(**question["mask"]),
        )

    def choose(self, find: Callable[..., PlanChoice]) -> tuple[PlanChoice, float]:
        begun = time.process_time()
        choice = find(self.problem, self.question["ranks"], self.cluster)
        return choice, time.process_time() - begun

    def facts(self, chosen: dict[Direction, Scored]) -> Facts:
        seconds = {d.value: self.simulate(d, s.name, s.options)[0] for d, s in chosen.items()}
        return {
            "seconds": sum(seconds.values()),
            "passes": seconds,
            "settings": {d.value: scored.text for d, scored in chosen.items()},
        }

    def simulate(self, direction: Direction, method: str, options: Facts) -> tuple[float, bool]:
        """Seconds, and whether tokens stay where they are by default."""
        how: Facts = {"method": method, "directions": (direction,), **options}
        plan = plan_on(self.cluster, self.problem, self.question["ranks"], **how)
        return simulate(plan, self.cluster, direction).runtime_seconds, tokens_stay(plan, {})

    def yardstick(self) -> Facts:
        seconds, stays = {}, True
        for direction in Direction:
            best = self.question["all"]["chosen"][direction.value]
            lists = {k: tuple(x) for k, x in best["options"].items() if isinstance(x, list)}
            options = best["options"] | lists | {"keep": "shards"}
            lasts, stay = self.simulate(direction, best["method"], options)
            seconds[direction.value] = lasts
            stays = stays and stay
        return {"seconds": sum(seconds.values()), "passes": seconds, "stays": stays}


def answer_of(question: Facts, search: bool) -> Facts:
    """The default, what 0.2 found, and with `search` also the best and the best that leaves tokens
    where they are."""
    judge = Judge(question)
    default, cpu = judge.choose(find_default)
    answer: Facts = {
        "name": question["name"],
        "default": judge.facts(default.chosen) | {"cpu_seconds": cpu, "tried": default.tried},
        "yardstick": judge.yardstick(),
    }
    if search:
        best, cpu = judge.choose(find_best)
        answer["search"] = judge.facts(best.chosen) | {"cpu_seconds": cpu, "tried": best.tried}
        answer["unmoved"] = judge.facts(best.unmoved)
    return answer


def judged(answer: Facts) -> dict[str, float]:
    """The default over the best, and over the best that leaves tokens where they are."""
    names = [name for name in ("default", "unmoved", "yardstick", "search") if name in answer]
    seconds = {name: answer[name]["seconds"] for name in names}
    moved = {"search", *(["yardstick"] if not answer["yardstick"]["stays"] else [])}
    return {
        "over_best": seconds["default"] / min(seconds.values()),
        "over_unmoved": seconds["default"] / min(seconds[name] for name in {*names} - moved),
        "over_yardstick": seconds["default"] / seconds["yardstick"],
    }


def table(answers: list[Facts], questions: dict[str, Facts]) -> str:
    lines = []
    for name in RATIOS:
        ratios = sorted((judged(answer)[name], answer["name"]) for answer in answers)
        worst = ", ".join(f"{where} {ratio:.3f}" for ratio, where in ratios[:-6:-1])
        mean = sum(ratio for ratio, _ in ratios) / len(ratios)
        above = sum(ratio > 1.03 for ratio, _ in ratios)
        lines.append(f"{name}: mean {mean:.4f}, above 1.03: {above} of {len(ratios)}; {worst}")
    for ranks in sorted({questions[answer["name"]]["ranks"] for answer in answers}):
        here = [answer for answer in answers if questions[answer["name"]]["ranks"] == ranks]
        line = f"{ranks:5d} ranks, CPU s (mean, most):"
        for name in ("default", "search"):
            cpu = [answer[name]["cpu_seconds"] for answer in here if name in answer]
            if cpu:
                line += f" {name} {sum(cpu) / len(cpu):.2f}, {max(cpu):.2f};"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--parts", type=Path, required=True, help="a line for each question")
    parser.add_argument("--only", help="questions whose name contains this")
    parser.add_argument("--most-ranks", type=int, default=4096)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--no-search", action="store_true", help="the default alone")
    parser.add_argument("--searched", type=Path, help="an earlier result, with its searches")
    args = parser.parse_args()
    questions = {q["name"]: q for q in json.loads(YARDSTICK.read_text())["questions"]}
    names = [
        name
        for name, question in questions.items()
        if question["ranks"] <= args.most_ranks and (not args.only or args.only in name)
    ]
    if not names:
        parser.error("no question has this in its name and so few ranks")
    searched, facts = {}, provenance() | {"machine": host()}
    if args.searched:
        earlier = json.loads(args.searched.read_text())
        facts["searches_of"] = earlier.get("searches_of", earlier["commit"])
        for answer in earlier["questions"]:
            searched[answer["name"]] = {name: answer[name] for name in ("search", "unmoved")}
    lines = args.parts.read_text().splitlines() if args.parts.exists() else []
    answers = {answer["name"]: answer for answer in map(json.loads, lines)}
    missing = [questions[name] for name in names if name not in answers]
    missing.sort(key=lambda question: -question["ranks"])  # the longest first
    with args.parts.open("a") as parts, ProcessPoolExecutor(args.jobs) as pool:
        searches = not (args.no_search or searched)
        waiting = [pool.submit(answer_of, question, searches) for question in missing]
        for at, done in enumerate(as_completed(waiting), 1):
            answer = done.result()
            answer |= searched.get(answer["name"], {})
            answers[answer["name"]] = answer
            parts.write(json.dumps(answer) + "\n")
            parts.flush()
            ratios = " ".join(f"{name} {x:.3f}" for name, x in judged(answer).items())
            cpu = answer["default"]["cpu_seconds"]
            settings = " | ".join(answer["default"]["settings"].values())
            line = f"{at}/{len(missing)} {answer['name']} {ratios}, {cpu:.2f} CPU s: {settings}"
            print(line, file=sys.stderr, flush=True)
    every = [answers[name] for name in names]
    print(table(every, questions))
    judgements = [answer | judged(answer) for answer in every]
    save(args.json, facts | {"questions": judgements})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
