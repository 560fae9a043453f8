"""The best plan over all methods, each pass apart: what `auto` finds when it may search.

Every method has its candidates (heads, queries and keys: Ulysses degree, tile, team, ring, node
patch) and its cuts (slices, chunks), as `explored.py` goes through them. Here all methods meet. One
whose least transfers and computation take longer than what was simulated already is not looked at
further, and neither is a setting whose bound (`estimate.py`) is above it. Whatever is left out so
could not have won: the answer is never slower than any method's own best.

Both passes of a plan have the same shards on the same devices, so they are chosen together where
the best of each would want others. The layout is free unless it is given, and each is searched as
if it were the only one; what leaves tokens where they are by default is found too (`unmoved`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_attention.choose.explored import Layouts, layouts_of
from mesh_attention.choose.one_pass import OnePass, Simulated, Standing, standing_of
from mesh_attention.choose.reasons import why
from mesh_attention.choose.search import Progress, Score, Search, a_search
from mesh_attention.cost.collector import collector_paused
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.planning import PLACES, ask_on
from mesh_attention.cost.waits import Overlap
from mesh_attention.plan.layout import LayoutKind
from mesh_attention.plan.methods.first_answer import methods_with
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import BOTH, Question, joined


@dataclass(frozen=True, slots=True)
class BestOfAll:
    """`chosen` for each pass, `standings` of all methods in each, best first, and what is
    not known but bounded after what is; `together`: the same of each method's passes that can be
    those of one plan. Methods that take no setting are in
    `refused`, with the reason. `tried` counts settings. `unmoved`: the best with tokens where they
    are by default, which `chosen` may not have."""

    chosen: dict[Direction, Standing]
    standings: dict[Direction, tuple[Standing, ...]]
    refused: dict[str, str]
    reason: str
    tried: int
    question: Question
    unmoved: dict[Direction, Standing]
    together: tuple[dict[Direction, Standing], ...]

    @property
    def place(self) -> dict[str, Any]:
        """Options that say where tokens lie, if not where they are by default."""
        if self.unmoved is self.chosen:
            return {}
        plan, options = self.plan(), next(iter(self.chosen.values())).options
        where = {name: options[name] for name in PLACES if options.get(name) is not None}
        return {"layout": plan.q_layout.kind.value, **where}

    def plan(self) -> Plan:
        return self.question.plan()

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.chosen.values())


@collector_paused()
def find_best_of_all(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    *,
    directions: Sequence[Direction] = BOTH,
    options: Mapping[str, Any] | None = None,
    overlap: Overlap | str = Overlap.EVENTS,
    kernel: str | None = None,
    progress: Progress | None = None,
) -> BestOfAll:
    """The methods that have all the options given are searched."""
    methods = methods_with(options or {})
    how: dict[str, Any] = {"overlap": overlap, "kernel": kernel}
    searches = [a_search(problem, num_ranks, cluster, one, options, **how) for one in directions]
    layouts = layouts_of(searches[0])
    told = _Part(progress, len(methods) * len(searches), len(layouts))
    found = [OnePass(search) for search in searches]
    for layout in layouts:
        for one in found:
            one.search_in(layout, methods, _limit(found, one, layout, layouts), told)
    chosen = _in_one_place(found)
    unmoved = [known for one in found if (known := one.unmoved())]
    if len(unmoved) < len(found):  # a kernel was asked for, and all that is left moves them
        unmoved = chosen
    if _sum_of(unmoved) <= _sum_of(chosen):
        chosen = unmoved
    together = _together(found)
    by_pass = {one[2].one.direction: standing_of(one) for one in chosen}
    return BestOfAll(
        by_pass,
        {one.search.direction: one.standings() for one in found},
        found[0].refused,
        why([*by_pass.values()], [[row[one] for row in together] for one in by_pass]),
        sum(one.tried for one in found),
        _question(found[0].search, by_pass),
        by_pass
        if unmoved is chosen
        else {one[2].one.direction: standing_of(one) for one in unmoved},
        together,
    )


class _Part:
    """Progress: methods done, of all in all passes. A method is looked at in every layout."""

    def __init__(self, progress: Progress | None, total: int, layouts: int) -> None:
        self._progress, self._looks, self._total, self._layouts = progress, 0, total, layouts

    def __call__(self) -> None:
        self._looks += 1
        if self._progress and self._looks % self._layouts == 0:
            self._progress(self._looks // self._layouts, self._total)


def _limit(
    passes: Sequence[OnePass], one: OnePass, layout: LayoutKind | None, layouts: Layouts
) -> Score | None:
    """What a pass must be better than for a plan in this layout to be chosen: what is best in one
    place so far, less what all other passes take in this layout, or take at least."""
    if layout is layouts[0] or not all(other.simulated for other in passes):
        return None
    too_much, seconds = _sum_of(_in_one_place(passes))
    if too_much:
        return None
    for other in passes:
        if other is one:
            continue
        score = other.searched.get(layout, (False, other.least_in(layout)))
        if score is None or score[0]:
            return False, 0.0
        seconds -= score[1]
    return False, seconds


def _in_one_place(passes: Sequence[OnePass]) -> list[Simulated]:
    """The best of each pass, where they have the same shards on the same devices; otherwise the
    two of a common place that take the least time together."""
    best = [one.best for one in passes]
    if len({one[1].place for one in best}) > 1:
        for wanted, other in ((best[0], passes[1]), (best[1], passes[0])):
            other.add(wanted[1])  # what it has in that place already may be much worse
        maps = [one.places() for one in passes]
        common = [place for place in maps[0] if place in maps[1]]
        common.sort(key=lambda place: _sum([one[place] for one in maps]))
        best = [one.at(common[0]) for one in passes]
        for place in common[1:_NUM_PLACES]:
            if _sum([one[place] for one in maps]) < _sum_of(best):
                best = min(best, [one.at(place) for one in passes], key=_sum_of)
    return best


def _together(passes: Sequence[OnePass]) -> tuple[dict[Direction, Standing], ...]:
    """Of every method the passes in a common place that take the least time together; where none
    were simulated together, those of which the least is known."""
    rows = []
    for name in passes[0].names:
        maps = [one.at_best(name) for one in passes]
        pairs = [
            [one[place] for one in maps] for place in maps[0] if all(place in one for one in maps)
        ]
        if pairs:
            rows.append(min(pairs, key=_by_time))
    directions = [one.search.direction for one in passes]
    rows.sort(key=_by_time)
    return tuple(
        {direction: one for direction, (_, one) in zip(directions, pair, strict=True)}
        for pair in rows
    )


def _by_time(pair: Sequence[tuple[Score, Standing]]) -> tuple[bool, bool, float]:
    """What does not fit comes last, and bounds before it."""
    scores, standings = zip(*pair, strict=True)
    too_much, _ = _sum(scores)
    is_bound = any(one.is_bound for one in standings)
    return too_much, is_bound, sum(one.seconds for one in standings)


_NUM_PLACES = 4  # in which both passes are simulated, where the best of each want others


def _sum(scores: Sequence[Score]) -> Score:
    return any(bad for bad, _ in scores), sum(seconds for _, seconds in scores)


def _sum_of(simulated: Sequence[Simulated]) -> Score:
    return _sum([score for score, _, _ in simulated])


def _question(search: Search, chosen: Mapping[Direction, Standing]) -> Question:
    """What makes the plan of all passes."""
    questions = [
        ask_on(
            *(search.cluster, search.problem, search.num_ranks),
            **{"method": one.name, "directions": (direction,), **one.options},
        )
        for direction, one in chosen.items()
    ]
    return questions[0] if len(questions) == 1 else joined(*questions)
