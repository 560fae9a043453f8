"""One pass: shapes in the order of their bounds, cuts of the best of them, the best few simulated.

1. Shapes (`shapes.py`), the most promising first, each in its first cut, by what one rank sees of
   it (`cost/estimate.py`). A shape is left out when its bound exceeds the best estimate so far.
2. The best of them in three more cuts, the best of these in more of their list (`cuts.py`), and
   the best settings with a short start and with even chunks.
3. The best settings simulated with all ranks, in the order of their estimates, until the next
   estimate is no shorter than the best simulation.

`SearchEffort` says how many in each step. A search tries all shapes; the default of every door
(`auto.py`) is the same with less effort. Nothing here looks at a clock: ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mesh_attention.choose.cuts import SHORT, TINY, cuts_of, variants_of
from mesh_attention.choose.effort import SearchEffort
from mesh_attention.choose.shapes import (
    Shape,
    busiest_ranks,
    shapes_of,
    shows_little,
)
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.planning import PLACES, plan_on, tokens_stay
from mesh_attention.cost.simulator import simulate
from mesh_attention.cost.timeline import Timeline
from mesh_attention.cost.waits import Overlap
from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.problem import Problem

Place = tuple[str, tuple[int, ...]]  # layout, and the device of each logical rank
Score = tuple[bool, float]  # whether it needs more memory than there is, and seconds


@dataclass(frozen=True)
class Scored:
    """A setting of one pass. `seconds` are simulated where there is a timeline, and otherwise what
    one rank sees, to which waiting for other ranks may come."""

    direction: Direction
    name: str  # of the method
    options: dict[str, Any]
    seconds: float
    peak_bytes: int
    fits: bool  # into the memory of a GPU
    place: Place
    stays: bool  # tokens are where they are by default, or where the caller said
    operations: int  # of the ranks that a simulation goes through, about
    may_wait: bool  # ranks have unlike work before they meet, which one rank does not see
    timeline: Timeline | None = field(default=None, compare=False, repr=False)

    @property
    def is_simulated(self) -> bool:
        return self.timeline is not None

    @property
    def score(self) -> Score:
        return not self.fits, self.seconds

    @property
    def text(self) -> str:
        words = [f"{name}={_word(value)}" for name, value in self.options.items()]
        return " ".join([self.name, *words])

    @cached_property
    def key(self) -> str:
        """For files: the same whenever the same is asked."""
        options = sorted((name, str(value)) for name, value in self.options.items())
        return f"{self.direction.value} {self.name} {options}"


def _word(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


@dataclass(frozen=True)
class SearchQuestion:
    """What all passes and layouts of a search have in common."""

    problem: Problem
    num_ranks: int
    cluster: Cluster
    options: Mapping[str, Any]
    methods: Sequence[str]
    effort: SearchEffort
    overlap: Overlap = Overlap.EVENTS
    kernel: str | None = None
    tell: Callable[[], None] = lambda: None  # a setting was tried

    def plan(self, direction: Direction, method: str, options: Mapping[str, Any]) -> Plan:
        how: dict[str, Any] = {"method": method, "directions": (direction,), **options}
        return plan_on(self.cluster, self.problem, self.num_ranks, **how)

    def simulate(self, direction: Direction, method: str, options: Mapping[str, Any]) -> Timeline:
        plan = self.plan(direction, method, options)
        how: dict[str, Any] = {"overlap": self.overlap, "kernel": self.kernel}
        return simulate(plan, self.cluster, direction, **how)


class PassSearch:
    """One pass in one layout. `scored` has every setting that a method took, the best first after
    `run`; `refusals` the first refusal of each method."""

    def __init__(
        self, asked: SearchQuestion, direction: Direction, layout: LayoutKind | None
    ) -> None:
        self._asked, self._direction, self._layout = asked, direction, layout
        self._known: dict[str, Scored | None] = {}
        self._best: Score | None = None
        self._sure: Score | None = None  # the best without waits that one rank does not see
        self.refusals: dict[str, PlanError] = {}
        zigzag = layout is LayoutKind.ZIGZAG and not asked.problem.mask.is_full
        self._ranks_wait = zigzag  # for each other, where chunks are of unlike work
        # Programs of even chunks of thousands of ranks take seconds to make.
        self._may_be_even = zigzag and asked.num_ranks <= asked.effort.ranks_of_even_chunks
        self._sparse = shows_little(asked.problem)

    @property
    def scored(self) -> list[Scored]:
        found = [one for one in self._known.values() if one is not None]
        return sorted(found, key=lambda one: (one.score, not one.stays, len(one.options)))

    def run(self, *, stays: bool) -> None:
        """`stays`: only settings that leave tokens where they are."""
        asked = self._asked
        shapes = shapes_of(
            *(asked.problem, asked.num_ranks, asked.cluster, self._direction),
            *(asked.methods, asked.options, self._layout),
        )
        placed = any(asked.options.get(name) is not None for name in PLACES)
        in_order = [shape for shape in shapes if placed or not shape.moves_tokens]
        self._look_at(in_order)
        if not stays and not placed:
            self._look_at([shape for shape in shapes if shape.moves_tokens])

    def _look_at(self, shapes: Sequence[Shape]) -> None:
        effort = self._asked.effort
        bound = min((shape.least_seconds for shape in shapes), default=0.0)
        enough = (False, bound * (1 + effort.tolerance))
        taken: list[tuple[Score, int]] = []  # and the number of the shape
        boxes: set[str] = set()
        for number, shape in enumerate(shapes):
            # Where latency or the mask decides, bytes say less about the order.
            uncertain = TINY < bound < SHORT or self._sparse
            if len(taken) >= effort.shapes * (2 if uncertain else 1):
                break
            if shape.box in boxes and not effort.every_name:
                continue
            boxes.add(shape.box)
            if self._best is not None and self._best < (False, shape.least_seconds):
                continue
            if self._sure is not None and self._sure <= enough:
                break
            found = self._try_cuts(shape, slice(0, 1), even=False)
            if found is not None:
                taken.append((found.score, number))
        for how_many, which in (
            (effort.in_four_cuts, slice(0, 4)),
            (effort.in_all_cuts, slice(4, effort.cuts)),
        ):
            taken.sort()
            for at, (score, number) in enumerate(taken[:how_many]):
                if self._sure is not None and self._sure <= enough:
                    break
                found = self._try_cuts(shapes[number], which)
                if found is not None:
                    taken[at] = min(score, found.score), number
        self._try_variants(shapes)

    def _try_cuts(self, shape: Shape, which: slice, *, even: bool = True) -> Scored | None:
        """The best of these cuts of a shape. Not `even`: for a first look, since programs of even
        chunks take four times as long to make."""
        best: Scored | None = None
        for cut in [*cuts_of(shape, self._direction, sparse=self._sparse)][which]:
            setting = {**shape.options, **cut}
            if even and self._prefers_even(shape, setting):
                setting["even_chunks"] = True
            found = self.attempt(shape.name, setting)
            if found is not None and (best is None or found.score < best.score):
                best = found
        return best

    def _prefers_even(self, shape: Shape, setting: Mapping[str, Any]) -> bool:
        """Backward, chunks of unlike work cost more in waiting than even ones do in calls."""
        backward = self._direction is Direction.BACKWARD
        waits = self._may_be_even and shape.tile != (1, 1)
        return (
            backward
            and waits
            and any("even_chunks" in one for one in variants_of(setting, shape, even=True))
        )

    def _try_variants(self, shapes: Sequence[Shape]) -> None:
        """Of the best cuts of the best of these shapes."""
        effort, of_shape = self._asked.effort, {_words(x.name, x.options): x for x in shapes}
        cuts: dict[str, list[Scored]] = {}
        for one in self.scored:
            if _words(one.name, one.options) in of_shape:
                cuts.setdefault(_words(one.name, one.options), []).append(one)
        even = self._may_be_even and self._asked.num_ranks <= effort.ranks_of_even_variants
        for words in [*cuts][: effort.varied]:
            shape = of_shape[words]
            if self._direction is Direction.BACKWARD and shape.held > 1 and not effort.every_name:
                continue  # attention of a slice outlasts its first transfers
            for one in cuts[words][: effort.varied_cuts]:
                for setting in variants_of(one.options, shape, even=even):
                    self.attempt(one.name, setting)

    def attempt(self, method: str, setting: dict[str, Any]) -> Scored | None:
        """How good it is; None where the method refuses it."""
        key = _key(method, setting)
        if key in self._known:
            return self._known[key]
        asked, found = self._asked, None
        try:
            plan = asked.plan(self._direction, method, setting)
            found = self._scored(plan, method, setting)
        except PlanError as error:
            self.refusals.setdefault(method, error)
        self._known[key] = found
        if found is not None and (self._best is None or found.score < self._best):
            self._best = found.score
        if found is not None and not found.may_wait:
            self._sure = found.score if self._sure is None else min(self._sure, found.score)
        asked.tell()
        return found

    def _scored(self, plan: Plan, method: str, setting: dict[str, Any]) -> Scored:
        asked = self._asked
        ranks = {asked.num_ranks // 2}  # where a causal mask leaves the mean of the work
        if self._sparse:
            ranks = busiest_ranks(plan, method, setting, asked.cluster.node.ranks)
        if asked.problem.num_heads % METHODS[method].degree(setting, asked.num_ranks):
            ranks.add(0)  # shares of heads differ, and the first is a large one
        if asked.problem.q_tokens < 2 * asked.num_ranks:
            ranks.add(0)  # others may have no token
        seen = estimate(
            *(plan, asked.cluster, self._direction),
            overlap=asked.overlap,
            kernel=asked.kernel,
            ranks=sorted(ranks),
        )
        one, method_has = plan.direction(self._direction), METHODS[method]
        chunks = setting.get("chunks") or (1, 1)
        across = method_has.rotates and plan.num_nodes > 1
        return Scored(
            *(self._direction, method, setting, seen.seconds, seen.peak_bytes),
            fits=seen.peak_bytes <= asked.cluster.gpu.memory_gib * 2**30,
            place=place_of(plan),
            stays=tokens_stay(plan, asked.options),
            operations=seen.num_operations // (1 if across else one.copies),
            may_wait=self._ranks_wait and chunks != (1, 1) and not setting.get("even_chunks"),
        )

    def simulate(self, one: Scored) -> Scored:
        """Once; the result takes the place of the estimate."""
        if one.timeline is not None:
            return one
        asked = self._asked
        timeline = asked.simulate(one.direction, one.name, one.options)
        found = replace(
            one,
            seconds=timeline.runtime_seconds,
            peak_bytes=timeline.peak_bytes,
            fits=timeline.peak_bytes <= asked.cluster.gpu.memory_gib * 2**30,
            may_wait=False,
            timeline=timeline,
        )
        self._known[_key(one.name, one.options)] = found
        return found

    def best_of(self, scored: Sequence[Scored]) -> Scored | None:
        """Of settings in the order of their estimates: simulated until the next estimate is no
        shorter than the best simulation; the best estimate where none can be afforded. Settings of
        one shape differ less than shapes do, so the best of each shape come first."""
        effort, best, operations, count = self._asked.effort, None, 0, 0
        if self._direction is Direction.BACKWARD and not effort.every_name:
            # Even chunks were tried in their place, and need no simulation.
            scored = [one for one in scored if not one.may_wait] or scored
        firsts: dict[str, Scored] = {}
        for one in scored:
            firsts.setdefault(_words(one.name, one.options), one)
        rest = [one for one in scored if one not in firsts.values()]
        for one in (*firsts.values(), *rest):
            if best is not None and best.score <= one.score:
                continue
            if one.timeline is None and (one.may_wait or effort.every_name):
                more = operations + one.operations
                if count < effort.simulated and more <= effort.simulated_operations:
                    operations, count = more, count + 1
                    one = self.simulate(one)
                elif one.may_wait:
                    continue  # its estimate says too little
            if best is None or one.score < best.score:
                best = one
        return best or next(iter(scored), None)


def _key(method: str, options: Mapping[str, Any]) -> str:
    return f"{method} {sorted(options.items(), key=str)}"


_CUTS = (
    "chunks",
    "head_slices",
    "even_chunks",
    "short_start",
    "backward_chunks",
    "backward_head_slices",
)


def _words(method: str, options: Mapping[str, Any]) -> str:
    """Of a shape: all that is not about cuts."""
    return f"{method} {sorted((k, str(v)) for k, v in options.items() if k not in _CUTS)}"


def place_of(plan: Plan) -> Place:
    return str(plan.q_layout.to_json()), plan.devices
