"""What is chosen for a batch of documents: by predicted time, in one layout for all layers."""

from __future__ import annotations

import pickle
import re
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from plan_cases import random_layouts

from mesh_attention.choose.ask import make_plan
from mesh_attention.choose.document_costs import LayerCosts
from mesh_attention.choose.documents import BatchChoice, choose_strategies
from mesh_attention.choose.pack import Layer, Packer
from mesh_attention.plan.language.computed_pairs import balance
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.parts.needed_rows import pairs_of_ranks
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.runs import visible_pairs
from mesh_attention.plan.read.count import count
from support.random_masks import random_cuts, random_window
from support.work import lines_run

CAUSAL, WINDOW = Mask(causal=True), Mask(causal=True, window=(4095, 0))
FEW_HEADS, MANY_HEADS = (32, 8), (64, 8)


def layer(heads: tuple[int, int], mask: Mask = CAUSAL) -> Problem:
    return Problem(1024, heads[0], 128, num_kv_heads=heads[1], mask=mask)


def documents(count: int, tokens: int, *, seed: int = 0, spread: float = 1.0) -> tuple[int, ...]:
    rng = Random(seed)
    sizes = np.cumsum([0.0] + [rng.lognormvariate(0, spread) for _ in range(count)])
    return tuple(np.round(sizes / sizes[-1] * tokens).astype(int).tolist())


def choose(layers: list[Problem], ranks: int, starts: tuple[int, ...]) -> BatchChoice:
    return choose_strategies(layers, ranks, starts, starts)


@pytest.mark.parametrize("ranks", [8, 64])
def test_windows_choose_a_halo_on_contiguous_shards(ranks: int) -> None:
    choice = choose([layer(FEW_HEADS, WINDOW)], ranks, (0, 16384 * ranks))
    assert (choice.layout, choice.strategies[0].method) == (LayoutKind.CONTIGUOUS, "seen")
    halo = 4095 * 8 * 256 * 2 / 2**20
    assert f"a rank receives up to {halo:.3g} MiB" in choice.reason


@pytest.mark.parametrize(("count", "ranks"), [(64, 16), (128, 64)])
def test_many_short_documents_stay_at_home_on_balanced_shards(count: int, ranks: int) -> None:
    choice = choose([layer(MANY_HEADS)], ranks, documents(count, 8192 * ranks))
    assert (choice.layout, choice.strategies[0].method) == (LayoutKind.LISTED, "seen")
    assert choice.stretches is not None
    assert choice.reason.startswith("seen on balanced shards: ")


def test_one_long_document_with_enough_heads_has_heads_first() -> None:
    choice = choose([layer(FEW_HEADS)], 8, (0, 1 << 19))
    assert (choice.layout, choice.strategies[0].method) == (LayoutKind.CONTIGUOUS, "ulysses")
    assert choice.stretches is None


def test_one_long_document_on_more_ranks_than_heads_is_a_mesh() -> None:
    choice = choose([layer(FEW_HEADS)], 64, (0, 1 << 17))
    assert (choice.layout, choice.strategies[0].method) == (LayoutKind.ZIGZAG, "mesh")
    assert choice.strategies[0].tile == (4, 16)


def test_layers_share_a_layout_and_each_has_its_own_method() -> None:
    choice = choose([layer(FEW_HEADS), layer(FEW_HEADS, WINDOW)], 8, (0, 1 << 17))
    assert choice.layout is LayoutKind.CONTIGUOUS
    assert [strategy.method for strategy in choice.strategies] == ["ulysses", "seen"]
    assert choice.reason.startswith("ulysses and seen on contiguous shards: ")
    assert "for 2 layers" in choice.reason


def test_a_layout_that_is_given_is_kept() -> None:
    starts = documents(256, 8192 * 8)
    for kind in (LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG):
        choice = choose_strategies([layer(FEW_HEADS)], 8, starts, starts, shards=(kind, None))
        assert (choice.layout, choice.stretches) == (kind, None)
    listed = choose([layer(FEW_HEADS)], 8, starts)
    shards = (listed.layout, listed.stretches)
    again = choose_strategies([layer(FEW_HEADS, WINDOW)], 8, starts, starts, shards=shards)
    assert (again.layout, again.stretches) == shards


def test_the_sentence_names_what_every_way_would_take() -> None:
    choice = choose([layer(FEW_HEADS)], 8, documents(64, 8192 * 8))
    for words in ("ulysses", "seen on zigzag shards"):
        assert re.search(rf"{words}:? [0-9.e+]+ ms", choice.reason)
    assert "work max/mean 1.0" in choice.reason


