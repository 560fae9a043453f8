"""The setting of a method with the shortest simulated time. Pure: same question, same answer.

Settings go by what one rank sees of them (`explored.py`); the few best are simulated, with all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_attention.choose.explored import (
    Explored,
    Place,
    TriedSetting,
    layouts_of,
    place_of,
)
from mesh_attention.choose.search import Progress, Score, Search, a_search, key_of
from mesh_attention.cost.collector import collector_paused
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.planning import tokens_stay
from mesh_attention.cost.timeline import Timeline
from mesh_attention.cost.waits import Overlap
from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.table import AUTO
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import ask

NUM_SIMULATED = 4  # settings at most, besides the method's own choice
NUM_SEEN_AGAIN = 4  # that more than one rank looks at, where not so many can be simulated
# Operations of all ranks in these simulations, about; a million takes minutes.
MAX_SIMULATED_OPERATIONS = 15_000


@dataclass(frozen=True, slots=True)
class Best:
    """`options` make the plan of `timeline` (with `plan_on`); `tried` counts settings."""

    timeline: Timeline
    options: dict[str, Any]
    tried: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting by what one rank sees of it: the score that is expected, and one that no simulation
    is better than. Passes of one plan have one place."""

    name: str  # of the method
    options: dict[str, Any]
    expected: Score
    least: Score
    place: Place
    num_operations: int
    stays: bool = True  # tokens are where they are by default

    def looks_like(self, other: Candidate) -> bool:
        """To the last digit."""
        mine, theirs = (
            (one.expected, one.least, one.place, one.num_operations) for one in (self, other)
        )
        return mine == theirs


@collector_paused()
def find_best(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    *,
    method: str,
    direction: Direction | str = Direction.FORWARD,
    options: Mapping[str, Any] | None = None,
    overlap: Overlap | str = Overlap.EVENTS,
    kernel: str | None = None,
    progress: Progress | None = None,
) -> Best:
    """Never slower than the method's own choice. Settings that fit into the GPU's memory win over
    those that do not; those that the method refuses are passed over, unless it refuses all."""
    search = a_search(
        *(problem, num_ranks, cluster, direction, options), overlap=overlap, kernel=kernel
    )
    if method == AUTO:
        raise PlanError("find_best is for one method; find_best_of_all searches all of them")
    ask(problem, num_ranks, method=method)
    best: tuple[Score, dict[str, Any], Timeline] | None = None
    before: Explored | None = None
    tried, refusal, layouts = 0, None, layouts_of(search)
    for at, layout in enumerate(layouts):
        told = _after(tried, len(layouts) - at, progress)
        explored = Explored(search, method, told, layout=layout)
        try:
            explored.try_all(before)
        except PlanError as error:
            refusal = refusal or error
            continue
        before = explored
        tried += explored.tried
        first = True
        for expected, least, setting in finalists(search, explored):
            # The first of a layout may be better than one rank thinks.
            if best is None or (least if first else max(expected, least)) < best[0]:
                timeline = search.simulate(method, setting)
                score = search.score_of(timeline)
                if best is None or score < best[0]:
                    best = score, setting, timeline
            first = False
    if best is None:
        assert refusal is not None
        raise refusal
    return Best(best[2], best[1], tried)


def _after(tried: int, layouts: int, progress: Progress | None) -> Progress | None:
    """Progress of one layout among those that are left."""
    if progress is None:
        return None
    return lambda done, total: progress(tried + done, tried + layouts * total)


def finalists(
    search: Search,
    explored: Explored,
    *,
    in_place: bool = False,
    may_win: Callable[[Score], bool] = lambda _: True,
) -> Iterator[tuple[Score, Score, dict[str, Any]]]:
    """Settings worth a simulation of all ranks, the best first; the method's own choice; and the
    best that is not cut, and the best in even chunks, since one rank does not see what others lose
    by a cut. What is expected of each, what is the least, and the setting; `in_place`: of those
    that leave tokens where they are by default. `may_win`, asked with the least: what may not is
    not looked at again."""
    own, uncut, even = key_of(explored.given), False, False
    simulated = 0
    known = [one for one in explored.all_in_order() if one.stays or not in_place]
    first = known[:NUM_SEEN_AGAIN]
    too_many = sum(one.num_operations for one in first) > MAX_SIMULATED_OPERATIONS
    if too_many and any(may_win(one.least) for one in first):
        known[:NUM_SEEN_AGAIN] = [_seen_again(search, explored.name, one) for one in first]
        known.sort(key=lambda one: one.expected)
    for at, (expected, least, setting, operations, *_) in enumerate(known):
        simulated += operations
        much = at >= NUM_SIMULATED or (at > 0 and simulated > MAX_SIMULATED_OPERATIONS)
        whole = setting.get("chunks") == (1, 1) and "head_slices" not in setting
        is_even = "even_chunks" in setting
        if key_of(setting) == own or (whole and not uncut) or (is_even and not even):
            yield least, least, setting  # passed over only where it cannot be better
        elif not much:
            yield expected, least, setting
        uncut, even = uncut or whole, even or is_even


def _seen_again(search: Search, method: str, one: TriedSetting) -> TriedSetting:
    """By the first and the last rank, too: under a mask a cut may leave them more work."""
    found = candidate(search, method, one.setting)
    return one._replace(expected=found.expected, least=found.least)


def candidate(search: Search, method: str, setting: Mapping[str, Any]) -> Candidate:
    """Looked at once, by three ranks; by one, where all were simulated to see what it expects."""
    key = method, key_of(setting)
    known: Candidate | None = search.candidates.get(key)
    if known is None:
        plan = search.plan(method, setting)
        seen = search.estimate(plan, (search.num_ranks // 2,) if key in search.timelines else None)
        seconds = search.expected_seconds(plan, method, setting, seen)
        known = search.candidates[key] = Candidate(
            *(method, dict(setting)),
            search.score(seconds, seen.peak_bytes),
            search.score(seen.least_seconds, seen.peak_bytes),
            place_of(plan),
            seen.num_operations,
            tokens_stay(plan, search.given),
        )
    return known
