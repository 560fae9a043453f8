"""Ranks all methods of a search, each with its time, MFU, bytes and memory.

`advise` and the report show the rows. Ranking may correct the choice of the search: it simulates a
method that seemed slower by its estimate, and the method becomes the choice if it is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mesh_attention.choose.auto import PlanChoice, search_best
from mesh_attention.choose.explain import explain, is_tie, seconds_of
from mesh_attention.choose.scored import (
    GLANCE,
    SEARCH,
    Scored,
    SearchQuestion,
    gpu_bytes,
    options_text,
    value_text,
)
from mesh_attention.cost.planning import collector_paused, num_pairs
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Communication
from mesh_attention.plan.language.traffic import TrafficMeter, far_bytes, traffic_of
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.arguments import bytes_text

Passes = dict[Direction, Scored]


@dataclass(frozen=True)
class RankedMethod:
    """A method at its best in each pass, or a choice of a method for each pass."""

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
        """If not, `seconds` are an estimate without the time that ranks wait for each other."""
        return all(scored.is_simulated for scored in self.passes.values())

    @cached_property
    def plans(self) -> dict[Direction, Plan]:
        return {
            direction: self.asked.plan(direction, scored.name, scored.options)
            if scored.timeline is None
            else scored.timeline.plan
            for direction, scored in self.passes.items()
        }

    @property
    def mfu_percent(self) -> float:
        """The MFU of all passes together, by the area of the mask."""
        problem, pairs = self.asked.problem, num_pairs(self.asked.problem)
        flops = sum(problem.flops(pairs, backward=d is Direction.BACKWARD) for d in self.passes)
        peak = self.asked.cluster.gpu.peak_tflops * 1e12 * self.asked.num_ranks
        return 100 * flops / (peak * self.seconds) if self.seconds else 0.0

    @cached_property
    def received(self) -> dict[Direction, tuple[int, int]]:
        """The most bytes that a rank receives, in all and from other nodes."""
        return {
            direction: received_bytes(self.plans[direction], direction)
            if scored.timeline is None
            else (max(scored.timeline.received_bytes), max(scored.timeline.far_bytes))
            for direction, scored in self.passes.items()
        }

    @property
    def peak_bytes(self) -> int:
        return max(scored.peak_bytes for scored in self.passes.values())

    @property
    def fits_gpu(self) -> bool:
        return all(scored.fits for scored in self.passes.values())

    @property
    def score(self) -> tuple[bool, float]:
        return not self.fits_gpu, self.seconds

    @property
    def is_short(self) -> bool:
        """Whether a simulation of it takes little time."""
        return all(s.operations <= SEARCH.simulated_operations for s in self.passes.values())

    def too_large(self, batch: int = 1) -> list[str]:
        """A line if the choice does not fit: then no method fits, since fitting methods are first.
        `batch`: sequences at a time, each with its part of the cluster's memory."""
        sizes = [(d, scored.peak_bytes) for d, scored in self.passes.items() if not scored.fits]
        if not sizes:
            return []
        needs = " and ".join(f"{bytes_text(size * batch)} {direction}" for direction, size in sizes)
        limit = bytes_text(gpu_bytes(self.asked.cluster) * batch)
        fewer = "tokens or heads" if batch == 1 else "tokens, heads or sequences"
        return [
            f"It does not fit: a rank needs {needs}, more than the {limit} of a GPU, "
            f"and nothing that fits was found; take more ranks, or fewer {fewer}."
        ]

    def setting(self, direction: Direction) -> str:
        """The options of a pass, as Python and the command line take them. A shape for which the
        method has no option, such as the tile of a ring, is left out."""
        scored = self.passes[direction]
        words = {name: value_text(value) for name, value in scored.options.items()}
        chosen = self.plans[direction].direction(direction).setting
        for name in ("ulysses", "tile", "team"):
            if name in chosen and name in METHODS[scored.name].options():
                words.setdefault(name, value_text(chosen[name]))
        return options_text(words) or "-"

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
                    "method": scored.name,
                    "seconds": scored.seconds,
                    "simulated": scored.is_simulated,
                    "options": scored.options,
                    "peak_bytes": scored.peak_bytes,
                    "received_bytes": self.received[direction][0],
                    "received_bytes_from_other_nodes": self.received[direction][1],
                }
                for direction, scored in self.passes.items()
            },
        }


@dataclass(frozen=True)
class Ranking:
    """`rows`: the choice, then other methods, the best first. `default`: a row of that choice."""

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
        """Whether a row and the choice are a tie."""
        return is_tie(self.chosen.seconds, row.seconds) and row.fits_gpu == self.chosen.fits_gpu


@collector_paused()
def ranked(choice: PlanChoice) -> Ranking:
    """All methods of a search, simulated if that takes little time. A method that seems better than
    the choice is simulated in any case, and becomes the choice if it is, as the default may."""
    asked, refused = choice.asked, dict(choice.refused)
    rows = [RankedMethod(passes, asked) for passes in choice.methods.values()]
    for name in asked.methods:
        if name not in choice.methods and name not in refused:
            try:
                rows.append(glance(asked, name, [*choice.chosen]))
            except PlanError as error:
                refused[name] = str(error)
    best = RankedMethod(choice.chosen, asked)
    default = choice.default
    usual = None if default is None else RankedMethod(default.chosen, asked)
    if usual is not None and usual.is_short:
        usual = _simulated(usual)
    for row in sorted((*rows, *([usual] if usual else [])), key=lambda row: row.seconds):
        if row.score < best.score or row.is_short:
            simulated = _simulated(row)
            rows = [simulated if other is row else other for other in rows]
            best = min(best, simulated, key=lambda row: row.score)
    stays = all(scored.stays for scored in best.passes.values())
    unmoved = best.passes if stays else choice.unmoved
    choice = replace(choice, chosen=best.passes, unmoved=unmoved)
    rest = [row for row in rows if row.name != best.name]
    return Ranking(choice, [best, *sorted(rest, key=lambda row: row.score)], refused, usual)


def glance(asked: SearchQuestion, method: str, directions: Sequence[Direction]) -> RankedMethod:
    """A method by an estimate of its most promising shape."""
    of_method = replace(asked, methods=(method,), effort=GLANCE)
    choice = search_best(of_method, directions, moves_tokens=False)
    return RankedMethod(choice.chosen, choice.asked)


def _simulated(row: RankedMethod) -> RankedMethod:
    passes = {direction: row.asked.simulated(scored) for direction, scored in row.passes.items()}
    return RankedMethod(passes, row.asked)


def name_of(passes: Passes) -> str:
    return "/".join(dict.fromkeys(scored.name for scored in passes.values()))


def received_bytes(plan: Plan, direction: Direction) -> tuple[int, int]:
    """Bytes that a rank receives in a pass, in all and from other nodes: the most of two ranks in
    the middle, in two nodes where there are several. Programs of all ranks take long to make."""
    pass_ = plan.direction(direction)
    most_received = most_far = 0
    for rank in {max(0, plan.num_ranks // 2 - 1), plan.num_ranks // 2}:
        program = pass_.programs[rank]
        meter = TrafficMeter(plan.problem, program.buffer_table())
        received = far = 0
        for op in program.operations:
            if isinstance(op, Communication):
                ranks, member = pass_.groups[op.group], pass_.members[op.group][rank]
                flows = meter.flows(op)
                received += traffic_of(op, flows, member, len(ranks)).received_bytes
                away = [plan.node_of(other) != plan.node_of(rank) for other in ranks]
                far += far_bytes(op, flows, away)
        most_received, most_far = max(most_received, received), max(most_far, far)
    return most_received, most_far
