"""Where the ranks of units are: in order, or a patch of units in every node."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_attention.api.report import Reports
from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.computed_pairs import pairs_of_tasks, pairs_of_tiles
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.text import parse_plan, plan_text
from mesh_attention.plan.methods.parts.assignment import PLACES
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.testing import run_local
from support.cases import Case
from support.listed import stretches_for
from support.reference import NAMES, attention, errors

# Ranks, ranks of a node, Ulysses degree, tile, units in a node.
SHAPES = [
    (16, 4, 4, (2, 2), 2),
    (16, 4, 4, (2, 2), 4),
    (16, 8, 8, (1, 2), 2),
    (32, 8, 8, (2, 2), 4),
    (32, 8, 4, (4, 2), 8),
    (32, 8, 4, (2, 4), 4),
    (36, 6, 4, (3, 3), 3),
    (24, 4, 2, (4, 3), 4),
]


def plan_of(method: str, ranks: int, **options: Any) -> Plan:
    problem = Problem(8 * ranks, 8, 4, num_kv_heads=8, mask=Mask(causal=True))
    return make_plan(problem, ranks, method=method, **options)


@pytest.mark.parametrize(("ranks", "per_node", "degree", "tile", "units"), SHAPES)
def test_a_node_has_as_many_ranks_of_each_unit_of_a_patch(
    ranks: int, per_node: int, degree: int, tile: tuple[int, int], units: int
) -> None:
    plan = plan_of(
        *("mesh-usp", ranks),
        ulysses=degree,
        tile=tile,
        ranks_per_node=per_node,
        units_per_node=units,
    )
    assert sorted(plan.devices) == list(range(ranks))
    for node in range(ranks // per_node):
        inside = [rank for rank in range(ranks) if plan.node_of(rank) == node]
        assert Counter(Counter(rank // degree for rank in inside).values()) == {
            per_node // units: units
        }
        # Units that gather from each other hold the same heads here.
        heads = [{rank % degree for rank in inside if rank // degree == u} for u in range(ranks)]
        assert len({frozenset(unit_heads) for unit_heads in heads if unit_heads}) == 1


def test_as_many_units_in_a_node_as_fit_are_tried_where_a_unit_fills_the_node() -> None:
    """Four ranks a node: of four units of four ranks one rank each, and of two units of eight two
    ranks each. Units of two ranks lie in order, which has two of them in a node."""
    assert METHODS["usp"].candidates(Problem(1024, 8, 4), 16, 4) == [
        {"ulysses": 2},
        {"ulysses": 4},
        {"ulysses": 4, "units_per_node": 4},
        {"ulysses": 8},
        {"ulysses": 8, "units_per_node": 2},
    ]


@pytest.mark.parametrize("method", ["mesh-usp", "usp", "double-ring"])
def test_whole_units_in_nodes_lie_in_order(method: str) -> None:
    options: dict[str, Any] = {"ulysses": 4, "ranks_per_node": 8, "units_per_node": 2}
    assert plan_of(method, 16, **options).devices == tuple(range(16))


@pytest.mark.parametrize(
    ("method", "ranks", "options"),
    [
        ("mesh-usp", 16, {"ulysses": 4, "tile": (2, 2), "ranks_per_node": 4, "units_per_node": 4}),
        ("mesh-usp", 16, {"ulysses": 4, "tile": (4, 1), "ranks_per_node": 4, "units_per_node": 2}),
        ("usp", 16, {"ulysses": 4, "ranks_per_node": 4, "units_per_node": 4}),
        (
            "usp",
            12,
            {"ulysses": 2, "ranks_per_node": 4, "units_per_node": 2, "gradients": "travel"},
        ),
        ("double-ring", 16, {"ulysses": 2, "inner": 2, "ranks_per_node": 4, "units_per_node": 4}),
    ],
)
def test_programs_with_units_spread_over_nodes_are_proven(
    method: str, ranks: int, options: dict[str, Any]
) -> None:
    assert verify(plan_of(method, ranks, **options)) == []


PLACED: list[tuple[str, int, dict[str, Any]]] = [
    ("mesh", 8, {"tile": (4, 2), "ranks_per_node": 4, "alpha": 2}),
    ("usp", 8, {"ulysses": 4, "ranks_per_node": 4, "units_per_node": 2}),
    ("mesh-usp", 8, {"ulysses": 2, "tile": (2, 2), "ranks_per_node": 4, "units_per_node": 4}),
]
LAYOUTS: list[tuple[dict[str, Any], Mask]] = [
    ({}, Mask(causal=True)),
    ({}, Mask()),
    ({}, Mask(causal=True, documents=(0, 11, 40, 53))),
    ({"layout": "striped", "stripe_block": 2}, Mask(causal=True)),
    ({"layout": "listed"}, Mask(causal=True)),
    ({"relayout": True, "chunks": (2, 1)}, Mask(causal=True, window=(9, 0))),
]


@pytest.mark.parametrize(("layout", "mask"), LAYOUTS, ids=repr)
@pytest.mark.parametrize(("method", "ranks", "options"), PLACED, ids=repr)
def test_tokens_lie_where_they_do_without_a_place_and_results_are_exact(
    method: str, ranks: int, options: dict[str, Any], layout: dict[str, Any], mask: Mask
) -> None:
    if layout.get("layout") == "listed":
        layout = layout | {"stretches": stretches_for("listed", Random(ranks), 53, ranks)}
    case = Case(ranks, 53, 53, (4, 4), mask=mask, options={"method": method, **options, **layout})
    plan = case.plan()
    assert plan.devices != tuple(range(ranks))
    plain = {name: x for name, x in case.options.items() if name not in PLACES}
    assert plan.shards == replace(case, options=plain).plan().shards
    assert verify(plan) == []
    assert parse_plan(plan_text(plan)) == plan
    result = run_local(plan, *case.tensors())
    results = {name: getattr(result, name) for name in NAMES}
    assert max(errors(results, attention(*case.tensors(), mask)).values()) <= 1e-10


@pytest.mark.parametrize(("method", "ranks", "options"), PLACED, ids=repr)
def test_bounds_count_the_work_of_every_rank_in_any_order(
    method: str, ranks: int, options: dict[str, Any]
) -> None:
    problem = Problem(53, 4, 8, mask=Mask(causal=True, documents=(0, 11, 40, 53)))
    degree = options.get("ulysses", 1)
    a, b = options.get("tile", (1, ranks // degree))
    for layout in ("zigzag", "contiguous"):
        plan = make_plan(problem, ranks, method=method, layout=layout, **options)
        tiles = pairs_of_tiles(plan.q_layout, plan.kv_layout, problem.rows, (a, b), degree)
        work = [0.0] * ranks
        for rank, _, pairs in pairs_of_tasks(plan, plan.forward):
            work[rank] += degree * pairs
        units = [rank // degree for rank in range(ranks)]
        assert work == [tiles[unit // a, unit % a] for unit in units]


def test_tiles_inside_nodes_receive_from_other_nodes_what_is_exchanged_for_heads_alone() -> None:
    plan = plan_of(
        *("mesh-usp", 32),
        ulysses=8,
        tile=(2, 2),
        ranks_per_node=8,
        units_per_node=4,
    )
    for pass_ in plan.passes:
        for name, ranks in pass_.groups.items():
            nodes = {plan.node_of(rank) for rank in ranks}
            is_unit = len({rank // 8 for rank in ranks}) == 1
            assert (len(nodes) == 4) if is_unit else (len(nodes) == 1), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"units_per_node": 2}, "'units_per_node' needs ranks_per_node"),
        ({"units_per_node": 3, "ranks_per_node": 8}, "that fits tiles 2x2: 2, 4$"),
        ({"units_per_node": 0, "ranks_per_node": 8}, "units_per_node=0: must be a whole number"),
        ({"units_per_node": 8, "ranks_per_node": 8}, "that fits tiles 2x2: 2, 4$"),
        (
            {"units_per_node": 4, "ranks_per_node": 8, "ranks": 24, "tile": (2, 3)},
            "4 units form no patch of the 3x2 grid of tiles 2x3",
        ),
        ({"units_per_node": 4, "ranks_per_node": 8, "alpha": 4}, "alpha that fits: 2"),
        ({"units_per_node": 4, "ranks_per_node": 10**12 - 1}, "that fits tiles 2x2: none$"),
        ({"alpha": 1, "ranks_per_node": 6}, "or say units_per_node"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of("mesh-usp", **{"ranks": 16, "ulysses": 4, "tile": (2, 2), **options})


def test_an_object_says_that_nodes_are_patches() -> None:
    """Though where ranks are is no part of a plan's cut, and so of what a plan says of itself."""

    class Object(Reports):
        def __init__(self, plan: Plan) -> None:
            source = SimpleNamespace(first=SimpleNamespace(plan=plan))
            self._calls = cast(
                ObjectCalls,
                SimpleNamespace(fixed=source, source=source, batch=None, chosen_by=None),
            )

    shape: dict[str, Any] = {"ulysses": 4, "tile": (2, 2), "ranks_per_node": 8}
    places: list[dict[str, Any]] = [{}, {"units_per_node": 4}]
    choices = [Object(plan_of("mesh-usp", 16, **shape, **place)).choice for place in places]
    assert ["nodes in patches" in choice for choice in choices] == [False, True]
