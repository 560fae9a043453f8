"""Bytes that `count` finds in the programs, against the closed formulas (algorithm.md, 4, 5, 8)."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from mesh_attention.machine.rates import Costs
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import AllGather, AllToAll, ReduceScatter
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.methods.parts.assignment import factorisations
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import PassCount, count
from support.sample import sample

GIB = 2**30
GOLDEN = Path(__file__).parent / "golden" / "schedule_3x3.txt"
SIZES = [
    *((n, a, b) for n in (1, 2, 5, 9, 12) for a, b in factorisations(n)),
    (16, 4, 4), (30, 5, 6),
]  # fmt: skip
CHUNKS = ((1, 1), (2, 3))


def counted(
    direction: Direction,
    n: int,
    setting: MeshSetting,
    *,
    kv_heads: int | None = None,
) -> PassCount:
    problem = Problem(24 * n, 4, 8, num_kv_heads=kv_heads)
    return count(box_plan(problem, n, setting, directions=(direction,)))[direction]


def units_of_each_rank(pass_count: PassCount) -> set[Fraction]:
    return {Fraction(rank.total.token_bytes, pass_count.unit_bytes) for rank in pass_count.ranks}


@pytest.mark.parametrize("combine", [Combine.EXCHANGE, Combine.REDUCE_SCATTER])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_forward_every_rank_moves_2a_plus_2b_minus_4_units(
    chunks: tuple[int, int], combine: Combine
) -> None:
    for n, a, b in SIZES:
        setting = MeshSetting(tile=(a, b), chunks=chunks, combine=combine)
        forward = counted(Direction.FORWARD, n, setting)
        assert units_of_each_rank(forward) == {Fraction(2 * a + 2 * b - 4)}


@pytest.mark.parametrize("g", [1, 2, 4])
def test_under_gqa_forward_moves_2_a_minus_1_plus_2_over_g_b_minus_1_units(g: int) -> None:
    for n, a, b in SIZES:
        forward = counted(Direction.FORWARD, n, MeshSetting(tile=(a, b)), kv_heads=4 // g)
        assert units_of_each_rank(forward) == {2 * (a - 1) + Fraction(2, g) * (b - 1)}


@pytest.mark.parametrize("combine", [Combine.EXCHANGE, Combine.REDUCE_SCATTER])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_backward_with_o_gathered_moves_4_a_minus_1_plus_4_b_minus_1_units(
    chunks: tuple[int, int], combine: Combine
) -> None:
    for n, a, b in SIZES:
        setting = MeshSetting(tile=(a, b), chunks=chunks, combine=combine, gather_out=True)
        backward = counted(Direction.BACKWARD, n, setting)
        assert units_of_each_rank(backward) == {Fraction(4 * (a - 1) + 4 * (b - 1))}


@pytest.mark.parametrize("chunks", CHUNKS)
def test_backward_with_delta_moves_3_a_minus_1_plus_4_b_minus_1_units(
    chunks: tuple[int, int],
) -> None:
    for n, a, b in SIZES:
        backward = counted(Direction.BACKWARD, n, MeshSetting(tile=(a, b), chunks=chunks))
        assert units_of_each_rank(backward) == {Fraction(3 * (a - 1) + 4 * (b - 1))}


def test_under_gqa_backward_with_delta_moves_3_a_minus_1_plus_4_over_g_b_minus_1_units() -> None:
    for n, a, b in SIZES:
        backward = counted(Direction.BACKWARD, n, MeshSetting(tile=(a, b)), kv_heads=1)
        assert units_of_each_rank(backward) == {3 * (a - 1) + Fraction(4, 4) * (b - 1)}


def test_statistics_are_one_accumulator_number_a_row_and_head_wherever_they_travel() -> None:
    """Forward exchange: LSE beside each partial output. Backward: LSE, and delta in place of O."""
    for n, a, b in SIZES:
        statistic = 24 * 4 * 4 * (a - 1)  # rows of a partition, heads, bytes of fp32
        for gather_out in (True, False):
            setting = MeshSetting(tile=(a, b), combine=Combine.EXCHANGE, gather_out=gather_out)
            for direction in Direction:
                times = 2 if direction is Direction.BACKWARD and not gather_out else 1
                for rank in counted(direction, n, setting).ranks:
                    assert rank.total.received_bytes - rank.total.token_bytes == times * statistic


def test_over_all_ranks_bytes_sent_equal_bytes_received() -> None:
    for (n, a, b), rotation in product(SIZES, (True, False)):
        for direction in Direction:
            pass_count = counted(direction, n, MeshSetting(tile=(a, b), rotation=rotation))
            sent = sum(rank.total.sent_bytes for rank in pass_count.ranks)
            assert sent == sum(rank.total.received_bytes for rank in pass_count.ranks)


def test_the_square_mesh_meets_the_lower_bound_of_4_over_sqrt_n_within_4_over_n() -> None:
    for root in (2, 4, 8):
        n = root * root
        forward = counted(Direction.FORWARD, n, MeshSetting(tile=(root, root)))
        (units,) = units_of_each_rank(forward)
        assert units / n == Fraction(4, root) - Fraction(4, n)


def paper_gib(
    direction: Direction, tile: tuple[int, int], alpha: int, *, causal: bool = False
) -> tuple[float, float]:
    """(total, inter-node) GiB per rank: 256 ranks, 8 a node, 512K tokens, 64 heads of 128, bf16."""
    problem = Problem(512 * 1024, num_heads=64, head_dim=128, mask=Mask(causal=causal))
    setting = MeshSetting(tile=tile, chunks=(1, 1), ranks_per_node=8, alpha=alpha)
    plan = box_plan(problem, 256, setting, directions=(direction,))
    numbers = count(plan)[direction].to_json()
    return (
        round(numbers["bytes_per_rank"]["mean"] / GIB, 1),
        round(numbers["inter_node_bytes_per_rank"]["mean"] / GIB, 1),
    )


def test_256_ranks_16x16_alpha_4_move_3_3_gib_backward_and_1_2_between_nodes() -> None:
    assert paper_gib(Direction.BACKWARD, (16, 16), 4) == (3.3, 1.2)


@pytest.mark.parametrize(
    ("tile", "alpha"), sample([((8, 32), 1), ((8, 32), 2), ((32, 8), 4), ((32, 8), 8)], 3)
)
def test_causal_8x32_with_alpha_1_or_2_and_32x8_with_4_or_8_move_2_4_gib_and_0_6_between_nodes(
    tile: tuple[int, int], alpha: int
) -> None:
    assert paper_gib(Direction.FORWARD, tile, alpha, causal=True) == (2.4, 0.6)


@pytest.mark.parametrize(
    ("tile", "alpha"), sample([((8, 32), 4), ((8, 32), 8), ((32, 8), 1), ((32, 8), 2)], 3)
)
def test_with_the_other_alphas_the_same_tiles_move_1_0_gib_or_more_between_nodes(
    tile: tuple[int, int], alpha: int
) -> None:
    total, between = paper_gib(Direction.FORWARD, tile, alpha, causal=True)
    assert total == 2.4
    assert between >= 1.0


@pytest.mark.parametrize(("kq", "kkv"), [(1, 1), (2, 3), (4, 4), (3, 1), (1, 5)])
def test_forward_has_2kq_plus_kkv_communication_tasks_and_kq_kkv_compute_tasks(
    kq: int, kkv: int
) -> None:
    plan = box_plan(Problem(4 * 60, 1, 4), 4, MeshSetting(tile=(2, 2), chunks=(kq, kkv)))
    order = plan.forward.schedule.order()
    compute = [task for task in order if task.kind == "C"]
    assert len(compute) == kq * kkv
    assert len(order) - len(compute) == 2 * kq + kkv


@pytest.mark.parametrize(("kq", "kkv"), [(1, 1), (2, 3), (4, 4)])
def test_backward_has_one_more_communication_task_for_each_kv_chunk(kq: int, kkv: int) -> None:
    plan = box_plan(Problem(4 * 60, 1, 4), 4, MeshSetting(tile=(2, 2), chunks=(kq, kkv)))
    names = [task.kind for task in plan.backward.schedule.order() if task.kind != "C"]
    kinds = {kind: names.count(kind) for kind in names}
    assert kinds == {"AG-Q": kq, "AG-KV": kkv, "RS-dQ": kq, "RS-dKV": kkv}


def test_all_ranks_run_their_collectives_in_the_one_order_of_the_schedule() -> None:
    setting = MeshSetting(tile=(2, 3), chunks=(3, 3), combine=Combine.REDUCE_SCATTER)
    plan = box_plan(Problem(360, 2, 8, mask=Mask(causal=True)), 6, setting)
    for pass_ in plan.passes:
        scheduled = [task for task in pass_.schedule.order() if task.kind != "C"]
        for program in pass_.programs:
            tasks = [
                op.task.whole
                for op in program.operations
                if isinstance(op, AllGather | ReduceScatter | AllToAll)
            ]
            assert list(dict.fromkeys(tasks)) == scheduled


def test_with_the_costs_of_the_golden_example_the_builder_makes_the_golden_schedule() -> None:
    """AG-KV 1, AG-Q 0.5, gamma 1; RS-Q is 0.5 but for its LSE (1/128 here), so C is a hair more."""
    problem = Problem(9 * 3 * 64, num_heads=1, head_dim=256)
    kv_bytes = 2 * 64 * 256 * 2 * 2  # K and V of one chunk from each of two other ranks
    flops = problem.flops((3 * 64) ** 2)
    costs = Costs(bytes_per_second=kv_bytes, flops_per_second=2 * flops / 1.01, latency_seconds=0.0)
    setting = MeshSetting(tile=(3, 3), chunks=(3, 3), costs=costs, gamma=1.0)
    plan = box_plan(problem, 9, setting)
    assert plan.forward.schedule.text() == GOLDEN.read_text().strip()
