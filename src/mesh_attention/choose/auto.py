"""What `auto` chooses: the best plan over all methods, both passes together.

`find_best` searches; `find_default` is the same search with the effort that a constructor can
afford, and leaves tokens where they are by default. Both passes of a plan have the same shards on
the same devices, so they are chosen together where the best of each would want others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_attention.choose.effort import DEFAULT, DEFAULT_OF_MANY, SEARCH, SearchEffort
from mesh_attention.choose.search import (
    PassSearch,
    Place,
    Score,
    Scored,
    SearchQuestion,
)
from mesh_attention.choose.shapes import default_layout, shows_little
from mesh_attention.cost.collector import collector_paused
from mesh_attention.cost.planning import PLACES, ask_on
from mesh_attention.cost.timeline import Timeline
from mesh_attention.cost.waits import Overlap
from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import a_cluster
from mesh_attention.plan.language.plan import Direction, Plan, a_direction
from mesh_attention.plan.methods.question import BOTH, Question, joined
from mesh_attention.plan.methods.table import METHODS, all_options, methods_with
from mesh_attention.plan.problem.arguments import choice, number
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.problem import Problem

Progress = Callable[[int, int], None]

_FEW_RANKS = 64
_PLACES = 3  # in which both passes are simulated, where the best of each want others


@dataclass(frozen=True)
class PlanChoice:
    """`chosen` for each pass. `unmoved`: the best with tokens where they are by default, which is
    `chosen` unless another place is faster. `methods`: each method at its best, passes in a common
    place, the best first. `refused`: methods that took no setting, with the reason."""

    asked: SearchQuestion
    chosen: dict[Direction, Scored]
    unmoved: dict[Direction, Scored]
    methods: dict[str, dict[Direction, Scored]]
    refused: dict[str, str]
    tried: int

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.chosen.values())

    @property
    def place(self) -> dict[str, Any]:
        """Options that say where tokens lie, if not where they are by default."""
        if all(one.stays for one in self.chosen.values()):
            return {}
        options = next(iter(self.chosen.values())).options
        where = {name: options[name] for name in PLACES if options.get(name) is not None}
        return {"layout": self.plan().q_layout.kind.value, **where}

    @property
    def is_simulated(self) -> bool:
        return all(one.timeline is not None for one in self.chosen.values())

    @property
    def question(self) -> Question:
        """What makes the plan of all passes."""
        return question_of(
            *(self.asked.cluster, self.asked.problem, self.asked.num_ranks),
            {d: (one.name, one.options) for d, one in self.chosen.items()},
        )

    def plan(self) -> Plan:
        return self.question.plan()

    def timeline(self, direction: Direction) -> Timeline:
        """Of what was chosen for a pass; simulated now where an estimate was enough to choose."""
        one = self.chosen[direction]
        return one.timeline or self.asked.simulate(direction, one.name, one.options)


def question_of(
    cluster: Cluster,
    problem: Problem,
    num_ranks: int,
    chosen: Mapping[Direction, tuple[str, Mapping[str, Any]]],
) -> Question:
    """One question from a method and its options for each pass."""
    questions = [
        ask_on(
            *(cluster, problem, num_ranks),
            **{"method": method, "directions": (direction,), **options},
        )
        for direction, (method, options) in chosen.items()
    ]
    return questions[0] if len(questions) == 1 else joined(*questions)


@collector_paused()
def find_best(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    *,
    directions: Sequence[Direction | str] = BOTH,
    options: Mapping[str, Any] | None = None,
    method: str | None = None,
    overlap: Overlap | str = Overlap.EVENTS,
    kernel: str | None = None,
    effort: SearchEffort = SEARCH,
    moves_tokens: bool = True,
    progress: Progress | None = None,
) -> PlanChoice:
    """Over all methods that have the options given, or of one method. Pure: same question, same
    answer. `moves_tokens`: layouts and places are searched too, where they are not given."""
    if options is not None and not isinstance(options, Mapping):
        raise PlanError(f"options={options!r}: must be a mapping of names to values")
    given = _read({name: x for name, x in (options or {}).items() if x is not None})
    cluster, num_ranks = a_cluster(cluster), number("ranks", num_ranks)
    if not isinstance(problem, Problem):
        raise PlanError(f"problem={problem!r}: must be a Problem")
    if method is not None and (not isinstance(method, str) or method not in METHODS):
        raise PlanError(f"unknown method {method!r}; known methods: {', '.join(METHODS)}")
    names = methods_with(given) if method is None else (method,)
    if not effort.every_name:
        few = num_ranks <= cluster.node.ranks or problem.q_tokens < 2 * num_ranks
        names = _likely(names, rows=few or shows_little(problem)) or names
    count = 0

    def tell() -> None:
        nonlocal count
        count += 1
        if progress:
            progress(count, max(count, expected))

    layouts = _layouts(problem, given, moves_tokens=moves_tokens and kernel is None)
    expected = 60 * len(directions) * len(layouts)
    asked = SearchQuestion(
        *(problem, num_ranks, cluster, given, names, effort),
        overlap=choice(Overlap, "overlap", overlap),
        kernel=kernel,
        tell=tell,
    )
    passes = [_Pass(asked, a_direction(one), layouts) for one in directions]
    for one in passes:
        one.run(moves_tokens=moves_tokens)
    if not all(one.scored for one in passes):
        for one in passes:  # with nothing but the caller's options, a method says what is wrong
            asked.plan(one.direction, names[0], given)
        raise next(iter(passes[0].refusals.values()), _nothing_fits(given))
    stay = all(any(scored.stays for scored in one.scored) for one in passes)
    unmoved = _in_one_place(passes, stays=stay)
    chosen = _in_one_place(passes) if moves_tokens else unmoved
    if _sum(unmoved) <= _sum(chosen):
        chosen = unmoved
    return PlanChoice(
        asked,
        {one.direction: one for one in chosen},
        {one.direction: one for one in unmoved},
        _methods(passes) if effort.every_name else {},
        {
            name: str(error)
            for name, error in passes[0].refusals.items()
            if not any(one.name == name for one in passes[0].scored)
        },
        sum(one.tried for one in passes),
    )


def find_default(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    directions: Sequence[Direction | str] = BOTH,
) -> PlanChoice:
    """What every door takes where nobody says a method."""
    return find_best(
        *(problem, num_ranks, cluster),
        directions=directions,
        options=options,
        effort=DEFAULT if number("ranks", num_ranks) <= _FEW_RANKS else DEFAULT_OF_MANY,
        moves_tokens=False,
    )


def _nothing_fits(given: Mapping[str, Any]) -> PlanError:
    said = ", ".join(f"{name}={value}" for name, value in given.items())
    return PlanError(f"no setting of any method takes {said}; leave something out")


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    """As methods declare them; those that no method has are refused later, by name."""
    known = all_options()
    return {n: known[n][0].read(x) if n in known else x for n, x in options.items()}


def _likely(names: Sequence[str], *, rows: bool) -> tuple[str, ...]:
    """Plain boxes; and what sends single rows, where the mask hides many or ranks are few."""
    known = [(name, METHODS[name]) for name in names]
    return tuple(name for name, one in known if one.is_plain_box or (rows and one.by_stretches))


def _layouts(
    problem: Problem, given: Mapping[str, Any], *, moves_tokens: bool
) -> list[LayoutKind | None]:
    """The layout that tokens have by default, and under a mask that shows little contiguous
    shards. None: as given."""
    if given.get("layout") is not None:
        return [None]
    first = default_layout(problem)
    free = moves_tokens or given.get("relayout")  # the caller's shards are contiguous anyway
    if free and shows_little(problem):
        return [first, LayoutKind.CONTIGUOUS]
    return [first]


class _Pass:
    """The searches of one pass, one in each layout."""

    def __init__(
        self, asked: SearchQuestion, direction: Direction, layouts: Sequence[LayoutKind | None]
    ) -> None:
        self.direction = direction
        self._searches = [PassSearch(asked, direction, layout) for layout in layouts]
        self._of: dict[str, PassSearch] = {}

    def run(self, *, moves_tokens: bool) -> None:
        for one in self._searches:
            one.run(stays=not moves_tokens)

    @property
    def scored(self) -> list[Scored]:
        found = [one for search in self._searches for one in search.scored]
        return sorted(found, key=lambda one: (one.score, not one.stays, len(one.options)))

    @property
    def refusals(self) -> dict[str, PlanError]:
        found: dict[str, PlanError] = {}
        for one in self._searches:
            found = one.refusals | found
        return found

    @property
    def tried(self) -> int:
        return len(self.scored)

    def best(self, scored: Sequence[Scored]) -> Scored | None:
        return self._searches[0].best_of(scored)

    def add(self, method: str, options: Mapping[str, Any]) -> None:
        self._searches[0].attempt(method, dict(options))


def _in_one_place(passes: Sequence[_Pass], *, stays: bool = False) -> list[Scored]:
    """The best of each pass where both have the same shards on the same devices; otherwise the two
    of a common place that take the least time together. `stays`: of settings that leave tokens
    where they are."""

    def scored(one: _Pass) -> list[Scored]:
        return [each for each in one.scored if each.stays or not stays]

    best = [one.best(scored(one)) for one in passes]
    found = [one for one in best if one is not None]
    if len({one.place for one in found}) <= 1:
        return found
    for mine, other in ((0, 1), (1, 0)):  # the setting of one pass may do for the other
        passes[other].add(found[mine].name, found[mine].options)
    by_place = [_by_place(scored(one)) for one in passes]
    common = [place for place in by_place[0] if place in by_place[1]]
    common.sort(key=lambda place: _sum([each[place][0] for each in by_place]))
    pairs = []
    for place in common[:_PLACES]:
        pair = [one.best(each[place]) for one, each in zip(passes, by_place, strict=True)]
        pairs.append([one for one in pair if one is not None])
    return min(pairs, key=_sum)


def _by_place(scored: Sequence[Scored]) -> dict[Place, list[Scored]]:
    found: dict[Place, list[Scored]] = {}
    for one in scored:
        found.setdefault(one.place, []).append(one)
    return found


def _methods(passes: Sequence[_Pass]) -> dict[str, dict[Direction, Scored]]:
    """Each method at its best, as far as it was simulated; passes in a common place."""
    rows: dict[str, list[Scored]] = {}
    names = dict.fromkeys(one.name for each in passes for one in each.scored)
    for name in names:
        by_place = [_by_place([s for s in one.scored if s.name == name]) for one in passes]
        common = [place for place in by_place[0] if all(place in each for each in by_place)]
        if not common:
            continue
        place = min(common, key=lambda place: _sum([each[place][0] for each in by_place]))
        rows[name] = [each[place][0] for each in by_place]
    order = sorted(rows, key=lambda name: _sum(rows[name]))
    return {name: {one.direction: one for one in rows[name]} for name in order}


def _sum(scored: Sequence[Scored]) -> Score:
    return any(not one.fits for one in scored), sum(one.seconds for one in scored)
