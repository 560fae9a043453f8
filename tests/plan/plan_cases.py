"""Random layouts, problems, settings and plans for the tests of the plan layer."""

from __future__ import annotations

from random import Random

from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.methods.parts.assignment import factorisations
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.problem import Problem
from support.listed import RULES, stretches_for
from support.random_masks import random_mask, random_slices

LAYOUTS = tuple(LayoutKind)


def random_sizes(rng: Random, most: int) -> tuple[int, int]:
    """Tokens of queries and of keys, equal half of the time."""
    q = rng.randint(1, most)
    return q, q if rng.random() < 0.5 else rng.randint(1, most)


def random_layouts(rng: Random, q_tokens: int, kv_tokens: int) -> tuple[Layout, Layout]:
    """Of queries and keys: the same kind on the same ranks, as in a plan."""
    kind, ranks = rng.choice(LAYOUTS), rng.randint(1, 6)
    block = rng.randint(1, 3) if kind is LayoutKind.STRIPED else 1

    def layout(tokens: int) -> Layout:
        return Layout(kind, tokens, ranks, block, stretches_for(kind, rng, tokens, ranks))

    return layout(q_tokens), layout(kv_tokens)


def random_problem(rng: Random, ranks: int) -> Problem:
    lengths = (1, 7, 2999, max(1, ranks - 1), 2 * ranks + 1, 2 * ranks * rng.randint(1, 8))
    q_tokens = rng.choice(lengths)
    kv_tokens = q_tokens if rng.random() < 0.6 else rng.choice(lengths)
    heads, kv_heads = rng.choice(((1, 1), (2, 2), (4, 2), (6, 2), (8, 1)))
    return Problem(
        q_tokens,
        heads,
        rng.choice((4, 8)),
        kv_tokens=kv_tokens,
        num_kv_heads=kv_heads,
        v_head_dim=rng.choice((None, 4, 16)),
        element_bytes=rng.choice((2, 2, 4, 8)),
        mask=(random_slices if rng.random() < 0.2 else random_mask)(rng, q_tokens, kv_tokens),
    )


def random_setting(rng: Random, problem: Problem, ranks: int) -> MeshSetting:
    tiles = list(factorisations(ranks))
    tile = rng.choice(tiles)
    # The most chunks on the most ranks take as long as all else.
    chunks = ((1, 1), (2, 2), (1, 3), (4, 1), (3, 2), (4, 4) if ranks <= 8 else (2, 1))
    layout = rng.choice((None, *(LAYOUTS if problem.q_tokens == problem.keys else RULES)))
    node, alpha = _random_node(rng, tile)
    return MeshSetting(
        tile=tile,
        backward_tile=rng.choice((None, rng.choice(tiles))),
        rotation=rng.random() < 0.75,
        chunks=rng.choice(chunks),
        backward_chunks=rng.choice((None, rng.choice(chunks))),
        layout=layout,
        stripe_block=rng.choice((1, 2, 5)) if layout is LayoutKind.STRIPED else 1,
        stretches=stretches_for(layout, rng, problem.q_tokens, ranks),
        combine=rng.choice(tuple(Combine)),
        gather_out=rng.random() < 0.5,
        ranks_per_node=node,
        alpha=alpha,
        head_slices=rng.choice((None, (1, 1))),
    )


def _random_node(rng: Random, tile: tuple[int, int]) -> tuple[int | None, int | None]:
    """Nodes of `width x height` tiles that fit, or consecutive ranks, or no nodes."""
    a, b = tile
    if rng.random() < 0.4:
        return None, None
    width = rng.choice([w for w in range(1, a + 1) if a % w == 0])
    height = rng.choice([h for h in range(1, b + 1) if b % h == 0])
    return width * height, rng.choice((width, None))


def random_plan(rng: Random, most_ranks: int = 12) -> Plan:
    ranks = rng.randint(1, most_ranks)
    problem = random_problem(rng, ranks)
    return box_plan(problem, ranks, random_setting(rng, problem, ranks))
