"""Masks of which a query sees several intervals: row ranges, counts, calls, text and checks."""

from __future__ import annotations

import pickle
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from dense_oracle import (
    dense_mask,
    padded_to,
    pairs_of_calls,
    positions_of,
    visible_pairs_of,
)
from plan_cases import random_layouts, random_sizes
from test_plan_lower import calls_of, overlap, random_task_side

from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attend, Call, CallKind
from mesh_attention.plan.language.text import digest, parse_plan, plan_text
from mesh_attention.plan.methods.parts.lower import MAX_CALLS
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.mask_slices import SliceKind
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.row_ranges import Interval, RowRanges, Segment, joined
from mesh_attention.plan.problem.runs import Run, visible_pairs
from mesh_attention.plan.read.verify import verify
from support.random_masks import random_slices
from support.sample import in_parts


def shown(mask: Mask, q_tokens: int, kv_tokens: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    rows = mask.rows(q_tokens, kv_tokens)
    return visible_pairs_of(rows, np.arange(q_tokens), np.arange(kv_tokens))


def picture(mask: Mask, q_tokens: int, kv_tokens: int | None = None) -> list[str]:
    seen = shown(mask, q_tokens, kv_tokens or q_tokens)
    return ["".join(".#"[int(x)] for x in row) for row in seen]


@in_parts(4)
def test_row_ranges_of_slices_agree_with_the_definition_for_thousands_of_them(seed: int) -> None:
    rng = Random(1 + 10 * seed)
    several = 0
    for _ in range(500):
        sizes = random_sizes(rng, 24)
        mask = random_slices(rng, *sizes)
        assert (shown(mask, *sizes) == dense_mask(mask, *sizes)).all(), (mask, sizes)
        several += mask.rows(*sizes).most_intervals > 1
    assert several > 75


def check_intervals(rows: RowRanges) -> None:
    """Disjoint, in order, and of several none is empty; all queries have a segment."""
    assert [q for s in rows.segments for q in range(s.start, s.stop)] == list(range(rows.q_tokens))
    for s in rows.segments:
        for q in range(s.start, s.stop):
            ends = [end for interval in s.intervals for end in interval.at(q)]
            assert ends == sorted(ends)
            sizes = [hi - lo for lo, hi in (interval.at(q) for interval in s.intervals)]
            assert len(sizes) == 1 or all(size > 0 for size in sizes)


def test_intervals_are_disjoint_in_order_and_only_a_single_one_is_empty() -> None:
    rng = Random(2)
    for _ in range(500):
        sizes = random_sizes(rng, 30)
        rows = random_slices(rng, *sizes).rows(*sizes)
        check_intervals(rows)


def dense_mask_of(rows: RowRanges) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return visible_pairs_of(rows, np.arange(rows.q_tokens), np.arange(rows.kv_tokens))


def test_pairs_are_counted_as_the_dense_matrix_has_them() -> None:
    rng = Random(3)
    for _ in range(400):
        sizes = random_sizes(rng, 40)
        mask = random_slices(rng, *sizes)
        layouts = random_layouts(rng, *sizes)
        q_runs, k_runs = (
            [run for span in random_task_side(rng, layout) for run in layout.runs(*span)]
            for layout in layouts
        )
        seen = padded_to(dense_mask(mask, *sizes), *(x.padded_tokens for x in layouts))
        counted = visible_pairs(q_runs, k_runs, mask.rows(*sizes))
        for i, q in enumerate(q_runs):
            for j, k in enumerate(k_runs):
                assert counted[i, j] == seen[np.ix_(positions_of([q]), positions_of([k]))].sum()


@in_parts(2)
def test_calls_compute_every_visible_pair_once_and_no_other(seed: int) -> None:
    rng = Random(4 + 10 * seed)
    kinds: set[CallKind] = set()
    for _ in range(350):
        sizes = random_sizes(rng, 40)
        mask = random_slices(rng, *sizes)
        layouts = random_layouts(rng, *sizes)
        q, k = (random_task_side(rng, layout) for layout in layouts)
        calls = calls_of(mask, layouts, q, k)
        at_q, at_k = (x.positions_of(spans) for x, spans in zip(layouts, (q, k), strict=True))
        seen = padded_to(dense_mask(mask, *sizes), *(x.padded_tokens for x in layouts))
        computed = pairs_of_calls(calls, at_q, at_k, mask.rows(*sizes))
        assert (computed == seen[np.ix_(at_q, at_k)]).all(), (mask, layouts, q, k, calls)
        assert len(calls) <= MAX_CALLS
        assert not any(overlap(a, b) for i, a in enumerate(calls) for b in calls[:i])
        assert calls or not computed.any()
        kinds.update(call.kind for call in calls)
    assert kinds == set(CallKind)


def test_a_tree_becomes_rectangles_and_squares_and_no_row_ranges() -> None:
    """A prompt of 4 and continuations of 3 and 5: what both see of the prompt is one call."""
    layout = Layout(LayoutKind.CONTIGUOUS, 12, 1)
    everything = ((0, 12),)
    calls = calls_of(Mask.tree([None, 0, 0], [4, 3, 5]), (layout, layout), everything, everything)
    assert set(calls) == {
        Call(CallKind.FULL, 4, 12, 0, 4),
        Call(CallKind.CAUSAL, 0, 4, 0, 4),
        Call(CallKind.CAUSAL, 4, 7, 4, 7),
        Call(CallKind.CAUSAL, 7, 12, 7, 12),
    }


def with_calls(plan: Plan, *calls: Call) -> Plan:
    """The one rank's forward pass with other calls."""
    (pass_,) = plan.passes
    (program,) = pass_.programs
    operations = tuple(
        replace(op, calls=calls) if isinstance(op, Attend) else op for op in program.operations
    )
    changed = replace(pass_, programs=(replace(program, operations=operations),))
    return replace(plan, passes=(changed,))


@pytest.mark.parametrize(
    ("slices", "right", "wrong", "says"),
    [
        (  # the ends of what all queries see, with a hole in the middle
            (((0, 6), (0, 2), "full"), ((0, 6), (4, 6), "full")),
            [(CallKind.FULL, 0, 6, 0, 2), (CallKind.FULL, 0, 6, 4, 6)],
            [(CallKind.FULL, 0, 6, 0, 6)],
            "contains pairs that the mask hides",
        ),
        (  # bounds that fall: the first and the last query see more than those between
            (((0, 2), (0, 6), "full"), ((2, 4), (0, 2), "full"), ((4, 6), (0, 6), "full")),
            [(CallKind.RANGE, 0, 6, 0, 6)],
            [(CallKind.FULL, 0, 6, 0, 6)],
            "contains pairs that the mask hides",
        ),
        (  # a square of one interval, in which a first query also sees its last key
            (((0, 6), (0, 6), "causal"), ((0, 2), (4, 6), "full")),
            [(CallKind.RANGE, 0, 2, 0, 6), (CallKind.RANGE, 2, 6, 0, 6)],
            [(CallKind.CAUSAL, 0, 6, 0, 6)],
            "does not lie on the mask's edge",
        ),
        (  # as many pairs as a square has, the other way round
            (((0, 6), (0, 6), "inverse_causal"), ((6, 6), (0, 0), "full")),
            [(CallKind.RANGE, 0, 6, 0, 6)],
            [(CallKind.CAUSAL, 0, 6, 0, 6)],
            "does not lie on the mask's edge",
        ),
        (
            (((0, 6), (0, 6), "causal"), ((0, 1), (3, 6), "full")),
            [
                (CallKind.FULL, 0, 1, 0, 1),
                (CallKind.FULL, 0, 1, 3, 6),
                (CallKind.RANGE, 1, 6, 0, 6),
            ],
            [(CallKind.FULL, 0, 1, 0, 1), (CallKind.RANGE, 1, 6, 0, 6)],
            "pairs of the task's 24 visible ones",
        ),
    ],
)
def test_calls_that_compute_what_is_hidden_or_miss_what_is_seen_are_refused(
    slices: Any, right: list[Any], wrong: list[Any], says: str
) -> None:
    mask = Mask(slices=slices)
    plan = make_plan(Problem(6, 1, 4, mask=mask), 1, method="ring", directions=(Direction.FORWARD,))
    assert verify(plan) == []
    assert verify(with_calls(plan, *(Call(*call) for call in right))) == []
    findings = verify(with_calls(plan, *(Call(*call) for call in wrong)))
    assert any(says in str(finding) for finding in findings), findings


def test_the_kinds_of_slices() -> None:
    def shown(kind: str, queries: int, keys: int) -> list[str]:
        return picture(Mask(slices=(((0, queries), (0, keys), kind),)), queries, keys)

    assert shown("full", 2, 3) == ["###", "###"]
    assert shown("causal", 3, 5) == ["###..", "####.", "#####"]
    assert shown("causal", 3, 2) == ["..", "#.", "##"]
    assert shown("inverse_causal", 3, 5) == ["#####", ".####", "..###"]
    assert shown("inverse_causal", 3, 2) == ["##", ".#", ".."]
    assert shown("bicausal", 3, 5) == ["###..", ".###.", "..###"]
    assert shown("bicausal", 3, 2) == ["..", "..", ".."]


def test_kinds_have_the_words_and_numbers_of_magi_attention_too() -> None:
    ranges = [(0, 2), (2, 4), (4, 6), (6, 8)]
    words = ["full", "causal", "inv_causal", "bi_causal"]
    listed: list[Any] = [zip(ranges, ranges, kinds, strict=True) for kinds in (range(4), words)]
    by_number, by_word = (Mask(slices=slices) for slices in listed)
    assert by_number == by_word
    assert by_number.slices is not None
    assert [kind for _, _, kind in by_number.slices] == list(SliceKind)


def test_a_tree_shows_ancestors_and_the_own_node_causally() -> None:
    tree = Mask.tree([None, 0, 0, 2, -1], [2, 2, 1, 2, 1])
    assert picture(tree, 8) == [
        "#.......",
        "##......",
        "###.....",
        "####....",
        "##..#...",
        "##..##..",
        "##..###.",
        ".......#",
    ]
    assert tree.rows(8, 8).most_intervals == 2


def test_a_long_chain_of_turns_is_one_causal_interval() -> None:
    chain = Mask.tree([None, *range(99)], [3] * 100)
    assert len(chain.rows(300, 300).segments) == 1
    assert chain.rows(300, 300).segments == Mask(causal=True).rows(300, 300).segments


def test_many_continuations_of_one_prompt_are_two_intervals() -> None:
    rollouts = Mask.tree([None] + [0] * 500, [1000] + [100] * 500)
    rows = rollouts.rows(51000, 51000)
    assert rows.most_intervals == 2
    prompt, own = 1000 * 1001 // 2, 100 * 101 // 2
    everything = [Run(0, 51000)]
    assert visible_pairs(everything, everything, rows).sum() == prompt + 500 * (own + 100000)


def test_global_tokens_are_seen_by_all_and_see_all() -> None:
    assert picture(Mask.with_global_tokens(6, 2, (1, 0)), 6) == [
        "#.....",
        "##....",
        "###...",
        "####..",
        "##.##.",
        "##..##",
    ]
    assert picture(Mask.with_global_tokens(5, 1, (1, 1), causal=False), 5) == [
        "#####",
        "###..",
        "####.",
        "#.###",
        "#..##",
    ]
    assert picture(Mask.with_global_tokens(3, 0, (0, 0)), 3) == ["#..", ".#.", "..#"]
    assert picture(Mask.with_global_tokens(3, 3, (0, 0)), 3) == ["#..", "##.", "###"]


def test_frames_see_themselves_whole_and_those_before_them() -> None:
    assert picture(Mask.block_causal(5, 2), 5) == ["##...", "##...", "####.", "####.", "#####"]
    few = Mask.block_causal(5, 2, frames_seen=2)
    assert picture(few, 5) == ["##...", "##...", "####.", "####.", "..###"]


@pytest.mark.parametrize(
    ("slices", "says"),
    [
        (3, "give a list of slices"),
        ([3], "slice 0 is 3: give"),
        ([((0, 1), (0, 1))], "slice 0 is"),
        ([((0, 1), (0, 1, 2), "full")], "slice 0 is"),
        ([((0, 1), (0, 1), "full"), ((2, 1), (0, 1), "full")], "slice 1 has queries 2 to 1"),
        ([((0, 1), (-1, 1), "full")], "slice 0: keys=-1"),
        ([((0, 1.5), (0, 1), "full")], "slice 0: queries=1.5"),
        ([((0, 1), (0, 1), "half")], "kind 'half'; valid kinds are: full, causal"),
        ([((0, 1), (0, 1), True)], "kind True"),
        ([((0, 1), (0, 1), [])], r"kind \[\]"),
    ],
)
def test_an_impossible_slice_is_refused_by_its_number(slices: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Mask(slices=slices)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Mask(causal=True, slices=()), "slices define the whole mask"),
        (lambda: Mask(documents=(0, 3), slices=()), "slices define the whole mask"),
        (lambda: Mask.tree([None, 1], [1, 1]), "node 1 has the parent 1"),
        (lambda: Mask.tree([None], [1, 1]), "1 parents and 2 lengths"),
        (lambda: Mask.tree([None], [-1]), "lengths=-1"),
        (lambda: Mask.tree([-2], [1]), "parents=-2"),
        (lambda: Mask.with_global_tokens(3, 4, (0, 0)), "more than the 3 tokens"),
        (lambda: Mask.block_causal(4, 0), "frame=0"),
        (lambda: Mask.block_causal(10**9, 1), "more than 16384 slices"),
        (lambda: Mask.block_causal(4, 2, frames_seen=0), "frames_seen=0"),
        (
            lambda: Problem(4, 1, 8, mask=Mask(slices=(((0, 5), (0, 1), "full"),))),
            "slice 0 has queries up to 5 and keys up to 1, but there are 4 and 4 tokens",
        ),
        (
            lambda: Problem(9, 1, 8, kv_tokens=4, mask=Mask(slices=(((0, 5), (0, 6), "full"),))),
            "slice 0 has queries up to 5 and keys up to 6, but there are 9 and 4 tokens",
        ),
    ],
)
def test_an_impossible_union_is_refused_with_the_values(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()


def test_unions_are_equal_hashed_pickled_described_and_printed() -> None:
    slices = ((0, 6), (0, 2), "full"), ((2, 6), (2, 6), "causal")
    as_lists: Any = [[list(q), list(k), kind] for q, k, kind in slices]
    mask, other = Mask(slices=slices), Mask(slices=as_lists)
    assert mask == other
    assert hash(mask) == hash(other)
    assert pickle.loads(pickle.dumps(mask)) == mask
    assert mask.describe() == "2 slices"
    assert Mask(slices=slices[:1]).describe() == "1 slice"
    assert not mask.is_full
    plan = make_plan(Problem(6, 2, 4, mask=mask), 2, method="mesh")
    again = parse_plan(plan_text(plan))
    assert again.problem == plan.problem
    assert digest(again) == digest(plan)
    less = make_plan(Problem(6, 2, 4, mask=Mask(slices=slices[1:])), 2, method="mesh")
    assert digest(less) != digest(plan)


def test_a_node_of_a_tree_that_follows_its_parent_is_one_stretch_with_it() -> None:
    """After a prompt of 2 tokens a turn of 3, and another of 4 that goes on with 5."""
    assert Mask.tree([None, 0, 0, 2], [2, 3, 4, 5]).slices == (
        ((0, 2), (0, 2), SliceKind.CAUSAL),
        ((2, 5), (0, 5), SliceKind.CAUSAL),
        ((5, 9), (0, 2), SliceKind.FULL),
        ((5, 9), (5, 9), SliceKind.CAUSAL),
        ((9, 14), (0, 2), SliceKind.FULL),
        ((9, 14), (5, 14), SliceKind.CAUSAL),
    )


def test_neighbours_that_see_the_same_intervals_are_one_segment() -> None:
    seen = Interval(0, 0, 2, 0), Interval(4, 0, 6, 0)
    segments = [Segment(0, 3, seen), Segment(3, 5, seen), Segment(5, 6, seen[:1])]
    assert joined(segments) == (Segment(0, 5, seen), segments[2])
