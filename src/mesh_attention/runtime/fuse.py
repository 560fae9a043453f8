"""An attention that is one call writes its results where the program would copy them to.

Builders give every attention an accumulator in wide precision, since rectangles are merged there,
and a copy that changes precision before results travel or are handed out. If one call does all, the
accumulator holds what the call returned and nothing else: the copy is left out, and so are two
passes over memory. Results are the same bit for bit.

Where buffers lie is not changed, since other ranks may know it (shared memory). So a result can be
written early only where nothing else lies meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.program import (
    Attend,
    AttendBackward,
    Merge,
    MergeRule,
    Operation,
    Program,
    reads,
    writes,
)
from mesh_attention.plan.workspace import WorkspaceMap, lifetimes


def without_copies(program: Program, memory: WorkspaceMap) -> Program:
    one_call = {
        at: op
        for at, op in enumerate(program.operations)
        if isinstance(op, Attend | AttendBackward) and _is_one_call(op)
    }
    if not one_call:
        return program
    found = _Copies(program, memory)
    operations: list[Operation | None] = list(program.operations)
    for at, op in one_call.items():
        copies: list[int] = []
        if isinstance(op, AttendBackward):
            operations[at], copies = found.of_backward(at, op)
        elif op.fresh:
            operations[at], copies = found.of_forward(at, op)
        for copy in copies:
            operations[copy] = None
    left = tuple(op for op in operations if op is not None)
    return replace(program, operations=left) if len(left) < len(operations) else program


def _is_one_call(op: Attend | AttendBackward) -> bool:
    """For all rows of both sides."""
    if len(op.calls) != 1:
        return False
    (call,) = op.calls
    return (call.q_start, call.q_stop, call.k_start, call.k_stop) == (
        *(0, op.q.num_rows, 0, op.k.num_rows),
    )


class _Copies:
    def __init__(self, program: Program, memory: WorkspaceMap) -> None:
        self._operations = program.operations
        self._memory = memory
        self._lifetimes = lifetimes(program)
        self._users: dict[str, list[int]] = defaultdict(list)
        for at, op in enumerate(program.operations):
            for name in op.touched:
                self._users[name].append(at)

    def of_forward(self, at: int, op: Attend) -> tuple[Attend, list[int]]:
        """The attention, and the places of copies that need not be made."""
        reader = self._only_reader(at, op.out)
        copy = None if reader is None else self._operations[reader]
        if reader is None or not isinstance(copy, Merge):
            return op, []
        both = copy.rule is MergeRule.SOFTMAX and copy.inputs == (op.out, op.lse)
        if both and self._only_reader(at, op.lse) != reader:
            return op, []
        if not (both or (copy.rule is MergeRule.SUM and copy.inputs == (op.out,))):
            return op, []
        if not self._can_be_early(copy.outputs, at, reader):
            return op, []
        out, lse = copy.outputs if both else (*copy.outputs, op.lse)
        return replace(op, out=out, lse=lse), [reader]

    def of_backward(self, at: int, op: AttendBackward) -> tuple[AttendBackward, list[int]]:
        targets: list[Piece] = []
        left_out: list[int] = []
        for piece, fresh in (
            (op.grad_q, op.fresh_q),
            (op.grad_k, op.fresh_kv),
            (op.grad_v, op.fresh_kv),
        ):
            reader = self._only_reader(at, piece) if fresh else None
            copy = None if reader is None else self._operations[reader]
            if (
                reader is not None
                and isinstance(copy, Merge)
                and copy.rule is MergeRule.SUM
                and copy.inputs == (piece,)
                and self._can_be_early(copy.outputs, at, reader)
            ):
                targets.append(copy.outputs[0])
                left_out.append(reader)
            else:
                targets.append(piece)
        grad_q, grad_k, grad_v = targets
        return replace(op, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v), left_out

    def _only_reader(self, at: int, piece: Piece) -> int | None:
        """Of what the attention writes there, if nothing else ever uses that buffer."""
        others = [i for i in self._users[piece.buffer] if i != at]
        if piece.buffer not in self._memory.offsets or len(others) != 1:
            return None
        (reader,) = others
        return reader if reader > at and self._pieces(reader, piece.buffer) == [piece] else None

    def _pieces(self, at: int, buffer: str) -> list[Piece]:
        """That an operation uses of a buffer."""
        op = self._operations[at]
        return [piece for piece in (*reads(op), *writes(op)) if piece.buffer == buffer]

    def _can_be_early(self, targets: Sequence[Piece], at: int, reader: int) -> bool:
        return all(self._is_free(target, at, reader) for target in targets)

    def _is_free(self, target: Piece, at: int, reader: int) -> bool:
        for i in self._users[target.buffer]:
            if i >= reader:
                break
            if any(piece.overlaps(target) for piece in self._pieces(i, target.buffer)):
                return False
        place = self._memory.offsets.get(target.buffer)
        if place is None:  # the caller's
            return True
        end = place + self._memory.sizes[target.buffer]
        for name, (born, freed) in self._lifetimes.items():
            start = self._memory.offsets[name]
            there = start < end and place < start + self._memory.sizes[name]
            if there and name != target.buffer and born <= reader and at <= freed:
                return False
        return True
