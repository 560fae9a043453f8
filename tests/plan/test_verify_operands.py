"""Operands that fit by size and are the wrong ones: another tensor, another head, another name.

Each of these plans moves the right number of rows at the right time. Without the check that each
test asks for, it runs to its end, with other numbers or in another kernel's crash.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mutants import Place, caught, places

from mesh_attention import make_plan
from mesh_attention.plan.language.buffers import Buffer, Piece, Precision, Role
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Attend,
    AttendBackward,
    Free,
    Merge,
    MergeRule,
    Operation,
    ReduceScatter,
    SendRecv,
    Task,
)
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify
from mesh_attention.plan.read.verify.structure import overlap_fault


def mesh(**options: Any) -> Plan:
    problem = Problem(32, 4, 4, num_kv_heads=options.pop("kv_heads", 4))
    return box_plan(problem, 4, MeshSetting(**{"tile": (2, 2), **options}))


def later_members(plan: Plan, kind: type[Operation], name: str) -> list[Place]:
    """Where members that are not the first of their group do this."""
    members = places(plan, lambda op: isinstance(op, kind) and op.name == name)
    return [place for place in members if place.pass_.groups[place.op.group][0] != place.rank]  # type: ignore[union-attr]


def test_a_gather_in_which_a_later_member_sends_another_tensor_is_caught_at_that_rank() -> None:
    gathers = later_members(mesh(), AllGather, "AG-KV-0")
    assert gathers
    for place in gathers:
        assert isinstance(place.op, AllGather)
        keys, values = place.op.moves
        for moves in (
            (replace(keys, part=values.part), values),
            (keys, replace(values, part=keys.part)),
            (replace(keys, whole=values.whole), replace(values, whole=keys.whole)),
        ):
            finding = caught(place, place.put(replace(place.op, moves=moves)))
            assert (finding.rank, finding.operation) == (place.rank, "AG-KV-0")


def test_a_reduction_whose_sums_a_later_member_takes_for_each_other_is_caught_at_that_rank() -> (
    None
):
    plan = mesh(combine=Combine.REDUCE_SCATTER)
    reductions = later_members(plan, ReduceScatter, "RS-dKV-0")
    assert reductions
    for place in reductions:
        assert isinstance(place.op, ReduceScatter)
        keys, values = place.op.moves
        for moves in (
            (replace(keys, part=values.part), replace(values, part=keys.part)),
            (replace(keys, whole=values.whole), replace(values, whole=keys.whole)),
        ):
            finding = caught(place, place.put(replace(place.op, moves=moves)))
            assert (finding.rank, finding.operation) == (place.rank, "RS-dKV-0")


@pytest.mark.parametrize("output", [0, 1])
def test_a_softmax_merge_into_its_second_input_is_caught_and_into_its_first_is_not(
    output: int,
) -> None:
    """The first is what the others are merged into, one after another."""
    for place in places(mesh(combine=Combine.EXCHANGE), lambda op: op.name == "RS-Q-0.merge"):
        op = place.op
        assert isinstance(op, Merge)
        assert len(op.inputs) == 4
        for pair in (0, 1):
            outputs = list(op.outputs)
            outputs[output] = op.inputs[2 * pair + output]
            merged = replace(op, outputs=tuple(outputs))
            end = replace(
                op, rule=MergeRule.SUM, inputs=(outputs[output],), outputs=(op.outputs[output],)
            )
            mutant = place.put(merged, end)
            if pair == 0:
                assert verify(mutant) == []
            else:
                finding = caught(place, mutant)
                assert (finding.rank, finding.operation) == (place.rank, op.name)


def with_heads(op: Attend | AttendBackward, names: tuple[str, ...], heads: Any) -> Any:
    pieces = {name: getattr(op, name) for name in names if getattr(op, name, None) is not None}
    return replace(op, **{name: replace(piece, heads=heads) for name, piece in pieces.items()})


QUERY_SIDE = ("q", "out", "lse", "grad_out", "delta", "grad_q")
KEY_SIDE = ("k", "v", "grad_k", "grad_v")


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((0, 4), (0, 1)),  # all query heads with the first key head
        ((0, 2), (1, 2)),  # each side alone is in order
        ((1, 3), (0, 1)),  # one of them has another key head
        ((0, 3), (0, 2)),  # three cannot be shared out to two
        ((1, 4), (0, 2)),
    ],
)
def test_query_heads_with_key_heads_that_are_not_theirs_are_caught_at_that_call(
    queries: tuple[int, int], keys: tuple[int, int]
) -> None:
    plan = mesh(kv_heads=2)
    for place in places(plan, lambda op: isinstance(op, Attend | AttendBackward)):
        op = place.op
        assert isinstance(op, Attend | AttendBackward)
        wrong = with_heads(with_heads(op, QUERY_SIDE, queries), KEY_SIDE, keys)
        finding = caught(place, place.put(wrong))
        assert (finding.rank, finding.operation) == (place.rank, op.name)
        assert "heads that do not belong to each other" in finding.message


def test_keys_in_place_of_queries_are_caught_before_their_rows_are_looked_up() -> None:
    """There may be more keys than queries."""
    plan = box_plan(Problem(8, 1, 4, kv_tokens=64), 4, MeshSetting(tile=(2, 2)))
    for place in places(plan, lambda op: isinstance(op, Attend | AttendBackward)):
        op = place.op
        assert isinstance(op, Attend | AttendBackward)
        finding = caught(place, place.put(replace(op, q=op.k, k=op.q)))
        assert (finding.rank, finding.operation) == (place.rank, op.name)


def test_query_heads_of_two_key_heads_in_equal_parts_are_proven() -> None:
    """Heads 0, 1 | 2, 3 of two key heads: calls for (0), (1, 2), (3), each with its key heads."""
    plan = mesh(kv_heads=2)
    for place in places(plan, lambda op: isinstance(op, Attend)):
        op = place.op
        assert isinstance(op, Attend)
        parts = (((0, 1), (0, 1)), ((1, 3), (0, 2)), ((3, 4), (1, 2)))
        calls = [with_heads(with_heads(op, QUERY_SIDE, q), KEY_SIDE, k) for q, k in parts]
        assert verify(place.put(*calls)) == []


def renamed(plan: Plan, rank: int, names: dict[str, str]) -> Plan:
    """The buffers of one forward program under other names, and nothing else changed."""

    def piece(operand: Piece) -> Piece:
        return replace(operand, buffer=names.get(operand.buffer, operand.buffer))

    def operation(op: Operation) -> Operation:
        match op:
            case Attend():
                fields = {n: piece(getattr(op, n)) for n in ("q", "k", "v", "out", "lse")}
                return replace(op, **fields)  # type: ignore[arg-type]
            case AllGather():
                return replace(op, moves=tuple(replace(m, part=piece(m.part)) for m in op.moves))
            case Merge():
                return replace(op, outputs=tuple(map(piece, op.outputs)))
        return op

    forward = plan.forward
    program = forward.programs[rank]
    buffers: tuple[Buffer, ...] = tuple(
        replace(b, name=names.get(b.name, b.name)) for b in program.buffers
    )
    programs = list(forward.programs)
    programs[rank] = replace(
        program, buffers=buffers, operations=tuple(map(operation, program.operations))
    )
    passes = (replace(forward, programs=tuple(programs)),)
    return replace(plan, passes=passes)


@pytest.mark.parametrize("names", [{"k": "v", "v": "k"}, {"q": "queries"}, {"lse": "lse.end"}])
def test_a_caller_s_tensor_under_another_name_is_caught(names: dict[str, str]) -> None:
    """Callers give and get tensors by name: K and V would change places."""
    plan = mesh()
    assert verify(renamed(plan, 1, {})) == []
    (finding,) = verify(renamed(plan, 1, names))
    assert (finding.rank, finding.operation in names.values()) == (1, True)
    assert "must be called" in finding.message


@pytest.mark.parametrize("heads", [(0, 0), (0, 9), (3, 2), (-1, 4)])
def test_a_buffer_of_heads_that_no_problem_has_is_caught(heads: tuple[int, int]) -> None:
    plan = mesh()
    program = plan.forward.programs[2]
    buffers = tuple(replace(b, heads=heads) if b.name == "q.0" else b for b in program.buffers)
    programs = list(plan.forward.programs)
    programs[2] = replace(program, buffers=buffers)
    findings = verify(replace(plan, passes=(replace(plan.forward, programs=tuple(programs)),)))
    assert [(f.rank, f.operation) for f in findings] == [(2, "q.0")]


def test_a_merge_with_more_or_fewer_results_than_its_rule_gives_is_caught() -> None:
    for place in places(mesh(combine=Combine.REDUCE_SCATTER), lambda op: isinstance(op, Merge)):
        op = place.op
        assert isinstance(op, Merge)
        for outputs in ((), (*op.outputs, op.outputs[-1])):
            finding = caught(place, place.put(replace(op, outputs=outputs)))
            assert (finding.rank, finding.operation) == (place.rank, op.name)
            assert f"by the rule {op.rule}" in finding.message
        if op.rule is MergeRule.LSE:
            finding = caught(place, place.put(replace(op, inputs=())))
            assert (finding.rank, finding.operation) == (place.rank, op.name)


def test_a_merge_of_three_halves_of_two_pairs_is_caught() -> None:
    """The kinds of all its pieces in turn are those of a good merge."""
    for place in places(mesh(combine=Combine.EXCHANGE), lambda op: op.name == "RS-Q-0.merge"):
        op = place.op
        assert isinstance(op, Merge)
        wrong = replace(op, inputs=op.inputs[:3], outputs=op.inputs[3:])
        finding = caught(place, place.put(wrong))
        assert (finding.rank, finding.operation) == (place.rank, op.name)


def test_what_a_communication_both_sends_and_receives_into_is_caught() -> None:
    """Run member by member on symbols it would seem to arrive first and then be sent on."""
    plan = make_plan(Problem(24, 2, 4), 3, method="ring", directions=(Direction.FORWARD,))
    shifts = places(plan, lambda op: isinstance(op, SendRecv))
    assert shifts
    for place in shifts:
        op = place.op
        assert isinstance(op, SendRecv)
        wrong = replace(op, receives=op.sends)
        if place.program.buffer_table()[op.sends[0].buffer].role is Role.WORKSPACE:
            finding = caught(place, place.put(wrong))
            assert (finding.rank, finding.operation) == (place.rank, op.name)
            assert "receives into them" in finding.message
    exchanged = places(mesh(), lambda op: isinstance(op, AllToAll))
    for place in exchanged:
        assert isinstance(place.op, AllToAll)
        finding = caught(place, place.put(replace(place.op, sends=place.op.receives)))
        assert (finding.rank, finding.operation) == (place.rank, place.op.name)
        assert "receives into them" in finding.message


def test_halves_of_one_buffer_may_be_sent_and_received_into() -> None:
    """By rows or by heads: they are different cells."""
    whole = Piece("x", 0, 4)
    assert overlap_fault([whole], [Piece("x", 4, 8)]) is None
    assert overlap_fault([Piece("x", 0, 4, (0, 1))], [Piece("x", 0, 4, (1, 2))]) is None
    for other in (Piece("x", 3, 8), Piece("x", 0, 4, (1, 2))):
        assert overlap_fault([whole], [other]) is not None


def test_statistics_in_less_than_fp32_are_caught() -> None:
    plan = mesh()
    program = plan.forward.programs[3]
    buffers = tuple(
        replace(b, precision=Precision.ELEMENT) if b.name == "lse.0" else b for b in program.buffers
    )
    programs = (*plan.forward.programs[:3], replace(program, buffers=buffers))
    (finding,) = verify(replace(plan, passes=(replace(plan.forward, programs=programs),)))
    assert (finding.rank, finding.operation) == (3, "lse.0")


def test_an_operand_in_another_precision_than_the_caller_s_is_caught_at_that_call() -> None:
    """Made by a copy, which may change it; kernels take one dtype."""
    plan = box_plan(Problem(8, 1, 4), 1, MeshSetting(), directions=(Direction.FORWARD,))
    (place,) = places(plan, lambda op: isinstance(op, Attend))
    assert isinstance(place.op, Attend)
    own = place.program.buffer_table()[place.op.q.buffer]
    for precision, findings in ((Precision.ELEMENT, 0), (Precision.ACCUMULATE, 1)):
        copied = replace(own, name="q.copy", precision=precision, role=Role.WORKSPACE)
        piece = replace(place.op.q, buffer="q.copy")
        mutant = place.put(
            Merge(Task("copy"), MergeRule.SUM, (place.op.q,), (piece,)),
            replace(place.op, q=piece),
            Free(("q.copy",)),
        )
        forward = mutant.forward
        program = replace(forward.programs[0], buffers=(*forward.programs[0].buffers, copied))
        faults = verify(replace(mutant, passes=(replace(forward, programs=(program,)),)))
        assert [f.operation for f in faults] == [place.op.name] * findings


@pytest.mark.parametrize("empty", [{"stop": 0}, {"heads": (1, 1)}])
def test_an_empty_piece_is_caught(empty: dict[str, Any]) -> None:
    """Some kernels end the whole process on an empty block."""
    for place in places(mesh(), lambda op: isinstance(op, Attend)):
        assert isinstance(place.op, Attend)
        wrong = replace(place.op, q=replace(place.op.q, **empty))
        finding = caught(place, place.put(wrong))
        assert (finding.rank, finding.operation) == (place.rank, place.op.name)
