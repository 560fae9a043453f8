"""What the page shows, as data: asked of the search, the simulator, the counts and the bounds.

Nothing here knows how it is shown. All times are modelled; `to_json` is what `--json` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from mesh_attention.choose.auto import PlanChoice
from mesh_attention.choose.plan_file import python_line
from mesh_attention.choose.ranking import RankedMethod, Ranking, ranked
from mesh_attention.choose.scored import gpu_bytes
from mesh_attention.cost.timeline import Event, Timeline
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.problem import problem_text
from mesh_attention.plan.read.count import least_bytes
from mesh_attention.report.assignment import AssignmentFacts, assignment_facts
from mesh_attention.report.estimates import (
    Scaling,
    ScalingLine,
    ShapeTimes,
    methods_with_shapes,
    points_of_scaling,
    scaling_lines,
    shape_times,
)

CHOSEN = "chosen"
NUM_RUNNERS_UP = 3
GANTT_RANKS = 4
MOST_EVENTS = 1500  # of a chart: with more, fewer ranks are drawn
MOST_SIMULATED = 15_000  # operations of all ranks: a runner-up with more has no chart
_ALIKE = 1e-9  # seconds: the same plan in other words


@dataclass(frozen=True, slots=True)
class MethodPass:
    """A method at its best in one pass; bytes are those that a rank receives. Where it was not
    simulated, seconds are what one rank expects."""

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
    is_tie: bool  # with the choice
    passes: dict[Direction, MethodPass]

    @property
    def is_simulated(self) -> bool:
        return all(pass_.is_simulated for pass_ in self.passes.values())


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
    the attention time that each takes. Bytes are those that a rank receives."""

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
    options: str  # in words; "given" in JSON
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
    batch: int = 1  # sequences that share the memory of a GPU; all numbers are those of one
    command: str = ""  # that asked for the page

    def to_json(self) -> dict[str, Any]:
        return {
            "given" if name == "options" else name: value for name, value in asdict(self).items()
        }


def report_facts(
    searched: PlanChoice,
    *,
    cluster_found: str,
    most_ranks: int = 1024,
    notes: Sequence[str] = (),
    batch: int = 1,
    command: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> ReportFacts:
    """`most_ranks` ends scaling. With a batch, the cluster has the memory of one sequence."""
    asked, directions = searched.asked, tuple(searched.chosen)
    problem, num_ranks, cluster = asked.problem, asked.num_ranks, asked.cluster
    at = points_of_scaling(num_ranks, cluster, most_ranks)
    with_shapes = methods_with_shapes(asked.options)
    expected = 3 + len(directions) * len(with_shapes) + 2 * len(at)
    steps = count(1)

    def tell() -> None:
        done = next(steps)
        if progress is not None:
            progress(done, max(done, expected))

    ranking = ranked(searched)
    choice, chosen = ranking.choice, ranking.chosen
    tell()
    assignment = assignment_facts(choice.plan())
    tell()
    gantts = _gantts(ranking)
    tell()
    shapes = [shape_times(asked, d, name, tell) for name in with_shapes for d in directions]
    lines = [
        line for scaling in Scaling for line in scaling_lines(asked, directions, scaling, at, tell)
    ]
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
        options=", ".join(f"{name}={value}" for name, value in asked.options.items()),
        chosen={d: scored.name for d, scored in choice.chosen.items()},
        settings={d: chosen.setting(d) for d in directions},
        seconds=chosen.seconds,
        mfu_percent=chosen.mfu_percent,
        received_bytes={d: total for d, (total, _) in chosen.received.items()},
        peak_bytes=chosen.peak_bytes,
        fits_gpu=chosen.fits_gpu,
        warnings=tuple(chosen.too_large(batch)),
        kernels={d: s.timeline.kernels for d, s in choice.chosen.items() if s.timeline},
        reason=ranking.reason,
        python=python_line(choice),
        settings_tried=choice.tried,
        refused=ranking.refused,
        least_bytes={d: least_bytes(problem, num_ranks, d) for d in directions},
        methods=tuple(_method(row, is_tie=ranking.is_tie(row)) for row in ranking.rows),
        assignment=assignment,
        gantts=tuple(gantts),
        shapes=tuple(times for times in shapes if times is not None),
        scaling=tuple(lines),
        notes=tuple(notes),
        batch=batch,
        command=command,
    )


def _method(row: RankedMethod, *, is_tie: bool) -> MethodFacts:
    passes = {
        direction: MethodPass(
            scored.seconds,
            scored.is_simulated,
            *row.received[direction],
            scored.peak_bytes,
            row.setting(direction),
        )
        for direction, scored in row.passes.items()
    }
    return MethodFacts(row.name, row.seconds, row.mfu_percent, row.peak_bytes, is_tie, passes)


def _gantts(ranking: Ranking) -> list[GanttFacts]:
    """Charts of the chosen plan, and of the next best methods that make another plan."""
    charts: list[GanttFacts] = []
    drawn: list[float] = []
    for row in ranking.rows:
        is_choice, passes = row is ranking.chosen, row.passes.values()
        is_short = all(p.is_simulated or p.operations <= MOST_SIMULATED for p in passes)
        is_new = not any(abs(row.seconds - seconds) < _ALIKE for seconds in drawn)
        if is_new and (is_choice or is_short) and len(drawn) <= NUM_RUNNERS_UP:
            drawn.append(row.seconds)
            name = CHOSEN if is_choice else row.name
            charts += [_gantt(name, row.asked.timeline(scored)) for scored in passes]
    return charts


def _gantt(name: str, timeline: Timeline) -> GanttFacts:
    """The first ranks of a timeline, at least one and as many as have few enough events."""
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
        timeline.pass_.direction,
        timeline.runtime_seconds,
        timeline.mfu_percent,
        timeline.exposed_communication_seconds,
        timeline.waiting_for_ranks_seconds,
        shown,
        tuple(events),
    )
