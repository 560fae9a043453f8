"""What the page shows, as data: asked of the search, the simulator, the counts and the bounds.

Nothing here knows how it is shown. All times are modelled; `to_json` is what `--json` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mesh_attention.choose.auto import BestOfAll
from mesh_attention.choose.one_pass import Standing
from mesh_attention.choose.ranking import RankedMethod, gpu_bytes, python_line, ranked_methods
from mesh_attention.choose.search import Search, a_search
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.timeline import Event, Timeline
from mesh_attention.plan.bounds import least_bytes
from mesh_attention.plan.draw.summary import problem_text
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.report.assignment_facts import AssignmentFacts, assignment_facts
from mesh_attention.report.scaling import (
    Scaling,
    ScalingLine,
    points_of_scaling,
    scaling_lines,
)
from mesh_attention.report.shape_times import ShapeTimes, methods_with_shapes, shape_times

Progress = Callable[[int, int], None]
CHOSEN = "chosen"
NUM_RUNNERS_UP = 3
GANTT_RANKS = 4
MOST_EVENTS = 1500  # of a chart: with more, fewer ranks are drawn
# Operations of all ranks: a runner-up with more was not simulated by the search, and is not here.
MOST_SIMULATED = 15_000
_ALIKE = 1e-9  # seconds: the same plan in other words


@dataclass(frozen=True, slots=True)
class MethodPass:
    """A method at its best in one pass; bytes are those that a rank receives. What was not
    simulated takes at least so many seconds."""

    seconds: float
    is_simulated: bool
    received_bytes: int
    other_node_bytes: int
    peak_bytes: int
    setting: str


@dataclass(frozen=True, slots=True)
class MethodFacts:
    name: str
    seconds: float
    mfu_percent: float
    peak_bytes: int
    passes: dict[Direction, MethodPass]

    @property
    def is_simulated(self) -> bool:
        return all(one.is_simulated for one in self.passes.values())


@dataclass(frozen=True, slots=True)
class GanttFacts:
    """What the first ranks do in one pass of a plan. `name` is CHOSEN or a method."""

    name: str
    method: str
    direction: Direction
    seconds: float
    mfu_percent: float
    open_seconds: float  # in which a rank computes nothing, in the mean
    waiting_seconds: float  # the part of it in which it waits for other ranks
    num_ranks: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class ReportFacts:
    """Times, bytes and memory are those of the chosen plan; so are `kernels`, by pass: the part of
    the attentions' time of each. Bytes are those that a rank receives."""

    problem: str
    tokens: int
    ranks: int
    nodes: int
    cluster: str
    cluster_description: str
    cluster_found: str
    gpu: str
    gpu_bytes: int
    directions: tuple[Direction, ...]
    given: str  # options, in words
    chosen: dict[Direction, str]  # method
    settings: dict[Direction, str]
    seconds: float
    mfu_percent: float
    received_bytes: dict[Direction, int]
    peak_bytes: int
    fits_gpu: bool
    warnings: tuple[str, ...]  # about the choice
    kernels: dict[Direction, dict[str, float]]
    reason: str
    python: str
    settings_tried: int
    refused: dict[str, str]
    least_bytes: dict[Direction, float]
    methods: tuple[MethodFacts, ...]
    assignment: AssignmentFacts
    gantts: tuple[GanttFacts, ...]
    shapes: tuple[ShapeTimes, ...]
    scaling: tuple[ScalingLine, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def report_facts(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster,
    found: BestOfAll,
    *,
    cluster_found: str,
    cluster_named: str | None = None,
    is_kept: bool = False,
    options: Mapping[str, Any] | None = None,
    kernel: str | None = None,
    most_ranks: int = 1024,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> ReportFacts:
    """`found` is what the search answered to the same question, and `auto` knows where it is kept;
    `cluster_named`: Python that makes the cluster; `most_ranks` ends scaling."""
    given, directions = dict(options or {}), tuple(found.chosen)
    searches = [a_search(problem, num_ranks, cluster, d, given, kernel=kernel) for d in directions]
    ranked = ranked_methods(found, problem, num_ranks, cluster)
    at = points_of_scaling(num_ranks, cluster, most_ranks)
    with_shapes = methods_with_shapes(given)
    told = _Told(progress, len(ranked) + 2 + len(searches) * len(with_shapes) + 2 * len(at))
    methods = []
    for row in ranked:
        if set(row.passes) == set(directions):
            methods.append(_method(row))
        told()
    assignment = assignment_facts(found.plan())
    told()
    gantts = _gantts(found, ranked, searches)
    told()
    shapes = [shape_times(search, name, told) for name in with_shapes for search in searches]
    lines = [
        line
        for scaling in Scaling
        for line in scaling_lines(searches[0], directions, scaling, at, told)
    ]
    chosen = RankedMethod(found.chosen, problem, num_ranks, cluster)
    return ReportFacts(
        problem=problem_text(problem),
        tokens=problem.q_tokens,
        ranks=num_ranks,
        nodes=-(-num_ranks // cluster.node.ranks),
        cluster=cluster.name,
        cluster_description=cluster.description,
        cluster_found=cluster_found,
        gpu=cluster.gpu.name,
        gpu_bytes=gpu_bytes(cluster),
        directions=directions,
        given=", ".join(f"{name}={value}" for name, value in given.items()),
        chosen={d: one.name for d, one in found.chosen.items()},
        settings={d: chosen.setting(d) for d in directions},
        seconds=chosen.seconds,
        mfu_percent=chosen.mfu_percent,
        received_bytes={d: total for d, (total, _) in chosen.received.items()},
        peak_bytes=chosen.peak_bytes,
        fits_gpu=chosen.fits_gpu,
        warnings=tuple(chosen.too_large()),
        kernels={d: _timeline(one).kernels for d, one in found.chosen.items()},
        reason=found.reason,
        python=python_line(
            *(found, problem, cluster, given, cluster_named or repr(cluster.name)),
            is_kept=is_kept,
        ),
        settings_tried=found.tried,
        refused=found.refused,
        least_bytes={one: least_bytes(problem, num_ranks, one) for one in directions},
        methods=tuple(methods),
        assignment=assignment,
        gantts=tuple(gantts),
        shapes=tuple(one for one in shapes if one is not None),
        scaling=tuple(lines),
        notes=tuple(notes),
    )


class _Told:
    """Counts what is done; what takes longer than expected moves the end."""

    def __init__(self, progress: Progress | None, expected: int) -> None:
        self._progress, self._expected, self._done = progress, expected, 0

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, max(self._done, self._expected))


def _timeline(one: Standing) -> Timeline:
    assert one.timeline is not None  # what is chosen was simulated
    return one.timeline


def _method(row: RankedMethod) -> MethodFacts:
    passes = {
        direction: MethodPass(
            one.seconds,
            not one.is_bound,
            *row.received[direction],
            row.peaks[direction],
            row.setting(direction),
        )
        for direction, one in row.passes.items()
    }
    return MethodFacts(row.name, row.seconds, row.mfu_percent, row.peak_bytes, passes)


def _gantts(
    found: BestOfAll, ranked: Sequence[RankedMethod], searches: Sequence[Search]
) -> list[GanttFacts]:
    """Of the chosen plan, and of the next best methods that make another plan."""
    charts = [_gantt(CHOSEN, _timeline(one)) for one in found.chosen.values()]
    seen = [found.seconds]
    for row in ranked:
        if len(seen) > NUM_RUNNERS_UP:
            break
        partial = len(row.passes) < len(searches)
        if partial or any(abs(row.seconds - seconds) < _ALIKE for seconds in seen):
            continue
        timelines = [_simulated(row, search) for search in searches]
        known = [one for one in timelines if one is not None]
        if len(known) == len(timelines):
            seen.append(row.seconds)
            charts += [_gantt(row.name, timeline) for timeline in known]
    return charts


def _simulated(row: RankedMethod, search: Search) -> Timeline | None:
    """None where that would take long."""
    one = row.passes[search.direction]
    if one.timeline is not None:
        return one.timeline
    programs = row.plans[search.direction].direction(search.direction).programs
    if len(programs[0].operations) * search.num_ranks > MOST_SIMULATED:
        return None
    return search.simulate(one.name, one.options)


def _gantt(name: str, timeline: Timeline) -> GanttFacts:
    events: list[Event] = []
    shown = 0
    for rank in range(min(GANTT_RANKS, timeline.plan.num_ranks)):
        of_rank = [*timeline.events(rank)]
        if shown and len(events) + len(of_rank) > MOST_EVENTS:
            break
        events += of_rank
        shown += 1
    return GanttFacts(
        name,
        f"{timeline.plan.method}",
        timeline.one.direction,
        timeline.runtime_seconds,
        timeline.mfu_percent,
        timeline.exposed_communication_seconds,
        timeline.waiting_for_ranks_seconds,
        shown,
        tuple(events),
    )
