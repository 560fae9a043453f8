"""What travels to the wrong place, or arrives as something else, is caught at that transfer.

One change is harmless; its test says why, and checks that it passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from mutants import (
    MUTANTS,
    Place,
    caught,
    places,
    random_places,
)

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Move,
    Operation,
    ReduceScatter,
    Task,
)
from mesh_attention.plan.language.text import parse_plan, plan_text
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify
from mesh_attention.plan.read.verify.structure import _group_fault


def test_pieces_sent_to_the_wrong_owner_are_caught_at_that_exchange() -> None:
    tried = 0
    for rng, place in random_places(8, lambda op: isinstance(op, AllToAll)):
        op = place.op
        assert isinstance(op, AllToAll)
        filled = [m for m, pieces in enumerate(op.sends) if pieces]
        if len(filled) < 2 or op.name.startswith("AG-KV"):
            continue
        i, j = rng.sample(filled, 2)
        sends = list(op.sends)
        sends[i], sends[j] = sends[j], sends[i]
        finding = caught(place, place.put(replace(op, sends=tuple(sends))))
        assert finding.operation == op.name
        assert finding.rank in {place.pass_.groups[op.group][m] for m in (i, j)}
        assert f"rank {place.rank}" in finding.message
        tried += 1
    assert tried > MUTANTS // 3


def test_kv_sent_to_a_rank_that_does_not_expect_it_is_caught_there() -> None:
    """Without rotation the fetch of KV is an all-to-all; every user gets the same pieces."""
    setting = MeshSetting(tile=(3, 3), rotation=False)
    plan = box_plan(Problem(54, 1, 4), 9, setting)
    for place in places(plan, lambda op: op.name == "AG-KV-0"):
        op = place.op
        assert isinstance(op, AllToAll)
        users = [m for m, pieces in enumerate(op.sends) if pieces]
        other = next(m for m in range(9) if m not in users)
        sends = list(op.sends)
        sends[users[0]], sends[other] = (), sends[users[0]]
        finding = caught(place, place.put(replace(op, sends=tuple(sends))))
        assert finding.operation == "AG-KV-0"
        assert finding.rank in (users[0], other)


def test_two_copies_that_change_places_in_a_stack_are_harmless() -> None:
    """An owner merges the partials of all members, in whatever order they lie."""
    plan = box_plan(Problem(32, 1, 4), 4, MeshSetting(tile=(4, 1), combine=Combine.EXCHANGE))
    place = places(plan, lambda op: op.name == "RS-Q-0")[0]
    op = place.op
    assert isinstance(op, AllToAll)
    receives = (op.receives[1], op.receives[0], *op.receives[2:])
    assert verify(place.put(replace(op, receives=receives))) == []


def test_a_gather_of_the_wrong_rows_is_caught_at_that_gather() -> None:
    tried = 0
    for rng, place in random_places(13, lambda op: isinstance(op, AllGather)):
        op = place.op
        assert isinstance(op, AllGather)
        at = rng.randrange(len(op.moves))
        part = op.moves[at].part
        shift = rng.choice((-part.num_rows, -1, 1, part.num_rows))
        wrong = Piece(part.buffer, part.start + shift, part.stop + shift, part.heads)
        moves = (*op.moves[:at], replace(op.moves[at], part=wrong), *op.moves[at + 1 :])
        finding = caught(place, place.put(replace(op, moves=moves)))
        assert finding.operation == op.name
        # Rows that the buffer has not are this rank's fault; a gather that delivers other rows
        # than its wholes declare shows at its first member.
        assert finding.rank in place.pass_.groups[op.group]
        tried += 1
    assert tried >= MUTANTS


def with_moves_everywhere(plan: Plan, name: str, change: Callable[[Move], Move]) -> Plan:
    """The same wrong moves on all ranks, so that sizes still match."""

    def altered(op: Operation) -> Operation:
        if isinstance(op, AllGather | ReduceScatter) and op.name == name:
            return replace(op, moves=tuple(map(change, op.moves)))
        return op

    forward = plan.forward
    programs = tuple(
        replace(program, operations=tuple(map(altered, program.operations)))
        for program in forward.programs
    )
    passes = tuple(replace(p, programs=programs) if p is forward else p for p in plan.passes)
    return replace(plan, passes=passes)


@pytest.mark.parametrize("cuts", [(0, 8), (0, 3, 8), (0, 5, 8), (0, 2, 4, 8)])
def test_wrong_cuts_of_a_gather_are_caught_even_where_all_members_agree_on_them(
    cuts: tuple[int, ...],
) -> None:
    """Zigzag halves of 4 rows each: any other cut lays the gathered rows out otherwise."""
    setting = MeshSetting(tile=(2, 2), layout=LayoutKind.ZIGZAG)
    plan = box_plan(Problem(32, 1, 4), 4, setting)
    assert verify(with_moves_everywhere(plan, "AG-Q-0", lambda m: m)) == []
    mutant = with_moves_everywhere(plan, "AG-Q-0", lambda m: replace(m, cuts=cuts))
    findings = verify(mutant)
    assert findings
    assert findings[0].operation == "AG-Q-0"


def test_a_gather_into_a_buffer_of_another_kind_is_caught_at_that_gather() -> None:
    plan = box_plan(Problem(32, 1, 4), 4, MeshSetting(tile=(2, 2)))
    mutant = with_moves_everywhere(
        plan,
        "AG-KV-0",
        lambda m: replace(m, part=replace(m.part, buffer="v" if m.part.buffer == "k" else "k")),
    )
    assert verify(mutant)[0].operation == "AG-KV-0"


def first_gather(plan: Plan, name: str, rank: int) -> Place:
    return next(p for p in places(plan, lambda op: op.name == name) if p.rank == rank)


@pytest.mark.parametrize("cuts", [(0, 5, 3, 8), (1, 8), (-1, 8), (0, 7), (0, 4, 4, 8), (0, 9)])
def test_cuts_that_do_not_divide_a_part_are_caught_before_anything_runs(
    cuts: tuple[int, ...],
) -> None:
    plan = box_plan(Problem(32, 1, 4), 4, MeshSetting(tile=(2, 2), layout=LayoutKind.CONTIGUOUS))
    place = first_gather(plan, "AG-Q-0", 1)
    assert isinstance(place.op, AllGather)
    moves = tuple(replace(move, cuts=cuts) for move in place.op.moves)
    finding = caught(place, place.put(replace(place.op, moves=moves)))
    assert (finding.rank, finding.operation) == (1, "AG-Q-0")
    assert f"cuts {cuts} do not divide the 8 rows of q" in finding.message


@pytest.mark.parametrize("rank", [0, 1])
def test_two_members_that_move_other_sizes_are_caught_at_that_gather(rank: int) -> None:
    """Cut otherwise on one of them; each by itself would be sound."""
    plan = box_plan(Problem(32, 1, 4), 4, MeshSetting(tile=(2, 2), layout=LayoutKind.CONTIGUOUS))
    place = first_gather(plan, "AG-Q-0", rank)
    assert isinstance(place.op, AllGather)
    assert place.pass_.groups[place.op.group] == (0, 1)
    moves = tuple(replace(move, cuts=(0, 3, 8)) for move in place.op.moves)
    finding = caught(place, place.put(replace(place.op, moves=moves)))
    assert (finding.rank, finding.operation) == (1, "AG-Q-0")
    assert "moves other sizes than rank 0" in finding.message


def test_the_last_member_of_a_reduction_may_call_its_buffers_as_it_likes() -> None:
    problem = Problem(32, 1, 4)
    plan = box_plan(problem, 4, MeshSetting(tile=(2, 2), combine=Combine.REDUCE_SCATTER))
    head, *programs = plan_text(plan).split("\nrank ")
    programs[1] = programs[1].replace("out.0.wire", "own.wire")
    assert "<own.wire[0:16]" in programs[1]
    assert verify(parse_plan("\nrank ".join((head, *programs)))) == []


def test_each_rank_may_call_its_buffers_as_it_likes() -> None:
    """The kinds of a collective are those of its members' own buffers, not those of their names."""
    problem = Problem(32, 4, 4)
    plan = make_plan(problem, 8, method="mesh-usp", ulysses=2, tile=(2, 2), keep="shards")
    head, *programs = plan_text(plan).split("\nrank ")
    other = {"k.u": "v.u", "v.u": "k.u"}
    programs[0] = re.sub(r"\b[kv]\.u\b", lambda match: other[match[0]], programs[0])
    assert "buffer v.u k element" in programs[0]
    assert verify(parse_plan("\nrank ".join((head, *programs)))) == []


