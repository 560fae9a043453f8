"""How near `mesh-attention tune` comes to the fastest of all settings that could be measured.

    torchrun --nproc-per-node 8 benchmarks/tuned_against_all.py --json result.json

measures the cluster (or takes `--cluster`), then every contender of every method in both passes,
several times, round by round so that a slow minute of the machine hits all alike; then tunes as
the command does, with at most ten measurements, and says where its choice stands. `replayed` is the
same policy on the table of all times: the choice without the noise of new measurements.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from provenance import taken

from mesh_attention import Mask, Problem
from mesh_attention.choose.scored import Scored
from mesh_attention.choose.tuning import Pair, Tuning, contenders
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import load_cluster
from mesh_attention.measure.attempts import Attempts, Refusal
from mesh_attention.measure.profile import profile_ranks
from mesh_attention.measure.ranks import Ranks, ranks_of_launcher
from mesh_attention.measure.tune import MEASUREMENTS, measure_pair, tune_ranks
from mesh_attention.plan.language.plan import Direction

Every = dict[Direction, list[Scored]]


def pairs_of(every: Every) -> list[Pair]:
    """Runs that measure every setting of both passes, as few as there can be."""
    left = {direction: list(found) for direction, found in every.items()}
    pairs = []
    while any(left.values()):
        one = next(found[0] for found in left.values() if found)
        pair = []
        for direction in Direction:
            here = [x for x in left[direction] if x.place == one.place]
            here = here or [x for x in every[direction] if x.place == one.place]
            pair.append(here[0] if here else None)
        for x in pair:
            if x is not None and x in left[x.direction]:
                left[x.direction].remove(x)
        if pair[0] is None or pair[1] is None:  # a place that the other pass does not want
            left[one.direction] = [x for x in left[one.direction] if x is not one]
            continue
        pairs.append((pair[0], pair[1]))
    return pairs


def measure_all(
    ranks: Ranks, problem: Problem, cluster: Cluster, pairs: Sequence[Pair], given: Any
) -> dict[str, list[float]]:
    """Seconds of each setting in each round."""
    found: dict[str, list[float]] = {}
    attempts = Attempts(ranks)
    for turn in range(given.rounds):
        for at, pair in enumerate(pairs if turn % 2 == 0 else pairs[::-1]):
            seconds = attempts.make(
                partial(measure_pair, ranks, problem, cluster, pair, given.lasting)
            )
            for one in pair:
                took = inf if isinstance(seconds, Refusal) else seconds[one.direction]
                found.setdefault(one.key, []).append(took)
            if ranks.rank == 0:
                print(f"# round {turn + 1}, {at + 1} of {len(pairs)}: {pair[0].text}", flush=True)
    return found


def replay(every: Every, times: dict[str, float]) -> tuple[Tuning, int]:
    """The policy of tune where every measurement gives what the table has."""
    tuning, made = Tuning(every), 0
    while made < MEASUREMENTS and (pair := tuning.next()) is not None:
        tuning.measured |= {one.key: times[one.key] for one in pair}
        made += 1
    return tuning, made


def standing(pair: Pair, every: Every, times: dict[str, float]) -> dict[str, Any]:
    """Of a choice among all pairs of settings, by the times of the table."""
    table = Tuning(every, times)
    best = table.best()
    assert best is not None
    mine, least = table.seconds(pair), table.seconds(best)
    passes = {
        one.direction.value: {
            "setting": one.text,
            "seconds": times[one.key],
            "place": 1 + sum(times[x.key] < times[one.key] for x in every[one.direction]),
        }
        for one in pair
    }
    return {"seconds": mine, "over_the_fastest_percent": 100 * (mine / least - 1), **passes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lasting", type=float, default=2.0, help="seconds of one measurement")
    parser.add_argument("--cluster", help="a file; left out: measured first")
    parser.add_argument("--json", type=Path, help="write the result here too")
    given = parser.parse_args()
    with ranks_of_launcher(None, command="tune") as ranks:
        if given.cluster:
            cluster = load_cluster(given.cluster)
        else:
            cluster = profile_ranks(ranks, head_dim=given.head_dim, heads=given.heads).cluster
        problem = Problem(
            *(given.tokens, given.heads, given.head_dim),
            num_kv_heads=given.kv_heads,
            mask=Mask(causal=not given.full),
            element_bytes=2 if ranks.is_cuda else 4,
        )
        every: Every = ranks.of_first(lambda: contenders(problem, ranks.size, cluster))
        rounds = measure_all(ranks, problem, cluster, pairs_of(every), given)
        times = {key: statistics.median(found) for key, found in rounds.items()}
        every = {d: [one for one in found if one.key in times] for d, found in every.items()}
        with tempfile.TemporaryDirectory() as folder:
            tuned = tune_ranks(
                ranks, problem, cluster, lasting=given.lasting, output=Path(folder, "tuned.json")
            )
        if ranks.rank == 0:
            report(given, ranks, every, rounds, times, tuned.best, tuned.taken)


def report(
    given: Any,
    ranks: Ranks,
    every: Every,
    rounds: dict[str, list[float]],
    times: dict[str, float],
    chosen: Pair,
    made: int,
) -> None:
    table = Tuning(every, times)
    fastest = table.best()
    assert fastest is not None
    again, steps = replay(every, times)
    replayed = again.best()
    assert replayed is not None
    first = min(
        ((f, b) for f in every[Direction.FORWARD] for b in every[Direction.BACKWARD]
         if f.place == b.place),
        key=lambda pair: sum(one.seconds for one in pair),
    )  # fmt: skip
    spread = [max(x) / min(x) - 1 for x in rounds.values() if max(x) < inf]
    result: dict[str, Any] = taken() | {
        "machine": platform.platform(),
        "torch": torch.__version__,
        "ranks": ranks.size,
        "arguments": {name: str(value) for name, value in vars(given).items() if name != "json"},
        "settings": {d.value: len(found) for d, found in every.items()},
        "spread_of_rounds_percent": 100 * statistics.median(spread),
        "fastest": standing(fastest, every, times),
        "predicted_best": standing(first, every, times),
        "tuned": {"measurements": made, **standing(chosen, every, times)},
        "replayed": {"measurements": steps, **standing(replayed, every, times)},
        "times": {
            d.value: [
                {
                    "setting": one.text,
                    "predicted": one.seconds,
                    "measured": None if times[one.key] == inf else times[one.key],
                    "rounds": [None if x == inf else x for x in rounds[one.key]],
                }
                for one in sorted(found, key=lambda one: times[one.key])
            ]
            for d, found in every.items()
        },
    }
    for name in ("fastest", "predicted_best", "tuned", "replayed"):
        one = result[name]
        print(
            f"{name:>14}: {one['seconds'] * 1e3:8.2f} ms, {one['over_the_fastest_percent']:5.1f} % "
            f"over the fastest; {one['forward']['setting']} | {one['backward']['setting']}"
        )
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
