"""Workspace bytes: what `count` finds live in the programs, and plans that keep to a cap."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from plan_cases import random_problem, random_setting

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import (
    Attend,
    AttendBackward,
    Free,
    Program,
    reads,
    writes,
)
from mesh_attention.plan.language.workspace import peak_buffer_bytes
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.methods.parts.greedy import MemoryCapError
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.methods.parts.setting import Keep
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import count
from mesh_attention.plan.read.verify import verify
from support.sample import sample


def peak(plan: Plan) -> int:
    (pass_count,) = count(plan).values()
    return pass_count.peak_buffer_bytes


def peak_by_definition(plan: Plan, program: Program) -> int:
    """At every operation, the buffers whose first use is no later and which are not yet freed."""
    size = {b.name: b.num_bytes(plan.problem) for b in program.buffers if b.role is Role.WORKSPACE}
    spans: dict[str, tuple[int, int]] = {}
    for at, op in enumerate(program.operations):
        names = (
            op.buffers if isinstance(op, Free) else [p.buffer for p in (*reads(op), *writes(op))]
        )
        for name in names:
            first, _ = spans.get(name, (at, at))
            spans[name] = (first, at)
    return max(
        sum(
            size[name]
            for name, (first, last) in spans.items()
            if name in size and first <= at <= last
        )
        for at, op in enumerate(program.operations)
        if not isinstance(op, Free)
    )


def capped(problem: Problem, n: int, setting: MeshSetting, direction: Direction, cap: int) -> Plan:
    fields = {name: getattr(setting, name) for name in setting.__dataclass_fields__}
    limited = MeshSetting(**{**fields, "max_memory_bytes": cap})
    return box_plan(problem, n, limited, directions=(direction,))


def smallest_cap(problem: Problem, n: int, setting: MeshSetting, direction: Direction) -> int:
    with pytest.raises(MemoryCapError) as raised:
        capped(problem, n, setting, direction, 0)
    return raised.value.smallest_cap_bytes


def test_the_counted_peak_is_the_most_that_is_live_at_any_operation_of_a_program() -> None:
    rng = Random(1)
    for _ in range(60):
        n = rng.randint(1, 9)
        problem = random_problem(rng, n)
        plan = box_plan(problem, n, random_setting(rng, problem, n))
        for pass_ in plan.passes:
            for program in pass_.programs:
                assert peak_buffer_bytes(program, plan.problem) == peak_by_definition(plan, program)


def test_a_program_without_a_workspace_holds_nothing() -> None:
    assert peak_buffer_bytes(Program(0, (), ()), Problem(64, 4, 8)) == 0


@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_share_an_answer_have_the_peak_that_each_has_by_definition(method: str) -> None:
    """45 tokens on 4 ranks leave padding, so ranks differ in their kernel calls."""
    problem = Problem(45, 8, 8, num_kv_heads=4, mask=Mask(causal=True))
    plan = make_plan(problem, 4, method=method)
    for direction, counted in count(plan).items():
        programs = plan.direction(direction).programs
        peaks = [rank.peak_buffer_bytes for rank in counted.ranks]
        assert peaks == [peak_by_definition(plan, program) for program in programs]


COMBINE = (Combine.EXCHANGE, Combine.REDUCE_SCATTER)
CASES = [  # either way to combine with every tile and with every number of chunks
    MeshSetting(tile=tile, chunks=chunks, combine=COMBINE[(at + turn) % 2], keep=Keep.SHARDS)
    for turn, tile in enumerate(((2, 3), (6, 1), (1, 6)))
    for at, chunks in enumerate(((1, 1), (2, 2), (3, 2), (4, 4) if tile == (2, 3) else (1, 4)))
]


@pytest.mark.parametrize(
    ("direction", "causal"),
    sample([(d, causal) for causal in (True, False) for d in Direction], 3),
)
def test_a_capped_plan_holds_no_more_than_the_cap_and_is_proven(
    direction: Direction, causal: bool
) -> None:
    problem = Problem(6 * 24, 2, 8, mask=Mask(causal=causal))
    for setting in CASES:
        least = smallest_cap(problem, 6, setting, direction)
        proven: list[Plan] = []  # larger caps often change nothing
        for cap in (least, least + least // 4, 2 * least):
            plan = capped(problem, 6, setting, direction, cap)
            assert peak(plan) <= cap
            if plan not in proven:
                assert verify(plan) == []
                proven.append(plan)


@pytest.mark.parametrize("direction", Direction)
def test_the_smallest_cap_in_the_error_works_and_one_byte_less_does_not(
    direction: Direction,
) -> None:
    problem = Problem(6 * 24, 2, 8)
    for setting in CASES:
        least = smallest_cap(problem, 6, setting, direction)
        capped(problem, 6, setting, direction, least)
        with pytest.raises(MemoryCapError, match=str(least)) as raised:
            capped(problem, 6, setting, direction, least - 1)
        assert raised.value.cap_bytes == least - 1
        assert raised.value.smallest_cap_bytes == least


@pytest.mark.parametrize("direction", Direction)
def test_for_full_masks_the_smallest_cap_is_exactly_what_the_capped_plan_holds(
    direction: Direction,
) -> None:
    """No task is empty, so the model that orders the tasks and the programs hold the same."""
    problem = Problem(6 * 24, 2, 8)
    for setting in CASES:
        least = smallest_cap(problem, 6, setting, direction)
        assert peak(capped(problem, 6, setting, direction, least)) == least


def test_with_room_to_spare_the_capped_order_is_that_of_greedy() -> None:
    problem = Problem(6 * 24, 2, 8)
    for setting in CASES:
        free = box_plan(problem, 6, setting, directions=(Direction.FORWARD,))
        roomy = capped(problem, 6, setting, Direction.FORWARD, 1 << 40)
        assert roomy.forward.schedule == free.forward.schedule


def test_a_lean_order_holds_less_than_greedy_when_there_are_chunks_to_free() -> None:
    problem = Problem(9 * 64, 4, 16)
    setting = MeshSetting(tile=(3, 3), chunks=(4, 4))
    free = box_plan(problem, 9, setting, directions=(Direction.FORWARD,))
    assert smallest_cap(problem, 9, setting, Direction.FORWARD) < peak(free)


def test_more_chunks_need_less_memory() -> None:
    problem = Problem(9 * 64, 4, 16)
    caps = [
        smallest_cap(problem, 9, MeshSetting(tile=(3, 3), chunks=(k, k)), Direction.FORWARD)
        for k in (1, 2, 4)
    ]
    assert caps == sorted(caps, reverse=True)
    assert caps[-1] < caps[0]


def live_at_end(pass_: Pass) -> set[str]:
    left: set[str] = set()
    for program in pass_.programs:
        live = {b.name for b in program.buffers if b.role is Role.WORKSPACE}
        for op in program.operations:
            if isinstance(op, Free):
                live -= set(op.buffers)
        left |= live
    return left


def last_uses(program: Program) -> dict[str, int]:
    """By buffer, the attentions that have been when it is used for the last time."""
    attentions, last = 0, {}
    for op in program.operations:
        if not isinstance(op, Free):
            attentions += isinstance(op, Attend | AttendBackward)
            last.update(dict.fromkeys((p.buffer for p in (*reads(op), *writes(op))), attentions))
    return last


@pytest.mark.parametrize("cap", [None, 1 << 40])
def test_every_workspace_buffer_is_freed_after_its_last_use_and_one_attention(
    cap: int | None,
) -> None:
    """One more, so that a transfer into its memory need not wait for it; under a cap at once."""
    rng = Random(2)
    for _ in range(30):
        n = rng.randint(1, 9)
        problem = random_problem(rng, n)
        drawn = random_setting(rng, problem, n)
        drawn = replace(drawn, keep=Keep.SHARDS)
        setting = replace(drawn, max_memory_bytes=cap)
        for pass_ in box_plan(problem, n, setting).passes:
            assert live_at_end(pass_) == set()
            for program in pass_.programs:
                last = last_uses(program)
                attentions = 0
                end = sum(isinstance(op, Attend | AttendBackward) for op in program.operations)
                hold = 1 if cap is None and n > 1 else 0
                for op in program.operations:
                    attentions += isinstance(op, Attend | AttendBackward)
                    for name in op.buffers if isinstance(op, Free) else ():
                        assert attentions == min(last[name] + hold, end)
