"""Runs campaigns for some time and says what they came to.

    python tests/hostile/run.py --seed 1 --seconds 600 --only programs --json FILE
    python tests/hostile/run.py --seed 1 --only programs --case 17      # one case again

Exit status 1 where anything is wrong; each such case is printed with the line that repeats it.
`--mutant` puts a mistake into the library first: then the campaign must find something.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]

from hostile.campaign import Campaign, Tally
from hostile.mutants import MUTANTS, mutated

__all__ = ["CAMPAIGNS", "campaign", "main", "run_campaign"]

CAMPAIGNS = ("programs", "exact", "plans", "arguments", "arguments_on_ranks", "command_line")
PROGRESS_SECONDS = 15.0
SHOWN = 20  # wrong cases that are printed in full


def campaign(name: str, seed: int, mutant: str | None) -> Campaign:
    """Imported when it is wanted: some need torch and processes."""
    if name == "programs":
        from hostile.programs import Programs

        return Programs(seed, mutant)
    if name == "exact":
        from hostile.exact import Exact

        return Exact(seed, mutant)
    if name == "plans":
        from hostile.plans import Plans

        return Plans(seed)
    if name == "arguments":
        from hostile.arguments import Arguments

        return Arguments(seed)
    if name == "arguments_on_ranks":
        from hostile.arguments_on_ranks import ArgumentsOnRanks

        return ArgumentsOnRanks(seed, mutant)
    from hostile.command_line import CommandLine

    return CommandLine(seed)


def run_campaign(
    name: str,
    seed: int,
    seconds: float,
    *,
    cases: int | None = None,
    first: int = 0,
    mutant: str | None = None,
    stop_at_wrong: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Tally:
    tally = Tally()
    tried = campaign(name, seed, mutant)
    said = begun = monotonic()
    try:
        number = first
        while (cases is None or tally.cases < cases) and monotonic() - begun < seconds:
            at = monotonic()
            with mutated(mutant):
                verdict = tried.case(number)
            tally.add(number, verdict, monotonic() - at)
            if verdict.wrong and len(tally.wrong) <= SHOWN:
                say(f"WRONG, again by run.py --seed {seed} --only {name} --case {number}")
                say("\n".join(f"  {what}" for what in verdict.wrong))
                if stop_at_wrong:
                    break
            number += 1
            if monotonic() - said > PROGRESS_SECONDS:
                said = monotonic()
                say(f"{name}: {tally.cases} cases, {len(tally.wrong)} wrong, {said - begun:.0f} s")
    finally:
        tried.close()
    return tally


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600, help="in all, shared out evenly")
    parser.add_argument("--cases", type=int, help="at most so many, of each campaign")
    parser.add_argument("--only", choices=CAMPAIGNS, action="append")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--mutant", choices=[*MUTANTS])
    parser.add_argument("--json", type=Path, help="a file for counts and what is wrong")
    args = parser.parse_args(argv)
    names = args.only or CAMPAIGNS
    cases = 1 if args.case is not None else args.cases
    results: dict[str, Any] = {}
    for name in names:
        tally = run_campaign(
            name,
            args.seed,
            args.seconds / len(names),
            cases=cases,
            first=args.case or 0,
            mutant=args.mutant,
            say=lambda words: print(words, flush=True),
        )
        print(f"{name}: {tally.cases} cases in {tally.seconds:.0f} s, {len(tally.wrong)} wrong")
        for what, count in sorted(tally.counts.items()):
            print(f"  {count:>8}  {what}")
        results[name] = {
            "cases": tally.cases,
            "seconds": round(tally.seconds, 1),
            "counts": dict(sorted(tally.counts.items())),
            "wrong": tally.wrong,
        }
    summary = {"seed": args.seed, "mutant": args.mutant, "campaigns": results}
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    wrong = sum(len(result["wrong"]) for result in results.values())
    print(json.dumps({"seed": args.seed, "mutant": args.mutant, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
