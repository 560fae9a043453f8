"""Which attentions may not run beside the kernel call before them (`lanes.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.dependencies import is_communication
from mesh_attention.plan.program import Attend, AttendBackward, Operation, writes

__all__ = ["joined_attentions"]


def joined_attentions(operations: Sequence[Operation]) -> set[int]:
    """Attentions whose kernels read what was computed after the last kernel call but one: beside
    the last call and its merge, where they would run, it may not be there yet."""
    found = set()
    calls = 0
    computed: dict[str, int] = {}  # calls that had begun when a buffer was last computed
    for at, op in enumerate(operations):
        if isinstance(op, Attend | AttendBackward):
            if any(computed.get(name, -1) >= calls for name in _kernel_inputs(op)):
                found.add(at)
            calls += len(op.calls)
        if not is_communication(op):
            computed.update((piece.buffer, calls) for piece in writes(op))
    return found


def _kernel_inputs(op: Attend | AttendBackward) -> Iterator[str]:
    inputs: tuple[Piece | None, ...] = (op.q, op.k, op.v)
    if isinstance(op, AttendBackward):
        inputs += (op.grad_out, op.lse, op.out, op.delta)
    return (piece.buffer for piece in inputs if piece is not None)
