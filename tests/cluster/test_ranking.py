"""What is said of a choice is what the model can stand by: ties, estimates, none before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_cases import problem_of

from mesh_attention.choose.auto import PlanChoice, find_best, find_default
from mesh_attention.choose.explain import explain, seconds_of
from mesh_attention.choose.ranking import ranked, received_bytes
from mesh_attention.choose.scored import Scored
from mesh_attention.cost import load_cluster, simulate
from mesh_attention.cost.planning import plan_on
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

FORWARD = Direction.FORWARD


@pytest.fixture(scope="module")
def choice() -> PlanChoice:
    return find_best(Problem(65536, 8, 64, mask=Mask(causal=True)), 8, "paper")


def scored(method: str, seconds: float) -> dict[Direction, Scored]:
    how = {"peak_bytes": 1, "fits": True, "place": "", "stays": True, "operations": 1}
    return {FORWARD: Scored(FORWARD, method, {}, seconds, **how, may_wait=False)}  # type: ignore[arg-type]


def test_every_method_has_a_row_or_a_refusal_and_none_is_before_the_choice(
    choice: PlanChoice,
) -> None:
    ranking = ranked(choice)
    assert {row.name for row in ranking.rows} | {*ranking.refused} >= {*METHODS}
    assert ranking.chosen.passes == ranking.choice.chosen
    seconds = [row.seconds for row in ranking.rows]
    assert seconds == sorted(seconds)


def test_what_seems_faster_than_the_choice_is_simulated(choice: PlanChoice) -> None:
    mesh = {
        d: replace(setting, seconds=setting.seconds / 100, timeline=None)
        for d, setting in choice.methods["mesh"].items()
    }
    ranking = ranked(replace(choice, methods=choice.methods | {"mesh": mesh}))
    row = next(row for row in ranking.rows if row.name == "mesh")
    assert row.is_simulated
    simulated = {d: choice.asked.simulated(x) for d, x in choice.methods["mesh"].items()}
    assert row.seconds == seconds_of(simulated)
    # Where it is faster indeed, it is the choice.
    slow = {
        d: replace(setting, seconds=10 * setting.seconds) for d, setting in choice.chosen.items()
    }
    ranking = ranked(replace(choice, chosen=slow, unmoved=slow))
    assert ranking.choice.seconds < seconds_of(slow)
    assert ranking.choice.seconds == ranking.rows[0].seconds


def test_the_choice_is_never_behind_the_default(choice: PlanChoice) -> None:
    default = find_default(*(choice.asked.problem, 8, "paper"))
    slow = {
        d: replace(setting, seconds=10 * setting.seconds) for d, setting in choice.chosen.items()
    }
    ranking = ranked(replace(choice, chosen=slow, unmoved=slow, methods={}, default=default))
    assert ranking.choice.seconds <= default.seconds


def test_the_sentence_compares_with_what_people_use() -> None:
    methods = {n: scored(n, t) for n, t in (("usp", 0.456), ("ring", 1.01), ("mesh", 0.3))}
    assert explain(scored("mesh-usp", 0.401), methods, ["ulysses", "seen"], 256) == (
        "mesh-usp takes about 401 ms forward: 12 % less time than usp (about 456 ms), 60 % less "
        "time than ring (about 1.01 s); ulysses cannot run on 256 ranks."
    )
    assert explain(scored("usp", 0.456), {"usp": scored("usp", 0.456)}, [], 4) == (
        "usp takes about 456 ms forward."
    )
    both = {**scored("usp", 0.2), Direction.BACKWARD: scored("mesh", 0.3)[FORWARD]}
    assert explain(both, {}, [], 4) == ("usp forward and mesh backward take about 500 ms together.")


def test_less_than_3_percent_is_a_tie() -> None:
    for seconds, said in ((0.98, "as fast as usp (about 1.00 s, within 3 %"), (0.96, "4 % less")):
        assert said in explain(scored("mesh", seconds), {"usp": scored("usp", 1.0)}, [], 4)


def test_waiting_for_slower_ranks_is_no_communication() -> None:
    uneven = Problem(32768, 4, 64, mask=Mask(documents=(0, *range(8192, 32769, 1024))))
    options = {"layout": "contiguous"}
    best = find_best(uneven, 4, "hgx-h100", method="seen", options=options, directions=(FORWARD,))
    assert "receives nothing; it waits" in explain(best.chosen, {}, [], 4)
    best = find_best(Problem(512, 4, 64), 4, "hgx-h100", method="ring", directions=(FORWARD,))
    assert "ms of communication are exposed" in explain(best.chosen, {}, [], 4)


def test_bytes_of_what_is_not_simulated_are_those_of_a_simulation() -> None:
    """Of StarTrail's ranks with teams of 2 the first and the one in the middle have all they need
    in their nodes, and their neighbours nothing."""
    paper = load_cluster("paper")
    small = replace(
        paper, node=replace(paper.node, ranks=4), network=replace(paper.network, nics=4)
    )
    plan = plan_on(small, problem_of(4096), 8, method="startrail", team=2)
    timeline = simulate(plan, small, "forward")
    assert timeline.far_bytes[4] == 0
    most = max(timeline.received_bytes), max(timeline.far_bytes)
    assert most[1] > 0
    assert received_bytes(plan, Direction.FORWARD) == most
