"""The fastest of the best predicted settings, measured on the ranks that will use it.

The first rank searches, reads and writes; what it chooses to measure next is made by all ranks, and
times are those of the last rank that is done, so all of them agree on every number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch

from mesh_attention.cluster.answers import (
    Chosen,
    keep_chosen,
    question_of_answer,
    what_is_asked,
)
from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.contenders import Contender, contenders
from mesh_attention.cluster.tuning import Pair, Tuning
from mesh_attention.errors import MeshAttentionError
from mesh_attention.measure.plan_seconds import plan_seconds
from mesh_attention.measure.ranks import MeasureError, Ranks
from mesh_attention.measure.tuning_state import TuningState
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.version import __version__

MEASUREMENTS = 10
LASTING = 2.0  # seconds of one measurement, about

Progress = Callable[[int, int], None]
Measure = Callable[[Pair], dict[Direction, float]]


@dataclass(frozen=True)
class Tuned:
    """`taken` runs were made now, `before` were known from a file; `kept_in` are files that `auto`
    reads."""

    best: Pair
    tuning: Tuning
    taken: int
    before: int
    kept_in: tuple[Path, ...]

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
) -> Tuned:
    """All ranks call it with the same arguments. At most so many `measurements` are made; those of
    a tuning that was ended count, unless all is to be measured `again`. The answer is kept for
    `cluster`, and `also_for` the one that `auto` finds here by itself."""
    given = dict(options or {})
    state = ranks.of_first(lambda: _state(ranks, problem, cluster, given))
    known: dict[str, float] = ranks.of_first(lambda: {} if again else state.read())
    found: dict[Direction, list[Contender]] = ranks.of_first(
        lambda: contenders(problem, ranks.size, cluster, given)
    )
    tuning = Tuning(found, known)
    before = taken = _runs(tuning)
    refusal = ""
    while taken < measurements and (pair := tuning.next()) is not None:
        if progress:
            progress(taken, measurements)
        try:
            plan = question_of_answer(problem, ranks.size, cluster, chosen_of(pair)).plan()
            seconds = plan_seconds(ranks, plan, lasting=lasting)
        except MeshAttentionError as error:  # where a rank refuses a plan, all of them do
            seconds, refusal = dict.fromkeys(Direction, inf), str(error)
        tuning.measured |= {one.key: seconds[one.direction] for one in pair}
        ranks.of_first(lambda: state.write(tuning.measured))
        taken += 1
    best = tuning.best()
    if best is None:
        raise MeasureError(f"no setting could run here; the last: {refusal}")
    kept = ranks.of_first(
        lambda: _keep(problem, ranks.size, (cluster, also_for), tuning, best, given)
    )
    return Tuned(best, tuning, taken - before, before, kept)


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
        sum(one.key in tuning.measured for one in every) for every in tuning.contenders.values()
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


def _keep(
    problem: Problem,
    num_ranks: int,
    clusters: tuple[Cluster | None, ...],
    tuning: Tuning,
    best: Pair,
    options: Mapping[str, Any],
) -> tuple[Path, ...]:
    chosen = chosen_of(best, tuning.measured)
    others = len({key for key, seconds in tuning.measured.items() if seconds < inf}) - len(best)
    forward, backward = (one.text for one in best)
    what = forward if forward == backward else f"{forward}, backward {backward}"
    reason = f"{what} was the fastest measured, of {others + len(best)} settings in both passes"
    kept = []
    first = clusters[0]
    for cluster in clusters:
        if cluster is None or first is None or not _nodes_are_alike(first, cluster, num_ranks):
            continue
        file = keep_chosen(problem, num_ranks, cluster, chosen, reason, options)
        if file is not None and file not in kept:
            kept.append(file)
    return tuple(kept)


def _nodes_are_alike(one: Cluster, other: Cluster, num_ranks: int) -> bool:
    """A plan depends on the size of a node, unless all ranks are on one: where nodes differ, it
    would not be what was measured."""
    sizes = one.node.ranks, other.node.ranks
    return sizes[0] == sizes[1] or min(sizes) >= num_ranks
