"""Plans a training step: every split of the ranks into data x context, with every policy.

The command line calls `plan_step` and `largest_context`; `step/costs.py` gives seconds and bytes.
Ranks of a context group are neighbours, and FSDP2 shards over all ranks. Without `batch` a context
group trains one sequence a step; with it, its part of the batch, one sequence after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesh_attention.choose.ask import usual_machine
from mesh_attention.choose.scored import gpu_bytes
from mesh_attention.cost.planning import collector_paused
from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import a_cluster
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import MAX_TOKENS, Problem
from mesh_attention.step.costs import (
    LayerAttention,
    Policy,
    StepMemory,
    StepTime,
    layer_attention,
    policies,
    step_memory,
    step_time,
)
from mesh_attention.step.model_shapes import MODELS, ModelShape, model_shape

Progress = Callable[[int, int], None]
_NEAR = 64  # the largest context is found to 1 part in 64


@dataclass(frozen=True)
class StepQuestion:
    """`memory_bytes` of a GPU, `host_bytes` of a node."""

    model: ModelShape
    tokens: int
    num_ranks: int
    cluster: Cluster
    batch: int | None
    memory_bytes: int
    host_bytes: int
    mask: Mask


@dataclass(frozen=True)
class PlannedStep:
    """A split of the ranks into data x context, with a policy. `sequences`: of all ranks in a
    step."""

    asked: StepQuestion
    tokens: int
    data: int
    context: int
    sequences: int
    policy: Policy
    attention: LayerAttention
    time: StepTime
    memory: StepMemory

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.sequences * self.tokens / self.seconds / self.asked.num_ranks

    @property
    def mfu_percent(self) -> float:
        """Counts operations that must be done once: attention by the area of the mask, 2.5 times as
        much backward as forward; six for each token and parameter of blocks and head."""
        model, gpu = self.asked.model, self.asked.cluster.gpu
        weights = model.layers * model.block_parameters + model.head_parameters
        flops = 3.5 * model.layers * self.attention.flops / self.tokens + 6.0 * weights
        return 100 * flops * self.tokens_per_second_per_gpu / (gpu.peak_tflops * 1e12)

    @property
    def node_host_bytes(self) -> int:
        return min(self.asked.num_ranks, self.asked.cluster.node.ranks) * self.memory.host

    @property
    def lacking_bytes(self) -> tuple[int, int]:
        """Missing memory of the GPU, and of the host of a node."""
        excess = self.memory.peak[1] - self.asked.memory_bytes
        return max(0, excess), max(0, self.node_host_bytes - self.asked.host_bytes)

    @property
    def fits(self) -> bool:
        return not any(self.lacking_bytes)

    @property
    def order(self) -> tuple[bool, float]:
        """A sort key: the fastest step that fits is first, or the step that lacks least."""
        lacking = max(self.lacking_bytes)
        return not self.fits, lacking or -self.tokens_per_second_per_gpu

    @property
    def room(self) -> float:
        """About how many times as many tokens would fit."""
        fixed = sum(self.memory[:5])  # bytes that do not grow with the tokens
        room = (self.asked.memory_bytes - fixed) / (self.memory.peak[1] - fixed)
        return min(room, self.asked.host_bytes / self.node_host_bytes) if self.memory.host else room

    def to_json(self) -> dict[str, Any]:
        moment, peak = self.memory.peak
        names = ["tokens", "data", "context", "sequences", "seconds", "tokens_per_second_per_gpu"]
        names += ["mfu_percent", "fits", "lacking_bytes", "node_host_bytes"]
        return {name: getattr(self, name) for name in names} | {
            **self.policy._asdict(),
            "methods": [scored.name for scored in self.attention.choice.chosen.values()],
            "attention_workspace_bytes": self.attention.workspace_bytes,
            "time_seconds": self.time._asdict(),
            "memory_bytes": self.memory._asdict() | {"peak": peak, "peak_moment": moment},
        }


@dataclass(frozen=True)
class StepPlan:
    """`steps` has every policy of every split, the best first; `refused` says why others cannot."""

    asked: StepQuestion
    steps: tuple[PlannedStep, ...]
    refused: dict[str, str]

    @property
    def best(self) -> PlannedStep:
        return self.steps[0]

    @property
    def splits(self) -> list[PlannedStep]:
        """Each split with its best policy, the best first."""
        best: dict[int, PlannedStep] = {}
        for step in self.steps:
            best.setdefault(step.context, step)
        return list(best.values())


@collector_paused()
def plan_step(
    model: str | ModelShape,
    tokens: int,
    num_ranks: int,
    *,
    cluster: Cluster | str | Path | None = None,
    batch: int | None = None,
    memory_bytes: int | None = None,
    host_bytes: int | None = None,
    mask: Mask | None = None,
    context: int | None = None,
    progress: Progress | None = None,
) -> StepPlan:
    """Seconds and memory of a model's training step, for every split of the ranks into data x
    context and every policy of keeping activations: the best first (`.best`).

    model           a name that `advise --help` lists, or the path of a `config.json`
    tokens          of one sequence
    batch           sequences a step over all ranks; left out: one for each data-parallel group
    memory_bytes    of a GPU; `host_bytes` of a node's host. Left out: as the cluster has it
    context         only the split with this number of ranks to a sequence; left out: all splits

    Experimental.

    >>> plan = plan_step("qwen3-8b", 32768, 8, cluster="hgx-h100", context=4)
    >>> plan.best.fits, plan.best.data
    (True, 2)
    """
    shape = model if isinstance(model, ModelShape) else model_shape(model)
    if not shape.layers:
        dense = ", ".join(name for name, other in MODELS.items() if other.layers)
        raise PlanError(f"{shape.name} has experts; steps are planned for dense models: {dense}")
    ranks = number("ranks", num_ranks)
    machine = usual_machine(ranks) if cluster is None else a_cluster(cluster)
    host = int(machine.step.host_memory_gib * 2**30) if machine.step else 0
    asked = StepQuestion(
        shape,
        number("tokens", tokens),
        ranks,
        machine,
        None if batch is None else number("batch", batch),
        gpu_bytes(machine) if memory_bytes is None else number("memory_bytes", memory_bytes),
        host if host_bytes is None else number("host_bytes", host_bytes, least=0),
        Mask(causal=True) if mask is None else mask,
    )
    groups = [n for n in range(1, ranks + 1) if ranks % n == 0 and (asked.batch or n) % n == 0]
    if context is not None:
        groups = [n for n in groups if n * number("context", context) == ranks]
    steps: list[PlannedStep] = []
    refused: dict[str, str] = {}
    for done, data in enumerate(groups):
        if progress:
            progress(done, len(groups))
        try:
            steps += _steps(asked, asked.tokens, ranks // data)
        except PlanError as error:
            refused[f"{data} x {ranks // data}"] = str(error)
            if len(refused) == len(groups):
                raise
    return StepPlan(asked, tuple(sorted(steps, key=lambda step: step.order)), refused)


def _steps(asked: StepQuestion, tokens: int, context: int) -> Iterator[PlannedStep]:
    """Every policy of a split, in the order of `policies`."""
    data, model = asked.num_ranks // context, asked.model
    in_turn = 1 if asked.batch is None else asked.batch // data  # sequences of a group
    problem = Problem(tokens, mask=asked.mask, **model.heads)
    attention = [
        layer_attention(problem, context, asked.cluster, keeps_shards=keeps_shards)
        for keeps_shards in (False, True)
    ]
    for policy in policies(attention[0].local_tokens):
        layer = attention[policy.keeps_attention]
        time = step_time(model, layer, policy, asked.cluster, asked.num_ranks, in_turn)
        memory = step_memory(model, layer, policy, asked.num_ranks)
        yield PlannedStep(asked, tokens, data, context, data * in_turn, policy, layer, time, memory)


@collector_paused()
def largest_context(
    asked: StepQuestion, progress: Progress | None = None
) -> tuple[PlannedStep | None, PlannedStep | None]:
    """The longest sequence that fits and the shortest tried that does not, one a step on all ranks.
    Memory is about linear in the tokens, so each probe says about where the limit is."""
    unit, asked = 1024 * asked.num_ranks, replace(asked, batch=None)
    fitting: PlannedStep | None = None
    beyond: PlannedStep | None = None
    length, probes = max(1, asked.tokens // unit), 0
    while 0 < length <= MAX_TOKENS // unit:
        steps = list(_steps(asked, length * unit, asked.num_ranks))
        step = min(steps, key=lambda step: step.order)
        fitting, beyond = (step, beyond) if step.fits else (fitting, step)
        low, high = (known.tokens // unit if known else 0 for known in (fitting, beyond))
        if high and (high - low) * _NEAR <= high + _NEAR:
            break
        length = max(int(length * max(step.room for step in steps)), low + low // _NEAR + bool(low))
        length = min(length, high - high // _NEAR - 1) if high else length
        probes += 1
        if progress:
            progress(probes, probes + 3)
    return fitting, beyond
