"""Cases for each method: sizes drawn by seed, settings dealt from the table, causal every other."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from method_settings import deal, listed

from mesh_attention import Mask, Problem
from mesh_attention.plan.methods.parts.head_group import ulysses_degrees
from mesh_attention.plan.methods.table import METHODS
from support.cases import Case

__all__ = ["RANKS", "cases", "heads_for", "problem_of", "ranks_in_turn"]

RANKS = (*range(1, 13), 16, 18, 25, 32)


def ranks_in_turn(name: str) -> tuple[int, ...]:
    """All but the two largest, which every other method has one of: rings of them take seconds."""
    turn = list(METHODS).index(name) % 4
    largest = {0: RANKS[-2:-1], 2: RANKS[-1:]}.get(turn, ())
    return (*RANKS[:-2], *largest)


def heads_for(ranks: int) -> list[tuple[int, int]]:
    """(query, KV) heads that n ranks can share out: MHA, GQA, fewer KV heads than ranks, MQA."""
    few = [(2 * ranks, 2)] if ranks % 2 == 0 else []
    return [(ranks, ranks), (2 * ranks, ranks), *few, (ranks, 1)]


def problem_of(ranks: int, heads: tuple[int, int], *, causal: bool = False) -> Problem:
    """Two tokens a rank, in bf16: the smallest problem that every layout shares out evenly."""
    return Problem(2 * ranks, heads[0], head_dim=4, num_kv_heads=heads[1], mask=Mask(causal=causal))


def cases(
    name: str, ranks: int, *, at_least: int = 1, at_most: int | None = None
) -> Iterator[Case]:
    """Forward and backward in float64; few tokens, because that is where the edges are."""
    draw = Random(f"{name} on {ranks}")
    heads = heads_for(ranks)
    problem = problem_of(ranks, heads[0])
    settings = deal(METHODS[name], problem, ranks, at_least=at_least, at_most=at_most)
    for number, setting in enumerate(settings):
        tokens = draw.choice([2 * ranks, 3 * ranks + 1, 2 * ranks - 1, max(1, ranks - 1)])
        crossed = draw.random() < 0.3 and setting["layout"] != "listed"
        degree = setting.get("ulysses", 1)
        shared = [pair for pair in heads if degree in ulysses_degrees(problem_of(ranks, pair))]
        yield Case(
            ranks,
            tokens,
            draw.randint(1, 3 * ranks) if crossed else tokens,
            heads=draw.choice(shared),
            head_dims=draw.choice([(4, 4), (4, 4), (8, 4)]),
            batch=draw.choice([1, 1, 2]),
            mask=Mask(causal=number % 2 == 0),
            seed=number,
            options={"method": name, **setting, **listed(setting, tokens, ranks, number)},
        )
