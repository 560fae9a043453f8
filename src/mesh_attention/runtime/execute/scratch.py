"""What the kernels of a program hold besides its buffers: what the call in flight needs.

Kernels return new tensors, which are merged into the buffers and dropped, and may take memory for
themselves meanwhile; backward calls share what is prepared for them. The largest operation decides,
so this too is known before anything runs, as far as kernels say what they take, and for one batch
element; larger batches need copies besides.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh_attention.kernels import Kernel
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attend, AttendBackward, Program
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.runtime.execute.backward import Missing, backward_needs
from mesh_attention.runtime.execute.kernel_blocks import call_size


def scratch_bytes(
    program: Program, problem: Problem, kernels: Mapping[str, Kernel], *, two_streams: bool
) -> int:
    """With two streams what one operation prepared is held during the first call of the next."""
    table = program.buffer_table()
    known: dict[tuple[object, ...], tuple[int, list[int]]] = {}  # slices of heads are alike
    largest = held = 0
    for op in program.operations:
        if not isinstance(op, Attend | AttendBackward) or not op.calls:
            continue
        heads = [piece.num_heads(table[piece.buffer]) for piece in (op.q, op.k)]
        given = isinstance(op, AttendBackward) and (op.out is None, op.delta is None)
        key = (op.calls, *heads, given)
        if key not in known:
            prepared = _prepared(op, heads[0], problem, kernels)
            known[key] = prepared, _calls(op, table, problem, kernels)
        prepared, (first, *others) = known[key]
        largest = max(largest, held + prepared + first, *(prepared + call for call in others))
        held = prepared if two_streams else 0
    return largest


def _calls(
    op: Attend | AttendBackward,
    table: Mapping[str, Buffer],
    problem: Problem,
    kernels: Mapping[str, Kernel],
) -> list[int]:
    direction = Direction.FORWARD if isinstance(op, Attend) else Direction.BACKWARD
    return [
        kernels[call.kernel].scratch_bytes(direction, call_size(problem, table, op, call))
        for call in op.calls
    ]


def _prepared(
    op: Attend | AttendBackward,
    num_heads: int,
    problem: Problem,
    kernels: Mapping[str, Kernel],
) -> int:
    """What is made once for all calls."""
    if isinstance(op, Attend):
        return 0
    calls = [
        (backward_needs(kernels[call.kernel]), (call.q_start, call.q_stop)) for call in op.calls
    ]
    missing = Missing.find(calls, has_out=op.out is not None, has_delta=op.delta is not None)
    return missing.num_bytes(
        num_heads=num_heads,
        v_head_dim=problem.v_dim,
        element_bytes=problem.element_bytes,
        accumulate_bytes=problem.accumulate_bytes,
    )
