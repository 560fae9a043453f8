"""A rank that runs makes its own program only; whoever asks the same question has the same plan."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable

import pytest

from mesh_attention.choose.ask import ask, make_plan
from mesh_attention.cli.main import main
from mesh_attention.plan.language.plan import Direction, Programs
from mesh_attention.plan.language.program import Program
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify
from support.sample import sample

RANKS = 8
CASES = {
    "small": (
        Problem(101, 8, 16, num_kv_heads=4, mask=Mask(causal=True)),
        "--tokens 101 --heads 8 --kv-heads 4 --head-dim 16 --causal",
    ),
    "cut by size": (Problem(1 << 16, 32, 64), "--tokens 65536 --heads 32 --head-dim 64"),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks whose programs were made, in order."""
    ranks: list[int] = []
    begin = Programs.__init__

    def counting(self: Programs, num_ranks: int, make: Callable[[int], Program]) -> None:
        def counted(rank: int) -> Program:
            ranks.append(rank)
            return make(rank)

        begin(self, num_ranks, counted)

    monkeypatch.setattr(Programs, "__init__", counting)
    return ranks


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_asking_for_the_program_of_a_rank_makes_no_other(
    method: str, name: str, made: list[int]
) -> None:
    plan = make_plan(CASES[name][0], RANKS, method=method)
    assert made == []
    for direction in Direction:
        first = plan.program(5, direction)
        assert first.rank == 5
        assert made == [5]
        assert plan.program(5, direction) is first  # and it is kept
        assert plan.direction(direction).programs[-3] is first
        assert made == [5]
        made.clear()


@pytest.mark.parametrize("method", sample(METHODS, 2))
def test_the_program_of_a_rank_is_the_same_whichever_were_made_before(method: str) -> None:
    problem = CASES["small"][0]
    whole = make_plan(problem, RANKS, method=method)
    for direction in Direction:
        programs = tuple(whole.direction(direction).programs)
        assert [program.rank for program in programs] == list(range(RANKS))
        for rank in range(RANKS):
            alone = make_plan(problem, RANKS, method=method)
            assert alone.program(rank, direction) == programs[rank]
        backwards = make_plan(problem, RANKS, method=method).direction(direction)
        assert [backwards.programs[rank] for rank in reversed(range(RANKS))] == [*programs[::-1]]
    assert whole == make_plan(problem, RANKS, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_groups_devices_and_settings_need_no_program(method: str, made: list[int]) -> None:
    plan = make_plan(CASES["small"][0], RANKS, method=method, ranks_per_node=4)
    for pass_ in plan.passes:
        assert len(pass_.programs) == RANKS
        assert pass_.order.steps
        assert all(set(members) <= set(range(RANKS)) for members in pass_.groups.values())
    assert (len(plan.devices), plan.num_nodes) == (RANKS, 2)
    assert made == []


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", sample(METHODS, 3))
def test_the_same_question_has_the_same_plan_however_it_is_asked(
    method: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    problem, flags = CASES[name]
    plan = make_plan(problem, RANKS, method=method)
    line = f"plan --method {method} --ranks {RANKS} {flags} --json"
    assert main(line.split()) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == digest(plan)
    # `ContextParallel` has some options as arguments of its own, and hands them over as they are.
    question = ask(problem, RANKS, method=method, tile=None, layout=None, chunks=None)
    assert question == ask(problem, RANKS, method=method)
    assert digest(question.plan()) == digest(plan)


def test_the_large_problem_is_cut_and_the_small_one_is_not() -> None:
    """Else the tests above would not see a choice that is made in one place only."""
    small, large = (
        make_plan(problem, RANKS, method="mesh").forward.setting for problem, _ in CASES.values()
    )
    assert "head_slices" in large
    assert "head_slices" not in small
    assert {small["chunks"], large["chunks"]} == {"1x1"}


def test_a_plan_can_be_pickled_and_copied() -> None:
    plan = make_plan(
        Problem(q_tokens=61, num_heads=4, head_dim=8, mask=Mask(causal=True)), 6, method="mesh"
    )
    for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert other == plan
        assert plan == other
        assert digest(other) == digest(plan)
        assert verify(other) == []
