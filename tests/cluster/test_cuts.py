"""Cuts that the search for the best setting tries next to one."""

from __future__ import annotations

import pytest

from mesh_attention.choose.cuts import Cut, first_cuts
from mesh_attention.plan.problem import Problem


def test_the_neighbours_have_twice_or_half_as_much_or_move_it_from_one_side_to_the_other() -> None:
    chunks = [cut.chunks for cut in Cut((2, 2), None, 1).neighbours()]
    assert chunks == [(4, 2), (2, 4), (1, 2), (2, 1), (4, 1), (1, 4)]
    heads = [cut.heads for cut in Cut((1, 1), (4, 8), 32).neighbours() if cut.chunks == (1, 1)]
    assert heads == [(8, 8), (2, 8), (4, 16), (4, 4), (8, 16), (2, 4), (1, 4)]


def test_no_neighbour_has_less_than_one_chunk_or_more_tasks_than_are_supported() -> None:
    assert [cut.chunks for cut in Cut((1, 1), None, 1).neighbours()] == [(2, 1), (1, 2)]
    assert [cut.chunks for cut in Cut((4, 4), None, 1).neighbours()] == [
        (2, 4), (4, 2), (8, 2), (2, 8),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "held", "expected"),
    [
        (None, 1, []),
        (None, 4, [(2, 4), (2, 2), (1, 2)]),
        ((2, 4), 4, [None, (1, 4), (2, 2), (1, 2)]),
        ((1, 2), 4, [(2, 2), (1, 4), (1, 1), (2, 4)]),
    ],
)
def test_slices_of_heads_stay_within_the_heads_that_a_rank_holds_and_rise(
    heads: tuple[int, int] | None, held: int, expected: list[tuple[int, int] | None]
) -> None:
    """All heads at once are no slices."""
    found = [cut.heads for cut in Cut((4, 4), heads, held).neighbours() if cut.chunks == (4, 4)]
    assert found == expected


def test_a_search_begins_with_slices_of_heads_where_there_are_several_and_with_2x2_chunks() -> None:
    assert [cut.chunks for cut in first_cuts(Problem(64, 1, 8), 1)] == [(2, 2)]
    several = first_cuts(Problem(64, 4, 8), 4)
    assert [cut.chunks for cut in several] == [(1, 1), (1, 2), (2, 2)]
    assert [cut.heads is None for cut in several] == [False, False, True]


def test_what_rotates_is_cut_only_after_an_exchange() -> None:
    problem = Problem(64, 4, 8)
    assert first_cuts(problem, 4, rotates=True) == ()
    assert first_cuts(problem, 2, rotates=True) == (Cut((1, 1), (1, 1), 2), Cut((2, 1), None, 2))
