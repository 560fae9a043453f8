"""All methods of a search in order, each with what people compare: time, MFU, bytes and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from mesh_attention.choose.auto import BestOfAll
from mesh_attention.choose.one_pass import Standing
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.planning import plan_on
from mesh_attention.plan.draw.summary import bytes_text
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.plan import Direction, Pass, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Communication
from mesh_attention.plan.question import ask
from mesh_attention.plan.runs import Run, visible_pairs
from mesh_attention.plan.traffic import TrafficMeter, far_bytes, traffic_of


@dataclass(frozen=True)
class RankedMethod:
    """A method at its best in every pass asked for."""

    passes: dict[Direction, Standing]
    problem: Problem
    num_ranks: int
    cluster: Cluster

    @property
    def name(self) -> str:
        return next(iter(self.passes.values())).name

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.passes.values())

    @property
    def is_simulated(self) -> bool:
        """Otherwise `seconds` is a bound: the method takes at least so long."""
        return not any(one.is_bound for one in self.passes.values())

    @cached_property
    def plans(self) -> dict[Direction, Plan]:
        return {
            direction: one.timeline.plan
            if one.timeline is not None
            else plan_on(
                *(self.cluster, self.problem, self.num_ranks),
                **{"method": one.name, "directions": (direction,), **one.options},
            )
            for direction, one in self.passes.items()
        }

    @property
    def mfu_percent(self) -> float:
        return mfu_percent(self.problem, self.passes, self.seconds, self.num_ranks, self.cluster)

    @cached_property
    def received(self) -> dict[Direction, tuple[int, int]]:
        """In all, and from other nodes, by the rank that receives most of each."""
        found = {}
        for direction, one in self.passes.items():
            if one.timeline is not None:
                most = max(one.timeline.received_bytes), max(one.timeline.far_bytes)
            else:
                plan = self.plans[direction]
                most = received_in_nodes(plan, plan.direction(direction))
            found[direction] = most
        return found

    @cached_property
    def peaks(self) -> dict[Direction, int]:
        """Bytes of memory in each pass."""
        found = {}
        for direction, one in self.passes.items():
            if one.timeline is not None:
                found[direction] = one.timeline.peak_bytes
            else:
                middle = (self.num_ranks // 2,)
                seen = estimate(self.plans[direction], self.cluster, direction, ranks=middle)
                found[direction] = seen.peak_bytes
        return found

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks.values())

    @property
    def fits_gpu(self) -> bool:
        return self.peak_bytes <= gpu_bytes(self.cluster)

    def too_large(self) -> list[str]:
        """A line where it does not fit. Nothing that does was found then: it would be before it."""
        limit = gpu_bytes(self.cluster)
        much = [(d, size) for d, size in self.peaks.items() if size > limit]
        if not much:
            return []
        needs = " and ".join(f"{bytes_text(size)} {direction}" for direction, size in much)
        return [
            f"It does not fit: a rank needs {needs}, more than the {bytes_text(limit)} of a GPU, "
            "and nothing that fits was found; take more ranks, fewer tokens or fewer heads."
        ]

    def setting(self, direction: Direction) -> str:
        """As the method takes it, in Python and on a command line; what it takes not is left out
        (a ring has a shape, but no choice of it)."""
        words = {name: _short(x) for name, x in self.passes[direction].options.items()}
        chosen = self.plans[direction].direction(direction).setting
        for name in ("ulysses", "tile", "team"):
            if name in chosen and name in METHODS[self.name].options():
                words.setdefault(name, _short(chosen[name]))
        return " ".join(f"{name}={value}" for name, value in words.items()) or "-"

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.name,
            "seconds": self.seconds,
            "at_least": not self.is_simulated,
            "mfu_percent": self.mfu_percent,
            "peak_bytes": self.peak_bytes,
            "fits_gpu": self.fits_gpu,
            "passes": {
                direction.value: {
                    "seconds": one.seconds,
                    "at_least": one.is_bound,
                    "simulated": not one.is_bound,
                    "options": one.options,
                    "peak_bytes": self.peaks[direction],
                    "received_bytes": self.received[direction][0],
                    "received_bytes_from_other_nodes": self.received[direction][1],
                }
                for direction, one in self.passes.items()
            },
        }


def gpu_bytes(cluster: Cluster) -> int:
    return int(cluster.gpu.memory_gib * 2**30)


def received_in_nodes(plan: Plan, one: Pass) -> tuple[int, int]:
    """The most that a rank of the first or of the middle node receives in a pass, and the most of
    other nodes: the programs of all ranks would take long to make. Copies receive the same."""
    here = {plan.node_of(0), plan.node_of(plan.num_ranks // 2)}
    total = between = 0
    for rank in range(plan.num_ranks):
        if rank % one.copies or plan.node_of(rank) not in here:
            continue
        program = one.programs[rank]
        meter = TrafficMeter(plan.problem, program.buffer_table())
        away: dict[str, list[bool]] = {}  # by group
        mine = far = 0
        for op in program.operations:
            if isinstance(op, Communication):
                ranks, member = one.groups[op.group], one.members[op.group][rank]
                flows = meter.flows(op)
                mine += traffic_of(op, flows, member, len(ranks)).received_bytes
                if op.group not in away:
                    away[op.group] = [plan.node_of(x) != plan.node_of(rank) for x in ranks]
                far += far_bytes(op, flows, away[op.group])
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


def ranked_methods(
    found: BestOfAll, problem: Problem, ranks: int, cluster: Cluster
) -> list[RankedMethod]:
    """Each with passes that can be those of one plan, the best first."""
    rows = [RankedMethod(passes, problem, ranks, cluster) for passes in found.together]
    # A bound says nothing about who is before whom, unless the other is below it.
    return sorted(rows, key=lambda row: (not row.fits_gpu, not row.is_simulated, row.seconds))


def python_line(
    found: BestOfAll,
    problem: Problem,
    cluster: Cluster,
    options: Mapping[str, Any],
    named: str,
    *,
    is_kept: bool,
) -> str:
    """To paste: the options themselves, where both passes have the same and nothing else decides;
    otherwise `auto`, which finds the answer kept on this machine, and where none is kept the plan.
    `named`: Python that makes the cluster."""
    chosen = [*found.chosen.values()]
    given = {**options, **found.place, **chosen[0].options}
    if len({(one.name, repr(sorted(one.options.items()))) for one in chosen}) == 1 and (
        len(chosen) < len(Direction)
        or _suffices(found, cluster, {"method": chosen[0].name, **given})
    ):
        how = f'method="{chosen[0].name}"{_arguments(given)}, ranks_per_node={cluster.node.ranks}'
    elif is_kept:
        how = f'method="auto"{_arguments({**options, **found.place})}, cluster={named}'
    else:
        return _imported(_line_with_plan(found, problem, named))
    return _imported(f"cp = ContextParallel(group, {_sizes(problem)}, {how})")


def _suffices(found: BestOfAll, cluster: Cluster, given: Mapping[str, Any]) -> bool:
    """Whether options make the plan without the cluster, whose costs may decide on an order."""
    asked, node = found.question, cluster.node.ranks
    how: dict[str, Any] = {"ranks_per_node": node, **given}
    other = ask(asked.problem, asked.num_ranks, **how).plan()
    mine = found.plan()
    return [one.schedule for one in mine.passes] == [one.schedule for one in other.passes]


def _imported(text: str) -> str:
    """With what a cluster needs that no file describes."""
    if "find_cluster(" not in text:
        return text
    return f"from mesh_attention.cost.detect_cluster import Machine, find_cluster\n{text}"


def _line_with_plan(found: BestOfAll, problem: Problem, named: str) -> str:
    sizes = {one.name: getattr(problem, one.name) for one in fields(problem) if one.name != "mask"}
    asked = f"Problem({_arguments(sizes)[2:]}, mask={_mask(problem.mask)})"
    chosen = {
        direction.value: {"method": one.name, "options": one.options}
        for direction, one in found.chosen.items()
    }
    ranks = found.question.num_ranks
    return (
        "from mesh_attention import ContextParallel, Mask, Problem\n"
        "from mesh_attention.choose.answers import question_of_answer\n"
        f"plan = question_of_answer({asked}, {ranks}, {named}, {chosen}).plan()\n"
        "cp = ContextParallel(group, plan=plan)"
    )


def _sizes(problem: Problem) -> str:
    sizes = f"seq_len={problem.q_tokens}, num_heads={problem.num_heads}, "
    if problem.kv_heads != problem.num_heads:
        sizes += f"num_kv_heads={problem.kv_heads}, "
    sizes += f"head_dim={problem.head_dim}, "
    if problem.v_dim != problem.head_dim:
        sizes += f"v_head_dim={problem.v_dim}, "
    if problem.keys != problem.q_tokens:
        sizes += f"kv_seq_len={problem.keys}, "
    if problem.element_bytes in _DTYPES:
        sizes += f"dtype=torch.{_DTYPES[problem.element_bytes]}, "
    if problem.mask in (Mask(), Mask(causal=True)):
        return f"{sizes}causal={problem.mask.causal}"
    return f"{sizes}mask={_mask(problem.mask)}"


_DTYPES = {4: "float32", 8: "float64"}  # bfloat16 need not be said


def _arguments(values: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in values.items())


def _mask(mask: Mask) -> str:
    said = {one.name: getattr(mask, one.name) for one in fields(mask)}
    if mask.slices is not None:  # by the names of kinds, which Python reads
        said["slices"] = tuple((q, k, str(kind)) for q, k, kind in mask.slices)
    unusual = {name: x for name, x in said.items() if x != getattr(Mask(), name)}
    return f"Mask({_arguments(unusual)[2:]})"
