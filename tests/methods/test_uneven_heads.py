"""Ulysses on every number of ranks up to that of the heads: shares of heads that differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
import torch

from mesh_attention import Mask, Problem, count, make_plan, verify
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.language.computed_pairs import balance
from mesh_attention.plan.language.program import AllToAll, Attend, Merge, MergeRule
from mesh_attention.plan.language.text import parse_plan, plan_text
from mesh_attention.plan.methods.parts.head_group import HeadGroup, head_shares, ulysses_degrees
from mesh_attention.plan.methods.parts.tile_plan import TilePass
from mesh_attention.plan.methods.parts.tile_side import Tiling
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from support.cases import Case
from support.gloo_check import check as check_by_gloo
from support.listed import stretches_for
from support.local_check import check
from support.pool import WorkerPool

HEADS = ((8, 8), (8, 2), (6, 3), (7, 7), (12, 4), (5, 1))
ULYSSES = {"method": "ulysses"}
FITTING = [(heads, ranks) for heads in HEADS for ranks in range(2, 10) if ranks <= heads[0]]
FITTING = FITTING[::2]  # heads and ranks meet in turn


def case_of(heads: tuple[int, int], ranks: int, **options: object) -> Case:
    tokens = 3 * ranks + 2
    all_options = {**ULYSSES, **options}
    return Case(ranks, tokens, tokens, heads, batch=2, mask=Mask(causal=True), options=all_options)


@pytest.mark.parametrize(("heads", "ranks"), FITTING[::2])
def test_every_number_of_ranks_equals_the_truth_and_moves_the_counted_bytes(
    heads: tuple[int, int], ranks: int
) -> None:
    layout = tuple(LayoutKind)[ranks % 4]
    case = case_of(heads, ranks, layout=layout)
    stretches = stretches_for(layout, Random(ranks), case.q_tokens, ranks)
    check(replace(case, options=case.options | {"stretches": stretches}))
    if ranks % 2:  # one call for all, which writes its results where they are sent from
        case = case_of(heads, ranks, gather_out=True)
        check(replace(case, kv_tokens=11, head_dims=(8, 4), mask=Mask()))


@pytest.mark.parametrize(("heads", "ranks"), FITTING)
def test_such_plans_are_proven_and_read_back(heads: tuple[int, int], ranks: int) -> None:
    plan = make_plan(case_of(heads, ranks).problem, ranks, method="ulysses")
    assert verify(plan) == []
    assert parse_plan(plan_text(plan)) == plan


@pytest.mark.parametrize("heads", HEADS)
def test_more_ranks_than_heads_are_refused_with_the_way_out(heads: tuple[int, int]) -> None:
    ranks = heads[0] + 1
    with pytest.raises(PlanError, match=f"{ranks} ranks .* work: 1 to {heads[0]}. Method mesh-usp"):
        make_plan(case_of(heads, ranks).problem, ranks, method="ulysses")


def test_bf16_is_added_in_fp32_by_the_owner() -> None:
    for heads, ranks in (((8, 2), 3), ((12, 4), 7), ((5, 1), 4)):
        case = replace(case_of(heads, ranks), dtype=torch.bfloat16)
        check(case, bound=0.02)
        for program in case.plan().backward.programs:
            sums = [op for op in program.operations if op.name == "EX-OUT-0.sum"]
            assert sums
            assert all(isinstance(op, Merge) and op.rule is MergeRule.SUM for op in sums)


def test_shares_are_as_even_as_can_be_and_end_with_kv_groups_where_that_costs_nothing() -> None:
    for kv_heads, group, ranks in product(range(1, 13), range(1, 9), range(1, 97)):
        heads = kv_heads * group
        if ranks > heads:
            continue
        shares = head_shares(heads, kv_heads, ranks)
        assert shares[0][0] == 0
        assert shares[-1][1] == heads
        assert all(before == after for (_, before), (after, _) in pairwise(shares))
        sizes = [last - first for first, last in shares]
        assert min(sizes) >= 1
        assert max(sizes) == -(-heads // ranks)
        if ranks % kv_heads == 0:  # every group is cut for itself
            assert {first for first, _ in shares} >= set(range(0, heads, group))
    # 9 ranks, 8 KV heads of 4: all but one of them hold one KV head, and no KV head is cut twice.
    shares = head_shares(32, 8, 9)
    assert [last - first for first, last in shares] == [4, 4, 4, 4, 4, 4, 4, 1, 3]


def test_equal_shares_are_those_of_before() -> None:
    for kv_heads, group in product((1, 2, 3, 4, 8), (1, 2, 3, 4)):
        heads = kv_heads * group
        problem = Problem(8, heads, 4, num_kv_heads=kv_heads)
        for degree in ulysses_degrees(problem):
            each = heads // degree
            expected = tuple((i * each, (i + 1) * each) for i in range(degree))
            assert head_shares(heads, kv_heads, degree) == expected
            layout = Layout(LayoutKind.CONTIGUOUS, 8, degree)
            groups = [HeadGroup(problem, layout, layout, degree, index) for index in range(degree)]
            assert all(len(group.uniform_heads) == 1 for group in groups)


def test_a_share_that_cuts_a_group_attends_once_for_each_regular_stretch() -> None:
    """3 ranks, 8 heads, KV groups of 4: the middle rank has heads of both."""
    plan = make_plan(Problem(6, 8, 4, num_kv_heads=2), 3, method="ulysses")
    program = plan.program(1, "forward")
    held = {b.name: b.heads for b in program.buffers}
    assert (held["q.u"], held["k.u"]) == ((2, 5), (0, 2))
    attends = [op for op in program.operations if isinstance(op, Attend)]
    assert [(op.q.heads, op.k.heads) for op in attends] == [((0, 2), (0, 1)), ((2, 3), (1, 2))]
    assert len([op for op in plan.program(0, "forward").operations if isinstance(op, Attend)]) == 1


def test_the_plan_states_its_rounding_and_the_work_is_as_stated() -> None:
    for (heads, kv_heads), ranks in (((32, 8), 9), ((8, 2), 5), ((7, 7), 4)):
        problem = Problem(64, heads, 4, num_kv_heads=kv_heads, mask=Mask(causal=True))
        plan = make_plan(problem, ranks, method="ulysses")
        most = -(-heads // ranks)
        for pass_ in plan.passes:
            said = f"at most {most} a rank, work max/mean {most * ranks / heads:.3f}"
            assert pass_.setting["heads"] == said
            assert balance(plan, pass_).ratio == pytest.approx(most * ranks / heads)


def test_a_kv_head_goes_to_the_ranks_that_need_it_and_to_no_other() -> None:
    problem = Problem(70, 32, 4, num_kv_heads=8, element_bytes=2)
    plan = make_plan(problem, 7, method="ulysses")
    slots = plan.q_layout.slots
    for rank in count(plan)[plan.forward.direction].ranks:
        program = plan.program(rank.rank, "forward")
        table = program.buffer_table()
        q_heads, kv_heads = (table[name].num_heads for name in ("q.u", "k.u"))
        arrived = slots * 6 * 4 * 2 * (q_heads + 2 * kv_heads)  # Q, K and V of the other six
        results = slots * 4 * 2 * (32 - q_heads)
        assert rank.total.token_bytes == arrived + results
        first, last = table["q.u"].heads
        assert table["k.u"].heads == (first // 4, -(-last // 4))
        assert table["k.u"].kind is Kind.K


def test_uneven_shares_over_real_processes(pool: WorkerPool) -> None:
    check_by_gloo(pool, [case_of((8, 2), 3), replace(case_of((7, 7), 3), dtype=torch.float32)])


@pytest.mark.parametrize("ranks", [8, 9])
def test_a_new_mask_makes_no_new_exchange_and_only_the_own_head_group(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    begin = TilePass.__init__

    def counting(self: TilePass, tiling: Tiling) -> None:
        made.append(tiling.head_group.index)
        begin(self, tiling)

    monkeypatch.setattr(TilePass, "__init__", counting)
    exchanges = []
    for cut in (30, 41):
        mask = Mask(causal=True, documents=(0, cut, 72))
        problem = Problem(72, 32, 4, num_kv_heads=8, mask=mask)
        plan = make_plan(problem, ranks, method="ulysses")
        programs = [plan.program(3, pass_.direction) for pass_ in plan.passes]
        exchanges.append([op for p in programs for op in p.operations if isinstance(op, AllToAll)])
    assert len(exchanges[0]) == 4
    assert all(operation is other for operation, other in zip(*exchanges, strict=True))
    assert set(made) == {0, 3}
