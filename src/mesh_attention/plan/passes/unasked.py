"""Leave out the exchange of lse where the caller does not ask for it and the backward pass has it.

A forward program that keeps lse, for the heads that its rank works on, hands it out for nothing but
the caller. It is the first pass, for programs of all ranks alike: transports look at those of other
ranks too, so they are compiled from a plan without it.
"""

from __future__ import annotations

from dataclasses import replace

from mesh_attention.plan.language.buffers import Kind, Piece, Role
from mesh_attention.plan.language.plan import Direction, Pass, Plan, Programs
from mesh_attention.plan.language.program import AllToAll, Operation, Program


def without_lse(plan: Plan) -> Plan:
    """The plan whose forward programs do not hand out lse, where they keep it."""

    def of_pass(pass_: Pass) -> Pass:
        if pass_.direction is not Direction.FORWARD:
            return pass_
        made = pass_.programs
        return replace(pass_, programs=Programs(len(made), lambda at: _without_lse(made[at])))

    return replace(plan, passes=tuple(map(of_pass, plan.passes)))


def _without_lse(program: Program) -> Program:
    """The program without its output `lse`; as it is where no lse is kept, or where lse reaches its
    owner otherwise than by an exchange."""
    table = program.buffer_table()
    of_lse = {name for name, buffer in table.items() if buffer.kind is Kind.LSE}
    handed_out = {name for name in of_lse if table[name].role is Role.OUTPUT}
    if all(table[name].role is not Role.KEPT for name in of_lse):
        return program

    def others(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces if piece.buffer not in of_lse)

    operations: list[Operation] = []
    for op in program.operations:
        if handed_out.isdisjoint(op.written):
            operations.append(op)
            continue
        if not isinstance(op, AllToAll):
            return program
        sends, receives = (tuple(map(others, side)) for side in (op.sends, op.receives))
        operations.append(replace(op, sends=sends, receives=receives))
    buffers = tuple(buffer for buffer in program.buffers if buffer.name not in handed_out)
    return replace(program, buffers=buffers, operations=tuple(operations))
