"""The setting of a method with the shortest simulated time. Pure: same question, same answer.

First every shape worth trying (tile, node patch, team, degree, ...: the method's own candidates),
cut into a few slices of heads and into a few chunks of rows. Then, for slices and for chunks since
steps do not lead from one to the other: the cut of the best shape, by doubling and halving while
that helps, and the cut found with the next best shapes. What the caller gave stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.load import a_cluster
from mesh_attention.cluster.planning import plan_on
from mesh_attention.cluster.simulate import simulate
from mesh_attention.cluster.timeline import Timeline
from mesh_attention.cluster.waits import Overlap
from mesh_attention.errors import PlanError
from mesh_attention.plan.arguments import choice
from mesh_attention.plan.build.slices import HeadSlices, usual_heads
from mesh_attention.plan.methods.mesh import MAX_TASKS
from mesh_attention.plan.methods.table import DEFAULT_METHOD, METHODS
from mesh_attention.plan.plan import Direction, a_direction
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import ask

NUM_REFINED = 3  # shapes that meet the cut found for the best one


@dataclass(frozen=True, slots=True)
class Best:
    """`options` make the plan of `timeline` (with `plan_on`); `tried` counts simulations."""

    timeline: Timeline
    options: dict[str, Any]
    tried: int


def find_best(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    *,
    method: str = DEFAULT_METHOD,
    direction: Direction | str = Direction.FORWARD,
    options: Mapping[str, Any] | None = None,
    overlap: Overlap | str = Overlap.EVENTS,
    kernel: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Best:
    """Never slower than the method's own choice. Settings that fit into the GPU's memory win over
    those that do not; those that the method refuses are passed over, unless it refuses all."""
    cluster, overlap = a_cluster(cluster), choice(Overlap, "overlap", overlap)
    num_ranks = ask(problem, num_ranks, method=method).num_ranks
    if options is not None and not isinstance(options, Mapping):
        raise PlanError(f"options={options!r}: must be a mapping of names to values")
    given = dict(options or {})
    one = a_direction(direction)

    def measure(setting: dict[str, Any]) -> Timeline:
        plan = plan_on(cluster, problem, num_ranks, method=method, directions=(one,), **setting)
        return simulate(plan, cluster, one, overlap=overlap, kernel=kernel)

    search = _Search(measure, progress)
    search.attempt(given)  # the method's own choice, and its refusal of what was given
    shapes = METHODS[method].candidates(problem, num_ranks, cluster.node.ranks)
    free = free_names(METHODS[method].options(), given)
    search.expected += 2 * len(shapes) + 40 if free else len(shapes)
    begun: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # by whether heads are sliced
    for shape in ({}, *shapes):
        for cut in first_cuts(problem, shape | given):
            setting = shape | given | cut.options(free)
            search.attempt(setting)
            begun[cut.heads is not None].append(setting)
    for settings in begun.values() if free else ():
        _refine(search, free, problem, search.ranking(settings))
    return search.answer()


Score = tuple[bool, float]
Key = tuple[tuple[str, Any], ...]


class _Search:
    """Settings tried so far, each once."""

    def __init__(
        self,
        measure: Callable[[dict[str, Any]], Timeline],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._measure, self._progress = measure, progress
        self._scores: dict[Key, Score | None] = {}
        self._best: tuple[Score, dict[str, Any], Timeline] | None = None
        self._refusal: PlanError | None = None
        self.expected = 1  # simulations, about

    def attempt(self, setting: dict[str, Any]) -> Score | None:
        """How good it is; None where the method refuses it."""
        key = tuple(sorted(setting.items()))
        if key in self._scores:
            return self._scores[key]
        score = None
        try:
            timeline = self._measure(setting)
        except PlanError as error:
            self._refusal = self._refusal or error
        else:
            memory = timeline.cluster.gpu.memory_gib * 2**30
            score = (timeline.peak_bytes > memory, timeline.runtime_seconds)
            if self._best is None or score < self._best[0]:
                self._best = score, setting, timeline
        self._scores[key] = score
        if self._progress:
            done = len(self._scores)
            self._progress(done, max(done, self.expected))
        return score

    def ranking(self, settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that the method takes, best first."""
        scored = [(score, s) for s in settings if (score := self.attempt(s)) is not None]
        return [setting for _, setting in sorted(scored, key=lambda pair: pair[0])]

    def answer(self) -> Best:
        if self._best is None:
            assert self._refusal is not None
            raise self._refusal
        _, setting, timeline = self._best
        tried = sum(score is not None for score in self._scores.values())
        return Best(timeline, setting, tried)


