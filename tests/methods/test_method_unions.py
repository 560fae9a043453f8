"""Every kind of mask that is a union of slices, under methods and layouts, against float64.

The truth has a dense mask that is written here pair by pair, in the words of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from mesh_attention import Mask, Problem, verify
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.computed_pairs import pairs_of_tasks
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.request.arguments import AskedPlan, layer_of_batches
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.testing import run_local
from support.cases import Case
from support.listed import RULES, stretches_for
from support.random_masks import random_slices
from support.reference import NAMES, attention, errors, tolerance, visible

METHODS: dict[str, dict[str, Any]] = {
    "mesh": {"tile": (2, 2), "chunks": (2, 2)},
    "ring": {},
    "ulysses": {},
    "allgather-kv": {},
    "usp": {"ulysses": 2},
    "seen": {},
}
LAYOUTS = tuple(LayoutKind)


@dataclass(frozen=True)
class Union:
    """A mask, and whether a query sees a key."""

    mask: Mask
    sees: Callable[[int, int], bool]
    q_tokens: int
    kv_tokens: int | None = None

    @property
    def dense(self) -> Tensor:
        keys = range(self.kv_tokens or self.q_tokens)
        return torch.tensor([[self.sees(q, k) for k in keys] for q in range(self.q_tokens)])


PARENTS, LENGTHS = [None, 0, 1, 1, 0, 4, None, 6], [7, 4, 3, 1, 5, 6, 8, 3]
NODE = [node for node, length in enumerate(LENGTHS) for _ in range(length)]


def in_tree(q: int, k: int) -> bool:
    node: int | None = NODE[q]
    while node is not None and node != NODE[k]:
        node = PARENTS[node]
    return node is not None and k <= q


def in_slices(q: int, k: int) -> bool:
    """Rows 0 to 4 see nothing, and so do 24 to 29."""
    return (
        (5 <= q < 12 and 3 <= k < 9)  # full
        or (10 <= q < 20 and 6 <= k < 14 and 13 - k >= 19 - q)  # causal: ends meet
        or (14 <= q < 28 and 20 <= k < 30 and k - 20 >= q - 14)  # inverse: beginnings meet
        or (12 <= q < 20 and 0 <= k < 11 and k - (q - 12) >= 0 and 10 - k >= 19 - q)  # both
    )


UNIONS = {
    "tree": Union(Mask.tree(PARENTS, LENGTHS), in_tree, len(NODE)),
    "rollouts": Union(
        Mask.tree([None, 0, 0, 0, 0], [10, 7, 7, 7, 7]),
        lambda q, k: k <= q and (k < 10 or (k - 10) // 7 == (q - 10) // 7),
        38,
    ),
    "sinks": Union(
        Mask.with_global_tokens(37, 3, (6, 0)), lambda q, k: k <= q and (k < 3 or k >= q - 6), 37
    ),
    "longformer": Union(
        Mask.with_global_tokens(37, 2, (4, 3), causal=False),
        lambda q, k: min(q, k) < 2 or -4 <= k - q <= 3,
        37,
    ),
    "video": Union(Mask.block_causal(38, 5), lambda q, k: k // 5 <= q // 5, 38),
    "few frames": Union(
        Mask.block_causal(38, 5, frames_seen=3), lambda q, k: q // 5 - 3 < k // 5 <= q // 5, 38
    ),
    "slices": Union(
        Mask(
            slices=(
                ((5, 12), (3, 9), "full"),
                ((10, 20), (6, 14), "causal"),
                ((14, 28), (20, 30), "inverse_causal"),
                ((12, 20), (0, 11), "bicausal"),
            )
        ),
        in_slices,
        30,
        33,
    ),
}


def check(case: Case, dense: Tensor) -> Plan:
    plan = case.plan()
    assert verify(plan) == []
    for pass_ in plan.passes:
        assert sum(pairs for _, _, pairs in pairs_of_tasks(plan, pass_)) == dense.sum()
    q, k, v, grad_out = case.tensors()
    result = run_local(plan, q, k, v, grad_out)
    truth = attention(q, k, v, grad_out, dense)
    distances = errors({name: getattr(result, name) for name in NAMES}, truth)
    assert max(distances.values()) <= tolerance(case.dtype), (distances, case)
    return plan


def check_union(union: Union, method: str, layout: LayoutKind) -> None:
    case = Case(
        4,
        union.q_tokens,
        union.kv_tokens or union.q_tokens,
        mask=union.mask,
        head_dims=(4, 4),
        heads=(4, 2) if method == "usp" else (4, 4),
        options={"method": method, **layout_of(layout, union), **METHODS[method]},
    )
    check(case, union.dense)


def layout_of(layout: LayoutKind, union: Union) -> dict[str, Any]:
    """One list is for as many queries as keys."""
    if layout is LayoutKind.LISTED and union.kv_tokens is not None:
        layout = LayoutKind.ZIGZAG
    return {"layout": layout, "stretches": stretches_for(layout, Random(0), union.q_tokens, 4)}


@pytest.mark.parametrize("name", UNIONS)
def test_unions_are_exact_under_methods_in_turn_and_their_pairs_are_counted(name: str) -> None:
    """Every second method, with another layout for each; the slow test has all of them."""
    at = list(UNIONS).index(name)
    for number, method in enumerate(METHODS):
        if (number + at) % 2:
            continue
        layout = LAYOUTS[(number // 2 + at) % len(LAYOUTS)]
        check_union(UNIONS[name], method, layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNIONS)
def test_unions_are_exact_under_every_method_and_every_layout(name: str) -> None:
    for method in METHODS:
        for layout in LAYOUTS:
            check_union(UNIONS[name], method, layout)


def test_rows_that_see_nothing_give_zero_and_minus_infinity() -> None:
    union = UNIONS["slices"]
    case = Case(3, 30, 33, mask=union.mask, options={"method": "ring"})
    result = run_local(case.plan(), *case.tensors())
    unseen = ~union.dense.any(dim=1)
    assert unseen.sum() == 11
    assert (result.out[:, unseen] == 0).all()
    assert (result.lse[:, :, unseen] == -torch.inf).all()
    assert result.grad_q is not None
    assert (result.grad_q[:, unseen] == 0).all()


def test_documents_beside_slices_are_refused_with_the_way_out() -> None:
    asked = AskedPlan(Problem(38, 4, 4, mask=UNIONS["video"].mask), 2, {"method": "mesh"})
    with pytest.raises(
        MeshAttentionError, match="make an object with the slices and the seq_len of each batch"
    ):
        layer_of_batches(asked, {}, CallOptions())


def test_stripes_of_several_tokens_are_refused_where_batches_say_their_length() -> None:
    options = {"method": "mesh", "layout": "striped", "stripe_block": 2}
    asked = AskedPlan(Problem(38, 4, 4, mask=Mask(causal=True)), 2, options)
    with pytest.raises(MeshAttentionError, match="stripe_block=2 is not supported with documents"):
        layer_of_batches(asked, options, CallOptions())


def random_union(rng: Random, ranks: int, number: int) -> Case:
    sizes = rng.randint(1, 40), rng.randint(1, 40)
    method = (
        rng.choice(list(METHODS)) if ranks == 4 else rng.choice(["ring", "allgather-kv", "seen"])
    )
    return Case(
        ranks,
        *sizes,
        mask=random_slices(rng, *sizes),
        head_dims=(4, 4),
        heads=(4, 4),
        seed=number,
        options={"method": method, "layout": rng.choice(RULES), **METHODS[method]},
    )


def check_random(first: int, stop: int) -> None:
    for number in range(first, stop):
        rng = Random(number)
        case = random_union(rng, rng.choice((1, 2, 3, 4, 4, 4)), number)
        check(case, visible(case.mask, case.q_tokens, case.kv_tokens))


def test_random_unions_of_slices_are_exact() -> None:
    check_random(0, 15)


@pytest.mark.slow
def test_two_thousand_random_unions_of_slices_are_exact() -> None:
    check_random(15, 2015)
