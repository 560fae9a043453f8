"""Layouts: exact maps between tokens and (rank, slot), and the runs they consist of."""

from __future__ import annotations

import pickle
from random import Random

import numpy as np
import pytest
from dense_oracle import dense_mask, padded_to, positions_of
from plan_cases import random_layouts, random_sizes

from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.parts.chunks import chunk_slots, chunks_between
from mesh_attention.plan.problem.layout import Layout, LayoutKind, Stretches
from mesh_attention.plan.problem.runs import Run, clip_run, join_runs, visible_pairs
from mesh_attention.plan.problem.spans import joined
from support.listed import stretches_for
from support.random_masks import random_mask
from support.sample import in_parts
from support.work import lines_run

CASES = [
    Layout(kind, tokens, ranks, block, stretches_for(kind, Random(tokens), tokens, ranks))
    for kind in LayoutKind
    for ranks in (1, 2, 3, 7, 8)
    for tokens in (1, 2, 5, ranks, 2 * ranks - 1, 2 * ranks + 1, 31, 97, 128)
    for block in ((1, 2, 5) if kind is LayoutKind.STRIPED else (1,))
]


def place_of(layout: Layout, token: int) -> tuple[int, int]:
    """(rank, slot) that owns a position, by the words of each kind; padding has a place too."""
    match layout.kind:
        case LayoutKind.CONTIGUOUS:
            return divmod(token, layout.slots)
        case LayoutKind.ZIGZAG:
            half = layout.slots // 2
            block, offset = divmod(token, half)
            if block < layout.num_ranks:
                return block, offset
            return 2 * layout.num_ranks - 1 - block, half + offset
        case LayoutKind.STRIPED:
            turn, offset = divmod(token, layout.num_ranks * layout.block)
            rank, within = divmod(offset, layout.block)
            return rank, turn * layout.block + within
        case LayoutKind.LISTED:
            # Padding is numbered through the ranks, after the last token.
            assert layout.stretches is not None
            unused = range(layout.num_tokens, layout.padded_tokens)
            for rank, own in enumerate(layout.stretches):
                held = [position for start, stop in own for position in range(start, stop)]
                missing = layout.slots - len(held)
                held += unused[:missing]
                unused = unused[missing:]
                if token in held:
                    return rank, held.index(token)
            raise AssertionError(token)


def test_token_to_rank_and_slot_and_back_is_exact_for_any_number_of_tokens() -> None:
    for layout in CASES:
        places = [place_of(layout, token) for token in range(layout.padded_tokens)]
        assert sorted(places) == [
            (rank, slot) for rank in range(layout.num_ranks) for slot in range(layout.slots)
        ], layout
        for token, (rank, slot) in enumerate(places):
            assert layout.positions(rank)[slot] == token, layout


def test_padding_is_known_as_padding_and_lies_at_the_end() -> None:
    for layout in CASES:
        slots = [token for rank in range(layout.num_ranks) for token in layout.tokens(rank)]
        real = [token for token in slots if token is not None]
        assert sorted(real) == list(range(layout.num_tokens)), layout
        assert len(slots) - len(real) == layout.padded_tokens - layout.num_tokens
        if layout.stretches is not None:  # as many slots as the largest rank has tokens
            sizes = [sum(stop - start for start, stop in own) for own in layout.stretches]
            assert layout.slots == max(sizes)
        else:
            assert 0 <= layout.padded_tokens - layout.num_tokens < layout._grain


def test_every_rank_owns_the_same_number_of_slots() -> None:
    for layout in CASES:
        assert {len(layout.positions(rank)) for rank in range(layout.num_ranks)} == {layout.slots}


