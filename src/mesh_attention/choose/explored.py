"""Settings of one method in one pass that were looked at, by what one rank sees of each.

First every shape worth trying (tile, node patch, team, degree, ...: the method's own candidates),
then the best of them cut into a few slices of heads and into a few chunks of rows. Then, for slices
and for chunks since steps do not lead from one to the other: the cut of the best shape, by doubling
and halving while that helps, and the cut found with the next best shapes. Then even chunks, where
ranks wait for each other. Last, the best of all that with other ways of combining. What the caller
gave stays as it is.

Layouts are searched one after the other (`layouts_of`), each as if it were the only one: what is
the best in one of them need not be near the best in another. Of many ranks that would take long;
there stripes, which move what zigzag does, are tried with what was the best in zigzag.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mesh_attention.choose.climb import refine
from mesh_attention.choose.cuts import first_cuts, free_names
from mesh_attention.choose.search import Key, Progress, Score, Search, key_of
from mesh_attention.cost.planning import tokens_stay
from mesh_attention.errors import PlanError
from mesh_attention.plan.build.reduce import Combine
from mesh_attention.plan.layout import LayoutKind
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.seen import usual_layout
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem

NUM_SHAPES = 3  # that are cut
HOPEFUL = 1.4  # times the best shape as it is: slower ones are not cut
NEAR = 1.02  # times the best so far: other cuts are not refined
RANKS_APART = 24  # at most, where stripes are searched as if they were the only layout
NUM_IN_STRIPES = 4  # settings that are tried there otherwise
NUM_EVEN = 3  # settings that are tried in even chunks
NUM_SHORT = 6  # settings in chunks of keys that are tried with a short start
STRIPES_SEEN = 64  # tokens a rank at most, where what is seen is looked for in stripes
RANKS_AND_STEPS = 640  # settings that are tried to refine a cut, times ranks: each takes longer
MIN_STEPS = 14  # however many ranks there are

Layouts = tuple[LayoutKind | None, ...]
Place = tuple[str, tuple[int, ...]]  # layout, and the device of each logical rank


def place_of(plan: Plan) -> Place:
    return str(plan.q_layout.to_json()), plan.devices


class TriedSetting(NamedTuple):
    """A setting by one rank: the score that is expected, and the least. `stays`: tokens are where
    they are by default. `copies`: ranks for which one may stand."""

    expected: Score
    least: Score
    setting: dict[str, Any]
    num_operations: int  # of all ranks
    place: Place
    combined: str | None  # how partial results are, where they are
    stays: bool
    copies: int


class Explored:
    """Settings of a method in a layout tried so far, each once, with what one rank expects of
    them. Without one they are in what was given, or in the method's own."""

    def __init__(
        self,
        search: Search,
        method: str,
        progress: Progress | None = None,
        *,
        layout: LayoutKind | None = None,
    ) -> None:
        self.name, self.layout = method, layout
        self._search, self._progress = search, progress
        self._known: dict[Key, TriedSetting | None] = {}
        self._refusal: PlanError | None = None
        self.least_moving = math.inf  # seconds of all transfers, of any setting
        self._most: float = math.inf  # settings to try
        self._best_seconds = math.inf  # of what fits into memory
        self.given = dict(search.given)
        if layout is not None and layout is not _own_layout(method, search.problem.mask):
            self.given["layout"] = layout.value
        self.free = free_names(METHODS[method].options(), self.given)
        node = search.cluster.node.ranks
        self._shapes = METHODS[method].candidates(search.problem, search.num_ranks, node)
        self._expected = 1 + len(self._shapes) + (60 if self.free else 0)  # settings, about

    def try_all(self, before: Explored | None = None) -> None:
        """`before`: what is known in the layout that tokens have by default."""
        if before is not None and self.follows:
            self.try_what_is_good(before)
            return
        self.try_shapes()
        self.try_cuts()
        self.try_even_chunks()
        self.try_short_start()
        self.try_other_ways()

    @property
    def follows(self) -> bool:
        """Whether another layout is to be searched first, and the best of it is tried here."""
        return self.layout is LayoutKind.STRIPED and self._search.num_ranks > RANKS_APART

    def try_what_is_good(self, before: Explored) -> None:
        """The best settings of another layout, in this one."""
        self._refuse_fragments()
        place = {name: value for name, value in self.given.items() if name == "layout"}
        for one in before.all_in_order()[:NUM_IN_STRIPES]:
            self.attempt(one.setting | place)
        self.attempt(self.given)
        if not self.tried:
            assert self._refusal is not None
            raise self._refusal

    def try_shapes(self) -> None:
        """As they are, and the method's own choice; its refusal where it takes none of them."""
        self._refuse_fragments()
        self.attempt(self.given)
        for shape in self._shapes:
            self.attempt(shape | self.given | self._uncut)
        if not self.tried:
            assert self._refusal is not None
            raise self._refusal

    @property
    def _uncut(self) -> dict[str, Any]:
        return {"chunks": (1, 1)} if "chunks" in self.free else {}

    def try_cuts(self) -> None:
        """Of the best shapes, and from the best cut on to better ones."""
        problem, free, given = self._search.problem, self.free, self.given
        rotates = METHODS[self.name].rotates
        if not free:
            return
        shapes = self.ranking(shape | given | self._uncut for shape in self._shapes)
        begun: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # by whether heads are cut
        hopeful = [one for one in _of_each_degree(shapes) if self._is_near_the_best(one, HOPEFUL)]
        for setting in (given, *hopeful):
            shape = {name: value for name, value in setting.items() if name not in free}
            for cut in first_cuts(problem, self._held(shape), rotates=rotates):
                begun[cut.heads is not None].append(shape | cut.options(free))
        rankings = [self.ranking(settings) for settings in begun.values()]
        for ranking in rankings:
            self._most = self.tried + max(MIN_STEPS, RANKS_AND_STEPS // self._search.num_ranks)
            if ranking and self._is_near_the_best(ranking[0], NEAR):
                refine(self, free, self._held, ranking)
        self._most = math.inf

    def try_other_ways(self) -> None:
        """The best with other ways of combining what ranks of several nodes computed."""
        best, options = self.all_in_order()[0], METHODS[self.name].options()
        several = self._search.num_ranks > self._search.cluster.node.ranks
        if several and "combine" in options and self.given.get("combine") is None:
            for way in _ways_to_combine(self._search.problem):
                if way.value != best.combined:
                    self.attempt(best.setting | {"combine": way.value})

    def try_even_chunks(self) -> None:
        """Of settings that take little time but for ranks that wait for each other, as under a
        causal mask those in many chunks do: the same in chunks of as much work. Not forward, where
        the kernels for calls without a mask are faster than those that even chunks need."""
        if self._search.direction is Direction.FORWARD:
            return
        if "even_chunks" not in METHODS[self.name].options() or "even_chunks" in self.given:
            return
        if self._search.problem.mask.is_full or self.layout is not LayoutKind.ZIGZAG:
            return
        known = sorted((one for one in self._known.values() if one), key=lambda one: one.least)
        cut = [one for one in known if one.setting.get("chunks", (1, 1)) != (1, 1)]
        found = self.ranking(one.setting | {"even_chunks": True} for one in cut[:NUM_EVEN])
        # For chunks that are alike another tile, or a finer cut of keys, may be the best.
        for best in found[:1]:
            tiles = [one["tile"] for one in self._shapes if _differ_in_tile(one, best)]
            found = self.ranking([best, *(best | {"tile": tile} for tile in tiles)])
        for best in found[:1]:
            kq, kkv = best["chunks"]
            self.attempt(best | {"chunks": (kq, 2 * kkv)})

    def try_short_start(self) -> None:
        """Of the best settings in chunks of keys: the same with a short first one. Not backward,
        where a call lasts long, and no computation waits so long for its first transfers."""
        if self._search.direction is Direction.BACKWARD:
            return
        if "short_start" not in METHODS[self.name].options() or "short_start" in self.given:
            return
        known = [one for one in self.all_in_order() if one.setting.get("chunks", (1, 1))[1] > 1]
        for one in known[:NUM_SHORT]:
            self.attempt(one.setting | {"short_start": True})

    def other_tiles(self, shape: dict[str, Any]) -> list[dict[str, Any]]:
        """Where units exchange heads, and a node has a patch of them: which tile is the best
        depends on the cut, since what tiles gather costs little there."""
        if not shape.get("units_per_node") or "tile" not in shape:
            return []
        others = [one | self.given for one in self._shapes]
        return [
            one for one in others if one | {"tile": None} == shape | {"tile": None} and one != shape
        ]

    def _is_near_the_best(self, setting: dict[str, Any], times: float) -> bool:
        (_, best), score = self.all_in_order()[0][0], self.attempt(setting)
        return score is not None and score[1] <= times * best

    def _held(self, setting: Mapping[str, Any]) -> int:
        """KV heads that a rank has."""
        search = self._search
        degree = METHODS[self.name].degree(setting, search.num_ranks)
        return max(1, search.problem.kv_heads // degree)

    def _refuse_fragments(self) -> None:
        """Every stripe would be a stretch of its own, with transfers and calls of its own."""
        problem, ranks = self._search.problem, self._search.num_ranks
        stripes = self.layout is LayoutKind.STRIPED and METHODS[self.name].by_stretches
        if stripes and problem.q_tokens > STRIPES_SEEN * ranks:
            raise PlanError(f"{self.name} is not searched in {problem.q_tokens} stripes")

    def attempt(self, setting: dict[str, Any]) -> Score | None:
        """How good it is; None where the method refuses it."""
        key = key_of(setting)
        if key in self._known:
            found = self._known[key]
            return None if found is None else found.expected
        if self.tried >= self._most:
            return None
        score, search = None, self._search
        self._known[key] = None
        try:
            # One rank is enough to rank by: in the middle, where masks leave the mean of work.
            plan = search.plan(self.name, setting)
            seen = search.estimate(plan, (search.num_ranks // 2,))
            seconds = search.expected_seconds(plan, self.name, setting, seen, self._best_seconds)
        except PlanError as error:
            self._refusal = self._refusal or error
        else:
            score = too_large, _ = search.score(seconds, seen.peak_bytes)
            if not too_large:
                self._best_seconds = min(self._best_seconds, seconds)
            least = search.score(seen.least_seconds, seen.peak_bytes)
            one = plan.direction(search.direction)
            self._known[key] = TriedSetting(
                *(score, least, setting, seen.num_operations),
                place=place_of(plan),
                combined=one.setting.get("q_reduce"),
                stays=tokens_stay(plan, search.given),
                copies=one.copies,
            )
            self.least_moving = min(self.least_moving, seen.moving_seconds)
        if self._progress:
            done = len(self._known)
            self._progress(done, max(done, self._expected))
        return score

    def ranking(self, settings: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that the method takes, best first."""
        scored = [(score, s) for s in settings if (score := self.attempt(s)) is not None]
        return [setting for _, setting in sorted(scored, key=lambda pair: pair[0])]

    def all_in_order(self) -> list[TriedSetting]:
        """What the method takes, best first."""
        return sorted((one for one in self._known.values() if one), key=lambda one: one[0])

    @property
    def tried(self) -> int:
        return sum(one is not None for one in self._known.values())


def layouts_of(search: Search) -> Layouts:
    """Those to search, the one that tokens have by default first: what shares out the work evenly,
    and under windows and documents what keeps together what is seen together. None: as given, or
    nothing to choose."""
    mask = search.problem.mask
    # A kernel that was asked for is not to be dodged by a layout that it cannot do.
    if mask.is_full or search.given.get("layout") is not None or search.kernel is not None:
        return (None,)
    if mask.window is None and mask.documents is None and mask.slices is None:
        return LayoutKind.ZIGZAG, LayoutKind.STRIPED
    return LayoutKind.ZIGZAG, LayoutKind.CONTIGUOUS


def _own_layout(method: str, mask: Mask) -> LayoutKind:
    """Of a method that is not told any, under a mask that hides something."""
    return usual_layout(mask) if METHODS[method].by_stretches else LayoutKind.ZIGZAG


def _differ_in_tile(shape: Mapping[str, Any], setting: Mapping[str, Any]) -> bool:
    """And in nothing else that the shape says."""
    return {name for name, value in shape.items() if setting.get(name) != value} == {"tile"}


def _ways_to_combine(problem: Problem) -> tuple[Combine, ...]:
    """None that rounds on the way: nobody asked for another precision."""
    exact = problem.element_bytes == problem.accumulate_bytes
    return (Combine.EXCHANGE, Combine.NODES, *((Combine.REDUCE_SCATTER,) if exact else ()))


def _of_each_degree(shapes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best shapes, and the best of each Ulysses degree: uncut, those that exchange more heads
    are before others that gain more by a cut."""
    first = {one.get("ulysses"): one for one in reversed(shapes)}
    others = [one for one in first.values() if one not in shapes[:NUM_SHAPES]]
    return [*shapes[:NUM_SHAPES], *others]
