"""The plan is an argument: made, searched or parsed, and compared by all ranks before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mesh_attention import ContextParallel, Mask, Plan, make_plan
from mesh_attention.choose.auto import find_best
from mesh_attention.choose.plan_file import write_choice
from mesh_attention.cost.planning import target_on
from mesh_attention.plan.language.plan import Direction, Programs
from mesh_attention.plan.language.program import AllGather, AllToAll, Attend, Program
from mesh_attention.plan.language.text import digest, parse_plan, plan_text
from mesh_attention.plan.passes.compile import compile_plan
from mesh_attention.testing import run_local
from support.cases import Case
from support.gloo_case import Part, attend, context, expected_bytes, whole
from support.pool import WorkerPool
from support.raised import Raised, all_raised, raised_by
from support.reference import NAMES, attention, errors, tolerance

CASE = Case(4, 45, 45, heads=(4, 2), batch=2, mask=Mask(causal=True), dtype=torch.float32)
CLUSTER = "hgx-h100"


def made(case: Case) -> Plan:
    return case.plan()


def searched(case: Case) -> Plan:
    """The setting with the shortest simulated time, with both passes."""
    return find_best(case.problem, case.ranks, CLUSTER, method="ring").plan()


def parsed(case: Case) -> Plan:
    return parse_plan(plan_text(case.plan()))


SOURCES = {"made": made, "searched": searched, "parsed": parsed}


def by_plan(rank: int, world_size: int, source: str, case: Case) -> tuple[Part, Any]:
    plan = SOURCES[source](case)
    with ContextParallel(plan=plan, softmax_scale=0.3) as cp:
        cp._calls.session.transports.poison = True
        assert cp.plan is plan
        cp.verify()
        return attend(cp, case), cp.transports()


@pytest.mark.parametrize("source", SOURCES)
def test_any_plan_can_be_given_and_is_exact(pool: WorkerPool, source: str) -> None:
    case = replace(CASE, options={"chunks": (2, 2)} if source != "searched" else {})
    parts = [part for part, _ in pool.run(by_plan, case.ranks, source, case)]
    truth = attention(*case.tensors(), case.mask, 0.3)
    assert max(errors(whole(parts, case), truth).values()) <= tolerance(case.dtype)
    if source != "searched":
        assert [part.traffic for part in parts] == [expected_bytes(case)[p.rank] for p in parts]


def by_file(rank: int, world_size: int, file: str, case: Case) -> tuple[Part, str]:
    with ContextParallel(plan=file, softmax_scale=0.3) as cp:
        cp.verify()
        return attend(cp, case), digest(cp.plan)


def test_the_file_of_a_choice_is_a_plan_and_one_for_other_ranks_is_refused(
    pool: WorkerPool, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    result = find_best(CASE.problem, CASE.ranks, CLUSTER)
    write_choice(file, result.question)
    parts = pool.run(by_file, CASE.ranks, str(file), CASE)
    assert {message for _, message in parts} == {digest(result.plan())}
    truth = attention(*CASE.tensors(), CASE.mask, 0.3)
    made = whole([part for part, _ in parts], CASE)
    assert max(errors(made, truth).values()) <= tolerance(CASE.dtype)
    for messages in pool.run(refused_file, 2, str(file)):
        assert "it is for 4 ranks, and this group has 2" in messages.error


def refused_file(rank: int, world_size: int, file: str) -> Raised:
    return raised_by(lambda: ContextParallel(plan=Path(file)))


@pytest.mark.parametrize("source", SOURCES)
def test_run_local_takes_any_plan(source: str) -> None:
    q, k, v, grad_out = CASE.tensors()
    result = run_local(SOURCES[source](CASE), q, k, v, grad_out)
    results = {name: getattr(result, name) for name in NAMES}
    truth = attention(q, k, v, grad_out, CASE.mask)
    assert max(errors(results, truth).values()) <= tolerance(CASE.dtype)


def construct(rank: int, world_size: int, arguments: dict[str, Any]) -> Raised:
    return raised_by(lambda: ContextParallel(plan=made(CASE), **arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 45}, "seq_len: the plan defines this already"),
        ({"causal": True, "head_dim": 8}, "head_dim, causal: the plan defines this already"),
        ({"method": "mesh", "tile": (2, 2)}, "method, tile: the plan defines this already"),
        ({"dtype": torch.float32}, "dtype: the plan defines this already"),
        ({"gamma": 2.0}, "gamma: the plan defines this already"),
        ({"kernel": "abacus"}, "no kernel is named 'abacus'"),
    ],
)
def test_what_the_plan_says_is_not_given_again(
    pool: WorkerPool, arguments: dict[str, Any], message: str
) -> None:
    raised = pool.run(construct, 4, arguments)
    all_raised(raised)
    assert all(message in failure.error for failure in raised)


def own_digest(rank: int, world_size: int, case: Case) -> str:
    with context(case) as cp:
        return digest(cp.plan)


@pytest.mark.parametrize("method", ["mesh", "usp"])
def test_the_object_asks_the_same_question_as_make_plan(pool: WorkerPool, method: str) -> None:
    """Large enough for slices of heads to be chosen."""
    case = Case(4, 2**18, 2**18, (8, 8), (64, 64), dtype=torch.bfloat16, options={"method": method})
    assert pool.run(own_digest, 4, case) == [digest(case.plan())] * 4


def missing(rank: int, world_size: int) -> Raised:
    return raised_by(lambda: ContextParallel(seq_len=12, head_dim=8))


def test_without_a_plan_what_is_missing_is_named(pool: WorkerPool) -> None:
    raised = pool.run(missing, 2)
    all_raised(raised)
    words = "causal: missing; give causal=True or False, or a mask, or a plan"
    assert all(words in failure.error for failure in raised)


def changed(plan: Plan, rank: int, change: Callable[[Program], Program]) -> Plan:
    """The plan with another forward program on one rank."""
    pass_ = plan.forward
    programs = [change(p) if p.rank == rank else p for p in pass_.programs]
    forward = replace(pass_, programs=tuple(programs))
    return replace(plan, passes=(forward, *plan.passes[1:]))


def without(kind: type[Any]) -> Callable[[Program], Program]:
    """The first operation of a kind left out."""

    def change(program: Program) -> Program:
        at = next(i for i, op in enumerate(program.operations) if isinstance(op, kind))
        operations = program.operations[:at] + program.operations[at + 1 :]
        return replace(program, operations=operations)

    return change


def doubled(kind: type[Any]) -> Callable[[Program], Program]:
    """The first operation of a kind comes twice: nothing that one rank could see is wrong."""

    def change(program: Program) -> Program:
        at = next(i for i, op in enumerate(program.operations) if isinstance(op, kind))
        operations = program.operations[: at + 1] + program.operations[at:]
        return replace(program, operations=operations)

    return change


def wrong_plans(rank: int, world_size: int) -> list[Raised]:
    wrong: list[Any] = [
        replace(CASE, ranks=6).plan(), replace(made(CASE), devices=(0, 1, 2, 2)), "a plan",
    ]  # fmt: skip
    return [raised_by(partial(ContextParallel, plan=plan)) for plan in wrong]


def test_plans_of_other_ranks_or_no_plans_are_refused(pool: WorkerPool) -> None:
    for raised in pool.run(wrong_plans, 4):
        all_raised(raised)
        assert "the plan is for 6 ranks, and the process group has 4" in raised[0].error
        assert "the plan's devices (0, 1, 2, 2) are not the ranks" in raised[1].error
        assert "No such file or directory" in raised[2].error


def odd_plan(rank: int, world_size: int, odd: int) -> Raised:
    plan = replace(CASE, options={"tile": (4, 1) if rank == odd else (2, 2)}).plan()
    return raised_by(lambda: ContextParallel(plan=plan))


@pytest.mark.parametrize("odd", [0, 2])
def test_another_plan_on_one_rank_is_refused_and_the_rank_named(pool: WorkerPool, odd: int) -> None:
    raised = pool.run(odd_plan, 4, odd)
    all_raised(raised)
    for failure in raised:
        assert f"rank {odd} of the group [0, 1, 2, 3] disagrees: plan is" in failure.error


@pytest.mark.parametrize("others", ["parsed", "made"])
@pytest.mark.parametrize("kind", [Attend, AllGather, AllToAll])
def test_a_damaged_plan_on_one_rank_is_refused_and_the_rank_named(
    pool: WorkerPool, kind: type[Any], others: str
) -> None:
    """Whether the others parsed the text as well or made the plan themselves."""
    case = replace(CASE, options={"tile": (2, 2), "combine": "exchange"})
    raised = pool.run(damaged, 4, case, kind, others)
    all_raised(raised)
    for rank, failure in enumerate(raised):
        assert failure.error.startswith("the plan is wrong" if rank == 2 else "rank 2: the plan is")


def damaged(rank: int, world_size: int, case: Case, kind: type[Any], others: str) -> Raised:
    plan = SOURCES[others](case)
    own_plan = changed(plan, 2, without(kind)) if rank == 2 else plan
    return raised_by(lambda: ContextParallel(plan=own_plan))


def half_made(rank: int, world_size: int, case: Case) -> Part:
    """One rank has made the plan and the others were sent its text."""
    with ContextParallel(plan=made(case) if rank == 0 else parsed(case)) as cp:
        return attend(cp, case)


def test_ranks_that_made_a_plan_and_ranks_that_read_it_agree(pool: WorkerPool) -> None:
    parts = pool.run(half_made, 4, CASE)
    distances = errors(whole(parts, CASE), attention(*CASE.tensors(), CASE.mask))
    assert max(distances.values()) <= tolerance(CASE.dtype)


def disguised(rank: int, world_size: int, case: Case, kind: type[Any]) -> Raised:
    """Damage that the plan itself does not show: its programs look as if the method made them."""
    plan = made(case)
    if rank == 2:
        pass_ = changed(plan, 2, doubled(kind)).forward
        forward = replace(pass_, programs=Programs(4, list(pass_.programs).__getitem__))
        plan = replace(plan, passes=(forward, *plan.passes[1:]))
    with ContextParallel(plan=plan) as cp:
        inputs = [cp.shard(x, 1) for x in case.tensors()[:3]]
        return raised_by(lambda: cp.attention(*inputs), cp)


@pytest.mark.parametrize("kind", [AllGather, AllToAll])
def test_collectives_that_do_not_fit_together_are_named_by_group(
    pool: WorkerPool, kind: type[Any]
) -> None:
    case = replace(CASE, options={"tile": (2, 2), "combine": "exchange"})
    raised = pool.run(disguised, 4, case, kind)
    all_raised(raised)
    groups = [name for name, members in made(case).forward.groups.items() if 2 in members]
    for failure in raised:
        assert "the plans of the ranks do not fit together" in failure.error
        assert any(f"in group forward {name}" in failure.error for name in groups)
        assert "2" in failure.error.partition("on ranks")[2]


def call(rank: int, world_size: int, directions: tuple[Direction, ...], dtype: torch.dtype) -> Any:
    plan = make_plan(CASE.problem, 4, method="mesh", directions=directions)
    with ContextParallel(plan=plan) as cp:
        inputs = [cp.shard(x, 1).to(dtype).requires_grad_() for x in CASE.tensors()[:3]]
        raised = raised_by(lambda: cp.attention(*inputs), cp)
        with torch.no_grad():
            right = [x.float() for x in inputs]
            out = cp.attention(*right)
        assert isinstance(out, Tensor)
        return raised, out.shape


@pytest.mark.parametrize(
    ("directions", "dtype", "message"),
    [
        ((Direction.FORWARD,), torch.float32, "this plan has no backward pass; it has: forward"),
        (tuple(Direction), torch.bfloat16, "the plan is for 4-byte elements, but the tensors are"),
    ],
)
def test_what_the_plan_cannot_do_is_refused_by_name(
    pool: WorkerPool, directions: tuple[Direction, ...], dtype: torch.dtype, message: str
) -> None:
    results = pool.run(call, 4, directions, dtype)
    all_raised([raised for raised, _ in results])
    assert all(message in raised.error for raised, _ in results)


def own_programs(rank: int, world_size: int, case: Case, training: bool) -> dict[str, list[int]]:
    """The programs that this rank has made for a call, by pass."""
    with context(case) as cp:
        inputs = [cp.shard(x, 1).requires_grad_(training) for x in case.tensors()[:3]]
        out = cp.attention(*inputs)
        assert isinstance(out, Tensor)
        if training:
            out.sum().backward()  # type: ignore[no-untyped-call]
        cp.transports()
        results = {}
        for pass_ in cp.plan.passes:
            assert isinstance(pass_.programs, Programs)
            made = pass_.programs._made
            results[pass_.direction.value] = [r for r, p in enumerate(made) if p is not None]
        assert cp.rank == rank
        return results


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", ["mesh", "ring", "ulysses"])
def test_a_rank_makes_its_own_programs_only(pool: WorkerPool, method: str, training: bool) -> None:
    case = replace(CASE, heads=(4, 4), options={"method": method})
    for rank, result in enumerate(pool.run(own_programs, 4, case, training)):
        assert result == {"forward": [rank], "backward": [rank] if training else []}


def wrong_everywhere(rank: int, world_size: int, change: str) -> Raised:
    """A text in which somebody changed a line, read by all ranks."""
    text = plan_text(made(CASE))
    if change == "calls":
        line = next(x for x in text.splitlines() if ": attend " in x and "+" in x)
        text = text.replace(line, re.sub(r"calls=[^+ ]*\+", "calls=", line), 1)
    else:
        text = text.replace('"causal": true', '"causal": false')
    return raised_by(lambda: ContextParallel(plan=parse_plan(text)))


@pytest.mark.parametrize("change", ["calls", "mask"])
def test_a_plan_that_computes_something_else_is_refused_on_all_ranks(
    pool: WorkerPool, change: str
) -> None:
    raised = pool.run(wrong_everywhere, 4, change)
    all_raised(raised)
    assert all("the plan is wrong: forward" in failure.error for failure in raised)


def compiled_after_plain(rank: int, world_size: int, odd: int | None) -> Raised:
    """A plan that was compiled for kernels that are not here, after the plain one ran."""
    plan = make_plan(CASE.problem, world_size, method="mesh")
    compiled = compile_plan(plan, target_on("hgx-h200", plan))

    def attend_by(own_plan: Plan) -> None:
        with ContextParallel(plan=own_plan) as cp:
            cp.attention(*(cp.shard(x, 1) for x in CASE.tensors()[:3]))

    attend_by(plan)
    return raised_by(lambda: attend_by(compiled if odd in (None, rank) else plan))


@pytest.mark.parametrize("odd", [None, 1])
def test_a_compiled_plan_is_not_taken_for_the_plain_one(pool: WorkerPool, odd: int | None) -> None:
    for of_rank in pool.run(compiled_after_plain, 2, odd):
        assert "compiled for a kernel" in of_rank.error or "disagree" in of_rank.error
