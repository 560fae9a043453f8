"""All methods of a search in order, each with what people compare: time, MFU, bytes and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mesh_attention.choose.auto import PlanChoice, find_best
from mesh_attention.choose.effort import GLANCE, SEARCH
from mesh_attention.choose.explain import explain, is_tie, seconds_of
from mesh_attention.choose.search import PassSearch, Scored, SearchQuestion
from mesh_attention.cost.collector import collector_paused
from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Communication
from mesh_attention.plan.language.traffic import TrafficMeter, far_bytes, traffic_of
from mesh_attention.plan.methods.table import METHODS, USUAL
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.runs import Run, visible_pairs

Passes = dict[Direction, Scored]


@dataclass(frozen=True)
class RankedMethod:
    """A method at its best in every pass asked for, or a choice of one for each."""

    passes: Passes
    asked: SearchQuestion

    @property
    def name(self) -> str:
        return name_of(self.passes)

    @property
    def seconds(self) -> float:
        return seconds_of(self.passes)

    @property
    def is_simulated(self) -> bool:
        """Otherwise `seconds` are what one rank sees, to which waiting for others may come."""
        return all(one.is_simulated for one in self.passes.values())

    @cached_property
    def plans(self) -> dict[Direction, Plan]:
        return {
            direction: self.asked.plan(direction, one.name, one.options)
            if one.timeline is None
            else one.timeline.plan
            for direction, one in self.passes.items()
        }

    @property
    def mfu_percent(self) -> float:
        asked = self.asked
        return mfu_percent(asked.problem, self.passes, self.seconds, asked.num_ranks, asked.cluster)

    @cached_property
    def received(self) -> dict[Direction, tuple[int, int]]:
        """In all, and from other nodes, by the rank that receives most of each."""
        found = {}
        for direction, one in self.passes.items():
            if one.timeline is not None:
                most = max(one.timeline.received_bytes), max(one.timeline.far_bytes)
            else:
                plan = self.plans[direction]
                most = received_bytes(plan, plan.direction(direction))
            found[direction] = most
        return found

    @property
    def peak_bytes(self) -> int:
        return max(one.peak_bytes for one in self.passes.values())

    @property
    def fits_gpu(self) -> bool:
        return all(one.fits for one in self.passes.values())

    @property
    def score(self) -> tuple[bool, float]:
        return not self.fits_gpu, self.seconds

    @property
    def is_short(self) -> bool:
        """Whether to simulate it does not take long."""
        return all(one.operations <= SEARCH.simulated_operations for one in self.passes.values())

    def too_large(self) -> list[str]:
        """A line where it does not fit. Nothing that does was found then: it would be before it."""
        much = [(d, one.peak_bytes) for d, one in self.passes.items() if not one.fits]
        if not much:
            return []
        needs = " and ".join(f"{bytes_text(size)} {direction}" for direction, size in much)
        limit = bytes_text(gpu_bytes(self.asked.cluster))
        return [
            f"It does not fit: a rank needs {needs}, more than the {limit} of a GPU, "
            "and nothing that fits was found; take more ranks, fewer tokens or fewer heads."
        ]

    def setting(self, direction: Direction) -> str:
        """As the method takes it, in Python and on a command line; what it takes not is left out
        (a ring has a shape, but no choice of it)."""
        one = self.passes[direction]
        words = {name: _short(x) for name, x in one.options.items()}
        chosen = self.plans[direction].direction(direction).setting
        for name in ("ulysses", "tile", "team"):
            if name in chosen and name in METHODS[one.name].options():
                words.setdefault(name, _short(chosen[name]))
        return " ".join(f"{name}={value}" for name, value in words.items()) or "-"

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.name,
            "seconds": self.seconds,
            "simulated": self.is_simulated,
            "mfu_percent": self.mfu_percent,
            "peak_bytes": self.peak_bytes,
            "fits_gpu": self.fits_gpu,
            "passes": {
                direction.value: {
                    "method": one.name,
                    "seconds": one.seconds,
                    "simulated": one.is_simulated,
                    "options": one.options,
                    "peak_bytes": one.peak_bytes,
                    "received_bytes": self.received[direction][0],
                    "received_bytes_from_other_nodes": self.received[direction][1],
                }
                for direction, one in self.passes.items()
            },
        }


@dataclass(frozen=True)
class Ranking:
    """`rows`: the choice first, then the methods that it is not, the best first. `default`: where
    it was given."""

    choice: PlanChoice
    rows: list[RankedMethod]
    refused: dict[str, str]
    default: RankedMethod | None

    @property
    def chosen(self) -> RankedMethod:
        return self.rows[0]

    @cached_property
    def reason(self) -> str:
        methods = {row.name: row.passes for row in self.rows}
        return explain(self.choice.chosen, methods, [*self.refused], self.choice.asked.num_ranks)

    def is_tie(self, row: RankedMethod) -> bool:
        """With the choice."""
        return is_tie(self.chosen.seconds, row.seconds) and row.fits_gpu == self.chosen.fits_gpu


@collector_paused()
def ranked(choice: PlanChoice, default: PlanChoice | None = None) -> Ranking:
    """Of all methods that the search was about. What people use and what seems as fast is simulated
    where that does not take long. No row is before the choice: what seems to be is simulated, and
    where that is so it is the choice. `default`: what doors take."""
    asked, refused = choice.asked, dict(choice.refused)
    rows = [RankedMethod(passes, asked) for passes in choice.methods.values()]
    for name in asked.methods:
        if name not in choice.methods and name not in refused:
            try:
                rows.append(glance(asked, name, [*choice.chosen]))
            except PlanError as error:
                refused[name] = str(error)
    best = RankedMethod(choice.chosen, asked)
    usual = None if default is None else RankedMethod(default.chosen, asked)
    if usual is not None and usual.is_short:
        usual = _simulated(usual)
    for row in sorted((*rows, *([usual] if usual else [])), key=lambda row: row.seconds):
        compared = row.name in USUAL or is_tie(row.seconds, best.seconds)
        if row.score < best.score or (compared and row.is_short):
            told = _simulated(row)
            rows = [told if one is row else one for one in rows]
            best = min(best, told, key=lambda one: one.score)
    stays = all(one.stays for one in best.passes.values())
    unmoved = best.passes if stays else choice.unmoved
    choice = replace(choice, chosen=best.passes, unmoved=unmoved)
    rest = [row for row in rows if row.name != best.name]
    return Ranking(choice, [best, *sorted(rest, key=lambda row: row.score)], refused, usual)


def glance(asked: SearchQuestion, method: str, directions: Sequence[Direction]) -> RankedMethod:
    """What one rank sees of the most promising shape of a method."""
    found = find_best(
        *(asked.problem, asked.num_ranks, asked.cluster),
        directions=directions,
        options=asked.options,
        method=method,
        overlap=asked.overlap,
        kernel=asked.kernel,
        effort=GLANCE,
        moves_tokens=False,
    )
    return RankedMethod(found.chosen, found.asked)


def _simulated(row: RankedMethod) -> RankedMethod:
    passes = {d: PassSearch(row.asked, d, None).simulate(one) for d, one in row.passes.items()}
    return RankedMethod(passes, row.asked)


def name_of(passes: Mapping[Direction, Scored]) -> str:
    return "/".join(dict.fromkeys(one.name for one in passes.values()))


def gpu_bytes(cluster: Cluster) -> int:
    return int(cluster.gpu.memory_gib * 2**30)


def received_bytes(plan: Plan, one: Pass) -> tuple[int, int]:
    """Of two ranks in the middle, in two nodes where there are several: what the one that receives
    most does in a pass, and from other nodes. The programs of all ranks would take long to make."""
    total = between = 0
    for rank in {max(0, plan.num_ranks // 2 - 1), plan.num_ranks // 2}:
        program = one.programs[rank]
        meter = TrafficMeter(plan.problem, program.buffer_table())
        mine = far = 0
        for op in program.operations:
            if isinstance(op, Communication):
                ranks, member = one.groups[op.group], one.members[op.group][rank]
                flows = meter.flows(op)
                mine += traffic_of(op, flows, member, len(ranks)).received_bytes
                away = [plan.node_of(other) != plan.node_of(rank) for other in ranks]
                far += far_bytes(op, flows, away)
        total, between = max(total, mine), max(between, far)
    return total, between


def mfu_percent(
    problem: Problem,
    directions: Iterable[Direction],
    seconds: float,
    num_ranks: int,
    cluster: Cluster,
) -> float:
    """Of these passes together, by the area of the mask."""
    everything = [Run(0, problem.q_tokens)], [Run(0, problem.keys)]
    pairs = int(visible_pairs(*everything, problem.rows)[0, 0])
    flops = sum(problem.flops(pairs, backward=one is Direction.BACKWARD) for one in directions)
    peak = cluster.gpu.peak_tflops * 1e12 * num_ranks
    return 100 * flops / (peak * seconds) if seconds else 0.0


def _short(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
