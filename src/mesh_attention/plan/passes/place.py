"""Places the buffers of a program, and leaves out needless copies, row sums and lse.

`compile.py` calls `placed`, which changes one program and looks at no other rank;
`runtime/session/rank_plan.py` calls `without_lse`.

Copies: builders give every attention a wide accumulator, in which its calls are merged, and a copy
that changes precision before results travel or leave the program. If an attention has one call, it
writes where the copy would, which saves two passes over memory; results are the same bit for bit.
Unused accumulators leave the program too, so buffers are placed anew in less memory. Where other
ranks know the places (shared memory), buffers stay, and a result is written early only where no
other buffer lies meanwhile.

Row sums: where queries travel, `delta = rowsum(out * grad_out)` travels in place of `out`. Rows
that stay, and that only one backward attention reads, do not need delta: kernels that need `out`
have it, and kernels that need sums make them.

lse: a forward program that keeps lse for the backward pass returns it only for the caller.
Transports look at the programs of other ranks too, so all of them are compiled from a plan without
the exchange of lse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Role
from mesh_attention.plan.language.plan import Direction, Pass, Plan, Programs
from mesh_attention.plan.language.program import (
    AllToAll,
    Attend,
    AttendBackward,
    Free,
    Merge,
    MergeRule,
    Operation,
    Program,
    reads,
    writes,
)
from mesh_attention.plan.language.workspace import (
    WorkspaceMap,
    is_one_call,
    lifetimes,
    peak_buffer_bytes,
    workspace_map,
)
from mesh_attention.plan.problem.problem import Problem


def placed(
    program: Program, problem: Problem, *, lse_gradient: bool, shows_workspace: bool
) -> Program:
    """The program without needless copies and row sums, with places for its buffers in no more
    memory than the plan says. `lse_gradient`: row sums stay, as a gradient of lse is subtracted
    from them. `shows_workspace`: buffers stay where other ranks know them (`Target`)."""
    changed = program if lse_gradient else without_row_sums(program)
    if not shows_workspace:
        if changed is not program:
            changed = _without_unused(changed, changed.operations)
        fused = without_copies(changed)
        memory = workspace_map(fused, problem)
        # Mostly true, and checked sooner than the plan's buffers are placed.
        if fused is program or memory.total_bytes <= peak_buffer_bytes(program, problem):
            return _with_places(fused, memory)
    planned = workspace_map(program, problem)
    if not shows_workspace and memory.total_bytes <= planned.total_bytes:
        return _with_places(fused, memory)
    fused = without_copies(changed, planned)
    used = _without_unused(fused, fused.operations)
    return _with_places(replace(used, buffers=fused.buffers), planned)


def _with_places(program: Program, memory: WorkspaceMap) -> Program:
    offsets = memory.offsets
    buffers = [b.at(offsets[b.name]) if b.name in offsets else b for b in program.buffers]
    return replace(program, buffers=tuple(buffers))


@lru_cache(maxsize=1 << 14)  # ranks share the buffers
def at_offset(buffer: Buffer, offset: int | None) -> Buffer:
    return buffer.at(offset)


def without_copies(program: Program, memory: WorkspaceMap | None = None) -> Program:
    """The program whose attentions write where a copy would. `memory`: places that must stay."""
    one_call = {
        at: op
        for at, op in enumerate(program.operations)
        if isinstance(op, Attend | AttendBackward) and is_one_call(op)
    }
    if not one_call:
        return program
    copies_of = _Copies(program, memory)
    operations: list[Operation | None] = list(program.operations)
    for at, op in one_call.items():
        copies: list[int] = []
        if isinstance(op, AttendBackward):
            operations[at], copies = copies_of.of_backward(at, op)
        elif op.fresh:
            operations[at], copies = copies_of.of_forward(at, op)
        for copy in copies:
            operations[copy] = None
    remaining = [op for op in operations if op is not None]
    if len(remaining) == len(operations):
        return program
    if memory is not None:
        return replace(program, operations=tuple(remaining))
    return _without_unused(program, remaining)


def _without_unused(program: Program, operations: Sequence[Operation]) -> Program:
    used = {name for op in operations if not isinstance(op, Free) for name in op.touched}
    unused = {b.name for b in program.buffers if b.role is Role.WORKSPACE} - used
    remaining: list[Operation] = []
    for op in operations:
        if isinstance(op, Free) and not unused.isdisjoint(op.buffers):
            names = tuple(name for name in op.buffers if name not in unused)
            remaining += [Free(names)] if names else []
        else:
            remaining.append(op)
    buffers = tuple(b for b in program.buffers if b.name not in unused)
    return replace(program, operations=tuple(remaining), buffers=buffers)


class _Copies:
    """Finds copies that are needless, and lets attentions write their outputs. Operations are
    named by their index in the program."""

    def __init__(self, program: Program, memory: WorkspaceMap | None) -> None:
        self._operations = program.operations
        self._memory = memory
        self._lifetimes = lifetimes(program)
        self._users: dict[str, list[int]] = defaultdict(list)
        for at, op in enumerate(program.operations):
            for name in op.touched:
                self._users[name].append(at)

    def of_forward(self, at: int, op: Attend) -> tuple[Attend, list[int]]:
        """The attention with new outputs, and the copies that it replaces."""
        both = self._copy(at, op.out, MergeRule.SOFTMAX, (op.out, op.lse))
        if both is not None and self._only_reader(at, op.lse) == both:
            out, lse = writes(self._operations[both])
            return replace(op, out=out, lse=lse), [both]
        of_out = self._copy(at, op.out, MergeRule.SUM, (op.out,))
        if of_out is None:
            return op, []
        return replace(op, out=writes(self._operations[of_out])[0]), [of_out]

    def of_backward(self, at: int, op: AttendBackward) -> tuple[AttendBackward, list[int]]:
        """The same of the gradients, each of which may have a copy of its own."""
        targets: list[Piece] = []
        copies: list[int] = []
        fresh = op.fresh_q, op.fresh_kv, op.fresh_kv
        for piece, is_fresh in zip((op.grad_q, op.grad_k, op.grad_v), fresh, strict=True):
            copy = self._copy(at, piece, MergeRule.SUM, (piece,)) if is_fresh else None
            targets.append(piece if copy is None else writes(self._operations[copy])[0])
            copies += [] if copy is None else [copy]
        grad_q, grad_k, grad_v = targets
        return replace(op, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v), copies

    def _copy(
        self, at: int, piece: Piece, rule: MergeRule, inputs: tuple[Piece, ...]
    ) -> int | None:
        """The merge of these inputs that alone reads the result of `at` in this piece, if `at` can
        write its outputs in its place."""
        reader = self._only_reader(at, piece)
        copy = None if reader is None else self._operations[reader]
        if reader is None or not isinstance(copy, Merge):
            return None
        fits = copy.rule is rule and copy.inputs == inputs
        early = fits and all(self._is_free(target, at, reader) for target in copy.outputs)
        return reader if early else None

    def _only_reader(self, at: int, piece: Piece) -> int | None:
        """The operation that reads the result of the attention `at` in this piece, if no other
        operation uses the buffer."""
        others = [i for i in self._users[piece.buffer] if i != at]
        if piece.buffer not in self._lifetimes or len(others) != 1:
            return None
        (reader,) = others
        return reader if reader > at and self._pieces(reader, piece.buffer) == [piece] else None

    def _pieces(self, at: int, buffer: str) -> list[Piece]:
        """The pieces of a buffer that the operation `at` uses."""
        op = self._operations[at]
        return [piece for piece in (*reads(op), *writes(op)) if piece.buffer == buffer]

    def _is_free(self, target: Piece, at: int, reader: int) -> bool:
        """Whether operation `at` can write this piece in place of the later `reader`."""
        for i in self._users[target.buffer]:
            if i >= reader:
                break
            if any(piece.overlaps(target) for piece in self._pieces(i, target.buffer)):
                return False
        memory = self._memory
        if memory is None or target.buffer not in memory.offsets:  # a buffer of the caller
            return True
        place = memory.offsets[target.buffer]
        end = place + memory.sizes[target.buffer]
        for name, (born, freed) in self._lifetimes.items():
            start = memory.offsets[name]
            overlaps = start < end and place < start + memory.sizes[name]
            if overlaps and name != target.buffer and born <= reader and at <= freed:
                return False
        return True


def without_row_sums(program: Program) -> Program:
    """Attentions take `out` in place of delta where delta is made of the caller's `out` and no row
    of it is read twice. Its buffer stays, unused: other ranks may know where buffers lie."""
    table = program.buffer_table()
    operations: list[Operation | None] = list(program.operations)
    for at, op in enumerate(program.operations):
        if not isinstance(op, Merge) or op.rule is not MergeRule.DELTA:
            continue
        (out, _), (delta,) = op.inputs, op.outputs
        stays = table[out.buffer].role is Role.INPUT and replace(delta, buffer=out.buffer) == out
        readers = _readers(program, at, delta.buffer) if stays else {}
        pieces = [piece for _, piece in readers.values()]
        if not any(a.overlaps(b) for a, b in combinations(pieces, 2)):
            for i, (reader, piece) in readers.items():
                operations[i] = replace(reader, out=replace(piece, buffer=out.buffer), delta=None)
                operations[at] = None
    if None not in operations:
        return program
    return replace(program, operations=tuple(op for op in operations if op is not None))


def _readers(program: Program, writer: int, buffer: str) -> dict[int, tuple[AttendBackward, Piece]]:
    """By index: the attentions that read this buffer as delta, and the piece that each reads. Empty
    where other operations use the buffer too."""
    readers: dict[int, tuple[AttendBackward, Piece]] = {}
    for at, op in enumerate(program.operations):
        if at == writer or isinstance(op, Free) or buffer not in op.touched:
            continue
        if not isinstance(op, AttendBackward) or op.delta is None:
            return {}
        readers[at] = op, op.delta
    return readers


def without_lse(plan: Plan) -> Plan:
    """The plan whose forward programs do not return lse, where they keep it."""

    def of_pass(pass_: Pass) -> Pass:
        if pass_.direction is not Direction.FORWARD:
            return pass_
        made = pass_.programs
        return replace(pass_, programs=Programs(len(made), lambda at: _without_lse(made[at])))

    return replace(plan, passes=tuple(map(of_pass, plan.passes)))


def _without_lse(program: Program) -> Program:
    """The program without its output `lse`. It stays as it is where no lse is kept, or where an
    operation other than an exchange writes the output."""
    table = program.buffer_table()
    of_lse = {name for name, buffer in table.items() if buffer.kind is Kind.LSE}
    outputs = {name for name in of_lse if table[name].role is Role.OUTPUT}
    if all(table[name].role is not Role.KEPT for name in of_lse):
        return program

    def others(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces if piece.buffer not in of_lse)

    operations: list[Operation] = []
    for op in program.operations:
        if outputs.isdisjoint(op.written):
            operations.append(op)
            continue
        if not isinstance(op, AllToAll):
            return program
        sends, receives = (tuple(map(others, side)) for side in (op.sends, op.receives))
        operations.append(replace(op, sends=sends, receives=receives))
    buffers = tuple(buffer for buffer in program.buffers if buffer.name not in outputs)
    return replace(program, buffers=buffers, operations=tuple(operations))