def test_a_pack_is_chosen_like_that_pickles_and_makes_its_plans() -> None:
    layers = (Layer(layer(FEW_HEADS)), Layer(layer(FEW_HEADS, WINDOW)))
    for ranks, starts in ((8, documents(40, 4096)), (3, (0, 5, 5, 6, 1000)), (64, (0, 4096))):
        pack = Packer(layers, ranks)(starts)
        again = pickle.loads(pickle.dumps(pack))
        assert again == pack
        assert again.reason == pack.reason
        for attention_layer in layers:
            plan = again.question(attention_layer).plan()
            assert (plan.q_layout, plan.num_ranks) == (pack.layout, ranks)


@pytest.mark.parametrize("starts", [(0, 1), (0, 0, 1, 1, 2), (0, 3, 4, 5, 6), tuple(range(100))])
@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_tiny_packs_have_a_choice_too(starts: tuple[int, ...], ranks: int) -> None:
    for masks in ([CAUSAL], [Mask()], [WINDOW, CAUSAL]):
        problems = [Problem(8, 4, 16, num_kv_heads=2, mask=mask) for mask in masks]
        pack = Packer(tuple(map(Layer, problems)), ranks)(starts)
        for attention_layer, _ in pack.strategies:
            assert pack.question(attention_layer).plan().num_ranks == ranks


def test_queries_and_keys_of_different_numbers_have_no_list() -> None:
    choice = choose_strategies([layer(FEW_HEADS, Mask())], 8, (0, 512, 8192), (0, 64, 1024))
    assert choice.layout is not LayoutKind.LISTED
    assert choice.strategies[0].method in ("ulysses", "seen", "mesh")


def test_pairs_of_ranks_are_those_of_the_rows_of_the_mask() -> None:
    rng = Random(1)
    for _ in range(200):
        tokens = rng.randint(1, 60)
        layout, _ = random_layouts(rng, tokens, tokens)
        starts = random_cuts(rng, tokens, rng.randint(1, 5))
        mask = Mask(causal=rng.random() < 0.6, window=random_window(rng), documents=starts)
        rows = mask.rows(tokens, tokens)
        everything = layout.runs(0, layout.padded_tokens)
        expected = [
            visible_pairs(layout.runs(a, b), everything, rows).sum()
            for a, b in pairwise(range(0, layout.padded_tokens + 1, layout.slots))
        ]
        assert pairs_of_ranks(layout, rows).tolist() == expected


@pytest.mark.parametrize("kind", [LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG])
def test_the_unevenness_of_a_mesh_is_that_of_its_tiles(kind: LayoutKind) -> None:
    rng = Random(2)
    for _ in range(40):
        tile = rng.choice(((2, 3), (1, 4), (4, 1), (3, 4)))
        ranks, tokens = tile[0] * tile[1], rng.randint(30, 150)
        mask = Mask(causal=rng.random() < 0.6, documents=random_cuts(rng, tokens, 3))
        problem = Problem(tokens, 4, 8, mask=mask)
        layout = Layout(kind, tokens, ranks)
        predicted = LayerCosts(problem, ranks).cost("mesh", tile, (layout, layout)).unevenness
        plan = make_plan(problem, ranks, method="mesh", layout=kind, tile=tile)
        assert predicted == pytest.approx(balance(plan, plan.forward).ratio), (problem, tile)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_predicted_bytes_are_those_that_plans_count(kind: str) -> None:
    """What the worst rank receives in the forward pass, but for statistics and padding."""
    starts = (0, 300, 301, 1200, 4096)
    problem = Problem(4096, 8, 64, num_kv_heads=4, mask=Mask(causal=True, documents=starts))
    layout = Layout(LayoutKind(kind), 4096, 8)
    for method, tile in (("seen", (1, 8)), ("ulysses", (1, 1)), ("mesh", (2, 4))):
        cost = LayerCosts(problem, 8).cost(method, tile, (layout, layout))
        how: dict[str, Any] = {"tile": tile} if method == "mesh" else {}
        plan = make_plan(problem, 8, method=method, layout=kind, **how)
        counted = count(plan)[Direction.FORWARD].to_json()["bytes_per_rank"]["max"]
        assert cost.received_bytes == pytest.approx(counted, rel=0.06), method


def test_padding_costs_what_the_kernel_that_takes_it_costs() -> None:
    def seconds(tokens: int) -> float:
        starts = (0, tokens // 2, tokens)
        problem = Problem(tokens, 16, 128, mask=Mask(causal=True, documents=starts))
        layout = Layout(LayoutKind.ZIGZAG, tokens, 8)
        return LayerCosts(problem, 8).cost("seen", (1, 8), (layout, layout)).seconds

    assert seconds(1 << 17) * 1.1 < seconds((1 << 17) - 1)


def test_choosing_for_128_documents_on_64_ranks_takes_milliseconds() -> None:
    """Eight for 48,000 lines."""
    for seed in range(3):
        starts = documents(128, 1 << 19, seed=seed)
        lines = lines_run(lambda: choose([layer(MANY_HEADS)], 64, starts))  # noqa: B023
        assert 0 < lines < 100_000
