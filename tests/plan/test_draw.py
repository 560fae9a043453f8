"""Drawings are read from the programs, so they show what runs and not what was meant."""

from __future__ import annotations

import dataclasses
import doctest
from itertools import product
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from graph_of_plan import task_graph

from mesh_attention.choose.ask import make_plan
from mesh_attention.machine.rates import usual_costs
from mesh_attention.plan.language.computed_pairs import _join, balance
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Attend, Operation, Program
from mesh_attention.plan.language.tasks import Schedule, TaskGraph
from mesh_attention.plan.methods.parts import tile_tasks
from mesh_attention.plan.methods.parts.assignment import Tile, factorisations
from mesh_attention.plan.methods.parts.greedy import greedy
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem import arguments
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem, problem_text
from mesh_attention.plan.problem.runs import Run
from mesh_attention.plan.read import draw
from mesh_attention.plan.read.draw import computed_cells, draw_assignment, draw_steps, draw_summary
from support.listed import stretches_for

CAUSAL = Mask(causal=True)


def plan_for(ranks: int, *, tokens: int = 576, mask: Mask | None = None, **options: Any) -> Plan:
    problem = Problem(q_tokens=tokens, num_heads=4, head_dim=8, mask=mask or Mask())
    stretches = stretches_for(options.get("layout"), Random(0), tokens, ranks)
    return make_plan(problem, ranks, method="mesh", **options, stretches=stretches)


def with_operations(plan: Plan, rank: int, operations: tuple[Operation, ...]) -> Plan:
    """The same plan with another forward program on one rank."""
    forward = plan.forward
    old = forward.programs[rank]
    programs = list(forward.programs)
    programs[rank] = Program(rank, old.buffers, operations)
    return dataclasses.replace(
        plan, passes=(dataclasses.replace(forward, programs=tuple(programs)), *plan.passes[1:])
    )


@pytest.mark.parametrize("ranks", [1, 6, 9, 12])
def test_the_matrix_read_from_the_programs_is_the_tiles_own(ranks: int) -> None:
    for tile, rotation in product(factorisations(ranks), (True, False)):
        plan = plan_for(ranks, tile=tile, rotation=rotation, chunks=(2, 3))
        for pass_ in plan.passes:
            cells = computed_cells(plan, pass_)
            assert np.array_equal(cells.ranks, Tile(*tile, rotation).assignment())
            assert cells.several == {}


@pytest.mark.parametrize("layout", list(LayoutKind))
def test_under_a_causal_mask_exactly_the_visible_cells_are_computed(layout: LayoutKind) -> None:
    for tokens, window in product((576, 100), (None, (30, 0))):
        mask = Mask(causal=True, window=window)
        plan = plan_for(9, tokens=tokens, mask=mask, layout=layout, chunks=(2, 2))
        queries = [plan.q_layout.positions(g) for g in range(9)]
        keys = [plan.kv_layout.positions(g) for g in range(9)]
        tile = Tile(3, 3).assignment()
        for pass_ in plan.passes:
            cell_ranks = computed_cells(plan, pass_).ranks
            for i, j in product(range(9), range(9)):
                (lo,), (hi,) = plan.problem.rows.intervals(queries[i])
                seen = (keys[j] >= lo[:, None]) & (keys[j] < hi[:, None])
                assert cell_ranks[i, j] == (tile[i, j] if seen.any() else -1)


def test_whole_tasks_show_the_tiles_that_a_mask_leaves_half_empty() -> None:
    plan = plan_for(9, mask=CAUSAL, layout=LayoutKind.CONTIGUOUS, rotation=False)
    spanned = computed_cells(plan, plan.forward, whole_tasks=True).ranks
    assert spanned[0].tolist() == [0, 0, 0, -1, -1, -1, -1, -1, -1]
    assert computed_cells(plan, plan.forward).ranks[0].tolist() == [0] + [-1] * 8
    first_row = draw_assignment(plan, plan.forward).splitlines()[1]
    assert first_row.split() == ["Q", "0", "0", *"." * 8]


