"""Tiles, rotation, footprints and the node mapping (algorithm.md, sections 1 to 3 and 6)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.methods.parts.assignment import (
    Assignment,
    Tile,
    best_tile,
    factorisations,
    patch_devices,
)
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import PassCount, count

TILES = [(n, a, b) for n in (1, 2, 6, 7, 9, 12, 15, 16, 36) for a, b in factorisations(n)]


def ring_assignment(num_ranks: int) -> Assignment:
    """Rank i owns row i, as Ring-Attention does."""
    return np.repeat(np.arange(num_ranks, dtype=np.int64)[:, None], num_ranks, axis=1)


@dataclass(frozen=True, slots=True)
class Footprint:
    q: frozenset[int]
    kv: frozenset[int]
    remote_q: frozenset[int]
    remote_kv: frozenset[int]


def footprint(assignment: Assignment, rank: int) -> Footprint:
    """The partitions a rank touches, and those of them that it does not own."""
    rows, columns = np.nonzero(assignment == rank)
    q, kv = frozenset(rows.tolist()), frozenset(columns.tolist())
    return Footprint(q, kv, q - {rank}, kv - {rank})


def plan_forward(problem: Problem, ranks: int, setting: MeshSetting) -> Plan:
    return box_plan(problem, ranks, setting, directions=(Direction.FORWARD,))


def forward_count(plan: Plan) -> PassCount:
    return count(plan)[Direction.FORWARD]


def forward_units(ranks: int, tile: tuple[int, int], *, rotation: bool = True) -> int:
    problem = Problem(ranks * 4, num_heads=2, head_dim=8)
    setting = MeshSetting(tile=tile, rotation=rotation)
    units = forward_count(plan_forward(problem, ranks, setting)).units_total
    assert units.denominator == 1
    return int(units)


def test_nine_ranks_with_the_row_assignment_of_the_ring_move_144_units() -> None:
    assert (Tile(1, 9).assignment() == ring_assignment(9)).all()
    assert forward_units(9, (1, 9)) == 144


def test_nine_ranks_with_3x3_tiles_and_no_rotation_move_84_units() -> None:
    assert forward_units(9, (3, 3), rotation=False) == 84


def test_nine_ranks_with_3x3_tiles_and_rotation_move_72_units() -> None:
    assert forward_units(9, (3, 3)) == 72


def test_rank_3_of_9_has_q_footprint_345_and_kv_012_without_rotation() -> None:
    partitions = footprint(Tile(3, 3, rotation=False).assignment(), 3)
    assert [sorted(x) for x in (partitions.q, partitions.kv)] == [[3, 4, 5], [0, 1, 2]]
    assert [sorted(x) for x in (partitions.remote_q, partitions.remote_kv)] == [[4, 5], [0, 1, 2]]


def test_rank_3_of_9_has_q_footprint_345_and_kv_036_with_rotation() -> None:
    partitions = footprint(Tile(3, 3).assignment(), 3)
    assert [sorted(x) for x in (partitions.q, partitions.kv)] == [[3, 4, 5], [0, 3, 6]]
    assert [sorted(x) for x in (partitions.remote_q, partitions.remote_kv)] == [[4, 5], [0, 6]]


def test_rank_0_of_15_with_3x5_tiles_has_q_group_012_and_kv_group_0_3_6_9_12() -> None:
    tile = Tile(3, 5)
    assert tile.q_group(tile.row(0)) == (0, 1, 2)
    assert tile.kv_group(tile.column(0)) == (0, 3, 6, 9, 12)
    plan = box_plan(Problem(30, 1, 4), 15, MeshSetting(tile=(3, 5)))
    assert plan.forward.groups["Q0"] == (0, 1, 2)
    assert plan.forward.groups["KV0"] == (0, 3, 6, 9, 12)


@pytest.mark.parametrize("rotation", [True, False])
def test_every_cell_belongs_to_one_rank_and_every_rank_has_a_rows_by_b_columns(
    rotation: bool,
) -> None:
    for n, a, b in TILES:
        matrix = Tile(a, b, rotation).assignment()
        assert Counter(matrix.ravel().tolist()) == dict.fromkeys(range(n), n)
        for rank in range(n):
            partitions = footprint(matrix, rank)
            assert (len(partitions.q), len(partitions.kv)) == (a, b)
            assert rank in partitions.q


def test_with_rotation_every_rank_fetches_exactly_b_minus_1_kv_partitions() -> None:
    for n, a, b in TILES:
        tile = Tile(a, b)
        for rank in range(n):
            partitions = footprint(tile.assignment(), rank)
            assert len(partitions.remote_kv) == b - 1
            assert partitions.kv == set(tile.kv_group(tile.column(rank)))


def test_the_ring_has_a_remote_footprint_of_n_minus_1() -> None:
    for n in (1, 2, 9):
        partitions = footprint(ring_assignment(n), n - 1)
        assert (len(partitions.remote_q), len(partitions.remote_kv)) == (0, n - 1)


@pytest.mark.parametrize("rotation", [True, False])
def test_a_remote_q_and_a_remote_kv_partition_cost_two_units_each(rotation: bool) -> None:
    for n, a, b in TILES:
        matrix = Tile(a, b, rotation).assignment()
        prints = [footprint(matrix, rank) for rank in range(n)]
        remote = sum(len(partitions.remote_q) + len(partitions.remote_kv) for partitions in prints)
        assert forward_units(n, (a, b), rotation=rotation) == 2 * remote


def test_kv_users_of_a_partition_are_the_ranks_that_compute_its_column() -> None:
    for n, a, b in TILES:
        for rotation in (True, False):
            tile = Tile(a, b, rotation)
            for partition in range(n):
                users = set(tile.assignment()[:, partition].tolist())
                assert set(tile.kv_users(partition)) == users


def units_into_nodes(alpha: int | None, combine: Combine = Combine.REDUCE_SCATTER) -> list[int]:
    plan = plan_forward(
        Problem(64 * 4, num_heads=2, head_dim=8),
        64,
        MeshSetting(tile=(8, 8), ranks_per_node=8, alpha=alpha, combine=combine),
    )
    counted = forward_count(plan)
    return [int(counted.units_into_node(node)) for node in range(plan.num_nodes)]


def test_64_ranks_8x8_row_major_bring_112_units_into_each_node_of_8() -> None:
    assert units_into_nodes(None) == [112] * 8
    assert units_into_nodes(8) == [112] * 8


def test_64_ranks_8x8_with_alpha_4_bring_64_units_into_each_node_of_8() -> None:
    assert units_into_nodes(4) == [64] * 8


def test_units_into_a_node_follow_the_patch_for_every_alpha() -> None:
    for alpha in (1, 2, 4, 8):
        height = 8 // alpha
        patch = 2 * height * (8 - alpha) + 2 * alpha * (8 - height)
        for combine in (Combine.REDUCE_SCATTER, Combine.NODES):
            assert units_into_nodes(alpha, combine) == [patch] * 8


def test_in_an_exchange_every_partial_that_crosses_into_the_node_counts() -> None:
    q_in, kv_in = 2 * 4, 2 * 4 * 6
    out_in = 8 * 4  # each of 8 owners gets a partial from each of 4 ranks outside
    assert units_into_nodes(4, Combine.EXCHANGE) == [q_in + kv_in + out_in] * 8


def test_auto_exchanges_inside_a_node_and_combines_in_each_node_first_across_nodes() -> None:
    """In the precision of accumulators the transport may add; in half precision it would round at
    every hop."""

    def reduced_by(ranks_per_node: int | None, element_bytes: int, alpha: int | None = None) -> str:
        setting = MeshSetting(tile=(4, 2), ranks_per_node=ranks_per_node, alpha=alpha)
        problem = Problem(64, 1, 4, element_bytes=element_bytes)
        return box_plan(problem, 8, setting).forward.setting["q_reduce"]

    for element_bytes, across in ((2, "nodes"), (4, "reduce-scatter"), (8, "reduce-scatter")):
        assert reduced_by(None, element_bytes) == "exchange"
        assert reduced_by(4, element_bytes) == "exchange"
        assert reduced_by(2, element_bytes) == across
        assert reduced_by(4, element_bytes, alpha=2) == across


def test_groups_that_lie_unevenly_on_nodes_exchange_all_partials() -> None:
    for tile, ranks_per_node in (((6, 2), 4), ((3, 4), 2), ((4, 3), 1)):
        setting = MeshSetting(tile=tile, ranks_per_node=ranks_per_node)
        assert box_plan(Problem(48, 1, 4), 12, setting).forward.setting["q_reduce"] == "exchange"


def test_a_node_is_an_alpha_wide_patch_of_the_tile_grid_and_devices_are_a_permutation() -> None:
    rng = Random(1)
    for _ in range(200):
        alpha, height, across, down = (rng.randint(1, 4) for _ in range(4))
        a, b, p = alpha * across, height * down, alpha * height
        devices = np.array(patch_devices(a, b, p, alpha))
        assert sorted(devices.tolist()) == list(range(a * b))
        nodes = (devices // p).reshape(b, a)
        for row in range(0, b, height):
            for column in range(0, a, alpha):
                assert len(set(nodes[row : row + height, column : column + alpha].flat)) == 1


def test_alpha_as_wide_as_the_node_keeps_consecutive_ranks_when_it_is_a_whole_tile_row() -> None:
    assert patch_devices(8, 4, 8, 8) == tuple(range(32))


def test_an_alpha_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(PlanError, match="alpha that fits: 1, 2, 4"):
        patch_devices(4, 8, 8, 3)
    with pytest.raises(PlanError, match="leave 'alpha' out"):
        patch_devices(3, 5, 8, 4)
    with pytest.raises(PlanError, match="'alpha' needs ranks_per_node"):
        box_plan(Problem(16, 1, 4), 4, MeshSetting(alpha=2))


def test_a_tile_that_does_not_fit_the_ranks_is_refused_with_those_that_do() -> None:
    with pytest.raises(PlanError, match="tiles that fit: 1x6, 2x3, 3x2, 6x1"):
        box_plan(Problem(16, 1, 4), 6, MeshSetting(tile=(2, 2)))
    with pytest.raises(PlanError, match="both sides must be at least 1"):
        Tile(0, 3)


def test_more_than_16_compute_tasks_are_refused() -> None:
    with pytest.raises(PlanError, match="product at most 16"):
        box_plan(Problem(64, 1, 4), 4, MeshSetting(chunks=(5, 4)))


def test_the_best_tile_moves_the_fewest_bytes_of_all_tiles() -> None:
    for kv_heads in (1, 2, 8):
        problem = Problem(96, num_heads=8, head_dim=4, num_kv_heads=kv_heads)
        for n in (6, 16, 24):
            units = {
                tile: forward_count(plan_forward(problem, n, MeshSetting(tile=tile))).units_total
                for tile in factorisations(n)
            }
            assert units[best_tile(n, problem)] == min(units.values())
