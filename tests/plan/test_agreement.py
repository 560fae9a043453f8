"""What ranks compare of their plans: the order, kinds and sizes of the collectives of a group."""

from __future__ import annotations

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.agreement import disagreements, meetings


def plan(*, head_dim: int = 8) -> Plan:
    return make_plan(
        Problem(64, 4, head_dim), 4, method="mesh", tile=(1, 4), directions=(Direction.FORWARD,)
    )


def test_all_ranks_of_a_plan_fit_together() -> None:
    mesh_plan = plan()
    assert disagreements({rank: meetings(mesh_plan, rank) for rank in range(4)}) == {}


def test_a_rank_whose_collectives_move_more_is_named_with_its_group() -> None:
    said = {rank: meetings(plan(), rank) for rank in range(3)}
    said[3] = meetings(plan(head_dim=16), 3)
    assert disagreements(said) == {"forward KV0": [3]}


def test_statistics_count_in_the_size_of_a_collective() -> None:
    """Eight heads of 4 are as many numbers as four heads of 8, but have twice as many LSEs."""
    four, eight = (
        make_plan(
            Problem(64, heads, 32 // heads), 4, method="mesh", tile=(2, 2), combine="reduce-scatter"
        )
        for heads in (4, 8)
    )
    for rank in range(4):
        said = {0: meetings(four, rank), 1: meetings(eight, rank)}
        q, kv = rank // 2, rank % 2
        assert set(disagreements(said)) == {f"forward Q{q}", f"backward Q{q}"}
        assert f"forward KV{kv}" in said[0]
