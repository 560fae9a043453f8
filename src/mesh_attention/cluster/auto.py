"""The best plan over all methods, each pass apart: what `auto` finds when it may search.

Every method has its candidates (heads, queries and keys: Ulysses degree, tile, team, ring, node
patch) and its cuts (slices, chunks), as `explored.py` goes through them. Here all methods meet. One
whose least transfers and computation take longer than what was simulated already is not looked at
further, and neither is a setting whose bound (`one_rank.py`) is above it. Whatever is left out so
could not have won: the answer is never slower than any method's own best.

Both passes of a plan have the same shards on the same devices, so they are chosen together where
the best of each would want others. The layout is free unless it is given; what leaves tokens where
they are by default is found too (`unmoved`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesh_attention.cluster.best import Candidate, Place, candidate, finalists
from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.explored import Explored, Progress, Score, Search, a_search
from mesh_attention.cluster.planning import ask_on, tokens_stay
from mesh_attention.cluster.reasons import why
from mesh_attention.cluster.timeline import Timeline
from mesh_attention.cluster.waits import Overlap
from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.first_answer import methods_with
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import BOTH, Question, joined
from mesh_attention.plan.runs import Run, visible_pairs


@dataclass(frozen=True, slots=True)
class Standing:
    """A method at its best in one pass. `timeline` where it was simulated; otherwise no setting of
    it that was tried takes less than `seconds`, and `options` is the one that promised most."""

    name: str  # of the method
    options: dict[str, Any]
    seconds: float
    timeline: Timeline | None = None

    @property
    def is_bound(self) -> bool:
        return self.timeline is None


@dataclass(frozen=True, slots=True)
class BestOfAll:
    """`chosen` for each pass, `standings` of all methods in each, best first, and what
    is not known but bounded after what is; methods that take no
    setting are in `refused`, with the reason. `tried` counts settings. `unmoved`: the best with
    tokens where they are by default, which `chosen` may not have."""

    chosen: dict[Direction, Standing]
    standings: dict[Direction, tuple[Standing, ...]]
    refused: dict[str, str]
    reason: str
    tried: int
    question: Question
    unmoved: dict[Direction, Standing]

    @property
    def place(self) -> dict[str, Any]:
        """Options that say where tokens lie, if not where they are by default."""
        if self.unmoved is self.chosen:
            return {}
        plan, options = self.plan(), next(iter(self.chosen.values())).options
        alpha = {"alpha": options["alpha"]} if options.get("alpha") is not None else {}
        return {"layout": plan.q_layout.kind.value, **alpha}

    def plan(self) -> Plan:
        return self.question.plan()

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.chosen.values())


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
    total = len(methods) * len(searches)
    found = []
    for at, search in enumerate(searches):
        told = _Part(progress, at * len(methods), total)
        found.append(_OnePass(search, methods, told))
    chosen = _in_one_place(found)
    first = found[0]
    by_pass = {one.search.direction: best for one, best in zip(found, chosen, strict=True)}
    stays = all(one.timeline and tokens_stay(one.timeline.plan, options or {}) for one in chosen)
    unmoved = by_pass if stays else {one.search.direction: one.unmoved() for one in found}
    standings = {one.search.direction: one.standings() for one in found}
    return BestOfAll(
        by_pass,
        standings,
        first.refused,
        why(chosen, list(standings.values())),
        sum(one.tried for one in found),
        _question(first.search, by_pass),
        unmoved,
    )


class _Part:
    """Progress of one pass among several: methods done, of all in all passes."""

    def __init__(self, progress: Progress | None, begin: int, total: int) -> None:
        self._progress, self._done, self._total = progress, begin, total

    def __call__(self) -> None:
        self._done += 1
        if self._progress:
            self._progress(self._done, self._total)


class _OnePass:
    """All methods in one pass. `simulated` and `candidates` are what was looked at closely."""

    def __init__(self, search: Search, methods: Sequence[str], told: Callable[[], None]) -> None:
        self.search = search
        self.refused: dict[str, str] = {}
        self.simulated: list[tuple[Score, Candidate, Timeline]] = []
        self.candidates: list[Candidate] = []
        self._known: list[Explored] = []
        self._at_least: dict[str, float] = {}  # seconds of a method, at its best
        for name in methods:
            explored = Explored(search, name)
            try:
                explored.try_shapes()
                self._known.append(explored)
            except PlanError as error:
                self.refused[name] = str(error)
                told()
        if not self._known:
            name, text = next(iter(self.refused.items()))
            raise PlanError(text if len(methods) == 1 else f"no method fits; {name}: {text}")
        for explored in sorted(self._known, key=lambda one: one.all_in_order()[0].expected):
            least = self._at_least[explored.name] = self._least(explored)
            if not self.simulated or (False, least) < self.best[0]:
                self._search(explored)
            told()

    @property
    def best(self) -> tuple[Score, Candidate, Timeline]:
        return min(self.simulated, key=_in_order)

    def _least(self, explored: Explored) -> float:
        """Seconds that any cut of any shape of the method takes: all transfers, which are longer
        where they are cut, and on a rank with the mean of all work computation at the best rate of
        any kernel, slowed by them."""
        search, problem = self.search, self.search.problem
        pairs = visible_pairs([Run(0, problem.q_tokens)], [Run(0, problem.keys)], problem.rows)
        flops = problem.flops(int(pairs[0, 0]), backward=search.direction is Direction.BACKWARD)
        kernels = search.cluster.passes(search.direction).values()
        rate = max(rate.tflops for kernel in kernels for rate in kernel.rates.values()) * 1e12
        usual, sms = search.cluster.disturbance.compute_slowdown, search.cluster.gpu.sms
        lost = min(one.sm_margin / sms if one.sm_margin else usual for one in kernels)
        moving = explored.least_moving
        return max(moving, flops / search.num_ranks / rate + lost * moving)

    def _search(self, explored: Explored) -> None:
        explored.try_cuts()
        _, seconds = explored.all_in_order()[0].expected
        if not self.simulated or seconds <= _OTHER_WAYS * self.best[0][1]:
            explored.try_other_ways()
        best: Score | None = None  # of this method
        passed: list[Score] = []  # bounds of settings that cannot be the best of all
        for expected, least, setting in finalists(self.search, explored):
            hopeless = best is not None and expected >= best
            if hopeless or (self.simulated and least >= self.best[0]):
                passed.append(least)
                continue
            one = candidate(self.search, explored.name, setting)
            self.candidates.append(one)
            if not self.simulated or one.least < self.best[0]:
                score, _, _ = self.simulate(one)
                best = score if best is None else min(best, score)
            else:
                passed.append(one.least)
        if passed:
            _, seconds = min(passed)
            self._at_least[explored.name] = max(self._at_least[explored.name], seconds)

    @property
    def tried(self) -> int:
        return sum(one.tried for one in self._known)

    def simulate(self, one: Candidate) -> tuple[Score, Candidate, Timeline]:
        """Once. Methods that make the same plan in other words have the same timeline."""
        found: tuple[Score, Timeline] | None = None
        for known in self.simulated:
            if known[1] is one:
                return known
            if known[1].looks_like(one):
                plan = self.search.plan(one.name, one.options)
                same = plan.direction(self.search.direction)
                if same.programs[0] == known[2].one.programs[0]:
                    found = known[0], replace(known[2], plan=plan, one=same)
        if found is None:
            timeline = self.search.simulate(one.name, one.options)
            found = self.search.score_of(timeline), timeline
        self.simulated.append((found[0], one, found[1]))
        return self.simulated[-1]

    def places(self) -> dict[Place, Score]:
        """What to expect at best in each."""
        found: dict[Place, Score] = {}
        exact = {id(one): score for score, one, _ in self.simulated}
        for one in self.candidates:
            score = exact.get(id(one), one.expected)
            found[one.place] = min(found.get(one.place, score), score)
        return found

    def at(self, place: Place) -> tuple[Score, Candidate, Timeline]:
        """The best there, of what is known and of what may be better."""
        known = [s for s in self.simulated if s[1].place == place]
        best = min(known, key=_in_order, default=None)
        here = [one for one in self.candidates if one.place == place]
        for one in sorted(here, key=lambda one: one.expected):
            if best is None or max(one.expected, one.least) < best[0]:
                found = self.simulate(one)
                best = found if best is None else min(best, found, key=_in_order)
        assert best is not None
        return best

    def unmoved(self) -> Standing:
        """The best with tokens where they are by default."""
        given = self.search.given
        known = [s for s in self.simulated if tokens_stay(s[2].plan, given)]
        best = min(known, key=_in_order, default=None)
        stay = [(s, m.name) for m in self._known for s in m.all_in_order() if s.stays]
        for seen, name in sorted(stay, key=lambda pair: pair[0].expected)[:_NUM_UNMOVED]:
            if best is None or max(seen.expected, seen.least) < best[0]:
                found = self.simulate(candidate(self.search, name, seen.setting))
                best = found if best is None else min(best, found, key=_in_order)
        assert best is not None
        return _standing(best)

    def add(self, one: Candidate) -> None:
        """The setting of another pass, for this one: some place must be common."""
        self.candidates.append(candidate(self.search, one.name, one.options))

    def standings(self) -> tuple[Standing, ...]:
        """Every method at its best, the best first."""
        found = []
        for method in self._known:
            name = method.name
            simulated = [one for one in self.simulated if one[1].name == name]
            if simulated:
                score, one, timeline = min(simulated, key=_in_order)
                found.append((False, score, Standing(name, one.options, score[1], timeline)))
            else:
                seen, least = method.all_in_order()[0], self._at_least[name]
                found.append((True, (seen.expected[0], least), Standing(name, seen.setting, least)))
        return tuple(standing for *_, standing in sorted(found, key=lambda one: one[:2]))


def _in_order(simulated: tuple[Score, Candidate, Timeline]) -> tuple[Score, int]:
    """Of settings that are alike the one in fewer words."""
    return simulated[0], len(simulated[1].options)


def _in_one_place(passes: Sequence[_OnePass]) -> list[Standing]:
    """The best of each pass, where they have the same shards on the same devices; otherwise the
    two of a common place that take the least time together."""
    best = [one.best for one in passes]
    if len({one[1].place for one in best}) > 1:
        for wanted, other in ((best[0], passes[1]), (best[1], passes[0])):
            other.add(wanted[1])  # what it has in that place already may be much worse
        maps = [one.places() for one in passes]
        common = [place for place in maps[0] if place in maps[1]]
        common.sort(key=lambda place: _sum([one[place] for one in maps]))
        pairs = [[one.at(place) for one in passes] for place in common[:_NUM_PLACES]]
        best = min(pairs, key=lambda pair: _sum([score for score, _, _ in pair]))
    return [_standing(one) for one in best]


def _standing(simulated: tuple[Score, Candidate, Timeline]) -> Standing:
    score, one, timeline = simulated
    return Standing(one.name, one.options, score[1], timeline)


_OTHER_WAYS = 1.1  # times the best: other layouts and ways of combining bring less
_NUM_UNMOVED = 3  # settings that are simulated for it
_NUM_PLACES = 3  # in which both passes are simulated, where the best of each want others


def _sum(scores: Sequence[Score]) -> Score:
    return any(bad for bad, _ in scores), sum(seconds for _, seconds in scores)


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
