"""The form in which transports read communications: what one member sends, another receives."""

from __future__ import annotations

from itertools import product

import pytest

from mesh_attention import Mask, Plan
from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.plan import Pass
from mesh_attention.plan.language.program import (
    AllGather,
    Communication,
    Move,
    ReduceScatter,
    SendRecv,
    Task,
    reads,
    writes,
)
from mesh_attention.plan.language.traffic import TrafficMeter
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.runtime.transport.interface import Transfers, transfers
from support.cases import Case

TASK = Task("AG-Q", (0,))
MOVE = Move(Piece("part", 10, 15), Piece("whole", 100, 110, (0, 2)), (0, 2, 5))


def test_a_gather_sends_its_part_to_all_and_receives_each_stretch_in_turn() -> None:
    """Two members: 0..2 of both, then 2..5 of both."""
    parts = (Piece("part", 10, 12), Piece("part", 12, 15))
    first = (Piece("whole", 100, 102, (0, 2)), Piece("whole", 104, 107, (0, 2)))
    second = (Piece("whole", 102, 104, (0, 2)), Piece("whole", 107, 110, (0, 2)))
    gathered = transfers(AllGather(TASK, "Q0", (MOVE,)), 2)
    assert gathered == Transfers((parts, parts), (first, second))
    reduced = transfers(ReduceScatter(TASK, "Q0", (MOVE,)), 2)
    assert reduced == Transfers((first, second), (parts, parts), adds=True)


def test_point_to_point_has_one_member_on_either_side() -> None:
    sent, received = (Piece("a", 0, 4),), (Piece("b", 0, 4),)
    result = transfers(SendRecv(TASK, "R", 2, sent, 0, received), 4)
    assert result == Transfers(((), (), sent, ()), (received, (), (), ()))


def communications(plan: Plan, pass_: Pass) -> dict[tuple[str, str], dict[int, Communication]]:
    """By group and name, and by the member that holds it."""
    results: dict[tuple[str, str], dict[int, Communication]] = {}
    for rank, program in enumerate(pass_.programs):
        for op in program.operations:
            if isinstance(op, Communication):
                member = pass_.groups[op.group].index(rank)
                results.setdefault((op.group, op.name), {})[member] = op
    return results


@pytest.mark.parametrize("method", METHODS)
def test_what_members_send_is_what_the_others_receive_and_all_that_is_read(method: str) -> None:
    case = Case(6, 61, 61, heads=(6, 6), mask=Mask(causal=True), options={"method": method})
    plan = case.plan()
    for pass_ in plan.passes:
        tables = [program.buffer_table() for program in pass_.programs]
        for (group, _), ops in communications(plan, pass_).items():
            members = pass_.groups[group]
            size = len(members)
            moved = {member: transfers(op, size) for member, op in ops.items()}
            for a, b in product(range(size), repeat=2):
                sent, received = moved[a].sends[b], moved[b].receives[a]
                assert [(p.num_rows, p.num_heads(tables[members[a]][p.buffer])) for p in sent] == [
                    (p.num_rows, p.num_heads(tables[members[b]][p.buffer])) for p in received
                ]
            for member, op in ops.items():
                table = tables[members[member]]
                meter = TrafficMeter(plan.problem, table)
                counted = meter.traffic(op, member, size)
                sent_bytes, received_bytes = (
                    sum(
                        piece.num_bytes(table[piece.buffer], plan.problem)
                        for other, pieces in enumerate(side)
                        if other != member
                        for piece in pieces
                    )
                    for side in (moved[member].sends, moved[member].receives)
                )
                assert (sent_bytes, received_bytes) == (
                    counted.sent_bytes,
                    counted.received_bytes,
                )
                touched = {p.buffer for side in moved[member].sends for p in side}
                assert touched == {p.buffer for p in reads(op)}
                landed = {p.buffer for side in moved[member].receives for p in side}
                assert landed == {p.buffer for p in writes(op)}
