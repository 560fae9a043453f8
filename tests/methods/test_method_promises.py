"""What single methods promise beyond the right answer (algorithm.md, section 9)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Attend, Communication, Program, SendRecv
from mesh_attention.plan.methods.parts.head_group import ulysses_degrees
from mesh_attention.plan.methods.startrail import team_sizes
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import count
from mesh_attention.plan.read.verify import verify

CAUSAL = Mask(causal=True)


def plan_of(method: str, ranks: int, *, mask: Mask = CAUSAL, **options: Any) -> Plan:
    problem = Problem(4 * ranks, num_heads=4, head_dim=4, mask=mask)
    return make_plan(problem, ranks, method=method, **options)


def attends(program: Program) -> list[Attend]:
    return [op for op in program.operations if isinstance(op, Attend)]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("method", ["ring", "double-ring", "ring-q"])
def test_the_next_block_is_on_its_way_before_the_one_at_hand_is_used(
    method: str, direction: Direction
) -> None:
    plan = plan_of(method, 8, mask=Mask())
    word = "Q" if method == "ring-q" else "KV"
    for program in plan.direction(direction).programs:
        names = [op.name for op in program.operations]
        for step in range(7):
            used = f"C-{step}-0" if method == "ring-q" else f"C-0-{step}"
            assert names.index(f"{word}-{step + 1}") < names.index(used)


def test_a_causal_ring_over_contiguous_partitions_computes_only_blocks_that_are_seen() -> None:
    plan = plan_of("ring", 8, layout="contiguous")
    assert [len(attends(program)) for program in plan.forward.programs] == list(range(1, 9))


def half_pairs(pass_: Pass, rank: int) -> int:
    """Twice the work of a rank: rectangles, and causal squares as half of one (section 7)."""
    work = 0
    for attend in attends(pass_.programs[rank]):
        for call in attend.calls:
            assert call.kind in ("full", "causal")
            area = (call.q_stop - call.q_start) * (call.k_stop - call.k_start)
            work += 2 * area if call.kind == "full" else area
    return work


@pytest.mark.parametrize("method", [name for name in METHODS if name != "ulysses"])
def test_in_the_zigzag_layout_every_rank_of_a_causal_method_has_equally_much_work(
    method: str,
) -> None:
    forward = plan_of(method, 16, layout="zigzag").forward
    assert len({half_pairs(forward, rank) for rank in range(16)}) == 1


@pytest.mark.parametrize(
    ("method", "options", "other", "its_options"),
    [
        ("allgather-kv", {}, "mesh", {"tile": (1, 4)}),
        ("mesh-usp", {"ulysses": 1, "tile": (2, 2)}, "mesh", {"tile": (2, 2)}),
        ("mesh-usp", {"ulysses": 4, "tile": (1, 1)}, "ulysses", {}),
        ("usp", {"ulysses": 1}, "ring", {}),
        ("double-ring", {"inner": 4}, "ring", {}),
        ("agq-ringkv", {"tile": (1, 4)}, "ring", {}),
    ],
)
def test_methods_that_are_the_same_box_have_the_same_programs(
    method: str, options: dict[str, Any], other: str, its_options: dict[str, Any]
) -> None:
    for mask in (CAUSAL, Mask()):
        plan = plan_of(method, 4, mask=mask, **options)
        same = plan_of(other, 4, mask=mask, **its_options)
        for direction in Direction:
            here, there = plan.direction(direction), same.direction(direction)
            assert here.groups == there.groups
            assert here.programs == there.programs


def test_all_gather_kv_is_the_mesh_with_one_row() -> None:
    for ranks in (1, 4, 6):
        mesh = plan_of("mesh", ranks, tile=(1, ranks))
        assert plan_of("allgather-kv", ranks).passes == mesh.passes


def test_ulysses_holds_each_kv_head_on_as_many_ranks_as_share_it_and_on_no_more() -> None:
    for kv_heads, ranks in product((1, 2, 4, 8), (2, 4, 8)):
        problem = Problem(32, num_heads=8, head_dim=4, num_kv_heads=kv_heads)
        plan = make_plan(problem, ranks, method="ulysses")
        for program in plan.forward.programs:
            (held,) = {
                b.heads for b in program.buffers if b.kind is Kind.K and b.name != Kind.K.value
            }
            assert held[1] - held[0] == max(1, kv_heads // ranks)


@pytest.mark.parametrize(
    ("method", "ranks", "options", "words"),
    [
        ("ulysses", 6, {}, "6 ranks are too many for 4 heads.* that work: 1 to 4. .* mesh-usp"),
        ("usp", 6, {"ulysses": 3}, "ulysses=3 .* degrees that work: 1, 2$"),
        ("mesh-usp", 12, {"ulysses": 8}, "ulysses=8 .* degrees that work: 1, 2, 4$"),
        ("double-ring", 6, {"inner": 4}, "inner=4 does not divide 6 ranks; sizes that do: 1, 2, 3"),
        ("startrail", 18, {"team": 2}, "team=2: its square must divide 18 .* that fit: 1, 3$"),
        ("agq-ringkv", 6, {"tile": (2, 2)}, "tile 2x2 has 4 .* 6 ranks; .* 1x6, 2x3, 3x2"),
        ("agkv-ringqo", 6, {"tile": (2, 2)}, "tile 2x2 has 4 .* 6 ranks; .* 1x6, 2x3, 3x2"),
        ("ring", 4, {"tile": (2, 2)}, "method ring has no option 'tile'; its options: layout"),
        ("ring", 4, {"gradients": "fly"}, "gradients='fly' is unknown; known: travel, direct"),
        ("no-such", 4, {}, "unknown method 'no-such'; known methods: mesh, ring"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    method: str, ranks: int, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of(method, ranks, **options)


def test_a_degree_that_would_split_the_group_of_a_kv_head_unevenly_is_refused() -> None:
    problem = Problem(24, num_heads=12, head_dim=4, num_kv_heads=3)
    assert ulysses_degrees(problem) == [1, 3, 6, 12]
    with pytest.raises(PlanError, match=r"degrees that work: 1$"):
        make_plan(problem, 4, method="usp", ulysses=4)


def test_startrail_takes_every_team_whose_square_divides_the_ranks() -> None:
    for ranks in range(1, 37):
        for team in team_sizes(ranks):
            plan = plan_of("startrail", ranks, mask=Mask(), team=team)
            rounds = {
                sum(isinstance(op, SendRecv) and op.name.startswith("KV-") for op in p.operations)
                for p in plan.forward.programs
            }
            assert rounds == {ranks // team**2 - 1}


def test_double_rings_bring_fewer_bytes_into_a_node_than_one_ring() -> None:
    """16 ranks, 4 a node: one ring crosses at each of 15 steps, the rings of 4 at 3 of them."""
    into = {
        method: count(plan_of(method, 16, mask=Mask(), ranks_per_node=4))[Direction.FORWARD]
        for method in ("ring", "double-ring")
    }
    assert [int(into["ring"].units_into_node(node)) for node in range(4)] == [30] * 4
    assert [int(into["double-ring"].units_into_node(node)) for node in range(4)] == [24] * 4


@pytest.mark.parametrize(("ranks", "per_node"), [(6, 2), (8, 4), (12, 3), (16, 4)])
def test_gradients_of_a_ring_enter_a_node_once_from_each_other(ranks: int, per_node: int) -> None:
    """K and V cross at each step; dK and dV of a node's blocks come as one sum a node."""
    into, moved = {}, {}
    for gradients in ("direct", "travel"):
        plan = plan_of("ring", ranks, mask=Mask(), ranks_per_node=per_node, gradients=gradients)
        pass_count = count(plan)[Direction.BACKWARD]
        into[gradients] = {
            int(pass_count.units_into_node(node)) for node in range(ranks // per_node)
        }
        moved[gradients] = {rank.total.token_bytes for rank in pass_count.ranks}
    assert into["direct"] == {2 * (ranks - 1) + 2 * (ranks - per_node)}
    assert into["travel"] == {2 * (ranks - 1) + 2 * (ranks - 1)}
    assert moved["direct"] == moved["travel"]


@pytest.mark.parametrize(
    ("method", "ranks", "options"),
    [
        ("ring", 6, {"ranks_per_node": 2}),
        ("ring", 9, {"ranks_per_node": 3, "layout": "contiguous"}),
        ("ring", 8, {"ranks_per_node": 3}),
        ("usp", 12, {"ulysses": 2, "ranks_per_node": 4}),
        ("startrail", 16, {"team": 2, "ranks_per_node": 8}),
        ("startrail", 8, {"team": 1, "ranks_per_node": 4}),
        ("agq-ringkv", 12, {"tile": (2, 6), "ranks_per_node": 6, "alpha": 2}),
        ("agkv-ringqo", 12, {"tile": (6, 2), "ranks_per_node": 3}),
        ("agkv-ringqo", 12, {"tile": (4, 3), "ranks_per_node": 3}),
        ("mesh", 12, {"tile": (12, 1), "ranks_per_node": 3}),
        ("mesh", 12, {"tile": (6, 2), "ranks_per_node": 2, "chunks": (2, 2)}),
        ("mesh", 12, {"tile": (3, 4), "ranks_per_node": 6, "combine": "nodes"}),
        ("mesh", 16, {"tile": (4, 4), "ranks_per_node": 4, "alpha": 2, "head_slices": (1, 1)}),
        ("mesh-usp", 16, {"tile": (4, 2), "ulysses": 2, "ranks_per_node": 4}),
        ("startrail", 16, {"team": 4, "ranks_per_node": 2}),
        ("agq-ringkv", 12, {"tile": (4, 3), "ranks_per_node": 2}),
    ],
)
def test_sums_inside_nodes_are_proven(method: str, ranks: int, options: dict[str, Any]) -> None:
    assert verify(plan_of(method, ranks, **options)) == []


def test_a_plan_of_rings_says_how_keys_and_gradients_travel() -> None:
    ring = plan_of("ring", 4, gradients="travel")
    assert ring.forward.setting == {"tile": "1x4", "kv": "ring"}
    assert ring.backward.setting == {"tile": "1x4", "kv": "ring", "gradients": "travel"}
    double = plan_of("double-ring", 4, inner=2)
    assert double.forward.setting["kv"] == "rings of 2"
    assert double.backward.setting["gradients"] == "direct"


def test_degrees_that_leave_one_unit_in_a_node_are_not_tried_with_double_rings() -> None:
    """Their inner rings have one member: that is USP, which tries them."""
    problem = Problem(256, 32, 4)
    settings = METHODS["double-ring"].candidates(problem, 32, 4)
    assert [setting["ulysses"] for setting in settings] == [1, 2]
    of_usp = METHODS["usp"].candidates(problem, 32, 4)
    assert {4, 32} <= {setting["ulysses"] for setting in of_usp}


@pytest.mark.parametrize("method", METHODS)
def test_every_communication_stands_in_the_schedule_that_is_drawn(method: str) -> None:
    plan = make_plan(Problem(128, 8, 4, mask=CAUSAL), 8, method=method, ranks_per_node=4)
    for pass_ in plan.passes:
        scheduled = set(pass_.schedule.order())
        moved = {
            op.task.whole
            for program in pass_.programs
            for op in program.operations
            if isinstance(op, Communication)
        }
        assert moved <= scheduled
