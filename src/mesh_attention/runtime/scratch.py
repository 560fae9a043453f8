"""What the kernels of a program hold besides its buffers: what the call under way needs.

Kernels return new tensors, which are merged into the buffers and dropped, and a library may take
memory for itself meanwhile. The largest operation decides, so this too is known before anything
runs, for the ready-made kernels and one batch element; larger batches need copies besides.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh_attention.kernels import Kernel, MaskKind
from mesh_attention.kernels.dense import DenseKernel
from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Attend, AttendBackward, Call, Program

__all__ = ["scratch_bytes"]


def scratch_bytes(
    program: Program, problem: Problem, kernels: Mapping[MaskKind, Kernel], *, two_streams: bool
) -> int:
    """With two streams what one operation prepared is held during the first call of the next."""
    table = program.buffer_table()
    largest = held = 0
    for op in program.operations:
        if isinstance(op, Attend):
            largest = max([largest, *(_forward(op, call, table, problem) for call in op.calls)])
        elif isinstance(op, AttendBackward) and op.calls:
            prepared = _prepared(op, table, problem)
            first, *others = (_backward(op, call, table, problem, kernels) for call in op.calls)
            largest = max([largest, held + prepared + first, *(prepared + c for c in others)])
            held = prepared if two_streams else 0
    return largest


def _forward(op: Attend, call: Call, table: dict[str, Buffer], problem: Problem) -> int:
    rows = call.q_stop - call.q_start
    heads = op.q.num_heads(table[op.q.buffer])
    return rows * heads * (problem.v_dim * problem.element_bytes + problem.accumulate_bytes)


def _prepared(op: AttendBackward, table: dict[str, Buffer], problem: Problem) -> int:
    """What all calls of an operation share."""
    heads = op.q.num_heads(table[op.q.buffer])
    first, last = min(c.q_start for c in op.calls), max(c.q_stop for c in op.calls)
    runs = {(c.q_start, c.q_stop) for c in op.calls}
    statistics = sum(stop - start for start, stop in runs) * heads * problem.accumulate_bytes
    stand_in = 0 if op.out is not None else (last - first) * heads * problem.v_dim
    return statistics + stand_in * problem.element_bytes


def _backward(
    op: AttendBackward,
    call: Call,
    table: dict[str, Buffer],
    problem: Problem,
    kernels: Mapping[MaskKind, Kernel],
) -> int:
    heads, kv_heads = op.q.num_heads(table[op.q.buffer]), op.k.num_heads(table[op.k.buffer])
    rows, keys = call.q_stop - call.q_start, call.k_stop - call.k_start
    kernel = kernels[MaskKind(call.kind)]
    own = 0
    if isinstance(kernel, DenseKernel):
        widths = (problem.head_dim, problem.v_dim)
        own = kernel.backward_workspace_bytes((rows, keys), (heads, kv_heads), widths)
    of_queries = rows * heads * problem.head_dim
    of_keys = keys * kv_heads * (problem.head_dim + problem.v_dim)
    return (of_queries + of_keys) * problem.element_bytes + own