def test_a_gather_written_row_by_row_is_proven_with_all_that_follows_it() -> None:
    """300 rows: more than the numbers of which Python has one object each."""
    setting = MeshSetting(tile=(2, 1), combine=Combine.REDUCE_SCATTER)
    plan = box_plan(Problem(300, 1, 4), 2, setting, directions=(Direction.FORWARD,))
    sends = tuple(Piece("q", at, at + 1) for at in range(150))
    receives = [Piece("q.0", at, at + 1) for at in range(300)]
    for rank in range(2):
        place = first_gather(plan, "AG-Q-0", rank)
        assert isinstance(place.op, AllGather)
        both = tuple(receives[:150]), tuple(receives[150:])
        plan = place.put(AllToAll(place.op.task, place.op.group, (sends, sends), both))
    assert places(plan, lambda op: isinstance(op, ReduceScatter))
    assert verify(plan) == []


def test_an_exchange_among_300_members_names_pieces_for_each_of_them() -> None:
    plan = box_plan(Problem(8, 1, 4), 1, MeshSetting())
    forward = replace(plan.forward, groups={"U0": tuple(range(300))})
    nothing: tuple[tuple[Piece, ...], ...] = ((),) * 300
    assert _group_fault(forward, 299, AllToAll(Task("EX-IN"), "U0", nothing, nothing)) is None
    fault = _group_fault(forward, 299, AllToAll(Task("EX-IN"), "U0", nothing[1:], nothing))
    assert fault == "must name pieces for each of the 300 members of U0"
