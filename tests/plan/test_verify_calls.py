"""Kernel calls that compute too much, too little or into the wrong state are caught at their task.

A few changes are harmless; the tests that meet them say why, and check that they pass.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from dense_oracle import pairs_of_calls, visible_pairs_of
from mutants import (
    MUTANTS,
    Compute,
    Place,
    caught,
    is_compute,
    places,
    random_places,
)

from mesh_attention.plan.language.buffers import Piece, Role
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import (
    AllToAll,
    Attend,
    AttendBackward,
    Call,
    CallKind,
    Free,
    Merge,
    Operation,
    Program,
    Task,
)
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify
from mesh_attention.plan.read.verify.calls import RowMap


def computed(place: Place, op: Compute) -> bool:
    """Do these calls compute exactly the visible pairs of the task, each once?"""
    table, plan = place.program.buffer_table(), place.plan
    q = plan.q_layout.positions_of(op.q.spans(table[op.q.buffer]))
    k = plan.kv_layout.positions_of(op.k.spans(table[op.k.buffer]))
    rows = plan.problem.rows
    return bool((pairs_of_calls(op.calls, q, k, rows) == visible_pairs_of(rows, q, k)).all())


def resized(rng: Random, call: Call, rows: int, columns: int) -> Call | None:
    """One side of a call moved by one row, where that leaves a call inside the task."""
    field = rng.choice(("q_start", "q_stop", "k_start", "k_stop"))
    new = replace(call, **{field: getattr(call, field) + rng.choice((-1, 1))})
    inside = 0 <= new.q_start < new.q_stop <= rows and 0 <= new.k_start < new.k_stop <= columns
    return new if inside else None


def test_a_call_enlarged_or_shrunk_is_caught_at_that_task_unless_it_computes_the_same_pairs() -> (
    None
):
    """A row range computes what the mask shows, so rows that see nothing may come or go."""
    broken = 0
    for rng, place in random_places(9, is_compute):
        op = place.op
        assert isinstance(op, Attend | AttendBackward)
        at = rng.randrange(len(op.calls))
        new = resized(rng, op.calls[at], op.q.num_rows, op.k.num_rows)
        if new is None:
            continue
        changed = replace(op, calls=(*op.calls[:at], new, *op.calls[at + 1 :]))
        mutant = place.put(changed)
        square = new.kind is not CallKind.CAUSAL or (
            new.q_stop - new.q_start == new.k_stop - new.k_start
        )
        if square and computed(place, changed):
            assert verify(mutant) == []
            continue
        finding = caught(place, mutant)
        assert (finding.rank, finding.operation) == (place.rank, op.name)
        assert "call" in finding.message
        broken += 1
    assert broken > MUTANTS // 4


def test_a_row_range_without_its_padding_row_computes_the_same_and_is_proven() -> None:
    problem = Problem(599, 1, 4, mask=Mask(causal=True))
    plan = box_plan(problem, 2, MeshSetting(tile=(1, 2), layout=LayoutKind.STRIPED))
    place = next(p for p in places(plan, is_compute) if p.rank == 1)
    assert isinstance(place.op, Attend)
    (call,) = place.op.calls
    assert call == Call(CallKind.RANGE, 0, 300, 0, 600)
    shorter, too_short = (replace(call, q_stop=stop) for stop in (299, 298))
    assert verify(place.put(replace(place.op, calls=(shorter,)))) == []
    finding = caught(place, place.put(replace(place.op, calls=(too_short,))))
    assert (finding.rank, finding.operation) == (1, place.op.name)


def test_a_dropped_or_doubled_call_is_caught_at_that_task() -> None:
    for rng, place in random_places(10, is_compute):
        op = place.op
        assert isinstance(op, Attend | AttendBackward)
        at = rng.randrange(len(op.calls))
        for calls in ((*op.calls[:at], *op.calls[at + 1 :]), (*op.calls, op.calls[at])):
            finding = caught(place, place.put(replace(op, calls=calls)))
            assert (finding.rank, finding.operation) == (place.rank, op.name)


def test_a_wrong_fresh_flag_is_caught_at_that_rank_and_task() -> None:
    """Set, it loses what was there; cleared, it adds to what was never written."""
    for rng, place in random_places(12, is_compute):
        op = place.op
        wrong: Operation
        if isinstance(op, Attend):
            wrong = replace(op, fresh=not op.fresh)
        elif isinstance(op, AttendBackward) and rng.random() < 0.5:
            wrong = replace(op, fresh_q=not op.fresh_q)
        else:
            assert isinstance(op, AttendBackward)
            wrong = replace(op, fresh_kv=not op.fresh_kv)
        finding = caught(place, place.put(wrong))
        assert (finding.rank, finding.operation) == (place.rank, op.name)


def test_a_query_that_lies_twice_in_a_task_is_caught_at_that_task() -> None:
    """Else one copy could be computed and the other, which is not, be taken for the result."""
    plan = box_plan(Problem(8, 1, 4), 1, MeshSetting(), directions=(Direction.FORWARD,))
    (place,) = places(plan, is_compute)
    op, end = place.op, place.program.operations[place.at + 1]
    assert isinstance(op, Attend)
    assert isinstance(end, Merge)
    twice = ((0, 8), (0, 8))
    accumulators = (op.out.buffer, op.lse.buffer)
    buffers = [
        replace(b, rows=twice) if b.name in accumulators else b for b in place.program.buffers
    ]
    own = next(b for b in buffers if b.name == "q")
    buffers.append(replace(own, name="qq", rows=twice, role=Role.WORKSPACE))
    copies = ((Piece("q", 0, 8), Piece("q", 0, 8)),)
    into = ((Piece("qq", 0, 8), Piece("qq", 8, 16)),)
    operations = (
        AllToAll(Task("AG-Q", (0,)), "all", copies, into),
        replace(
            op, q=Piece("qq", 0, 16), out=replace(op.out, stop=16), lse=replace(op.lse, stop=16)
        ),
        replace(end, inputs=tuple(replace(piece, start=8, stop=16) for piece in end.inputs)),
        Free(("qq", *accumulators)),
    )
    program = Program(0, tuple(buffers), operations)
    forward = replace(place.pass_, programs=(program,), groups={"all": (0,)})
    (finding,) = verify(replace(plan, passes=(forward,)))
    assert (finding.operation, "same query twice" in finding.message) == (op.name, True)


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize(("start", "stop"), [(0, 9), (-1, 8), (4, 4)])
def test_a_call_outside_the_rows_of_either_side_is_caught_at_its_task(
    side: str, start: int, stop: int
) -> None:
    plan = box_plan(Problem(8, 1, 4), 1, MeshSetting(), directions=(Direction.FORWARD,))
    (place,) = places(plan, is_compute)
    assert isinstance(place.op, Attend)
    (call,) = place.op.calls
    assert call == Call(CallKind.FULL, 0, 8, 0, 8)
    outside = replace(call, q_start=start, q_stop=stop)
    if side == "k":
        outside = replace(call, k_start=start, k_stop=stop)
    finding = caught(place, place.put(replace(place.op, calls=(outside,))))
    assert finding.operation == place.op.name
    assert "lies outside its rows (8 x 8)" in finding.message


def test_rows_of_a_strided_run_stay_one_run_where_they_are_cut_too() -> None:
    """Or the pairs of long striped sequences would be counted token by token."""
    layout = Layout(LayoutKind.STRIPED, 64, 4)
    rows = RowMap(layout, ((0, 16),))
    (whole,) = rows.runs(0, 16)
    assert (whole.start, whole.stride, whole.count) == (0, 4, 16)
    (part,) = rows.runs(1, 4)
    assert (part.start, part.stride, part.count) == (4, 4, 3)
