"""Masks as row ranges, against the definition pair by pair."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from dense_oracle import dense_mask
from plan_cases import random_sizes

from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from support.random_masks import random_mask
from support.sample import in_parts


@in_parts(4)
def test_bounds_agree_with_the_definition_for_thousands_of_random_masks(seed: int) -> None:
    rng = Random(1 + 10 * seed)
    for _ in range(1000):
        q_tokens, kv_tokens = random_sizes(rng, 24)
        mask = random_mask(rng, q_tokens, kv_tokens)
        (lo,), (hi,) = mask.rows(q_tokens, kv_tokens).intervals(np.arange(q_tokens))
        keys = np.arange(kv_tokens)
        shown = (keys >= lo[:, None]) & (keys < hi[:, None])
        assert (shown == dense_mask(mask, q_tokens, kv_tokens)).all(), (mask, q_tokens, kv_tokens)


def test_bounds_never_fall() -> None:
    rng = Random(2)
    for _ in range(2000):
        q_tokens, kv_tokens = random_sizes(rng, 40)
        mask = random_mask(rng, q_tokens, kv_tokens)
        (lo,), (hi,) = mask.rows(q_tokens, kv_tokens).intervals(np.arange(q_tokens))
        assert (np.diff(lo) >= 0).all(), mask
        assert (np.diff(hi) >= 0).all(), mask


@in_parts(4)
def test_segments_divide_the_queries_and_each_bound_is_one_line_on_a_segment(seed: int) -> None:
    rng = Random(3 + 10 * seed)
    for _ in range(500):
        q_tokens, kv_tokens = random_sizes(rng, 40)
        rows = random_mask(rng, q_tokens, kv_tokens).rows(q_tokens, kv_tokens)
        assert [q for s in rows.segments for q in range(s.start, s.stop)] == list(range(q_tokens))
        (lo,), (hi,) = rows.intervals(np.arange(q_tokens))
        for q in range(q_tokens):
            s = rows.segment_at(q)
            assert s.start <= q < s.stop
            (interval,) = s.intervals
            assert interval.at(q) == (lo[q], hi[q])


def test_positions_past_the_end_see_nothing() -> None:
    rng = Random(4)
    for _ in range(300):
        q_tokens, kv_tokens = random_sizes(rng, 24)
        rows = random_mask(rng, q_tokens, kv_tokens).rows(q_tokens, kv_tokens)
        (lo,), (hi,) = rows.intervals(np.arange(q_tokens, q_tokens + 5))
        assert (lo == hi).all()


def test_a_causal_mask_is_aligned_at_the_end_when_keys_and_queries_differ_in_number() -> None:
    more_keys = Mask(causal=True).rows(2, 5)
    assert [x.tolist() for x in more_keys.intervals(np.arange(2))] == [[[0, 0]], [[4, 5]]]
    more_queries = Mask(causal=True).rows(5, 2)
    (lo,), (hi,) = more_queries.intervals(np.arange(5))
    assert (hi - lo).tolist() == [0, 0, 0, 1, 2]


def test_every_kind_of_mask_shows_what_it_says() -> None:
    def seen(mask: Mask, tokens: int = 5) -> list[int]:
        return [int(keys) for keys in dense_mask(mask, tokens, tokens).sum(axis=1)]

    assert Mask().is_full
    assert seen(Mask(causal=True, window=(2, 0))) == [1, 2, 3, 3, 3]
    assert seen(Mask(window=(1, 1)), 4) == [2, 3, 3, 2]
    assert seen(Mask(causal=True, documents=(0, 2, 5))) == [1, 2, 1, 2, 3]
    assert seen(Mask(causal=True, prefix=3)) == [3, 3, 3, 4, 5]


def test_a_mask_says_in_words_what_it_is() -> None:
    assert Mask().describe() == "full"
    assert Mask(causal=True, window=(3, None)).describe() == "causal, window 3:inf"
    assert Mask(causal=True, prefix=4).describe() == "causal, prefix 4"
    assert Mask(causal=True, documents=(0, 1, 4)).describe() == "causal, 2 documents"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prefix": 3}, "needs causal=True"),
        ({"causal": True, "prefix": -1}, "length >= 0"),
        ({"causal": True, "prefix": 2, "window": (1, 1)}, "exclude each other"),
        ({"window": (-1, 0)}, "None for no limit"),
        ({"kv_documents": (0, 4)}, "needs 'documents'"),
        ({"documents": (0,)}, "cumulative starts"),
        ({"documents": (1, 4)}, "cumulative starts"),
        ({"documents": (0, 3, 2)}, "cumulative starts"),
        ({"documents": (0, 4), "kv_documents": (0, 2, 4)}, "same number of documents"),
    ],
)
def test_an_impossible_mask_is_refused_with_the_way_out(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Mask(**fields)


def test_documents_must_end_at_the_last_token() -> None:
    with pytest.raises(PlanError, match="documents end at 4 but there are 5 tokens"):
        Problem(5, 1, 4, mask=Mask(causal=True, documents=(0, 2, 4)))
    with pytest.raises(PlanError, match="kv_documents end at 5 but there are 7 tokens"):
        Problem(5, 1, 4, kv_tokens=7, mask=Mask(causal=True, documents=(0, 2, 5)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"q_tokens": 0}, "q_tokens=0"),
        ({"num_heads": 6, "num_kv_heads": 4}, "KV heads that fit: 1, 2, 3, 6"),
        ({"element_bytes": 3}, "must be 2, 4 or 8"),
        ({"v_head_dim": 0}, "v_head_dim=0"),
        ({"head_dim": 2.5}, "head_dim=2.5"),
    ],
)
def test_an_impossible_problem_is_refused_with_the_value(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Problem(**{"q_tokens": 8, "num_heads": 2, "head_dim": 4, **fields})


def test_problems_with_defaults_written_out_are_equal() -> None:
    assert Problem(8, 2, 4) == Problem(8, 2, 4, kv_tokens=8, num_kv_heads=2, v_head_dim=4)
