"""Any mask under any method, layout and number of ranks: a property, tried on random examples.

Outputs and all gradients equal attention by its definition in float64, with workspaces that begin
as NaN; the plan is proven, its text parses back, and what moves is what was counted. What does not
fit is refused in a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from random import Random

import pytest
from method_settings import Setting, manners, shapes

from mesh_attention import Mask, MeshAttentionError, Problem, make_plan
from mesh_attention.choose.documents import Starts
from mesh_attention.choose.pack import Layer, Packer
from mesh_attention.plan.methods.table import METHODS
from support.cases import random_heads
from support.dense_call import check, drawn_call
from support.drawn_masks import drawn_mask, drawn_starts, drawn_within
from support.listed import RULES, stretches_for
from support.property import for_all
from support.reference import visible

HEADS = ((1, 1), (2, 1), (3, 3), (4, 2), (5, 5), (6, 2), (6, 6), (7, 1), (8, 4), (9, 3))
CHUNKS = ((1, 1), (2, 1), (1, 2), (2, 2))
# Most for the ways that documents of a batch take; 150 with those that are chosen for a batch.
EXAMPLES = {"seen": 25, "ulysses": 18, "mesh": 20, "allgather-kv": 12}
OTHERS, CHOSEN = 6, 30
MANY = 66  # times as many: 10,000


def few_ranks(draw: Random) -> int:
    """Up to 9, mostly few: rings of n take time by n * n."""
    return draw.choice((1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, draw.randint(5, 9)))


def any_ranks(draw: Random) -> int:
    return draw.randint(1, 9)


def drawn_setting(draw: Random, method: str, problem: Problem, ranks: int) -> Setting:
    """One that fits; now and then another, which may be refused."""
    options = METHODS[method].options()
    fitting = shapes(METHODS[method], problem, ranks)
    setting = dict(draw.choice(fitting)) if fitting else {}
    setting |= draw.choice(manners(METHODS[method]))
    if setting["layout"] == "striped":
        setting["stripe_block"] = draw.randint(1, 3)
    crossed = problem.q_tokens != problem.keys
    if setting["layout"] == "listed" and crossed and draw.randint(0, 9) < 9:
        setting["layout"] = "zigzag"
    setting["stretches"] = stretches_for(setting["layout"], draw, problem.q_tokens, ranks)
    if "chunks" in options:
        setting["chunks"] = draw.choice(CHUNKS)
    if "head_slices" in options and draw.randint(0, 5) == 5:
        held = problem.kv_heads // (setting.get("ulysses") or 1)
        setting |= random_heads(draw, max(1, held))
    if draw.randint(0, 24) == 24:
        others = {"ulysses": 2, "inner": 2, "tile": (2, 2), "team": 3, "layout": "listed"}
        name = draw.choice([name for name in others if name in options])
        setting[name] = others[name]
    return setting


def drawn_problem(draw: Random, tokens: tuple[int, int], mask: Mask, least: int = 1) -> Problem:
    """Of at least so many heads."""
    heads, kv_heads = draw.choice([pair for pair in HEADS if pair[0] >= least])
    width = draw.choice((2, 3, 4))
    return Problem(
        q_tokens=tokens[0],
        kv_tokens=tokens[1],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        v_head_dim=draw.choice((width, width, 5)),
        element_bytes=draw.choice((8, 8, 4)),
        mask=mask,
    )


def check_method(draw: Random, method: str, ranks: int) -> None:
    tokens = draw.choice((max(1, ranks - 1), 2 * ranks + 1, draw.randint(1, 12)))
    drawn = drawn_mask(draw, tokens)
    least = ranks if method == "ulysses" else 1
    problem = drawn_problem(draw, drawn.sizes, drawn.mask, least)
    setting = drawn_setting(draw, method, problem, ranks)
    plan, refusal = None, ""
    try:
        plan = make_plan(problem, ranks, method=method, **setting)
    except MeshAttentionError as error:
        refusal = str(error)
    if plan is None:
        assert " " in refusal, "not a sentence"
    else:
        check(drawn_call(draw, plan, drawn.shown, has_delta=not setting["gather_out"]))


def one_pack(rows: list[Starts]) -> Starts:
    lengths = [b - a for row in rows for a, b in pairwise(row)]
    return tuple(accumulate(lengths, initial=0))


def check_chosen(draw: Random, ranks: int) -> None:
    """A batch as `ContextParallel.documents` makes it, of layers that share its tensors."""
    rows = draw.choice((1, 1, 2))
    crossed = draw.randint(0, 3) == 3
    tokens, keys = (draw.randint(1, 16 // rows) for _ in range(2))
    number = draw.randint(1, min(tokens, 6) + 1)
    packed = [drawn_starts(draw, tokens, number) for _ in range(rows)]
    kv_packed = [drawn_starts(draw, keys, number) for _ in range(rows)] if crossed else packed
    layout = draw.choice((None, None, None, *RULES))
    masks = [Mask(**drawn_within(draw, 6)) for _ in range(draw.randint(1, 2))]
    layers = [Layer(drawn_problem(draw, (9, 9), mask), layout=layout) for mask in masks]
    pack = Packer(tuple(layers), ranks)(packed, kv_packed if crossed else None)
    layer = draw.choice(layers)
    plan = pack.question(layer).plan()
    assert (plan.q_layout, plan.kv_layout) == (pack.layout, pack.kv_layout)
    assert layout in (None, pack.layout.kind)
    starts, kv_starts = one_pack(packed), one_pack(kv_packed)
    mask = Mask(
        causal=layer.problem.mask.causal,
        window=layer.problem.mask.window,
        prefix=layer.problem.mask.prefix,
        documents=starts,
        kv_documents=kv_starts,
    )
    shown = visible(mask, starts[-1], kv_starts[-1])
    check(drawn_call(draw, plan, shown, has_delta=True))


def check_many(method: str, times: int, ranks: Callable[[Random], int], seed: int) -> None:
    seed += list(METHODS).index(method)
    examples = times * EXAMPLES.get(method, OTHERS)
    for_all(lambda draw: check_method(draw, method, ranks(draw)), examples, seed)


@pytest.mark.parametrize("method", METHODS)
def test_any_mask_is_exact_under_any_method(method: str) -> None:
    check_many(method, 1, few_ranks, seed=0)


def test_any_documents_are_exact_as_they_are_chosen_for() -> None:
    for_all(lambda draw: check_chosen(draw, few_ranks(draw)), CHOSEN, seed=100)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_many_masks_are_exact_under_any_method(method: str) -> None:
    """With the chosen ones 10,000."""
    check_many(method, MANY, any_ranks, seed=200)


@pytest.mark.slow
def test_many_documents_are_exact_as_they_are_chosen_for() -> None:
    for_all(lambda draw: check_chosen(draw, any_ranks(draw)), MANY * CHOSEN, seed=300)


def test_the_examples_are_as_many_as_promised() -> None:
    each = [EXAMPLES.get(method, OTHERS) for method in METHODS]
    assert sum(each) + CHOSEN >= 150
    assert MANY * (sum(each) + CHOSEN) >= 10_000
