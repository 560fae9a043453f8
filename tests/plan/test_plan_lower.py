"""Lowering: kernel calls that compute exactly what the mask shows."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from dense_oracle import dense_mask, padded_to, pairs_of_calls
from plan_cases import random_layouts, random_sizes

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attend, AttendBackward, Call, CallKind
from mesh_attention.plan.methods.parts import lower as lower_module
from mesh_attention.plan.methods.parts.blocks import RowList, rectangles
from mesh_attention.plan.methods.parts.chunks import chunk_slots, chunks_between, whole_rows
from mesh_attention.plan.methods.parts.lower import MAX_CALLS, MAX_PAIRS, Queries, lower
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.spans import Spans
from support.random_masks import random_mask
from support.sample import in_parts


def random_task_side(rng: Random, layout: Layout) -> Spans:
    """A chunk of some ranks, in any order."""
    chunk = rng.choice(chunks_between(layout.halves, chunk_slots(layout.halves, rng.randint(1, 3))))
    ranks = rng.sample(range(layout.num_ranks), rng.randint(1, layout.num_ranks))
    members = sorted(ranks) if rng.random() < 0.7 else ranks
    return whole_rows([((r * layout.slots, (r + 1) * layout.slots),) for r in members], chunk)


def calls_of(mask: Mask, layouts: tuple[Layout, Layout], q: Spans, k: Spans) -> tuple[Call, ...]:
    rows = mask.rows(*(layout.num_tokens for layout in layouts))
    queries = Queries.of(RowList.of(layouts[0], q), rows)
    return lower(queries, RowList.of(layouts[1], k))


def overlap(call: Call, other: Call) -> bool:
    apart_q = call.q_stop <= other.q_start or other.q_stop <= call.q_start
    apart_k = call.k_stop <= other.k_start or other.k_stop <= call.k_start
    return not (apart_q or apart_k)


@in_parts(4)
def test_calls_compute_every_visible_pair_once_and_no_other_for_thousands_of_tasks(
    seed: int,
) -> None:
    rng = Random(1 + 10 * seed)
    kinds: set[CallKind] = set()
    for _ in range(500):
        q_tokens, kv_tokens = random_sizes(rng, 40)
        mask = random_mask(rng, q_tokens, kv_tokens)
        layouts = random_layouts(rng, q_tokens, kv_tokens)
        q, k = (random_task_side(rng, layout) for layout in layouts)
        calls = calls_of(mask, layouts, q, k)
        at_q, at_k = (x.positions_of(spans) for x, spans in zip(layouts, (q, k), strict=True))
        pairs = padded_to(
            dense_mask(mask, q_tokens, kv_tokens), *(layout.padded_tokens for layout in layouts)
        )
        computed = pairs_of_calls(calls, at_q, at_k, mask.rows(q_tokens, kv_tokens))
        assert (computed == pairs[np.ix_(at_q, at_k)]).all(), (mask, layouts, q, k, calls)
        kinds.update(call.kind for call in calls)
    assert kinds == set(CallKind)


@in_parts(4)
def test_cells_told_by_comparison_give_the_calls_that_a_close_look_gives(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = Random(4 + 10 * seed)
    tasks = []
    for _ in range(500):
        q_tokens, kv_tokens = random_sizes(rng, 60)
        mask = random_mask(rng, q_tokens, kv_tokens)
        layouts = random_layouts(rng, q_tokens, kv_tokens)
        q, k = (random_task_side(rng, layout) for layout in layouts)
        queries = Queries.of(RowList.of(layouts[0], q), mask.rows(q_tokens, kv_tokens))
        keys = RowList.of(layouts[1], k)
        tasks.append((queries, keys, lower(queries, keys)))
    pieces = [(queries.pieces, keys) for queries, keys, _ in tasks]
    assert sum(own is not None and own.picture(k.blocks) is not None for own, k in pieces) > 75
    monkeypatch.setattr(lower_module, "_FEW_PAIRS", 0)
    for queries, keys, calls in tasks:
        assert calls == lower(queries, keys), (queries, keys)


def test_the_rectangles_of_a_task_are_disjoint_and_no_task_has_more_than_the_limit() -> None:
    rng = Random(2)
    for _ in range(1000):
        q_tokens, kv_tokens = random_sizes(rng, 120)
        mask = random_mask(rng, q_tokens, kv_tokens)
        layouts = random_layouts(rng, q_tokens, kv_tokens)
        calls = calls_of(mask, layouts, *(random_task_side(rng, layout) for layout in layouts))
        assert len(calls) <= MAX_CALLS
        for i, call in enumerate(calls):
            assert not any(overlap(call, other) for other in calls[:i])


def test_a_task_without_visible_pairs_has_no_calls() -> None:
    layout = Layout(LayoutKind.CONTIGUOUS, 16, 2)
    assert calls_of(Mask(causal=True), (layout, layout), ((0, 8),), ((8, 16),)) == ()
    striped = Layout(LayoutKind.STRIPED, 2000, 2)
    early, late = ((0, 400),), ((500, 1000),)
    assert calls_of(Mask(causal=True), (striped, striped), early, late) == ()


def test_a_task_that_the_mask_shows_whole_is_one_full_call() -> None:
    layout = Layout(LayoutKind.ZIGZAG, 16, 2)
    everything = ((0, 16),)
    assert calls_of(Mask(), (layout, layout), everything, everything) == (
        Call(CallKind.FULL, 0, 16, 0, 16),
    )
    high, low = ((4, 8),), ((0, 4),)
    assert calls_of(Mask(causal=True), (layout, layout), high, low) == (
        Call(CallKind.FULL, 0, 4, 0, 4),
    )
    stripes = Layout(LayoutKind.STRIPED, 2 * 257, 2)  # too many to look at each
    assert calls_of(Mask(), (stripes, stripes), ((0, 257),), ((0, 257),)) == (
        Call(CallKind.FULL, 0, 257, 0, 257),
    )


def test_a_contiguous_causal_task_is_one_square_on_the_diagonal_and_one_rectangle_below() -> None:
    layout = Layout(LayoutKind.CONTIGUOUS, 16, 4)
    square = Call(CallKind.CAUSAL, 0, 4, 0, 4)
    assert calls_of(Mask(causal=True), (layout, layout), ((4, 8),), ((4, 8),)) == (square,)
    both = calls_of(Mask(causal=True), (layout, layout), ((4, 8),), ((0, 8),))
    assert both == (Call(CallKind.FULL, 0, 4, 0, 4), Call(CallKind.CAUSAL, 0, 4, 4, 8))


def test_documents_become_causal_squares_and_no_row_ranges() -> None:
    layout = Layout(LayoutKind.CONTIGUOUS, 12, 1)
    calls = calls_of(
        Mask(causal=True, documents=(0, 5, 6, 12)), (layout, layout), ((0, 12),), ((0, 12),)
    )
    assert {(call.q_start, call.q_stop) for call in calls} == {(0, 5), (5, 6), (6, 12)}
    assert all((call.q_start, call.q_stop) == (call.k_start, call.k_stop) for call in calls)
    assert all(call.kind is not CallKind.RANGE for call in calls)


@pytest.mark.parametrize(("blocks", "looked_at"), [(256, True), (257, False)])
def test_only_so_many_pairs_of_blocks_are_looked_at_one_by_one(
    blocks: int, looked_at: bool
) -> None:
    """Every second token of two documents: two rectangles, where they are looked for."""
    assert MAX_PAIRS == 256 * 256
    layout = Layout(LayoutKind.STRIPED, 2 * blocks, 2)
    cut = blocks // 2
    mask = Mask(documents=(0, 2 * cut, 2 * blocks))
    calls = calls_of(mask, (layout, layout), ((0, blocks),), ((0, blocks),))
    rectangles = (
        Call(CallKind.FULL, 0, cut, 0, cut),
        Call(CallKind.FULL, cut, blocks, cut, blocks),
    )
    whole = (Call(CallKind.RANGE, 0, blocks, 0, blocks),)
    assert calls == (rectangles if looked_at else whole)


def test_a_task_that_would_shatter_is_one_row_range() -> None:
    striped = Layout(LayoutKind.STRIPED, 4096, 4)
    side = ((0, 1024),)
    assert calls_of(Mask(causal=True), (striped, striped), side, side) == (
        Call(CallKind.RANGE, 0, 1024, 0, 1024),
    )


def test_rectangles_cover_the_true_cells_and_no_other_each_once() -> None:
    rng = np.random.default_rng(3)
    for _ in range(500):
        cells = rng.random(tuple(rng.integers(1, 9, 2))) < rng.random()
        covered = np.zeros(cells.shape, dtype=np.int64)
        for i0, i1, j0, j1 in rectangles(cells):
            covered[i0:i1, j0:j1] += 1
        assert (covered == cells).all()


@pytest.mark.parametrize("ranks", [64, 256, 1024])
def test_a_rank_that_gathers_all_zigzag_halves_makes_few_calls(ranks: int) -> None:
    """High halves lie in falling order, so every one of them is a block of its own."""
    problem = Problem(8 * ranks, 2, 8, mask=Mask(causal=True))
    plan = make_plan(problem, ranks, method="allgather-kv", directions=(Direction.FORWARD,))
    for program in plan.forward.programs[:: ranks // 16]:
        (op,) = (op for op in program.operations if isinstance(op, Attend))
        assert len(op.calls) <= 5
        assert not any(call.kind is CallKind.RANGE for call in op.calls)


def test_token_stripes_are_one_call_and_not_looked_at_block_by_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,048 blocks a side: pair by pair a ring of 32 ranks took a minute to plan."""

    def unwanted(*_: object) -> None:
        raise AssertionError("looked at every pair of blocks")

    monkeypatch.setattr("mesh_attention.plan.methods.parts.lower._calls", unwanted)
    problem = Problem(2048 * 4, 2, 8, mask=Mask(causal=True))
    plan = make_plan(problem, 4, method="ring", layout="striped")
    for pass_ in plan.passes:
        for program in pass_.programs:
            for op in program.operations:
                if isinstance(op, Attend | AttendBackward):
                    assert [call.kind for call in op.calls] == [CallKind.RANGE]


def test_thousands_of_documents_are_one_call_and_not_looked_at_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20,000 documents a side would be 400 million cells: 10 s and gigabytes."""
    layout = Layout(LayoutKind.CONTIGUOUS, 10_000, 2)
    mask = Mask(causal=True, documents=tuple(range(10_001)))
    monkeypatch.setattr("mesh_attention.plan.methods.parts.lower.grid_calls", None)
    own = ((0, 5000),)
    assert calls_of(mask, (layout, layout), own, own) == (Call(CallKind.RANGE, 0, 5000, 0, 5000),)
