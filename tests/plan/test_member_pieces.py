"""What is known of the pieces of members in brief is what the pieces themselves say."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from mesh_attention import Problem, make_plan
from mesh_attention.plan.language.buffers import Buffer, Kind, Role
from mesh_attention.plan.language.member_pieces import Holders, MemberPieces, MovedTensor
from mesh_attention.plan.language.operation_text import operation_text, parse_operation
from mesh_attention.plan.language.program import AllToAll, Program, Task
from mesh_attention.plan.language.traffic import TrafficMeter
from mesh_attention.plan.language.workspace import Alike, dependencies, workspace_map

QUERIES = Holders([[("", (0, 2))], [("", (2, 4))]])
IN_COPIES = Holders([[("", (0, 1)), (".copy1", (1, 2))], [("", (2, 3))]])
SIDE = (
    MovedTensor("q", (((0, 2), (6, 8)), (), ((2, 6),)), QUERIES),
    MovedTensor("k", (((0, 1),), (), ()), IN_COPIES),
)
PROBLEM = Problem(8 * 6, 6, 16, num_kv_heads=3)


def in_full(op: AllToAll) -> AllToAll:
    """The same exchange, with all of its pieces."""
    return AllToAll(op.task, op.group, tuple(op.sends), tuple(op.receives))


def programs() -> Iterator[Program]:
    """Of methods with heads in copies, in chunks, at once, and among all ranks."""
    for how in (
        {"method": "ulysses", "ranks": 6},
        {"method": "ulysses", "ranks": 4},
        {"method": "mesh-usp", "ranks": 12, "ulysses": 3, "tile": (2, 2), "chunks": (2, 2)},
        {"method": "usp", "ranks": 6, "ulysses": 3, "relayout": True, "layout": "zigzag"},
    ):
        plan = make_plan(PROBLEM, how.pop("ranks"), **how)  # type: ignore[arg-type]
        for pass_ in plan.passes:
            yield from pass_.programs[::3]


def exchanges(program: Program) -> list[AllToAll]:
    every = [op for op in program.operations if isinstance(op, AllToAll)]
    return [op for op in every if isinstance(op.sends, MemberPieces)]


def test_members_have_the_rows_of_their_unit_and_the_heads_of_their_group() -> None:
    pieces = MemberPieces(SIDE)
    assert len(pieces) == 6
    assert [f"{p.buffer} {p.start}:{p.stop} {p.heads}" for p in pieces[0]] == [
        "q 0:2 (0, 2)",
        "q 6:8 (0, 2)",
        "k 0:1 (0, 1)",
        "k.copy1 0:1 (1, 2)",
    ]
    assert pieces[2:4] == ((), ())
    assert [p.heads for p in pieces[-1]] == [(2, 4)]
    with pytest.raises(IndexError):
        pieces[6]


def test_pieces_are_equal_to_a_tuple_of_them_pickled_or_not() -> None:
    pieces = MemberPieces(SIDE)
    full = tuple(pieces)
    assert pieces == full
    assert full == pieces
    assert pieces == MemberPieces(SIDE)
    assert hash(pieces) == hash(full)
    assert repr(pieces) == repr(full)
    assert pickle.loads(pickle.dumps(pieces)) == full
    assert pieces != full[1:]
    assert pieces != MemberPieces(SIDE[:1])


def test_names_and_bytes_are_those_of_the_pieces() -> None:
    op = AllToAll(Task("EX"), "U0", MemberPieces(SIDE), MemberPieces(SIDE[:1]))
    kinds = {"q": Kind.Q, "k": Kind.K, "k.copy1": Kind.LSE}
    table = {n: Buffer(n, kind, ((0, 8),), (0, 4), role=Role.INPUT) for n, kind in kinds.items()}
    assert op.touched == in_full(op).touched == ("q", "k", "k.copy1")
    flows = TrafficMeter(PROBLEM, table).flows(op)
    assert flows == TrafficMeter(PROBLEM, table).flows(in_full(op))
    assert [*flows.sent] == [0, 1, 4, 5]
    without = TrafficMeter(PROBLEM, table, kinds=(Kind.K,))
    assert without.flows(op) == without.flows(in_full(op))


@pytest.mark.parametrize("program", [*programs()], ids=lambda program: f"rank {program.rank}")
def test_readers_take_an_exchange_in_brief_as_they_take_it_in_full(program: Program) -> None:
    table, full = program.buffer_table(), dict[AllToAll, AllToAll]()
    for op in exchanges(program):
        full[op] = in_full(op)
        assert op.touched == full[op].touched
        assert op.written == full[op].written
        assert TrafficMeter(PROBLEM, table).flows(op) == TrafficMeter(PROBLEM, table).flows(
            in_full(op)
        )
        assert parse_operation(operation_text(op)) == op
    assert full
    operations = [
        full[op] if isinstance(op, AllToAll) and op in full else op for op in program.operations
    ]
    other = Program(program.rank, program.buffers, tuple(operations))
    memory = workspace_map(program, PROBLEM)
    assert workspace_map(other, PROBLEM) == memory
    assert dependencies(other, memory) == dependencies(program, memory)


def test_programs_of_equal_exchanges_are_alike() -> None:
    program = next(programs())
    alike = Alike()
    copies = [
        AllToAll(op.task, op.group, MemberPieces(op.sends.tensors), op.receives)
        if isinstance(op, AllToAll) and isinstance(op.sends, MemberPieces)
        else op
        for op in program.operations
    ]
    other = Program(program.rank, program.buffers, tuple(copies))
    assert alike.uses(other) == alike.uses(program)
