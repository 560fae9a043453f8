"""Form, before meaning: names that exist, pieces inside their buffers, groups with this rank."""

from __future__ import annotations

from itertools import pairwise

from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Communication,
    Free,
    Operation,
    Program,
    ReduceScatter,
    SendRecv,
    reads,
    writes,
)
from mesh_attention.plan.verify.finding import Finding

__all__ = ["structure_findings"]


def structure_findings(plan: Plan, one: Pass) -> list[Finding]:
    findings: list[Finding] = []
    direction = str(one.direction)
    if [program.rank for program in one.programs] != list(range(plan.num_ranks)):
        findings.append(
            Finding(direction, 0, "programs", "there must be one program for each rank")
        )
    if sorted(plan.devices) != list(range(plan.num_ranks)):
        findings.append(Finding(direction, 0, "devices", "must number every rank exactly once"))
    for name, members in one.groups.items():
        if len(set(members)) != len(members) or not set(members) <= set(range(plan.num_ranks)):
            findings.append(Finding(direction, 0, name, f"is not a group of ranks: {members}"))
    if findings:
        return findings
    for program in one.programs:
        wrong = _program_fault(one, program)
        if wrong:
            findings.append(Finding(direction, program.rank, *wrong))
    return findings


def _program_fault(one: Pass, program: Program) -> tuple[str, str] | None:
    table = program.buffer_table()
    if len(table) != len(program.buffers):
        return "buffers", "two buffers have the same name"
    sizes = {name: (b.num_rows, b.num_heads) for name, b in table.items()}
    names: set[str] = set()
    for op in program.operations:
        fault = _piece_fault(op, sizes)
        if fault is None and isinstance(op, AllGather | ReduceScatter | AllToAll | SendRecv):
            fault = "occurs twice" if op.name in names else _group_fault(one, program.rank, op)
            names.add(op.name)
        if fault:
            return op.name, fault
    return None


def _piece_fault(op: Operation, sizes: dict[str, tuple[int, int]]) -> str | None:
    if isinstance(op, Free):
        missing = [name for name in op.buffers if name not in sizes]
        return f"frees the unknown buffer {missing[0]}" if missing else None
    for piece in (*reads(op), *writes(op)):
        if piece.buffer not in sizes:
            return f"uses the unknown buffer {piece.buffer}"
        rows, heads = sizes[piece.buffer]
        if not 0 <= piece.start <= piece.stop <= rows:
            return f"uses rows {piece.start}:{piece.stop} of {piece.buffer}, which has {rows}"
        if piece.heads and not 0 <= piece.heads[0] <= piece.heads[1] <= heads:
            return f"uses heads {piece.heads} of {piece.buffer}, which has {heads}"
    return None


def _group_fault(one: Pass, rank: int, op: Communication) -> str | None:
    members = one.groups.get(op.group)
    if members is None:
        return f"uses the unknown group {op.group}"
    if rank not in members:
        return f"uses group {op.group}, which this rank is not in"
    size = len(members)
    if isinstance(op, AllToAll) and not len(op.sends) == len(op.receives) == size:
        return f"must name pieces for each of the {size} members of {op.group}"
    if isinstance(op, SendRecv) and not (0 <= op.to_member < size and 0 <= op.from_member < size):
        return f"names a member that group {op.group} does not have"
    if isinstance(op, AllGather | ReduceScatter):
        for move in op.moves:
            rows = move.part.num_rows
            rising = all(a < b for a, b in pairwise(move.cuts))
            if not rising or move.cuts[0] != 0 or move.cuts[-1] != rows:
                return f"cuts {move.cuts} do not divide the {rows} rows of {move.part.buffer}"
            if move.whole.num_rows != rows * size:
                return f"{move.whole.buffer} is not {size} times {move.part.buffer}"
    return None
