"""Attention of one layer inside a step: seconds and bytes, by the search and the simulator.

Nothing is modelled here: `find_default` chooses as `ContextParallel` does, `simulate` times it, and
readers of plans count what it holds.
"""

from __future__ import annotations

from typing import NamedTuple

from mesh_attention.choose.auto import PlanChoice, find_default
from mesh_attention.cost.timeline import Timeline
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import AttendBackward
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import kept_bytes


class LayerAttention(NamedTuple):
    """Of the rank that has most.

    local_tokens     rows of a shard, padding included
    flops            of all ranks forward, by the area of the mask; backward has 2.5 times as many
    held_bytes       between the passes; of shards alone not counted: they are computed again
    backward_bytes   at the peak of the backward pass, with the caller's tensors
    workspace_bytes  the part of it that is not the caller's: buffers and kernels
    """

    choice: PlanChoice
    local_tokens: int
    flops: float
    forward_seconds: float
    backward_seconds: float
    held_bytes: int
    backward_bytes: int
    workspace_bytes: int


def layer_attention(
    problem: Problem, num_ranks: int, cluster: Cluster, *, keeps_shards: bool
) -> LayerAttention:
    """`keeps_shards`: the forward pass leaves nothing but out and lse, which a checkpoint keeps;
    otherwise also what it exchanged for heads, so that the backward pass need not."""
    choice = find_default(problem, num_ranks, cluster, {"keep": "shards"} if keeps_shards else {})
    forward, backward = (choice.timeline(direction) for direction in Direction)
    plan, kernel = choice.plan(), _kernel_bytes(backward)
    return LayerAttention(
        choice,
        plan.q_layout.slots,
        forward.flops,
        forward.runtime_seconds,
        backward.runtime_seconds,
        0 if keeps_shards else kept_bytes(plan).held_bytes,
        backward.peak_bytes + kernel,
        backward.workspace_bytes + kernel,
    )


def _kernel_bytes(backward: Timeline) -> int:
    """What the largest call holds: its results, and fp32 sums of dq, and of dk and dv where query
    heads share them (as `scratch_bytes` of the fastest backward kernel counts)."""
    problem, programs = backward.plan.problem, backward.pass_.programs
    program = programs[len(programs) // 2]
    table, largest = program.buffer_table(), 0
    for op in program.operations:
        if not isinstance(op, AttendBackward):
            continue
        heads, kv_heads = (piece.num_heads(table[piece.buffer]) for piece in (op.q, op.k))
        for call in op.calls:
            dq = (call.q_stop - call.q_start) * heads * problem.head_dim
            dkv = (call.k_stop - call.k_start) * kv_heads * (problem.head_dim + problem.v_dim)
            sums = 4 * (dq + (dkv if heads != kv_heads else 0))
            largest = max(largest, problem.element_bytes * (dq + dkv) + sums)
    return largest