def test_a_task_that_is_gone_shows_as_a_visible_cell_of_nobody() -> None:
    plan = plan_for(4)
    rest = tuple(op for op in plan.forward.programs[1].operations if not isinstance(op, Attend))
    broken = with_operations(plan, 1, rest)
    assert "?" in draw_assignment(broken, broken.forward)
    assert "? visible, but computed by nobody" in draw_assignment(broken, broken.forward)
    assert "?" not in draw_assignment(plan, plan.forward)


def test_a_cell_that_two_ranks_compute_shows_as_shared() -> None:
    plan = plan_for(4)
    twin = plan.forward.programs[0]
    programs = list(plan.forward.programs)
    programs[1] = Program(1, twin.buffers, twin.operations)
    forward = dataclasses.replace(plan.forward, programs=tuple(programs))
    cells = computed_cells(plan, forward)
    assert cells.several[0, 0] == (0, 1)
    assert cells.to_json()[0] == [[0, 1], None, [0, 1], None]
    assert "* several ranks share this cell" in draw_assignment(plan, forward)


def test_columns_line_up_for_any_number_of_ranks() -> None:
    for ranks in (4, 16, 64):
        plan = plan_for(ranks)
        grid = draw_assignment(plan, plan.forward).splitlines()
        assert len(grid) == ranks + 1
        assert len({len(line) for line in grid}) == 1


def test_above_64_ranks_a_corner_is_drawn_and_said_to_be_one() -> None:
    plan = plan_for(100, tokens=1000)
    grid = draw_assignment(plan, plan.forward).splitlines()
    assert len(grid) == 1 + 32 + 2
    assert grid[1].endswith(" ...")
    assert grid[-1] == "the first 32 of 100 partitions; `first` sets how many are drawn"
    assert len(draw_assignment(plan, plan.forward, first=100).splitlines()) == 101


def test_the_step_table_sets_the_lanes_side_by_side() -> None:
    schedule = Schedule.parse("1 AG-KV-0\n2 AG-Q-1 + C-0-0, C-1-0\n3 compute only C-0-2")
    assert draw_steps(schedule).splitlines() == [
        "step  communication  compute",
        "   1  AG-KV-0        -",
        "   2  AG-Q-1         C-0-0 C-1-0",
        "   3  -              C-0-2",
    ]
    assert draw_steps(Schedule(())) == "step  communication  compute"


def test_the_balance_counts_visible_pairs_of_the_calls() -> None:
    for layout in LayoutKind:
        plan = plan_for(9, tokens=540, mask=CAUSAL, layout=layout, chunks=(2, 2))
        for pass_ in plan.passes:
            assert balance(plan, pass_).mean == pytest.approx(540 * 541 / 2 / 9)
    zigzag = plan_for(9, tokens=540, mask=CAUSAL, layout=LayoutKind.ZIGZAG)
    assert balance(zigzag, zigzag.forward).ratio == 1.0
    contiguous = plan_for(9, tokens=540, mask=CAUSAL, layout=LayoutKind.CONTIGUOUS)
    assert balance(contiguous, contiguous.forward).ratio > 1.5