def test_contiguous_rank_g_owns_block_g() -> None:
    layout = Layout(LayoutKind.CONTIGUOUS, 12, 3)
    assert [layout.tokens(g) for g in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_striped_token_t_belongs_to_rank_t_mod_n() -> None:
    for ranks in (1, 3, 8):
        layout = Layout(LayoutKind.STRIPED, 50, ranks)
        assert all(place_of(layout, t) == (t % ranks, t // ranks) for t in range(50))


def test_striped_blocks_are_dealt_out_in_turn() -> None:
    layout = Layout(LayoutKind.STRIPED, 12, 2, block=3)
    assert [layout.tokens(g) for g in range(2)] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


def test_zigzag_rank_g_owns_blocks_g_and_2n_minus_1_minus_g() -> None:
    for ranks in (1, 2, 5):
        size = 3
        layout = Layout(LayoutKind.ZIGZAG, 2 * ranks * size, ranks)
        for g in range(ranks):
            low, high = g * size, (2 * ranks - 1 - g) * size
            assert layout.tokens(g) == [*range(low, low + size), *range(high, high + size)]
            assert layout.halves == (0, size, 2 * size)


def test_an_interval_of_places_has_the_positions_of_its_slots_in_order() -> None:
    rng = Random(1)
    for layout in CASES:
        everything = np.concatenate([layout.positions(g) for g in range(layout.num_ranks)])
        for _ in range(6):
            start, stop = sorted(rng.randint(0, len(everything)) for _ in range(2))
            expected = everything[start:stop].tolist()
            assert positions_of(layout.runs(start, stop)) == expected
            assert layout.positions_of(((start, stop),)).tolist() == expected


def test_slot_runs_are_those_slots_of_all_ranks() -> None:
    rng = Random(2)
    for layout in CASES:
        for _ in range(6):
            start, stop = sorted(rng.randint(0, layout.slots) for _ in range(2))
            if start == stop:
                continue
            expected = [
                x for g in range(layout.num_ranks) for x in layout.positions(g)[start:stop].tolist()
            ]
            assert sorted(positions_of(layout.slot_runs(start, stop))) == sorted(expected)


def test_chunks_divide_the_slots_and_never_outnumber_them() -> None:
    for layout in CASES:
        for count in (1, 2, 3, 4, 16):
            chunks = chunks_between(layout.halves, chunk_slots(layout.halves, count))
            assert len(chunks) == min(count, layout.slots)
            assert [s for c in chunks for s in range(c.start, c.stop)] == list(range(layout.slots))
            assert max(c.size for c in chunks) - min(c.size for c in chunks) <= 1


def test_the_cuts_of_a_chunk_keep_the_halves_of_a_zigzag_apart() -> None:
    halves = Layout(LayoutKind.ZIGZAG, 24, 2).halves  # 12 slots: low 0..5, high 6..11
    cuts = {1: [(0, 6, 12)], 2: [(0, 6), (0, 6)], 3: [(0, 4), (0, 2, 4), (0, 4)]}
    for count, expected in cuts.items():
        assert [c.cuts for c in chunks_between(halves, chunk_slots(halves, count))] == expected


def test_intervals_that_touch_are_joined_and_empty_ones_left_out() -> None:
    assert joined([(0, 2), (2, 5), (7, 7), (8, 9)]) == ((0, 5), (8, 9))


@pytest.mark.parametrize(
    ("kind", "tokens", "ranks", "block", "says"),
    [
        (LayoutKind.ZIGZAG, 0, 2, 1, "at least one token"),
        (LayoutKind.ZIGZAG, 2, 0, 1, "one rank"),
        (LayoutKind.STRIPED, 2, 2, 0, "at least one token"),
        (LayoutKind.ZIGZAG, 2, 2, 4, "only applies to the striped layout"),
    ],
)
def test_an_impossible_layout_is_refused(
    kind: LayoutKind, tokens: int, ranks: int, block: int, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        Layout(kind, tokens, ranks, block)


@pytest.mark.parametrize(
    ("stretches", "says"),
    [
        ((((0, 2),), ((1, 4),)), "positions 1..2 are listed twice"),
        ((((0, 1),), ((2, 4),)), "positions 1..2 are not listed"),
        ((((1, 2),), ((2, 4),)), "positions 0..1 are not listed"),
        ((((0, 3),), ()), "positions 3..4 are not listed"),
        ((((0, 2),), ((2, 5),)), "positions 4..5 are listed twice, or are no tokens"),
        ((((0, 4),),), "stretches of 1 ranks were given for 2"),
        ((((2, 0),), ((0, 4),)), "2..0 ends before it starts"),
        (None, "layout=listed needs 'stretches'"),
    ],
)
def test_a_list_that_is_not_every_position_once_is_refused(
    stretches: Stretches | None, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        Layout(LayoutKind.LISTED, 4, 2, stretches=stretches)
    with pytest.raises(PlanError, match="only apply to layout=listed, not zigzag"):
        Layout(LayoutKind.ZIGZAG, 4, 2, stretches=(((0, 4),), ()))


def test_listed_stretches_are_equal_however_they_are_cut() -> None:
    cut = Layout(LayoutKind.LISTED, 6, 2, stretches=(((0, 1), (1, 1), (1, 3)), ((4, 6), (3, 4))))
    assert cut == Layout(LayoutKind.LISTED, 6, 2, stretches=(((0, 3),), ((4, 6), (3, 4))))
    assert [cut.tokens(rank) for rank in range(2)] == [[0, 1, 2], [4, 5, 3]]
    assert pickle.loads(pickle.dumps(cut)) == cut


def test_a_listed_layout_is_quick_for_64_ranks_of_ten_stretches() -> None:
    """One rank plans its own program from it, at every batch."""
    cuts = [819 * i for i in range(641)]
    owned = tuple(tuple((cuts[i], cuts[i + 1]) for i in range(g, 640, 64)) for g in range(64))

    def read() -> None:
        layout = Layout(LayoutKind.LISTED, 640 * 819, 64, stretches=owned)
        assert len(layout.runs(0, layout.padded_tokens)) == 640

    assert 0 < lines_run(read) < 30_000  # 13,600 in 1.5 ms


def test_places_outside_a_layout_are_refused() -> None:
    layout = Layout(LayoutKind.CONTIGUOUS, 5, 2)
    with pytest.raises(PlanError, match=r"outside 0\.\.1"):
        layout.positions(2)


def random_run(rng: Random) -> Run:
    block = rng.randint(1, 5)
    return Run(rng.randint(0, 12), block, block + rng.randint(0, 6), rng.randint(1, 6))


def test_a_clipped_run_has_exactly_the_positions_inside() -> None:
    rng = Random(3)
    for _ in range(3000):
        run = random_run(rng)
        start, stop = rng.randint(0, 70), rng.randint(0, 70)
        inside = [x for x in positions_of([run]) if start <= x < stop]
        assert positions_of(clip_run(run, start, stop)) == inside, (run, start, stop)


@in_parts(4)
def test_visible_pairs_agree_with_the_dense_mask_for_pieces_of_any_layout(seed: int) -> None:
    rng = Random(4 + 10 * seed)
    for _ in range(200):
        q_tokens, kv_tokens = random_sizes(rng, 24)
        mask = random_mask(rng, q_tokens, kv_tokens)
        layouts = random_layouts(rng, q_tokens, kv_tokens)
        pairs = padded_to(
            dense_mask(mask, q_tokens, kv_tokens), *(layout.padded_tokens for layout in layouts)
        )
        queries, keys = (
            [
                run
                for _ in range(3)
                for run in layout.runs(
                    *sorted(rng.randint(0, layout.padded_tokens) for _ in range(2))
                )
            ]
            for layout in layouts
        )
        counted = visible_pairs(queries, keys, mask.rows(q_tokens, kv_tokens))
        for i, q in enumerate(queries):
            for j, k in enumerate(keys):
                dense = pairs[np.ix_(positions_of([q]), positions_of([k]))].sum()
                assert counted[i, j] == dense, (mask, q, k)


@in_parts(2)
def test_visible_pairs_of_all_ranks_slots_are_right_when_queries_and_keys_differ_in_number(
    seed: int,
) -> None:
    """Their runs then have different strides, and blocks longer than the other side's stride."""
    rng = Random(6 + 10 * seed)
    for _ in range(400):
        q_tokens, kv_tokens = rng.randint(1, 12), rng.randint(1, 60)
        mask = random_mask(rng, q_tokens, kv_tokens)
        layouts = random_layouts(rng, q_tokens, kv_tokens)
        pairs = padded_to(
            dense_mask(mask, q_tokens, kv_tokens), *(layout.padded_tokens for layout in layouts)
        )
        q, k = (
            layout.slot_runs(chunk.start, chunk.stop)
            for layout in layouts
            for chunk in [rng.choice(chunks_between(layout.halves, chunk_slots(layout.halves, 3)))]
        )
        counted = visible_pairs(q, k, mask.rows(q_tokens, kv_tokens)).sum()
        assert counted == pairs[np.ix_(positions_of(q), positions_of(k))].sum(), (mask, layouts)


@in_parts(4)
def test_visible_pairs_agree_with_the_dense_mask_for_runs_of_any_stride(seed: int) -> None:
    rng = Random(5 + 10 * seed)
    for _ in range(200):
        queries = [random_run(rng) for _ in range(rng.randint(1, 3))]
        keys = [random_run(rng) for _ in range(rng.randint(1, 3))]
        q_tokens, kv_tokens = (max(run.stop for run in runs) for runs in (queries, keys))
        mask = random_mask(rng, q_tokens, kv_tokens)
        pairs = dense_mask(mask, q_tokens, kv_tokens)
        counted = visible_pairs(queries, keys, mask.rows(q_tokens, kv_tokens))
        dense = [
            [pairs[np.ix_(positions_of([q]), positions_of([k]))].sum() for k in keys]
            for q in queries
        ]
        assert counted.tolist() == dense, (mask, queries, keys)

    assert join_runs(Run(10 * at, 3) for at in range(5)) == (Run(0, 3, 10, 5),)
    uneven = [Run(0, 3), Run(10, 3), Run(20, 3), Run(31, 3)]
    assert join_runs(uneven) == tuple(uneven)
    falling = [Run(10 * at, 3) for at in reversed(range(5))]
    assert join_runs(falling) == tuple(falling)
