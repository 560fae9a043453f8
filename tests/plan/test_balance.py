"""Packs of documents shared out: every token once, tokens and work even, documents mostly whole."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.balance import TOKEN_SLACK, _Front, _Kind, balanced_stretches
from mesh_attention.plan.problem.document_work import DocumentWork, pairs_before
from mesh_attention.plan.problem.layout import Layout, LayoutKind, Stretches
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.runs import Run, visible_pairs
from mesh_attention.plan.problem.spans import joined
from support.random_masks import random_window
from support.work import lines_run

CAUSAL = Mask(causal=True)
PACKS = [(16, 8), (64, 8), (256, 8), (16, 64), (64, 64), (256, 64)]
SHARD = 8192


def log_normal(rng: Random, documents: int, tokens: int) -> tuple[int, ...]:
    sizes = np.cumsum([0.0] + [rng.lognormvariate(0, 1) for _ in range(documents)])
    return tuple(np.round(sizes / sizes[-1] * tokens).astype(int).tolist())


def random_pack(rng: Random) -> tuple[int, ...]:
    """Any lengths: alike, of one token, of none, one huge among small ones."""
    sizes = rng.choice(([7], [0, 1, 2], [0, 1, 20, 77, 300], [1, 3, 5, 2000]))
    lengths = [rng.choice(sizes) + rng.choice((0, 0, 1)) for _ in range(rng.randint(1, 40))]
    lengths[0] += not sum(lengths)
    return (0, *np.cumsum(lengths).tolist())


def random_layer(rng: Random) -> Mask:
    match rng.randrange(4):
        case 0:
            return Mask()
        case 1:
            return Mask(causal=True, prefix=rng.choice((0, 5, 100)))
        case 2:
            return Mask(causal=rng.random() < 0.5, window=random_window(rng))
    return CAUSAL


def pairs_of_ranks(documents: tuple[int, ...], mask: Mask, stretches: Stretches) -> list[int]:
    """Counted through the rows of the mask, without any formula of what is tested."""
    tokens = documents[-1]
    packed = Mask(mask.causal, mask.window, mask.prefix, documents=documents)
    runs = [Run(a, b - a) for own in stretches for a, b in own]
    run_pairs = visible_pairs(runs, [Run(0, tokens)], packed.rows(tokens, tokens))[:, 0].tolist()
    counts = iter(run_pairs)
    return [sum(next(counts) for _ in own) for own in stretches]


def tokens_of(stretches: Stretches) -> list[int]:
    return [sum(b - a for a, b in own) for own in stretches]


def whole(documents: tuple[int, ...], stretches: Stretches) -> list[int]:
    """The lengths of documents that lie on one rank."""
    starts = np.array(documents)
    owners: dict[int, set[int]] = {}
    for rank, own in enumerate(stretches):
        for a, b in own:
            first = int(np.searchsorted(starts, a, side="right")) - 1
            for at in range(first, int(np.searchsorted(starts, b, side="left"))):
                owners.setdefault(at, set()).add(rank)
    return [documents[at + 1] - documents[at] for at, of in owners.items() if len(of) == 1]


def test_the_work_of_the_first_tokens_begins_at_none_from_either_end() -> None:
    """A document of 4 tokens and two of 2, under the causal mask."""
    kinds = [_Kind([0], 4, 10.0, 4, 2.5), _Kind([6, 4], 2, 3.0, 2, 1.5)]
    most, fewest = _Front(kinds, backwards=False), _Front(kinds, backwards=True)
    assert [most.work(tokens) for tokens in (0, 2, 4, 5, 8)] == [0.0, 5.0, 10.0, 11.5, 16.0]
    assert [fewest.work(tokens) for tokens in (0, 2, 4, 6, 8)] == [0.0, 3.0, 6.0, 11.0, 16.0]


@pytest.mark.parametrize(("documents", "ranks"), PACKS)
def test_packs_of_natural_lengths_have_even_work_and_tokens(documents: int, ranks: int) -> None:
    for seed in range(10):
        pack = log_normal(Random(seed), documents, SHARD * ranks)
        stretches = balanced_stretches(pack, ranks, [CAUSAL])
        work = pairs_of_ranks(pack, CAUSAL, stretches)
        assert max(work) <= 1.05 * sum(work) / ranks
        assert max(tokens_of(stretches)) <= (1 + 2 * TOKEN_SLACK) * SHARD
        stretches = balanced_stretches(pack, ranks, [CAUSAL], exact=True)
        work = pairs_of_ranks(pack, CAUSAL, stretches)
        assert max(work) <= 1.05 * sum(work) / ranks
        assert {*tokens_of(stretches)} == {SHARD}


def test_documents_shorter_than_a_shard_mostly_stay_at_home() -> None:
    for documents, ranks, most in ((64, 8, 10), (256, 8, 6), (256, 64, 60)):
        for seed in range(5):
            pack = log_normal(Random(seed), documents, SHARD * ranks)
            short = [b - a for a, b in pairwise(pack) if 0 < b - a < SHARD]
            kept = whole(pack, balanced_stretches(pack, ranks, [CAUSAL]))
            assert len(short) - len(kept) <= most


def test_documents_that_make_ranks_even_within_the_slack_are_not_cut() -> None:
    """Nearly alike, so that no two ranks get the same; and of all lengths, of which the last two of
    a rank are chosen to make it even."""
    for lengths, ranks in ((range(1000, 1016), 4), (range(100, 400), 6)):
        pack = (0, *np.cumsum(lengths).tolist())
        assert len(whole(pack, balanced_stretches(pack, ranks, [CAUSAL]))) == len(lengths)


@pytest.mark.parametrize("part", range(2))
def test_any_pack_has_every_token_on_one_rank_and_even_tokens(part: int) -> None:
    rng = Random(part)
    for _ in range(150):
        pack, ranks = random_pack(rng), rng.choice((1, 2, 3, 5, 8, 16, 64))
        masks = [random_layer(rng) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.5:
            pack = (*pack, -(-pack[-1] // ranks) * ranks)
        exact = pack[-1] % ranks == 0 and rng.random() < 0.7
        stretches = balanced_stretches(pack, ranks, masks, exact=exact)
        assert not exact or {*tokens_of(stretches)} == {pack[-1] // ranks}
        layout = Layout(LayoutKind.LISTED, pack[-1], ranks, stretches=stretches)
        assert layout.stretches == stretches, "sorted, joined, none empty"
        assert all(own == tuple(sorted(own)) for own in stretches)
        shard = pack[-1] / ranks
        tokens = tokens_of(stretches)
        assert max(tokens) <= shard + 2 * int(TOKEN_SLACK * shard) + 1, (pack, ranks, masks)


@pytest.mark.parametrize("part", range(2))
def test_any_pack_of_causal_documents_has_even_work_up_to_single_tokens(part: int) -> None:
    """A token of the longest document is the finest that can be moved; cuts of shards that are long
    enough fall on multiples of eight."""
    rng = Random(part)
    for _ in range(150):
        pack, ranks = random_pack(rng), rng.choice((1, 2, 3, 5, 8))
        stretches = balanced_stretches(pack, ranks, [CAUSAL])
        work = pairs_of_ranks(pack, CAUSAL, stretches)
        longest = max(b - a for a, b in pairwise(pack))
        assert max(work) <= 1.03 * sum(work) / ranks + 2 * longest, (pack, ranks, work)


def test_windows_and_full_attention_on_the_same_shards_are_even_together() -> None:
    window = Mask(causal=True, window=(1023, 0))
    for seed in range(5):
        for documents, ranks in PACKS[:4]:
            pack = log_normal(Random(seed), documents, SHARD * ranks)
            stretches = balanced_stretches(pack, ranks, [CAUSAL, window, window, window])
            full, near = (pairs_of_ranks(pack, mask, stretches) for mask in (CAUSAL, window))
            work = [a + 3 * b for a, b in zip(full, near, strict=True)]
            assert max(work) <= 1.05 * sum(work) / ranks


@pytest.mark.parametrize("window", [(None, 2), (1, None), (0, None)])
def test_windows_without_an_end_on_one_side_are_even_too(window: tuple[int | None, int]) -> None:
    mask = Mask(window=window)
    for pack, ranks in (((0, SHARD * 8), 8), (log_normal(Random(0), 64, SHARD * 8), 8)):
        work = pairs_of_ranks(pack, mask, balanced_stretches(pack, ranks, [mask]))
        assert max(work) <= 1.05 * sum(work) / ranks


def test_one_document_alone_is_a_zigzag_and_without_a_mask_in_order() -> None:
    for ranks in (1, 2, 5, 8):
        zigzag = Layout(LayoutKind.ZIGZAG, 16 * ranks, ranks)
        listed = balanced_stretches((0, 16 * ranks), ranks, [CAUSAL])
        runs = [zigzag.runs(g * 16, (g + 1) * 16) for g in range(ranks)]
        assert listed == tuple(joined((run.start, run.stop) for run in own) for own in runs)
        plain = balanced_stretches((0, 16 * ranks), ranks, [Mask()])
        assert plain == tuple(((16 * g, 16 * g + 16),) for g in range(ranks))


def test_a_huge_document_is_shared_by_all_and_small_ones_fill_up() -> None:
    pack = (0, 40_000, *range(40_100, 80_001, 100))
    stretches = balanced_stretches(pack, 8, [CAUSAL])
    work = pairs_of_ranks(pack, CAUSAL, stretches)
    assert max(work) <= 1.03 * sum(work) / 8
    assert all(own[0][0] < 40_000 for own in stretches)
    assert len(whole(pack, stretches)) > 380


def test_pairs_before_a_row_are_those_of_the_rows_of_the_mask() -> None:
    rng = Random(5)
    for _ in range(300):
        mask, length = random_layer(rng), rng.randint(1, 30)
        (lo,), (hi,) = mask.rows(length, length).intervals(np.arange(length))
        for row in range(length + 1):
            assert pairs_before(mask, row, length) == (hi - lo)[:row].sum(), (mask, row, length)


def test_the_work_of_layers_is_the_sum_of_their_pairs_by_weight() -> None:
    rng = Random(6)
    for _ in range(300):
        masks = [random_layer(rng) for _ in range(rng.randint(1, 4))]
        weights = [rng.choice((1.0, 2.5)) for _ in masks]
        work, length = DocumentWork(masks, weights), rng.randint(1, 30)
        a, b, c, d = sorted(rng.randint(0, length) for _ in range(4))
        expected = sum(
            weight * (pairs_before(mask, stop, length) - pairs_before(mask, start, length))
            for mask, weight in zip(masks, weights, strict=True)
            for start, stop in ((a, b), (c, d))
        )
        assert work.of([(a, b), (c, d)], length) == pytest.approx(expected), masks


@pytest.mark.parametrize("documents", [(), (0,), (0, 0), (3, 5)])
def test_what_is_no_pack_is_refused(documents: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="cumulative starts"):
        balanced_stretches(documents, 2, [CAUSAL])
    with pytest.raises(PlanError, match="ranks=0"):
        balanced_stretches((0, 4), 0, [CAUSAL])


def test_128_documents_on_64_ranks_take_milliseconds() -> None:
    """Seven for 40,000 lines."""
    pack = log_normal(Random(0), 128, SHARD * 64)
    assert 0 < lines_run(lambda: balanced_stretches(pack, 64, [CAUSAL])) < 80_000


def test_many_documents_of_few_lengths_take_no_time_that_grows_with_their_square() -> None:
    def lines(count: int) -> int:
        return lines_run(lambda: balanced_stretches(range(count + 1), 8, [CAUSAL]))

    assert 0 < lines(16_000) < 5 * lines(4_000)