def test_the_task_graph_read_from_a_plan_gives_its_greedy_schedule_again() -> None:
    choices = product((1, 6), ((1, 1), (3, 2), (4, 4)), LayoutKind, (True, False))
    for number, (ranks, chunks, layout, rotation) in enumerate(choices):
        # In turn, and in another one for every layout and rotation.
        combine = list(Combine)[(number + number // 8) % len(Combine)]
        plan = plan_for(
            ranks, mask=CAUSAL, chunks=chunks, layout=layout, rotation=rotation, combine=combine
        )
        for pass_ in plan.passes:
            assert greedy(task_graph(plan, pass_, usual_costs())) == pass_.schedule


@pytest.mark.parametrize(
    ("tile", "rotation"), [((2, 3), True), ((2, 3), False), ((1, 6), True), ((6, 1), True)]
)
def test_the_tasks_that_a_mesh_orders_are_those_that_its_programs_show(
    tile: tuple[int, int], rotation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their seconds, on the mean of all ranks, and what they wait for. Without rotation ranks
    receive unequally much; tiles of one row or column gather nothing on that side."""
    ordered: list[TaskGraph] = []

    def watched(graph: TaskGraph, *, gamma: float) -> Schedule:
        ordered.append(graph)
        return greedy(graph, gamma=gamma)

    monkeypatch.setattr(tile_tasks, "greedy", watched)
    plan = plan_for(6, tile=tile, chunks=(3, 2), rotation=rotation)
    for pass_, expected in zip(plan.passes, ordered, strict=True):
        plan_graph = task_graph(plan, pass_, usual_costs())
        for nodes, expected_nodes in (
            (plan_graph.communication, expected.communication),
            (plan_graph.compute, expected.compute),
        ):
            needs = {node.task: set(node.needs) for node in expected_nodes}
            seconds = {
                node.task: pytest.approx(node.cost, rel=1e-9, abs=0) for node in expected_nodes
            }
            assert {node.task: set(node.needs) for node in nodes} == needs
            assert {node.task: node.cost for node in nodes} == seconds


def test_neighbouring_runs_are_joined_wherever_they_stand() -> None:
    far, left, right = Run(0, 4), Run(16, 1, 8, 4), Run(17, 1, 8, 4)
    assert _join([right, far, left]) == [far, Run(16, 2, 8, 4)]


def test_slots_of_queries_and_keys_are_told_apart_where_they_differ() -> None:
    assert "contiguous, 96 slots a rank" in draw_summary(plan_for(6))
    problem = Problem(576, 4, 8, kv_tokens=288)
    summary = draw_summary(make_plan(problem, 6, method="mesh"))
    assert "contiguous, 96 query and 48 key slots a rank" in summary


def test_the_summary_fits_one_screen_and_names_what_matters() -> None:
    plan = plan_for(
        64, tokens=4096, mask=CAUSAL, ranks_per_node=8, alpha=4, chunks=(2, 2), gather_out=True
    )
    text = draw_summary(plan)
    assert len(text.splitlines()) <= 24
    for word in ("64 ranks in 8 nodes of 8", "4096 tokens", "causal", "zigzag", "tile 8x8",
                 "Q0: 0 1 2 3", "between nodes", "workspace", "max/mean visible pairs 1.0000",
                 "digest"):  # fmt: skip
        assert word in text


def test_bytes_are_written_with_the_largest_unit_that_keeps_them_above_one() -> None:
    assert [bytes_text(n) for n in (1, 1023, 1024, 5 * 2**20, 3 * 2**40)] == [
        "1 B", "1023 B", "1.00 KiB", "5.00 MiB", "3.00 TiB",
    ]  # fmt: skip


def test_a_plan_of_one_direction_draws_that_one() -> None:
    plan = plan_for(4, directions=(Direction.BACKWARD,))
    backward: Pass = plan.backward
    assert draw_assignment(plan, backward).splitlines()[1].split() == ["Q", "0", "0", "1", "0", "1"]
    assert "forward" not in draw_summary(plan)


@pytest.mark.parametrize("module", [arguments, draw])
def test_examples_in_docstrings_are_true(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_problem_is_told_with_what_is_out_of_the_ordinary_and_without_the_rest() -> None:
    plain = Problem(8, 4, 16)
    assert problem_text(plain) == "8 tokens, 4 heads of 16, 2 bytes an element, full"
    special = Problem(8, 4, 16, kv_tokens=9, num_kv_heads=2, v_head_dim=12, element_bytes=4)
    assert problem_text(special) == (
        "8 tokens against 9 keys, 4 heads of 16 (2 KV heads), values of 12, "
        "4 bytes an element, full"
    )
