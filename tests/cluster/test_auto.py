"""The search: as fast as any method at its best, one plan for both passes, faithful to options."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from simulated_cases import problem_of

from mesh_attention.choose.ask import make_plan
from mesh_attention.choose.auto import find_best, find_default
from mesh_attention.choose.explain import TIE
from mesh_attention.cost import Cluster, load_cluster, simulate
from mesh_attention.cost.planning import plan_on
from mesh_attention.errors import PlanError
from mesh_attention.machine.load import cluster_names
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify

PAPER = load_cluster("paper")
# Two nodes are enough to have links of two kinds, and small ones enough to have two.
SMALL = replace(PAPER, node=replace(PAPER.node, ranks=2), network=replace(PAPER.network, nics=2))


def drawn(seed: int) -> tuple[Problem, int, Cluster]:
    """A small problem and a cluster of small nodes, with links of other rates than it has; every
    other one drives transfers by its host."""
    random = Random(seed)
    kv_heads = random.choice((1, 2, 3, 4))
    problem = Problem(
        q_tokens=random.choice((3, 4096, 10_000, 65_536)),
        num_heads=kv_heads * random.choice((1, 2, 4)),
        num_kv_heads=kv_heads,
        head_dim=random.choice((64, 128)),
        mask=Mask(causal=random.random() < 0.6),
    )
    if seed >= 200:
        ends = {random.randrange(1, problem.q_tokens) for _ in range(4)}
        masks = [
            Mask(causal=True, window=(max(1, problem.q_tokens // random.choice((8, 64))), 0)),
            Mask(causal=True, documents=(0, *sorted(ends), problem.q_tokens)),
        ]
        problem = replace(problem, mask=random.choice(masks))
    cluster = load_cluster(random.choice(cluster_names()))
    ranks = random.choice((1, 2, 4))
    node = replace(
        cluster.node,
        ranks=ranks,
        all_to_all_gb_per_second=cluster.node.all_to_all_gb_per_second * random.uniform(0.1, 1),
    )
    network = replace(cluster.network, nics=random.choice([n for n in (1, 2, 4) if ranks % n == 0]))
    return (
        problem,
        random.choice((1, 2, 3, 4, 5, 6, 8)),
        replace(cluster, node=node, network=network, host_driven=seed % 2 == 0),
    )


def is_not_slower(seed: int) -> None:
    problem, ranks, cluster = drawn(seed)
    for direction in Direction:
        auto_choice = find_best(problem, ranks, cluster, directions=(direction,))
        for method in METHODS:
            try:
                method_choice = find_best(
                    problem, ranks, cluster, method=method, directions=(direction,)
                )
            except PlanError:
                assert method in auto_choice.refused
                continue
            best = method_choice.chosen[direction]
            if best.fits and best.is_simulated:
                assert auto_choice.seconds <= (1 + TIE) * best.seconds, (seed, method)


def test_it_is_not_slower_than_any_method_at_its_best() -> None:
    is_not_slower(1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(160, 240))
def test_it_is_not_slower_than_any_method_at_its_best_in_80_cases(seed: int) -> None:
    """From 200 on under windows and documents, where layouts make a difference."""
    is_not_slower(seed)


@pytest.mark.parametrize(
    "method",
    [
        method if method in ("mesh", "usp") else pytest.param(method, marks=pytest.mark.slow)
        for method in METHODS
    ],
)
def test_the_best_of_a_method_is_at_least_as_fast_as_its_own_choice(method: str) -> None:
    problem, way = problem_of(65536), Direction.BACKWARD
    usual = plan_on(SMALL, problem, 4, method=method, directions=(way,))
    best = find_best(problem, 4, SMALL, method=method, directions=(way,))
    assert best.seconds <= (1 + TIE) * simulate(usual, SMALL, way).runtime_seconds
    again = simulate(best.plan(), SMALL, way)
    assert again.runtime_seconds == best.seconds


def test_layouts_are_searched_and_the_best_that_leaves_tokens_is_known_too() -> None:
    problem = Problem(16384, 2, 128, mask=Mask(causal=True, window=(512, 0)))
    choice = find_best(problem, 4, "paper")
    assert choice.place == {"layout": "contiguous"}
    assert choice.plan().q_layout.kind == "contiguous"
    for setting in choice.unmoved.values():
        plan = choice.asked.plan(setting.direction, setting.name, setting.options)
        assert plan.q_layout.kind == "zigzag"
        assert plan.devices == tuple(range(4))
    assert choice.seconds < sum(setting.seconds for setting in choice.unmoved.values())
    zigzag_choice = find_best(problem, 4, "paper", options={"layout": "zigzag"})
    assert zigzag_choice.place == {}
    assert zigzag_choice.plan().q_layout.kind == "zigzag"


def test_of_ties_of_both_passes_the_default_takes_the_fewest_operations() -> None:
    """Forward wants chunks, backward wants none, and backward recalls what forward keeps."""
    problem = Problem(32768, 32, 128, num_kv_heads=8, mask=Mask(causal=True))
    choice = find_default(problem, 8, "hgx-h100")
    cut = find_default(problem, 8, "hgx-h100", options={"chunks": (2, 1)})
    assert cut.seconds < choice.seconds < 1.01 * cut.seconds
    for setting in choice.chosen.values():
        assert (setting.name, setting.options) == ("ulysses", {"chunks": (1, 1)})
    assert choice.chosen[Direction.BACKWARD].recalls


def test_both_passes_of_a_method_are_told_of_one_place() -> None:
    problem = Problem(8192, 4, 64, num_kv_heads=1, element_bytes=4, mask=Mask(causal=True))
    choice = find_best(problem, 5, "a100-roce")
    assert {*choice.methods} | {*choice.refused} <= {*METHODS}
    for row in choice.methods.values():
        plans = [
            choice.asked.plan(at, setting.name, setting.options) for at, setting in row.items()
        ]
        assert len({(plan.q_layout, plan.devices) for plan in plans}) == 1


@pytest.mark.parametrize(
    ("ranks", "tokens"), [(1, 4096), (7, 4096), (5, 3)], ids=["alone", "prime", "few tokens"]
)
def test_there_is_always_an_answer_whose_plan_holds(ranks: int, tokens: int) -> None:
    problem = replace(problem_of(tokens), mask=Mask(causal=True))
    choice = find_best(problem, ranks, "hgx-h100")
    plan = choice.plan()
    assert verify(plan) == []
    assert [pass_.direction for pass_ in plan.passes] == list(Direction)
    for direction, setting in choice.chosen.items():
        assert setting.timeline is not None
        assert setting.seconds == setting.timeline.runtime_seconds
        simulated = setting.timeline.plan.direction(direction)
        assert plan.direction(direction).programs == simulated.programs


def test_the_default_is_what_every_door_makes_and_leaves_tokens_where_they_are() -> None:
    problem = Problem(16384, 4, 128, mask=Mask(causal=True, window=(512, 0)))
    default = find_default(problem, 4, "paper")
    assert default.place == {}
    assert default.plan().q_layout.kind == "zigzag"
    assert digest(make_plan(problem, 4, cluster="paper")) == digest(default.plan())


def test_what_is_given_stays_and_narrows_the_methods() -> None:
    how: dict[str, Any] = {"directions": (Direction.FORWARD,), "options": {"tile": (2, 2)}}
    choice = find_best(problem_of(4096), 4, PAPER, **how)
    assert choice.chosen[Direction.FORWARD].options["tile"] == (2, 2)
    assert all("tile" in METHODS[name].options() for name in choice.methods)
    cut: dict[str, Any] = {"chunks": (1, 1), "head_slices": (2, 8)}
    (setting, _) = find_best(
        problem_of(65536), 8, PAPER, method="mesh", options=cut
    ).chosen.values()
    assert setting.options.items() >= cut.items()


def test_refusals_are_the_methods_own() -> None:
    for options, message in (
        ({"team": 1, "inner": 2}, "no method has all of the options inner, team"),
        ({"tyle": (2, 2)}, "no method has an option 'tyle'"),
    ):
        with pytest.raises(PlanError, match=message):
            find_best(problem_of(4096), 4, PAPER, options=options)
    for method, shape, message in (
        ("mesh", (3, 3), "tiles that fit"),
        ("ring", (4, 4), "has no option 'tile'"),
        ("rng", (4, 4), "known methods"),
    ):
        with pytest.raises(PlanError, match=message):
            find_best(problem_of(), 16, PAPER, method=method, options={"tile": shape})


def test_what_fits_into_memory_wins() -> None:
    problem, how = problem_of(65536), {"method": "mesh", "directions": (Direction.FORWARD,)}

    def peak(cluster: Cluster) -> tuple[int, float]:
        choice = find_best(problem, 4, cluster, **how)  # type: ignore[arg-type]
        return choice.chosen[Direction.FORWARD].peak_bytes, choice.seconds

    def with_memory(num_bytes: float) -> Cluster:
        return replace(SMALL, gpu=replace(SMALL.gpu, memory_gib=num_bytes / 2**30))

    free = peak(SMALL)
    fitting = peak(with_memory(free[0] - 1))
    assert fitting[0] < free[0]
    assert fitting[1] >= free[1]
    assert peak(with_memory(1))[1] > 0  # still an answer


def test_rings_of_one_unit_are_not_called_a_double_ring() -> None:
    """They are USP's, or Ulysses itself where there is one unit."""
    for per_node in (2, 4):
        for shape in METHODS["double-ring"].candidates(problem_of(4096), 16, per_node):
            assert 1 < shape["inner"] < 16 // shape["ulysses"]


def test_progress_grows_to_the_end() -> None:
    steps: list[tuple[int, int]] = []
    find_best(problem_of(4096), 2, PAPER, progress=lambda *now: steps.append(now))
    assert [done for done, _ in steps] == list(range(1, len(steps) + 1))
    assert all(done <= total for done, total in steps)


def test_a_row_of_the_table_is_all_that_a_search_needs_to_know_a_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METHODS, "mesh again", replace(METHODS["mesh"], name="mesh again"))
    choice = find_best(Problem(4096, 4, 64), 4, "hgx-h100")
    assert "mesh again" in choice.methods
