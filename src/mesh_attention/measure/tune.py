"""The fastest of the best predicted settings, measured on the ranks that will use it.

The first rank searches, reads and writes; what it chooses to measure next is made by all ranks, and
times are those of the last rank that is done, so all of them agree on every number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from mesh_attention.choose.answers import (
    Chosen,
    is_measured,
    keep_chosen,
    kept_answer,
    question_of_answer,
    what_is_asked,
)
from mesh_attention.choose.contenders import Contender, contenders
from mesh_attention.choose.tuning import Pair, Tuning
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.measure.attempts import Attempts, Refusal
from mesh_attention.measure.plan_seconds import plan_seconds
from mesh_attention.measure.ranks import MeasureError, Ranks
from mesh_attention.measure.tuning_state import Known, TuningState
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.version import __version__

MEASUREMENTS = 10
LASTING = 2.0  # seconds of one measurement, about

Progress = Callable[[int, int], None]
TellLine = Callable[[str], None]


@dataclass(frozen=True)
class Tuned:
    """`taken` runs were made now, `before` were known from a file; `kept_in` are files that `auto`
    reads, `stayed` says of which clusters a faster answer was kept before."""

    best: Pair
    tuning: Tuning
    taken: int
    before: int
    kept_in: tuple[Path, ...]
    stayed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.tuning.seconds(self.best)


def tune_ranks(
    ranks: Ranks,
    problem: Problem,
    cluster: Cluster,
    options: Mapping[str, Any] | None = None,
    *,
    also_for: Cluster | None = None,
    measurements: int = MEASUREMENTS,
    lasting: float = LASTING,
    again: bool = False,
    progress: Progress | None = None,
    tell_line: TellLine | None = None,
) -> Tuned:
    """All ranks call it with the same arguments. At most so many `measurements` are made; those of
    a tuning that was ended count, unless all is to be measured `again`. The answer is kept for
    `cluster`, and `also_for` the one that `auto` finds here by itself, unless one that was measured
    faster is there and not all is measured `again`. `tell_line` hears of every measurement."""
    given = dict(options or {})
    state = ranks.of_first(lambda: _state(ranks, problem, cluster, given))
    known: Known = ranks.of_first(lambda: {} if again else state.read())
    found: dict[Direction, list[Contender]] = ranks.of_first(
        lambda: contenders(problem, ranks.size, cluster, given)
    )
    refused = {key: one for key, one in known.items() if isinstance(one, str)}
    tuning = Tuning(
        found, {key: inf if isinstance(x, str) else x for key, x in known.items()}, refused
    )
    attempts = Attempts(ranks)
    before = taken = _runs(tuning)
    while taken < measurements and (pair := tuning.next()) is not None:
        if progress:
            progress(taken, measurements)
        seconds = attempts.make(partial(measure_pair, ranks, problem, cluster, pair, lasting))
        if isinstance(seconds, Refusal):
            tuning.refuse(pair, seconds.reason)
        else:
            tuning.measured |= {one.key: seconds[one.direction] for one in pair}
            taken += 1
        ranks.of_first(lambda: state.write(tuning.measured | tuning.refused))
        if tell_line:
            tell_line(_line(pair, seconds, taken, measurements))
    best = tuning.best()
    if best is None:
        raise MeasureError(f"no setting could run here; the last: {[*tuning.refused.values()][-1]}")
    kept, stayed = ranks.of_first(
        lambda: keep_tuned(
            *(problem, ranks.size, (cluster, also_for), tuning, best, given), replace=again
        )
    )
    return Tuned(best, tuning, taken - before, before, kept, stayed)


def measure_pair(
    ranks: Ranks, problem: Problem, cluster: Cluster, pair: Pair, lasting: float
) -> dict[Direction, float]:
    plan = question_of_answer(problem, ranks.size, cluster, chosen_of(pair)).plan()
    return plan_seconds(ranks, plan, lasting=lasting)


def _line(pair: Pair, found: dict[Direction, float] | Refusal, taken: int, most: int) -> str:
    if isinstance(found, Refusal):
        settings = ", ".join(f"{one.direction.value} {one.text}" for one in pair)
        return f"cannot run: {settings}: {found.reason}"
    settings = ", ".join(
        f"{one.direction.value} {one.text} {found[one.direction] * 1e3:.2f} ms" for one in pair
    )
    return f"measured {taken} of at most {most}: {settings}"


def _state(
    ranks: Ranks, problem: Problem, cluster: Cluster, options: Mapping[str, Any]
) -> TuningState:
    asked = what_is_asked(problem, ranks.size, cluster, options)
    if asked is None:
        raise MeasureError("an option has no form in a file, so the answer could not be kept")
    device = torch.cuda.get_device_name() if ranks.is_cuda else ranks.device.type
    where = {"device": device, "backend": ranks.backend, "torch": torch.__version__}
    state = TuningState(asked | {"where": where, "version": __version__})
    state.prepare()
    return state


def _runs(tuning: Tuning) -> int:
    """Runs that were made: each measures a setting of each pass, of which one may be known."""
    counts = [
        sum(tuning.measured.get(one.key, inf) < inf for one in every)
        for every in tuning.contenders.values()
    ]
    return max(counts)


def chosen_of(pair: Pair, measured: Mapping[str, float] | None = None) -> Chosen:
    """As answers have it."""
    return {
        one.direction.value: {
            "method": one.name,
            "options": one.options,
            "seconds": one.seconds if measured is None else measured[one.key],
            "measured": measured is not None,
        }
        for one in pair
    }


def keep_tuned(
    problem: Problem,
    num_ranks: int,
    clusters: tuple[Cluster | None, ...],
    tuning: Tuning,
    best: Pair,
    options: Mapping[str, Any],
    *,
    replace: bool,
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Files that were written, and a line for each cluster whose answer stays: one that was
    measured faster, unless it is to be replaced."""
    chosen = chosen_of(best, tuning.measured)
    others = len({key for key, seconds in tuning.measured.items() if seconds < inf}) - len(best)
    forward, backward = (one.text for one in best)
    what = forward if forward == backward else f"{forward}, backward {backward}"
    reason = f"{what} was the fastest measured, of {others + len(best)} settings in both passes"
    kept: list[Path] = []
    stayed: list[str] = []
    first = clusters[0]
    for cluster in clusters:
        if cluster is None or first is None or not _nodes_are_alike(first, cluster, num_ranks):
            continue
        earlier = None if replace else _measured_before(problem, num_ranks, cluster, options)
        if earlier is not None and _together(earlier) < tuning.seconds(best):
            methods = ", ".join(f"{way} {one['method']}" for way, one in earlier.items())
            line = (
                f"The answer that was kept for {cluster.name} stays ({methods}): it took "
                f"{_together(earlier) * 1e3:.2f} ms when it was measured, and the fastest now "
                f"{tuning.seconds(best) * 1e3:.2f} ms; --again replaces it."
            )
            stayed += [line] if line not in stayed else []
            continue
        file = keep_chosen(problem, num_ranks, cluster, chosen, reason, options)
        if file is not None and file not in kept:
            kept.append(file)
    return tuple(kept), tuple(stayed)


def _measured_before(
    problem: Problem, num_ranks: int, cluster: Cluster, options: Mapping[str, Any]
) -> Chosen | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged one is replaced
        chosen = kept_answer(problem, num_ranks, cluster, options)
    return chosen if is_measured(chosen) else None


def _together(chosen: Chosen) -> float:
    """Seconds of both passes; inf where they are none, so that the answer is replaced."""
    every = [one.get("seconds") for one in chosen.values()]
    return sum(x if isinstance(x, int | float) and 0 < x < inf else inf for x in every)


def _nodes_are_alike(one: Cluster, other: Cluster, num_ranks: int) -> bool:
    """A plan depends on the size of a node, unless all ranks are on one: where nodes differ, it
    would not be what was measured."""
    sizes = one.node.ranks, other.node.ranks
    return sizes[0] == sizes[1] or min(sizes) >= num_ranks
