"""A ring written by hand from the dataclasses: `verify` and `count` know no builder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision, Role
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import (
    Attend,
    Call,
    CallKind,
    Free,
    Merge,
    MergeRule,
    Operation,
    Program,
    SendRecv,
    Task,
)
from mesh_attention.plan.language.tasks import Schedule, Step
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import count
from mesh_attention.plan.read.verify import Finding, verify

TOKENS, HEADS = 8, 2  # of one rank


def buffer(name: str, kind: Kind, owner: int, role: Role = Role.WORKSPACE) -> Buffer:
    statistic = kind.is_statistic or (kind is Kind.OUT and role is Role.WORKSPACE)
    precision = Precision.ACCUMULATE if statistic else Precision.ELEMENT
    rows = ((owner * TOKENS, (owner + 1) * TOKENS),)
    return Buffer(name, kind, rows, (0, HEADS), precision, role)


def whole(name: str) -> Piece:
    return Piece(name, 0, TOKENS)


def ring_program(rank: int, n: int) -> Program:
    """Step s attends to the KV of rank `rank - s`, and has passed the one before on."""
    buffers = [
        *(buffer(k.value, k, rank, Role.INPUT) for k in (Kind.Q, Kind.K, Kind.V)),
        *(buffer(k.value, k, rank, Role.OUTPUT) for k in (Kind.OUT, Kind.LSE)),
        buffer("sum", Kind.OUT, rank),
        buffer("sum_lse", Kind.LSE, rank),
    ]
    operations: list[Operation] = []
    k, v = "k", "v"
    for step in range(n):
        if step:
            held, (k, v) = (k, v), (f"k.{step}", f"v.{step}")
            owner = (rank - step) % n
            buffers += [buffer(k, Kind.K, owner), buffer(v, Kind.V, owner)]
            shift = SendRecv(
                Task("ring", (step,)),
                "all",
                to_member=(rank + 1) % n,
                sends=tuple(map(whole, held)),
                from_member=(rank - 1) % n,
                receives=(whole(k), whole(v)),
            )
            operations.append(shift)
            if step > 1:
                operations.append(Free(held))
        operations.append(
            Attend(
                Task("C", (0, step)),
                q=whole("q"),
                k=whole(k),
                v=whole(v),
                out=whole("sum"),
                lse=whole("sum_lse"),
                calls=(Call(CallKind.FULL, 0, TOKENS, 0, TOKENS),),
                fresh=step == 0,
            )
        )
    if n > 1:
        operations.append(Free((k, v)))
    ends = (whole("out"), whole("lse"))
    operations.append(Merge(Task("end"), MergeRule.SOFTMAX, (whole("sum"), whole("sum_lse")), ends))
    operations.append(Free(("sum", "sum_lse")))
    return Program(rank, tuple(buffers), tuple(operations))


def ring_plan(n: int) -> Plan:
    problem = Problem(TOKENS * n, HEADS, head_dim=4)
    layout = Layout(LayoutKind.CONTIGUOUS, problem.q_tokens, n)
    steps = [Step(Task("ring", (s,)) if s else None, (Task("C", (0, s)),)) for s in range(n)]
    forward = Pass(
        Direction.FORWARD,
        {"all": tuple(range(n))},
        tuple(ring_program(rank, n) for rank in range(n)),
        Schedule(tuple(steps)),
    )
    return Plan(problem, layout, layout, (forward,), devices=tuple(range(n)), method="by hand")


def with_operation(plan: Plan, rank: int, name: str, new: Operation) -> Plan:
    forward = plan.forward
    program = forward.programs[rank]
    operations = tuple(new if op.name == name else op for op in program.operations)
    programs = list(forward.programs)
    programs[rank] = replace(program, operations=operations)
    return replace(plan, passes=(replace(forward, programs=tuple(programs)),))


def shift_of(plan: Plan, rank: int, name: str) -> SendRecv:
    shift = next(op for op in plan.forward.programs[rank].operations if op.name == name)
    assert isinstance(shift, SendRecv)
    return shift


def first(findings: list[Finding]) -> Finding:
    assert findings
    return findings[0]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_hand_written_ring_is_proven_and_every_rank_moves_2_n_minus_1_units(n: int) -> None:
    plan = ring_plan(n)
    assert [str(f) for f in verify(plan)] == []
    counted = count(plan)[Direction.FORWARD]
    assert {rank.total.token_bytes for rank in counted.ranks} == {2 * (n - 1) * counted.unit_bytes}
    assert counted.units_total == 2 * n * (n - 1)
    assert all(set(rank.by_operation) <= {"SendRecv"} for rank in counted.ranks)


def test_point_to_point_into_a_node_counts_at_the_rank_at_its_edge() -> None:
    plan = replace(ring_plan(4), ranks_per_node=2)
    counted = count(plan)[Direction.FORWARD]
    assert [int(counted.units_into_node(node)) for node in range(2)] == [6, 6]
    assert [rank.entering_node_token_bytes > 0 for rank in counted.ranks] == [
        True, False, True, False,
    ]  # fmt: skip


def test_sending_to_the_wrong_neighbour_is_caught_at_that_shift() -> None:
    plan = ring_plan(3)
    wrong = replace(shift_of(plan, 1, "ring-1"), to_member=0)
    finding = first(verify(with_operation(plan, 1, "ring-1", wrong)))
    assert (finding.rank, finding.operation) == (0, "ring-1")
    assert "rank 1 sends" in finding.message


def test_expecting_the_wrong_neighbour_is_caught_at_that_rank() -> None:
    plan = ring_plan(3)
    wrong = replace(shift_of(plan, 1, "ring-2"), from_member=2)
    finding = first(verify(with_operation(plan, 1, "ring-2", wrong)))
    assert (finding.rank, finding.operation) == (1, "ring-2")


def test_passing_the_old_block_on_is_caught_by_the_rank_that_receives_it() -> None:
    plan = ring_plan(3)
    wrong = replace(shift_of(plan, 0, "ring-2"), sends=(whole("k"), whole("v")))
    finding = first(verify(with_operation(plan, 0, "ring-2", wrong)))
    assert (finding.rank, finding.operation) == (1, "ring-2")
    assert "other tokens" in finding.message


def test_a_member_that_a_group_does_not_have_is_caught_at_that_rank() -> None:
    plan = ring_plan(3)
    wrong = replace(shift_of(plan, 2, "ring-1"), to_member=3)
    finding = first(verify(with_operation(plan, 2, "ring-1", wrong)))
    assert (finding.rank, finding.operation) == (2, "ring-1")


def test_keys_and_values_swapped_on_the_way_are_caught() -> None:
    plan = ring_plan(3)
    wrong = replace(shift_of(plan, 0, "ring-1"), sends=(whole("v"), whole("k")))
    finding = first(verify(with_operation(plan, 0, "ring-1", wrong)))
    assert (finding.rank, finding.operation) == (1, "ring-1")


def with_buffers(plan: Plan, rank: int, buffers: tuple[Buffer, ...]) -> Plan:
    programs = list(plan.forward.programs)
    programs[rank] = replace(programs[rank], buffers=buffers)
    return replace(plan, passes=(replace(plan.forward, programs=tuple(programs)),))


@pytest.mark.parametrize("kind", ["k.1", "sum"])
@pytest.mark.parametrize("rows", [(-1, 7), (17, 25), (8, 8)])
def test_a_buffer_of_rows_that_no_rank_has_is_caught(kind: str, rows: tuple[int, int]) -> None:
    plan = ring_plan(3)
    buffers = tuple(
        replace(b, rows=(rows,)) if b.name == kind else b for b in plan.forward.programs[1].buffers
    )
    finding = first(verify(with_buffers(plan, 1, buffers)))
    assert (finding.rank, finding.operation) == (1, kind)
    assert finding.message == "has rows outside the 24 places of all ranks"


def test_two_buffers_of_one_name_are_caught() -> None:
    plan = ring_plan(2)
    buffers = plan.forward.programs[1].buffers
    finding = first(verify(with_buffers(plan, 1, (*buffers, buffers[-1]))))
    assert (finding.rank, finding.operation) == (1, "buffers")
    assert finding.message == "two buffers have the same name"


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece("x", 0, 8), "uses the unknown buffer x"),
        (Piece("k", 0, 9), "uses rows 0:9 of k, which has 8"),
        (Piece("k", -1, 8), "uses rows -1:8 of k, which has 8"),
        (Piece("k", 5, 4), "uses rows 5:4 of k, which has 8"),
        (Piece("k", 0, 8, (0, 3)), "uses heads (0, 3) of k, which has 2"),
        (Piece("k", 0, 8, (-1, 2)), "uses heads (-1, 2) of k, which has 2"),
        (Piece("k", 0, 8, (2, 1)), "uses heads (2, 1) of k, which has 2"),
    ],
)
def test_a_piece_outside_its_buffer_is_caught(piece: Piece, message: str) -> None:
    plan = ring_plan(2)
    wrong = replace(shift_of(plan, 1, "ring-1"), sends=(piece, whole("v")))
    finding = first(verify(with_operation(plan, 1, "ring-1", wrong)))
    assert (finding.rank, finding.operation) == (1, "ring-1")
    assert finding.message == message


def test_freeing_what_does_not_exist_is_caught() -> None:
    plan = ring_plan(2)
    free = next(op for op in plan.forward.programs[0].operations if isinstance(op, Free))
    wrong = replace(free, buffers=(*free.buffers, "x"))
    finding = first(verify(with_operation(plan, 0, free.name, wrong)))
    assert (finding.rank, finding.message) == (0, "frees the unknown buffer x")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "uses the unknown group all"),
        ({"all": (1, 2)}, "uses group all, which this rank is not in"),
    ],
)
def test_a_group_that_is_not_there_or_without_the_rank_is_caught(
    groups: dict[str, tuple[int, ...]], message: str
) -> None:
    plan = ring_plan(3)
    finding = first(verify(replace(plan, passes=(replace(plan.forward, groups=groups),))))
    assert (finding.rank, finding.operation, finding.message) == (0, "ring-1", message)


@pytest.mark.parametrize(("to", "source"), [(-1, 1), (0, -1), (0, 3)])
def test_members_are_numbered_from_0_to_the_size_of_the_group(to: int, source: int) -> None:
    plan = ring_plan(3)
    wrong = replace(shift_of(plan, 2, "ring-1"), to_member=to, from_member=source)
    finding = first(verify(with_operation(plan, 2, "ring-1", wrong)))
    assert (finding.rank, finding.operation) == (2, "ring-1")
    assert finding.message == "names a member that group all does not have"


def test_the_ring_moves_what_the_1xn_mesh_moves() -> None:
    problem = Problem(TOKENS * 5, HEADS, 4, mask=Mask())
    mesh = count(box_plan(problem, 5, MeshSetting(tile=(1, 5))))[Direction.FORWARD]
    ring = count(ring_plan(5))[Direction.FORWARD]
    assert mesh.units_total == ring.units_total
