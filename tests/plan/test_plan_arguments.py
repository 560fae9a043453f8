"""Nonsense from the caller is refused by name, never taken for something else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from mesh_attention import Mask, MeshAttentionError, Problem, count, make_plan, verify
from mesh_attention.plan.language.text import digest, plan_text
from mesh_attention.plan.methods.question import ask, attention_mask
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.arguments import number, real

PROBLEM = Problem(64, 2, 8)
READERS: dict[str, Callable[[Any], object]] = {
    "verify": verify,
    "count": count,
    "digest": digest,
    "plan_text": plan_text,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("nonsense", [None, 5, "plan", PROBLEM])
def test_what_is_not_a_plan_is_refused_by_every_reader(name: str, nonsense: Any) -> None:
    with pytest.raises(MeshAttentionError, match=f"{type(nonsense).__name__} is not a Plan"):
        READERS[name](nonsense)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tile", 3), ("tile", (2, 2.0)), ("tile", (4, 1, 1)), ("tile", (True, 4)), ("tile", {4, 1}),
        ("tile", "2"), ("tile", "٢x٢"), ("tile", "0_2x2"), ("chunks", 5), ("chunks", (2,)),
        ("chunks", ""), ("rotation", "no"),
        ("gather_out", "x"), ("ranks_per_node", 1.5), ("alpha", "2"), ("stripe_block", 2.5),
        ("gamma", float("nan")), ("gamma", "a"), ("costs", {}), ("combine", 5),
        ("layout", "diagonal"), ("max_memory_bytes", "1GiB"), ("backward_tile", 3),
        ("tile", (0, 4)), ("ranks_per_node", 10**30),
    ],
)  # fmt: skip
def test_an_option_of_the_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    for method in ("mesh", "auto"):
        with pytest.raises(MeshAttentionError, match=name):
            make_plan(PROBLEM, 4, method=method, **{name: value})


@pytest.mark.parametrize("method", METHODS)
def test_an_option_that_is_none_was_not_given(method: str) -> None:
    nothing: dict[str, Any] = dict.fromkeys(METHODS[method].options())
    assert make_plan(PROBLEM, 2, method=method, **nothing) == make_plan(PROBLEM, 2, method=method)


@pytest.mark.parametrize("ranks", [4.0, "4", None, [4], True, 0, -1])
def test_ranks_are_a_whole_number(ranks: Any) -> None:
    with pytest.raises(MeshAttentionError, match="ranks"):
        make_plan(PROBLEM, ranks, method="mesh")


def test_a_pair_may_be_text_or_a_list_and_numbers_may_be_of_numpy() -> None:
    plans = [
        make_plan(PROBLEM, 4, method="mesh", tile=tile)
        for tile in ("4x1", [4, 1], (np.int64(4), 1), np.array([4, 1]))
    ]
    assert plans == [make_plan(PROBLEM, 4, method="mesh", tile=(4, 1))] * 4
    assert real("softcap", np.float32(2)) == real("softcap", np.int64(2)) == 2.0
    mask = attention_mask(causal=np.True_, window_size=np.array([3, 0]))  # type: ignore[arg-type]
    assert repr(mask) == repr(Mask(causal=True, window=(3, 0)))
    assert repr(Mask(causal=np.True_)) == repr(Mask(causal=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["window_size", "tile"])
def test_an_iterator_is_refused_since_the_next_who_reads_it_would_find_nothing(name: str) -> None:
    read: dict[str, Callable[..., object]] = {
        "window_size": partial(attention_mask, causal=True),
        "tile": partial(ask, PROBLEM, 4, method="mesh"),
    }
    for once in (iter((2, 2)), (x for x in (2, 2))):
        with pytest.raises(MeshAttentionError, match=f"{name}=<"):
            read[name](**{name: once})


@pytest.mark.parametrize(
    "arguments",
    [
        {"causal": "no"}, {"causal": None}, {"window": 5}, {"window": (5,)}, {"window": ("a", 1)},
        {"prefix": 1.5, "causal": True}, {"documents": 5}, {"documents": ("a", 3)},
    ],
)  # fmt: skip
def test_a_mask_of_the_wrong_kind_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(MeshAttentionError):
        Mask(**arguments)


@pytest.mark.parametrize("documents", [[0, 64], (0, 64), np.array([0, 64])])
def test_documents_may_be_any_sequence_of_numbers(documents: Any) -> None:
    assert Mask(documents=documents) == Mask(documents=(0, 64))


@pytest.mark.parametrize("arguments", [{"mask": None}, {"mask": "causal"}, {"q_tokens": True}])
def test_a_problem_of_the_wrong_kind_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(MeshAttentionError):
        Problem(**({"q_tokens": 64, "num_heads": 2, "head_dim": 8} | arguments))


def test_more_tokens_than_counts_can_hold_are_refused() -> None:
    assert Problem(1 << 30, 1, 8).q_tokens == 1 << 30
    with pytest.raises(MeshAttentionError, match="at most 1073741824 are supported"):
        Problem((1 << 30) + 1, 1, 8)


def test_a_number_is_refused_with_the_least_that_it_may_be() -> None:
    with pytest.raises(MeshAttentionError, match=r"must be a whole number of at least 1$"):
        number("ranks", "four")
    with pytest.raises(MeshAttentionError, match=r"must be a whole number of at least -1$"):
        number("window_size", -2, least=-1)
    with pytest.raises(MeshAttentionError, match=r"must be a whole number$"):
        number("shift", 1.5, least=None)
    assert number("shift", -7, least=None) == -7


def test_a_mask_may_be_said_in_several_ways_that_do_not_contradict_each_other() -> None:
    causal, window = Mask(causal=True), Mask(window=(4, None))
    assert attention_mask(causal=None) == attention_mask(causal=False) == Mask()
    assert attention_mask(causal=True) == attention_mask(causal=None, mask=causal) == causal
    assert attention_mask(causal=True, mask=causal) == causal
    assert attention_mask(causal=False, mask=window) == window
    assert attention_mask(causal=None, window_size=(4, -1)) == window
    assert attention_mask(causal=True, window_size=(-1, -1)) == causal
    for said, mask in ((True, window), (False, causal)):
        with pytest.raises(MeshAttentionError, match=f"causal={said} contradicts a mask that is"):
            attention_mask(causal=said, mask=mask)
    with pytest.raises(MeshAttentionError, match="not both"):
        attention_mask(causal=None, mask=causal, window_size=(4, 0))
