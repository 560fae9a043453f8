"""The text form parses back to an equal plan, and the digest tells plans apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from plan_cases import random_plan

from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import MeshAttentionError, PlanTextError
from mesh_attention.plan.language.operation_text import operation_text, parse_operation
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Free, Operation, SendRecv, Task
from mesh_attention.plan.language.text import digest, parse_plan, plan_text
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify
from support.sample import in_parts


def small_plan() -> Plan:
    return box_plan(Problem(32, 2, 4), 4, MeshSetting(tile=(2, 2), chunks=(2, 1)))


@in_parts(2)
def test_a_plan_parses_back_to_an_equal_plan_with_the_same_digest(seed: int) -> None:
    rng = Random(1 + 10 * seed)
    for _ in range(25):
        plan = random_plan(rng, most_ranks=8)
        again = parse_plan(plan_text(plan))
        assert again == plan
        assert digest(again) == digest(plan)


def test_a_parsed_plan_is_proven_like_the_one_it_was_written_from() -> None:
    rng = Random(2)
    for _ in range(20):
        assert verify(parse_plan(plan_text(random_plan(rng, most_ranks=6)))) == []


def test_every_operation_of_a_plan_parses_back() -> None:
    rng = Random(3)
    for _ in range(20):
        for pass_ in random_plan(rng).passes:
            for program in pass_.programs:
                for op in program.operations:
                    assert parse_operation(operation_text(op)) == op


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  buffer q.0 ", "rank 0: buffer q.0 is written 2 times"),
        ("  buffer q ", "rank 0: buffer q is written 2 times"),
        ("group Q0 ", "group Q0 is written 2 times"),
        ("rank 0", "rank 0 is written 2 times"),
        ("pass forward ", "pass forward is written 2 times"),
    ],
)
def test_a_line_that_names_something_twice_is_refused(line: str, message: str) -> None:
    lines = plan_text(small_plan()).splitlines()
    at = next(i for i, other in enumerate(lines) if other.startswith(line))
    with pytest.raises(PlanTextError, match=message):
        parse_plan("\n".join([*lines[: at + 1], *lines[at:]]))


@pytest.mark.parametrize("nonsense", [None, b"mesh-attention plan 1", 5])
def test_what_is_not_text_is_refused(nonsense: Any) -> None:
    with pytest.raises(PlanTextError, match=f"is a str, not {type(nonsense).__name__}"):
        parse_plan(nonsense)


def test_a_pass_that_a_plan_lacks_is_refused_with_those_it_has() -> None:
    forward = make_plan(Problem(32, 2, 4), 4, method="mesh", directions=(Direction.FORWARD,))
    with pytest.raises(MeshAttentionError, match="has no backward pass; it has: forward"):
        _ = forward.backward


def test_operations_read_as_short_sentences() -> None:
    plan = small_plan()
    texts = [operation_text(op) for op in plan.forward.programs[0].operations]
    assert "AG-Q-0: all-gather group=Q0 moves=q[0:4]<q.0[0:8]/0,4" in texts
    assert texts[-1].startswith("free: free buffers=")


def test_two_plans_have_the_same_digest_exactly_when_they_are_equal() -> None:
    rng = Random(4)
    plans = [random_plan(rng, most_ranks=4) for _ in range(60)]
    plans += [parse_plan(plan_text(plan)) for plan in plans[:20]]
    digests = [digest(plan) for plan in plans]
    for i, plan in enumerate(plans):
        for j, other in enumerate(plans):
            assert (plan == other) == (digests[i] == digests[j])


def with_operations(plan: Plan, rank: int, operations: tuple[Operation, ...]) -> Plan:
    last_pass = plan.passes[-1]
    programs = list(last_pass.programs)
    programs[rank] = replace(programs[rank], operations=operations)
    return replace(plan, passes=(*plan.passes[:-1], replace(last_pass, programs=tuple(programs))))


def test_any_changed_operation_of_any_rank_changes_the_digest() -> None:
    plan = small_plan()
    seen = {digest(plan)}
    for rank, program in enumerate(plan.passes[-1].programs):
        ops = program.operations
        for at, op in enumerate(ops):
            renamed = (
                Free((*op.buffers, "x")) if isinstance(op, Free) else replace(op, task=Task("x"))
            )
            dropped = digest(with_operations(plan, rank, (*ops[:at], *ops[at + 1 :])))
            changed = digest(with_operations(plan, rank, (*ops[:at], renamed, *ops[at + 1 :])))
            assert dropped not in seen
            assert changed not in seen
            seen |= {dropped, changed}


def test_mapping_nodes_and_settings_are_part_of_the_digest() -> None:
    plan = small_plan()
    others = (
        replace(plan, devices=(1, 0, 2, 3)),
        replace(plan, ranks_per_node=2),
        replace(plan, method="other"),
        replace(plan, problem=replace(plan.problem, head_dim=8)),
        replace(plan, passes=plan.passes[:1]),
    )
    assert len({digest(plan), *map(digest, others)}) == 1 + len(others)


def test_point_to_point_with_heads_parses_back() -> None:
    text = "shift: send-recv group=g to_member=1 sends=k[0:4]{0:2} from_member=2 receives=-"
    op = parse_operation(text)
    assert isinstance(op, SendRecv)
    assert op.sends[0].heads == (0, 2)
    assert op.receives == ()
    assert operation_text(op) == text


@pytest.mark.parametrize(
    "text",
    [
        "C-0-0: dance q=q[0:4]",
        "AG-Q-0: all-gather group=Q0",
        "AG-Q-0: all-gather group=Q0 moves=q[0:4]<q.0[0:8]/0,4 more=1",
        "AG-Q-0: all-gather group=Q0 moves=q[0:4<q.0[0:8]/0,4",
        "AG-Q-0: all-gather group=Q0 moves=q[0:4]<q.0[0:8]/zero",
        "x: merge rule=guess inputs=- outputs=-",
        "x: send-recv group=g to_member=one sends=- from_member=2 receives=-",
        "x: attend q=q[0:1] k=k[0:1] v=v[0:1] out=o[0:1] lse=l[0:1] calls=full(0:1) fresh=yes",
        "x: attend q=q[0:1] k=k[0:1] v=v[0:1] out=o[0:1] lse=l[0:1] calls=- fresh=perhaps",
        "",
    ],
)
def test_a_text_that_is_no_operation_is_refused(text: str) -> None:
    with pytest.raises(PlanTextError):
        parse_operation(text)


def line_with(text: str, start: str) -> int:
    return next(i for i, line in enumerate(text.splitlines()) if line.startswith(start))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "some other file\n",
        lambda text: text.splitlines()[0],
        lambda text: text.replace("mesh-attention plan 1", "mesh-attention plan 9"),
        lambda text: text.replace('"problem"', '"riddle"', 1),
        lambda text: text.replace("{", "(", 1),
        lambda text: text.replace("pass forward", "pass sideways"),
        lambda text: text.replace("step 1 ", "step 7 "),
        lambda text: text.replace("rank 0\n", "", 1),
        lambda text: text.replace(" workspace ", " attic "),
        lambda text: text.replace("all-gather", "all-lather"),
        lambda text: text.replace('"num_heads": 2', '"num_heads": 0'),
        lambda text: text.replace("group Q0 0,1", "group Q0 0,one"),
    ],
)
def test_a_damaged_text_is_refused_as_no_plan(damage: Callable[[str], str]) -> None:
    text = plan_text(small_plan())
    damaged = damage(text)
    assert damaged != text
    with pytest.raises(PlanTextError):
        parse_plan(damaged)


def test_text_errors_belong_to_the_one_family() -> None:
    assert issubclass(PlanTextError, MeshAttentionError)
    assert issubclass(PlanTextError, ValueError)
