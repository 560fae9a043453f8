"""What a search is asked (`SearchQuestion`), how much it tries (`SearchEffort`), and the settings
that it scores (`Scored`). The search itself is in `search.py`; rankings and tuning read its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from mesh_attention.cost.operation_costs import Overlap
from mesh_attention.cost.planning import plan_on
from mesh_attention.cost.simulator import simulate
from mesh_attention.cost.timeline import Timeline
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.problem.problem import Problem

Place = str  # the layout, with the order of ranks
Score = tuple[bool, float]  # whether it needs more memory than there is, and seconds


class SearchEffort(NamedTuple):
    """How many settings a search tries, and which are near enough to be as good."""

    shapes: int  # in one cut each
    in_four_cuts: int = 0  # of these that can be cut, in four cuts
    in_all_cuts: int = 0  # of these, in so many cuts:
    cuts: int = 0
    refined: int = 0  # shapes whose best cut is tried with more and fewer chunks, while that gains
    varied: int = 0  # shapes that are tried with a short start and with even chunks
    varied_cuts: int = 0  # so many cuts of each of these
    simulated: int = 0  # settings simulated with all ranks
    simulated_operations: int = 0  # of all ranks together, in these simulations
    every_name: bool = True  # also shapes that another method has under its own name
    ranks_of_even_chunks: int = 4096  # on more ranks even chunks are not tried
    tolerance: float = 0.0  # so near to the bound of all shapes, or to another estimate, is enough
    tie: float = 0.0  # of settings so near to the best the simplest is taken


SEARCH = SearchEffort(
    shapes=10_000,
    in_four_cuts=6,
    in_all_cuts=3,
    cuts=12,
    refined=3,
    varied=6,
    varied_cuts=2,
    simulated=40,
    simulated_operations=12_000,
)
# What a constructor can afford.
DEFAULT = SearchEffort(
    shapes=6,
    in_four_cuts=4,
    refined=1,
    simulated=4,
    simulated_operations=1200,
    every_name=False,
    ranks_of_even_chunks=1024,
    tolerance=0.02,
    tie=0.01,
)
# Settings of many ranks take longer to make, and to simulate.
DEFAULT_OF_MANY = DEFAULT._replace(shapes=5, in_four_cuts=1, simulated=2, simulated_operations=400)
GLANCE = SearchEffort(shapes=1, every_name=False)


@dataclass(frozen=True)
class Scored:
    """A setting of one pass, with its score. `seconds` are simulated where there is a timeline.
    Otherwise they are what one rank sees, to which waiting for other ranks may come."""

    direction: Direction
    name: str  # of the method
    options: dict[str, Any]
    seconds: float
    peak_bytes: int
    fits: bool  # into the memory of a GPU
    place: Place
    stays: bool  # tokens are where they are by default, or where the caller said
    operations: int  # of the ranks that a simulation goes through, about
    may_wait: bool  # ranks have unlike work before they meet, and `seconds` do not know it
    is_rough: bool = False  # ranks have unlike links or rows, of which `seconds` know too little
    recalls: bool = False  # it needs what a forward pass of the same setting keeps
    others_bytes: int = 0  # that the other layers keep meanwhile
    rank_operations: int = 0
    busy_seconds: float = 0.0  # of computation, as the estimate has it
    timeline: Timeline | None = field(default=None, compare=False, repr=False)

    @property
    def is_simulated(self) -> bool:
        return self.timeline is not None

    @property
    def setting(self) -> tuple[str, dict[str, Any]]:
        """Passes of the same setting may have one plan, where backward finds what forward keeps."""
        return self.name, self.options

    @property
    def score(self) -> Score:
        return not self.fits, self.seconds

    @property
    def text(self) -> str:
        return f"{self.name} {options_text(self.options)}".strip()

    @cached_property
    def key(self) -> str:
        """A key for files: the same whenever the same is asked."""
        options = sorted((name, str(value)) for name, value in self.options.items())
        return f"{self.direction.value} {self.name} {options}"


def options_text(options: Mapping[str, Any]) -> str:
    """
    >>> options_text({"tile": (2, 2), "layout": "zigzag"})
    'tile=2x2 layout=zigzag'
    """
    return " ".join(f"{name}={value_text(value)}" for name, value in options.items())


def value_text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def gpu_bytes(cluster: Cluster) -> int:
    return int(cluster.gpu.memory_gib * 2**30)


@dataclass(frozen=True)
class SearchQuestion:
    """What all passes and layouts of a search have in common."""

    problem: Problem
    num_ranks: int
    cluster: Cluster
    options: Mapping[str, Any]  # the caller's
    methods: Sequence[str]
    effort: SearchEffort
    overlap: Overlap = Overlap.EVENTS
    kernel: str | None = None
    report: Callable[[], None] = lambda: None  # called when a setting was tried

    def plan(self, direction: Direction, method: str, options: Mapping[str, Any]) -> Plan:
        asked: dict[str, Any] = {"method": method, "directions": (direction,), **options}
        return plan_on(self.cluster, self.problem, self.num_ranks, **asked)

    def timeline(self, scored: Scored) -> Timeline:
        """The timeline of a setting, which is simulated now unless it was before."""
        if scored.timeline is not None:
            return scored.timeline
        plan = self.plan(scored.direction, scored.name, scored.options)
        return simulate(
            plan, self.cluster, scored.direction, overlap=self.overlap, kernel=self.kernel
        )

    def simulated(self, scored: Scored) -> Scored:
        """The setting with the result of a simulation in place of the estimate."""
        if scored.timeline is not None:
            return scored
        timeline = self.timeline(scored)
        peak_bytes = timeline.peak_bytes + scored.others_bytes
        return replace(
            scored,
            seconds=timeline.runtime_seconds,
            peak_bytes=peak_bytes,
            fits=peak_bytes <= gpu_bytes(self.cluster),
            may_wait=False,
            timeline=timeline,
        )
