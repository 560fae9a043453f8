"""Operations dropped, doubled or swapped on one rank: `verify` catches each and names the place.

A proven plan is changed in one place, chosen at random among all places where the change means
something (`mutants.py`); the files beside this one break kernel calls, transfers, merges and frees.
That such plans are proven as they are is what test_verify_every_mesh.py shows, for 500 of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from mutants import (
    MUTANTS,
    Collective,
    Place,
    caught,
    is_collective,
    is_compute,
    places,
    random_places,
)

from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify


def test_a_dropped_compute_task_is_caught() -> None:
    """At the owner of what it would have computed: only there is it known that nobody else did."""
    for _, place in random_places(1, is_compute):
        caught(place, place.put())


def test_a_duplicated_compute_task_is_caught_at_that_rank_and_task() -> None:
    """Also where its accumulator is fresh: the second one would lose what the first computed."""
    for _, place in random_places(2, is_compute):
        finding = caught(place, place.put(place.op, place.op))
        assert (finding.rank, finding.operation) == (place.rank, place.op.name)


def test_a_dropped_collective_is_caught() -> None:
    """Its group deadlocks, or a reader finds nothing; which comes first is left open."""
    for _, place in random_places(3, is_collective):
        caught(place, place.put())


def test_a_duplicated_collective_is_caught_at_that_rank_and_operation() -> None:
    for _, place in random_places(4, is_collective):
        finding = caught(place, place.put(place.op, place.op))
        assert (finding.rank, finding.operation) == (place.rank, place.op.name)


def swapped(place: Place, other: int) -> Plan:
    ops = list(place.program.operations)
    ops[place.at], ops[other] = ops[other], ops[place.at]
    return place.with_operations(tuple(ops))


def test_two_collectives_of_one_group_swapped_on_one_rank_are_caught() -> None:
    """By the schedule at that rank, or, inside one task, because its group deadlocks; of two
    members that disagree about the parts of a task either may be named."""
    tried = 0
    for rng, place in random_places(5, is_collective):
        assert isinstance(place.op, Collective)
        group, ops = place.op.group, place.program.operations
        others = [
            at
            for at, op in enumerate(ops)
            if isinstance(op, Collective) and op.group == group and at != place.at
        ]
        if others:
            other = rng.choice(others)
            mutant = swapped(place, other)
            caught(place, mutant)
            names, members = (place.op.name, ops[other].name), place.pass_.groups[group]
            blamed = members if len(members) == 2 else (place.rank,)
            assert any(f.rank in blamed or f.operation in names for f in verify(mutant))
            tried += 1
    assert tried > MUTANTS // 2


def test_of_two_ranks_that_disagree_the_one_that_left_the_schedule_is_named() -> None:
    setting = MeshSetting(tile=(2, 1), chunks=(2, 1), combine=Combine.REDUCE_SCATTER)
    plan = box_plan(Problem(64, 1, 4), 2, setting)
    reductions = places(plan, lambda op: op.name == "RS-Q-0")
    assert {place.rank for place in reductions} == {0, 1}
    for place in reductions:
        names = [op.name for op in place.program.operations]
        finding = caught(place, swapped(place, names.index("RS-Q-1")))
        assert (finding.rank, finding.operation) == (place.rank, "RS-Q-1")


def test_swapped_halves_of_one_task_leave_the_group_waiting_and_every_rank_is_named() -> None:
    setting = MeshSetting(tile=(2, 2), combine=Combine.REDUCE_SCATTER)
    plan = box_plan(Problem(32, 1, 4), 4, setting)
    for place in places(plan, lambda op: op.name == "RS-Q-0.lse"):
        names = [op.name for op in place.program.operations]
        findings = verify(swapped(place, names.index("RS-Q-0.lse-all")))
        waiting = {f.rank: f.operation for f in findings if "deadlocks" in f.message}
        assert waiting[place.rank] == "RS-Q-0.lse-all"
        group = next(
            g for name, g in place.pass_.groups.items() if name[0] == "Q" and place.rank in g
        )
        assert {waiting[other] for other in group if other != place.rank} == {"RS-Q-0.lse"}


@pytest.mark.parametrize("tile", [(2, 2), (2, 5), (8, 1)])
def test_the_rank_that_swapped_them_is_named_first_also_in_groups_of_two(
    tile: tuple[int, int],
) -> None:
    """Of two that wait for each other nobody is in the majority; but other groups do the same. And
    it is among the findings however many ranks wait."""
    setting = MeshSetting(tile=tile, combine=Combine.REDUCE_SCATTER)
    ranks = tile[0] * tile[1]
    plan = box_plan(Problem(8 * ranks, 1, 4), ranks, setting)
    for place in places(plan, lambda op: op.name == "RS-Q-0.lse"):
        names = [op.name for op in place.program.operations]
        finding = caught(place, swapped(place, names.index("RS-Q-0.lse-all")))
        assert (finding.rank, finding.operation) == (place.rank, "RS-Q-0.lse-all")


def test_collectives_of_two_groups_swapped_are_caught_by_the_schedule_where_none_would_hang() -> (
    None
):
    """A Q group and a KV group share one rank at most, so such a swap alone cannot deadlock; but
    the program is then not the schedule that people see, and the finding says so."""
    setting = MeshSetting(tile=(2, 2))
    plan = box_plan(Problem(32, 1, 4), 4, setting)
    for place in places(plan, lambda op: op.name == "AG-Q-0"):
        names = [op.name for op in place.program.operations]
        finding = caught(place, swapped(place, names.index("AG-KV-0")))
        assert finding.rank == place.rank
        assert finding.operation in ("AG-Q-0", "AG-KV-0")
        assert "schedule" in finding.message


def test_a_deadlock_names_where_the_others_are_and_no_more_than_four_of_them() -> None:
    """One rank of eight begins a gather that the seven others have left out."""
    plan = box_plan(Problem(64, 1, 4), 8, MeshSetting(tile=(8, 1), chunks=(1, 1)))
    forward = plan.forward
    assert forward.groups["Q0"] == tuple(range(8))
    programs = tuple(
        replace(
            program,
            operations=tuple(
                op for op in program.operations if program.rank == 0 and op.name == "AG-Q-0"
            ),
        )
        for program in forward.programs
    )
    broken = replace(plan, passes=(replace(forward, programs=programs),))
    messages = [f.message for f in verify(broken) if "deadlocks" in f.message]
    assert messages == [
        "deadlocks: " + ", ".join(f"rank {rank} is at its end" for rank in (1, 2, 3, 4))
    ]


def test_the_total_of_a_pass_is_checked_against_the_mask_and_not_against_the_programs() -> None:
    """Programs of a plan for one mask do not pass for another."""
    causal, full = (
        box_plan(Problem(32, 1, 4, mask=Mask(causal=c)), 4, MeshSetting(tile=(2, 2), layout=kind))
        for c, kind in ((True, LayoutKind.CONTIGUOUS), (False, LayoutKind.CONTIGUOUS))
    )
    assert verify(replace(full, passes=causal.passes))
    assert verify(replace(causal, passes=full.passes))


def test_findings_say_pass_rank_and_operation_in_words_and_in_json() -> None:
    plan = box_plan(Problem(32, 1, 4), 4, MeshSetting(tile=(2, 2)))
    place = next(p for p in places(plan, is_compute) if p.rank == 2)
    finding = caught(place, place.put(place.op, place.op))
    assert str(finding).startswith("forward, rank 2, C-0-0: ")
    assert finding.to_json() == {
        "pass": "forward",
        "rank": 2,
        "operation": "C-0-0",
        "message": finding.message,
    }
