"""The best of all methods: never slower than any at its best, and one plan for both passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from simulated_cases import problem_of

from mesh_attention.choose import auto
from mesh_attention.choose.answers import VARIABLE, ask_auto, keep_answer, kept_answer
from mesh_attention.choose.auto import find_best_of_all
from mesh_attention.choose.best import Candidate, find_best
from mesh_attention.choose.one_pass import OnePass, Standing
from mesh_attention.choose.ranking import received_in_nodes
from mesh_attention.choose.reasons import why
from mesh_attention.cost import Cluster, load_cluster, simulate
from mesh_attention.cost.machine.load import cluster_names
from mesh_attention.cost.planning import plan_on
from mesh_attention.errors import PlanError
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.verify import verify

PAPER = load_cluster("paper")


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


def is_never_slower(seed: int) -> None:
    problem, ranks, cluster = drawn(seed)
    for direction in Direction:
        found = find_best_of_all(problem, ranks, cluster, directions=(direction,))
        chosen = found.chosen[direction]
        for method in METHODS:
            try:
                best = find_best(problem, ranks, cluster, method=method, direction=direction)
            except PlanError:
                assert method in found.refused
                continue
            limit = cluster.gpu.memory_gib * 2**30
            if best.timeline.peak_bytes <= limit:
                assert chosen.seconds <= best.timeline.runtime_seconds, (seed, method)


@pytest.mark.parametrize("seed", [1, 234])  # the last: one whose best is in another layout
def test_it_is_never_slower_than_any_method_at_its_best(seed: int) -> None:
    is_never_slower(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(240))
def test_it_is_never_slower_than_any_method_at_its_best_in_240_cases(seed: int) -> None:
    """From 200 on under windows and documents, where layouts make a difference."""
    is_never_slower(seed)


def test_ways_of_combining_are_searched_unless_one_is_given() -> None:
    problem = Problem(16384, 16, 128, num_kv_heads=1, mask=Mask(causal=True))
    asked: dict[str, Any] = {"method": "mesh", "direction": Direction.BACKWARD}
    best = find_best(problem, 32, "hgx-h100", **asked)
    assert best.options["combine"] == "nodes"
    options = best.options | {"method": "mesh", "directions": (Direction.BACKWARD,)}
    plan = plan_on("hgx-h100", problem, 32, **(options | {"combine": "auto"}))
    as_usual = simulate(plan, "hgx-h100", "backward")
    assert best.timeline.runtime_seconds < as_usual.runtime_seconds
    given = find_best(problem, 32, "hgx-h100", options={"combine": "exchange"}, **asked)
    assert given.options["combine"] == "exchange"


def test_layouts_are_searched_and_what_leaves_tokens_in_place_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    mask = Mask(causal=True, window=(512, 0))
    problem = Problem(16384, 2, 128, mask=mask)
    found = find_best_of_all(problem, 4, "paper")
    assert found.place == {"layout": "contiguous"}
    assert found.plan().q_layout.kind == "contiguous"
    for direction, one in found.unmoved.items():
        assert one.timeline is not None
        assert one.timeline.plan.q_layout.kind == "zigzag"
        assert one.timeline.plan.devices == tuple(range(4))
        assert one.seconds >= found.chosen[direction].seconds
    keep_answer(problem, 4, "paper", found)
    for options, kind in ((None, "zigzag"), (found.place, "contiguous")):
        assert kept_answer(problem, 4, "paper", options)
        assert ask_auto(problem, 4, "paper", options).plan().q_layout.kind == kind
    given = find_best_of_all(problem, 4, "paper", options={"layout": "zigzag"})
    assert given.place == {}
    assert given.plan().q_layout.kind == "zigzag"
    assert given.seconds <= sum(one.seconds for one in found.unmoved.values())


def in_one_place(problem: Problem, ranks: int, cluster: str, **options: Any) -> float:
    """Seconds of both passes of the best method, each in the layout given."""
    found = []
    for name in ("mesh", "seen", "ulysses", "usp", "mesh-usp"):
        try:
            how: dict[str, Any] = {"method": name, "options": options}
            both = [find_best(problem, ranks, cluster, direction=d, **how) for d in Direction]
        except PlanError:
            continue
        if all(one.timeline.plan.devices == tuple(range(ranks)) for one in both):
            found.append(sum(one.timeline.runtime_seconds for one in both))
    return min(found)


@pytest.mark.slow
def test_every_layout_is_searched_as_if_it_were_the_only_one() -> None:
    """Under this window the best is in zigzag, where `seen` has another tile than in contiguous
    shards, which are its own choice."""
    mask = Mask(causal=True, window=(4095, 0))
    problem = Problem(131072, 32, 128, num_kv_heads=8, mask=mask)
    found = find_best_of_all(problem, 16, "paper")
    zigzag = find_best(problem, 16, "paper", method="seen", options={"layout": "zigzag"})
    kept = found.unmoved[Direction.FORWARD]
    assert kept.seconds <= zigzag.timeline.runtime_seconds
    assert found.seconds <= sum(one.seconds for one in found.unmoved.values())
    assert [one.seconds for one in found.chosen.values()] == [
        found.together[0][direction].seconds for direction in found.chosen
    ]


def test_both_passes_of_a_method_are_told_of_one_layout() -> None:
    problem = Problem(8192, 4, 64, num_kv_heads=1, element_bytes=4, mask=Mask(causal=True))
    found = find_best_of_all(problem, 5, "a100-roce")
    for row in found.together:
        plans = [
            plan_on("a100-roce", problem, 5, method=one.name, directions=(at,), **one.options)
            for at, one in row.items()
        ]
        assert len({(plan.q_layout, plan.devices) for plan in plans}) == 1
        assert sum(one.seconds for one in row.values()) >= found.seconds
    for layout in ("zigzag", "striped"):
        assert found.seconds <= in_one_place(problem, 5, "a100-roce", layout=layout)
    assert sum(one.seconds for one in found.unmoved.values()) <= in_one_place(
        problem, 5, "a100-roce", layout="zigzag"
    )


@pytest.mark.parametrize(
    ("ranks", "tokens"), [(1, 4096), (7, 4096), (5, 3)], ids=["alone", "prime", "few tokens"]
)
def test_there_is_always_an_answer_whose_plan_holds(ranks: int, tokens: int) -> None:
    problem = replace(problem_of(tokens), mask=Mask(causal=True))
    found = find_best_of_all(problem, ranks, "hgx-h100")
    plan = found.plan()
    assert verify(plan) == []
    assert [one.direction for one in plan.passes] == list(Direction)
    assert found.reason
    for direction, one in found.chosen.items():
        assert one.timeline is not None
        assert one.seconds == one.timeline.runtime_seconds
        simulated = one.timeline.plan.direction(direction)
        assert plan.direction(direction).programs == simulated.programs
        assert found.standings[direction][0].seconds <= one.seconds
        assert {s.name for s in found.standings[direction]} | {*found.refused} == {*METHODS}


@pytest.mark.slow
def test_it_beats_the_mesh_where_kv_heads_are_few() -> None:
    """32 H100s in 4 nodes, 64:8 heads, 128K tokens, causal."""
    problem = Problem(131072, 64, 128, num_kv_heads=8, mask=Mask(causal=True))
    only = {"directions": (Direction.FORWARD,)}
    found = find_best_of_all(problem, 32, "hgx-h100", **only)  # type: ignore[arg-type]
    seconds = {one.name: one.seconds for one in found.standings[Direction.FORWARD]}
    assert found.seconds < 0.98 * seconds["mesh"]
    assert "beats" in found.reason or "as fast as" in found.reason
    assert "from other nodes" in found.reason


def test_the_reason_and_the_table_look_at_ranks_that_others_stand_for() -> None:
    """Of StarTrail's ranks with teams of 2 the first and the one in the middle have all they need
    in their nodes, and their neighbours nothing."""
    small = replace(
        PAPER, node=replace(PAPER.node, ranks=4), network=replace(PAPER.network, nics=4)
    )
    plan = plan_on(small, problem_of(4096), 8, method="startrail", team=2)
    timeline = simulate(plan, small, "forward")
    assert timeline.far_bytes[0] == timeline.far_bytes[4] == 0
    most = max(timeline.received_bytes), max(timeline.far_bytes)
    assert most[1] > 0
    assert received_in_nodes(plan, plan.forward) == most
    standing = Standing("startrail", {}, timeline.runtime_seconds, timeline)
    assert "from other nodes" in why([standing], [[standing]])


class KnownPass:
    """What is known of one pass, by method: where its tokens lie, and seconds."""

    def __init__(self, other: dict[str, float], **known: tuple[str, float]) -> None:
        self._other = other  # seconds of what the other pass may bring
        self.candidates = [self._made(name, *one) for name, one in known.items()]

    def _made(self, name: str, place: str, seconds: float) -> Candidate:
        score = (False, seconds)
        return Candidate(name, {}, score, score, (place, ()), 1)

    @property
    def best(self) -> tuple[Any, Candidate, None]:
        one = min(self.candidates, key=lambda one: one.expected)
        return one.expected, one, None

    def add(self, one: Candidate) -> None:
        self.candidates.append(self._made(one.name, one.place[0], self._other[one.name]))

    def places(self) -> dict[Any, Any]:
        scores = sorted([(one.expected, one.place) for one in self.candidates], reverse=True)
        return {place: score for score, place in scores}

    def at(self, place: Any) -> tuple[Any, Candidate, None]:
        here = [one for one in self.candidates if one.place == place]
        one = min(here, key=lambda one: one.expected)
        return one.expected, one, None


def test_a_pass_takes_the_setting_of_the_other_where_its_own_is_worse_there() -> None:
    """Forward the best is striped, backward zigzag; forward has a poor setting in zigzag, too."""
    forward = KnownPass({"good": 1.01}, best=("striped", 1.0), poor=("zigzag", 2.0))
    backward = KnownPass({"best": 9.0}, good=("zigzag", 1.0))
    chosen = auto._in_one_place([forward, backward])  # type: ignore[list-item]
    assert [(one.name, score[1]) for score, one, _ in chosen] == [("good", 1.01), ("good", 1.0)]


def test_in_a_place_what_turned_out_slow_does_not_keep_others_from_being_tried() -> None:
    place = ("zigzag", ())
    seconds = {"promising": 0.6, "good": 0.9, "worse": 1.6}
    every = [Candidate(n, {}, (False, s), (False, 0.1), place, 1) for n, s in seconds.items()]
    one: Any = object.__new__(OnePass)
    one.candidates, one.simulated = every, [((False, 1.5), every[0], None)]
    taken = seconds | {"promising": 1.5}
    one.simulate = lambda other: ((False, taken[other.name]), other, None)
    assert one.at(place)[1].name == "good"


def test_a_place_is_as_good_as_what_is_expected_of_any_setting_there() -> None:
    """One that was simulated and is slow does not hide what the other pass would have here."""
    place = ("zigzag", ())
    slow, good = (
        Candidate("mesh", {"tile": tile}, (False, seconds), (False, 0.1), place, 1)
        for tile, seconds in (((1, 4), 0.9), ((2, 2), 0.6))
    )
    one: Any = object.__new__(OnePass)
    one.candidates, one.simulated = [slow, good], [((False, 1.5), slow, None)]
    one.at_best = lambda: {place: ((False, 1.5), None)}
    assert one.places() == {place: (False, 0.6)}


def test_rings_of_one_unit_are_not_called_a_double_ring() -> None:
    """They are USP's, or Ulysses itself where there is one unit."""
    problem = problem_of(4096)
    for per_node in (2, 4):
        for shape in METHODS["double-ring"].candidates(problem, 16, per_node):
            assert 1 < shape["inner"] < 16 // shape["ulysses"]
    found = find_best_of_all(
        problem,
        4,
        replace(PAPER, node=replace(PAPER.node, ranks=1), network=replace(PAPER.network, nics=1)),
        directions=(Direction.FORWARD,),
    )
    assert found.chosen[Direction.FORWARD].name != "double-ring"


def test_what_is_given_narrows_the_methods() -> None:
    how = {"directions": (Direction.FORWARD,), "options": {"tile": (2, 2)}}
    found = find_best_of_all(problem_of(4096), 4, PAPER, **how)  # type: ignore[arg-type]
    for direction, one in found.chosen.items():
        assert one.options["tile"] == (2, 2)
        assert "tile" in METHODS[one.name].options()
        assert {s.name for s in found.standings[direction]} < {*METHODS}
    with pytest.raises(PlanError, match="no method has all of the options inner, team"):
        find_best_of_all(problem_of(4096), 4, PAPER, options={"team": 1, "inner": 2})
    with pytest.raises(PlanError, match="no method has an option 'tyle'"):
        find_best_of_all(problem_of(4096), 4, PAPER, options={"tyle": (2, 2)})


def test_progress_grows_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    find_best_of_all(problem_of(4096), 2, PAPER, progress=lambda *now: told.append(now))
    assert [done for done, _ in told] == list(range(1, 2 * len(METHODS) + 1))
    assert {total for _, total in told} == {2 * len(METHODS)}
