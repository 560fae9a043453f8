"""Which rows travel where only what is seen does: intervals against every single pair of tokens."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from mesh_attention import Mask
from mesh_attention.plan.methods.parts.assignment import Tile, factorisations
from mesh_attention.plan.methods.parts.needed_rows import (
    NeededRows,
    Rows,
    needed_keys,
    needed_queries,
    query_parts,
    ranges_of,
    visible_keys,
)
from mesh_attention.plan.methods.parts.needed_side import RankRows
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.row_ranges import RowRanges
from support.listed import stretches_for
from support.random_masks import random_mask, random_slices
from support.sample import sample


def drawn(seed: int) -> tuple[Layout, Layout, RowRanges]:
    draw = random.Random(seed)
    kind, ranks = draw.choice(list(LayoutKind)), draw.randint(1, 7)
    block = draw.choice([1, 2, 5]) if kind is LayoutKind.STRIPED else 1
    q_tokens = draw.randint(1, 60)
    alike = kind is LayoutKind.LISTED or draw.random() < 0.5
    kv_tokens = q_tokens if alike else draw.randint(1, 60)
    mask = (random_mask if seed % 3 else random_slices)(draw, q_tokens, kv_tokens)
    stretches = stretches_for(kind, draw, q_tokens, ranks)
    q, kv = (Layout(kind, tokens, ranks, block, stretches) for tokens in (q_tokens, kv_tokens))
    return q, kv, mask.rows(q_tokens, kv_tokens)


def visible(rows: RowRanges, queries: np.ndarray) -> set[int]:
    lo, hi = rows.intervals(queries)
    pairs = zip(lo.ravel().tolist(), hi.ravel().tolist(), strict=True)
    return {key for start, stop in pairs for key in range(start, stop)}


def by_other(rows: Rows) -> dict[int, list[tuple[int, int]]]:
    slots_by_rank: dict[int, list[tuple[int, int]]] = defaultdict(list)
    columns = (rows.ranks.tolist(), rows.slots.tolist(), rows.sizes.tolist())
    for other, slot, size in zip(*columns, strict=True):
        slots_by_rank[other].append((slot, size))
    return slots_by_rank


def sides(seed: int) -> tuple[tuple[Layout, ...], tuple[NeededRows, ...], list[list[set[int]]]]:
    """Of queries and of keys: layouts, needed rows, and the positions that each rank needs."""
    q, kv, rows = drawn(seed)
    tiles = [Tile(*shape) for shape in factorisations(q.num_ranks)]
    tile = tiles[0] if seed % 2 else random.Random(seed).choice(tiles)
    needs: list[list[set[int]]] = [[], []]
    for rank in range(q.num_ranks):
        owners = tile.q_group(tile.row(rank)), tile.kv_group(tile.column(rank))
        queries, keys = (
            {int(p) for owner in group for p in layout.positions(owner) if p < layout.num_tokens}
            for group, layout in zip(owners, (q, kv), strict=True)
        )
        seen = {position: visible(rows, np.array([position])) & keys for position in queries}
        needs[0].append({position for position in queries if seen[position]})
        needs[1].append(set().union(*seen.values()))
    needed = needed_queries(q, kv, rows, tile.a), needed_keys(q, kv, rows, tile.a)
    return (q, kv), needed, needs


@pytest.mark.parametrize("seed", sample(range(60), 2))
def test_each_rank_receives_every_row_that_it_needs_once_and_no_other(seed: int) -> None:
    """Keys that queries of its tile row see, and queries that see keys of its tile column."""
    for layout, seen, needs in zip(*sides(seed), strict=True):
        sent = [by_other(seen.sent(rank)) for rank in range(layout.num_ranks)]
        foreign = False
        for rank in range(layout.num_ranks):
            received = seen.received(rank)
            positions = [
                int(position)
                for owner, slot, size in zip(
                    received.ranks, received.slots, received.sizes, strict=True
                )
                for position in layout.positions(int(owner))[slot : slot + size]
            ]
            assert positions == sorted(needs[rank])
            assert (received.sizes > 0).all()
            for owner, stretches in by_other(received).items():
                assert sent[owner].pop(rank) == stretches
                foreign |= owner != rank
        assert not any(sent)
        assert seen.travels == foreign
        own = [set(layout.positions(rank).tolist()) for rank in range(layout.num_ranks)]
        expected = [[len(wanted & owned) for owned in own] for wanted in needs]
        users, owners, tokens = seen.tokens_between()
        counted = np.zeros((layout.num_ranks, layout.num_ranks), dtype=np.int64)
        np.add.at(counted, (users, owners), tokens)
        assert counted.tolist() == expected


@pytest.mark.parametrize("seed", sample(range(60), 2))
def test_the_rows_of_a_share_fit_together(seed: int) -> None:
    """What is gathered lies where it is said to, and each partial result is merged once."""
    for layout, seen, needs in zip(*sides(seed), strict=True):
        shares = [RankRows(seen, layout, rank) for rank in range(layout.num_ranks)]
        for share in shares:
            own = layout.positions(share.rank)
            positions = layout.positions_of(share.rows)
            assert share.num_rows == len(positions)
            for owner, stretches in share.gathered.items():
                for (start, stop), (slot, last) in zip(
                    stretches, shares[owner].sent[share.rank], strict=True
                ):
                    assert (positions[start:stop] == layout.positions(owner)[slot:last]).all()
            assert share.local == (needs[share.rank] <= set(own.tolist()))
            stack = layout.positions_of(share.stack)
            merged: dict[int, int] = defaultdict(int)
            for (start, stop), summands in share.sums:
                for slot, position in enumerate(own[start:stop].tolist(), start):
                    for partial in summands:
                        buffer = stack if partial.arrives else positions
                        assert buffer[slot + partial.shift] == position
                        merged[position] += 1
            whole = share.local and bool(share.rows)
            for position in own.tolist():
                users = [rank for rank, wanted in enumerate(needs) if position in wanted]
                others = sum(user != share.rank for user in users)
                # A rank that gathers nothing has partials of all its rows, most of them empty.
                assert merged[position] == others + (whole or share.rank in users)


def test_stretches_are_those_of_real_tokens_and_as_long_as_they_can_be() -> None:
    zigzag = ranges_of(Layout(LayoutKind.ZIGZAG, 10, 2))  # 12 slots
    assert zigzag.starts.tolist() == [0, 9, 3]
    assert zigzag.stops.tolist() == [3, 10, 9]
    assert zigzag.places.tolist() == [0, 3, 6]
    striped = ranges_of(Layout(LayoutKind.STRIPED, 7, 2, block=2))
    assert striped.starts.tolist() == [0, 4, 2, 6]
    assert striped.stops.tolist() == [2, 6, 4, 7]


def test_queries_of_one_stretch_see_an_interval_for_each_document() -> None:
    mask = Mask(causal=True, documents=(0, 3, 3, 4, 10))
    start, stop = np.array([1, 5]), np.array([6, 7])
    index, lo, hi = visible_keys(query_parts(start, stop, mask.rows(10, 10)))
    assert index.tolist() == [0, 0, 0, 1]
    assert lo.tolist() == [0, 3, 4, 4]
    assert hi.tolist() == [3, 4, 6, 7]


@pytest.mark.parametrize(("documents", "sizes"), [((0, 4, 8, 12, 16), [8]), ((0, 16), [4, 4, 4])])
def test_rows_that_follow_each_other_for_both_ranks_are_one_stretch(
    documents: tuple[int, ...], sizes: list[int]
) -> None:
    layout = Layout(LayoutKind.LISTED, 16, 2, stretches=(((0, 4), (8, 12)), ((4, 8), (12, 16))))
    seen = needed_keys(layout, layout, Mask(causal=True, documents=documents).rows(16, 16), 1)
    received, sent = seen.received(0), seen.sent(0)
    assert received.sizes.tolist() == sizes
    own = received.sizes[received.ranks == 0].tolist()
    assert sent.sizes[sent.ranks == 0].tolist() == own