def _refine(
    search: _Search, free: Sequence[str], problem: Problem, ranking: Sequence[dict[str, Any]]
) -> None:
    if not ranking:
        return
    shapes: list[dict[str, Any]] = []
    for setting in ranking:
        shape = {name: value for name, value in setting.items() if name not in free}
        if shape not in shapes:
            shapes.append(shape)
    best, lead = _climb(search, shapes[0], Cut.of(ranking[0], problem), free)
    for shape in shapes[1:NUM_REFINED]:
        here = replace(best, held=Cut.of(shape, problem).held)
        score = search.attempt(shape | here.options(free))
        if score is not None and (lead is None or score < lead):
            best, lead = _climb(search, shape, here, free)


def _climb(
    search: _Search, shape: dict[str, Any], cut: Cut, free: Sequence[str]
) -> tuple[Cut, Score | None]:
    """From a cut to better neighbours until there are none."""
    best, score = cut, search.attempt(shape | cut.options(free))
    while True:
        found = best
        for near in best.neighbours():
            other = search.attempt(shape | near.options(free))
            if other is not None and (score is None or other < score):
                found, score = near, other
        if found == best:
            return best, score
        best = found


_NAMES = ("chunks", "head_slices")


@dataclass(frozen=True, slots=True)
class Cut:
    """`heads` None: all of the `held` KV heads at once."""

    chunks: tuple[int, int]
    heads: HeadSlices | None
    held: int

    @staticmethod
    def of(setting: Mapping[str, Any], problem: Problem) -> Cut:
        held = max(1, problem.kv_heads // (setting.get("ulysses") or 1))
        return Cut(setting.get("chunks") or (1, 1), setting.get("head_slices"), held)

    def options(self, free: Sequence[str]) -> dict[str, Any]:
        """As options, of those names that are free to be chosen."""
        whole = {"chunks": self.chunks, "head_slices": self.heads}
        return {name: whole[name] for name in free if whole[name] is not None}

    def neighbours(self) -> Iterator[Cut]:
        """Twice or half as many, or moved from one side to the other."""
        kq, kkv = self.chunks
        for chunks in (
            (2 * kq, kkv),
            (kq, 2 * kkv),
            (kq // 2, kkv),
            (kq, kkv // 2),
            (2 * kq, kkv // 2),
            (kq // 2, 2 * kkv),
        ):
            if min(chunks) >= 1 and chunks[0] * chunks[1] <= MAX_TASKS:
                yield Cut(chunks, self.heads, self.held)
        first, most = self.heads or (self.held, self.held)
        for heads in (
            (2 * first, most),
            (first // 2, most),
            (first, 2 * most),
            (first, most // 2),
            (2 * first, 2 * most),
            (first // 2, most // 2),
            (first // 4, most // 2),
        ):
            if 1 <= heads[0] <= heads[1] <= self.held:
                all_at_once = heads == (self.held, self.held)
                yield Cut(self.chunks, None if all_at_once else heads, self.held)


def free_names(options: Collection[str], given: Mapping[str, Any]) -> tuple[str, ...]:
    """What of a cut the method has and the caller did not give, for either pass."""
    return tuple(
        name
        for name in _NAMES
        if name in options and name not in given and f"backward_{name}" not in given
    )


def first_cuts(problem: Problem, shape: Mapping[str, Any]) -> tuple[Cut, ...]:
    """Two to begin with: slices of heads, where there are several, and chunks of rows."""
    held = Cut.of(shape, problem).held
    heads = usual_heads(problem, problem.kv_heads // held)
    chunks = Cut((2, 2), None, held)
    return (chunks,) if heads is None else (Cut((1, 1), heads, held), chunks)
