"""All methods in one pass, layout by layout: who is at its best, where, and how good that is.

In a layout, a method whose least transfers and computation take longer than what was simulated in
it already is not looked at further, and neither is a setting whose bound (`estimate.py`) is above
it. What leaves tokens where they are by default is compared with its like only, since it has to be
the best of these too. Where all ranks are many, what three of them expect is enough to pass over
what is slower: in 173 simulations of 48 to 128 ranks none took less than 0.996 of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mesh_attention.choose.best import Candidate, candidate, finalists
from mesh_attention.choose.explored import Explored, Place
from mesh_attention.choose.search import FEW_RANKS, Score, Search, key_of
from mesh_attention.cost.timeline import Timeline
from mesh_attention.errors import PlanError
from mesh_attention.plan.layout import LayoutKind
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.runs import Run, visible_pairs

_OTHER_WAYS = 1.1  # times the best: other ways of combining, and stripes, bring less
_EXPECTED = 1.02  # times the best: what takes longer by three ranks does so by all
_LONG_SIMULATION = 1.15  # times what is expected: methods without copies come later
_NUM_TRIED = 3  # settings that are looked at in a place where none was simulated

Simulated = tuple[Score, Candidate, Timeline]


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


def standing_of(simulated: Simulated) -> Standing:
    score, one, timeline = simulated
    return Standing(one.name, one.options, score[1], timeline)


class _Bounds:
    """Of a layout: the best of what stays where it is and of all, so far; and a limit."""

    def __init__(self, limit: Score | None) -> None:
        self._limit = limit
        self.best: dict[bool, Score | None] = {True: None, False: None}  # by whether it stays

    def add(self, one: Candidate, score: Score) -> None:
        for stays in (True, False) if one.stays else (False,):
            best = self.best[stays]
            self.best[stays] = score if best is None else min(best, score)

    def allow(self, least: Score, *, stays: bool) -> bool:
        best = self.best[stays]
        return (best is None or least < best) and (self._limit is None or least < self._limit)

    def expect(self, one: Candidate, *, stays: bool) -> bool:
        """Whether it may be the best by what is expected of it."""
        known = [score for score in (self.best[stays], self._limit) if score is not None]
        return all(one.expected <= (too_large, _EXPECTED * s) for too_large, s in known)


class OnePass:
    """`simulated` and `candidates` are what was looked at closely; `searched` has the best score in
    each layout, where a method takes it."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.searched: dict[LayoutKind | None, Score | None] = {}
        self.simulated: list[Simulated] = []
        self.candidates: list[Candidate] = []
        self._known: list[Explored] = []
        self._at_least: dict[tuple[str, LayoutKind | None], float] = {}  # of a method in a layout
        self._refusals: dict[str, str] = {}

    def search_in(
        self,
        layout: LayoutKind | None,
        methods: Sequence[str],
        limit: Score | None,
        told: Callable[[], None],
    ) -> None:
        """What is not better than the limit is of no use. All transfers of a method are counted in
        what it takes at least, which are longer where they are cut."""
        if limit is not None and limit <= (False, self.least_in(layout)):
            self.searched[layout] = None
            for _ in methods:
                told()
            return
        here: list[Explored] = []
        before = {one.name: one for one in self._known}
        for name in methods:
            explored = Explored(self.search, name, layout=layout)
            try:
                if not explored.follows or not before:
                    explored.try_shapes()
                    here.append(explored)
                elif name in before and self._is_near_the_best(before[name]):
                    explored.try_what_is_good(before[name])
                    here.append(explored)
                else:
                    told()
            except PlanError as error:
                self._refusals.setdefault(name, str(error))
                told()
        self._known += here
        if not self._known:
            name, text = next(iter(self._refusals.items()))
            raise PlanError(text if len(methods) == 1 else f"no method fits; {name}: {text}")
        bounds = _Bounds(limit)
        for explored in sorted(here, key=_soon):
            self._search(explored, bounds)
            told()
        self.searched[layout] = bounds.best[False]

    @property
    def names(self) -> list[str]:
        """Of the methods that take a setting."""
        return list(dict.fromkeys(one.name for one in self._known))

    @property
    def refused(self) -> dict[str, str]:
        """Methods that take no layout, and why not the first."""
        return {name: text for name, text in self._refusals.items() if name not in self.names}

    @property
    def tried(self) -> int:
        return sum(one.tried for one in self._known)

    @property
    def best(self) -> Simulated:
        return min(self.simulated, key=_in_order)

    def least_in(self, layout: LayoutKind | None, moving: float = 0.0) -> float:
        """Seconds that any plan takes in which so much is moved: on a rank with the mean of all
        work, computation at the best rate of any kernel for this layout, slowed by transfers."""
        search, problem = self.search, self.search.problem
        pairs = visible_pairs([Run(0, problem.q_tokens)], [Run(0, problem.keys)], problem.rows)
        flops = problem.flops(int(pairs[0, 0]), backward=search.direction is Direction.BACKWARD)
        kernels = [
            rates
            for rates in search.cluster.passes(search.direction).values()
            if layout is not LayoutKind.STRIPED or not rates.keys_in_runs
        ]
        rate = max(rate.tflops for kernel in kernels for rate in kernel.rates.values()) * 1e12
        usual, sms = search.cluster.disturbance.compute_slowdown, search.cluster.gpu.sms
        found = [one.lost(sms) for one in kernels]
        lost = min(usual if one is None else one for one in found)
        return max(moving, flops / search.num_ranks / rate + lost * moving)

    def _search(self, explored: Explored, bounds: _Bounds) -> None:
        which = sorted({one.stays for one in explored.all_in_order()})
        key = explored.name, explored.layout
        least_of_all = self.least_in(explored.layout, explored.least_moving)
        self._at_least[key] = least_of_all
        if not bounds.allow((False, least_of_all), stays=which[-1]):
            return
        passed: list[Score] = []  # bounds of settings that cannot be the best
        if not explored.follows:
            explored.try_cuts()
            explored.try_even_chunks()
            explored.try_short_start()
            best, (_, seconds) = bounds.best[which[-1]], explored.all_in_order()[0].expected
            if best is None or seconds <= _OTHER_WAYS * best[1]:
                explored.try_other_ways()
        for stays in which:
            mine: Score | None = None  # the best of this method
            allow = partial(bounds.allow, stays=stays)
            found = finalists(self.search, explored, in_place=stays, may_win=allow)
            for expected, least, setting in found:
                hopeless = mine is not None and expected >= mine
                if hopeless or not allow(least):
                    passed.append(least)
                    continue
                one = candidate(self.search, explored.name, setting)
                self.candidates.append(one)
                few = self.search.num_ranks <= FEW_RANKS
                if allow(one.least) and (few or bounds.expect(one, stays=stays)):
                    score, _, _ = self.simulate(one)
                    bounds.add(one, score)
                    mine = score if mine is None else min(mine, score)
                else:
                    passed.append(one.least)
        if passed:
            self._at_least[key] = max(least_of_all, min(passed)[1])

    def _is_near_the_best(self, explored: Explored) -> bool:
        return explored.all_in_order()[0].expected[1] <= _OTHER_WAYS * self.best[0][1]

    def simulate(self, one: Candidate) -> Simulated:
        """Once. Methods that make the same plan in other words have the same timeline."""
        found: tuple[Score, Timeline] | None = None
        for known in self.simulated:
            if known[1].name == one.name and known[1].options == one.options:
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

    def unmoved(self) -> Simulated | None:
        """The best with tokens where they are by default."""
        known = [one for one in self.simulated if one[1].stays]
        return min(known, key=_in_order, default=None)

    def at_best(self, name: str | None = None) -> dict[Place, tuple[Score, Standing]]:
        """A method, or all, in each place: the best that was simulated there, or else what promises
        most, with what is expected and a bound."""
        exact: dict[Place, tuple[Score, Standing]] = {}
        for one in sorted(self.simulated, key=_in_order):
            if name in (None, one[1].name):
                exact.setdefault(one[1].place, (one[0], standing_of(one)))
        seen: dict[Place, tuple[Score, Standing]] = {}
        for explored in self._known:
            for tried in explored.all_in_order() if name in (None, explored.name) else ():
                if tried.place not in seen or tried.expected < seen[tried.place][0]:
                    least = self._at_least[explored.name, explored.layout]
                    standing = Standing(explored.name, tried.setting, least)
                    seen[tried.place] = tried.expected, standing
        return seen | exact

    def places(self) -> dict[Place, Score]:
        """What to expect at best in each."""
        found = {place: score for place, (score, _) in self.at_best().items()}
        simulated = {(one.name, key_of(one.options)) for _, one, _ in self.simulated}
        for one in self.candidates:
            if (one.name, key_of(one.options)) not in simulated:
                found[one.place] = min(found.get(one.place, one.expected), one.expected)
        return found

    def at(self, place: Place) -> Simulated:
        """The best there, of what is known and of what may be better."""
        known = [s for s in self.simulated if s[1].place == place]
        best = min(known, key=_in_order, default=None)
        here = [one for one in self.candidates if one.place == place]
        if best is None:
            tried = [
                (seen.expected, method.name, seen.setting)
                for method in self._known
                for seen in method.all_in_order()
                if seen.place == place
            ]
            for _, name, setting in sorted(tried, key=lambda one: one[0])[:_NUM_TRIED]:
                here.append(candidate(self.search, name, setting))
        for one in sorted(here, key=lambda one: one.expected):
            if best is None or max(one.expected, one.least) < best[0]:
                found = self.simulate(one)
                best = found if best is None else min(best, found, key=_in_order)
        assert best is not None
        return best

    def add(self, one: Candidate) -> None:
        """The setting of another pass, for this one: some place must be common."""
        with suppress(PlanError):
            self.candidates.append(candidate(self.search, one.name, one.options))

    def standings(self) -> tuple[Standing, ...]:
        """Every method at its best, the best first, and bounds last."""
        found = []
        for name in self.names:
            mine = [(one.is_bound, (bad, one.seconds), one) for (bad, _), one in self._all(name)]
            found.append(min(mine, key=lambda one: one[:2]))
        return tuple(standing for *_, standing in sorted(found, key=lambda one: one[:2]))

    def _all(self, name: str) -> list[tuple[Score, Standing]]:
        return list(self.at_best(name).values())


def _soon(explored: Explored) -> Score:
    """What promises most first, and of what promises as much that of which a few ranks stand for
    all: simulated in no time, it keeps others from being simulated at all."""
    first = explored.all_in_order()[0]
    too_large, seconds = first.expected
    return too_large, seconds * (1.0 if first.copies > 1 else _LONG_SIMULATION)


def _in_order(simulated: Simulated) -> tuple[Score, bool, int]:
    """Of settings that are alike the one that leaves tokens where they are, in fewer words."""
    score, one, _ = simulated
    return score, not one.stays, len(one.options)
