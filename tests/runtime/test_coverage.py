"""First touches: every row is stored once and added to afterwards, and none is forgotten."""

from __future__ import annotations

import random

import pytest

from mesh_attention.runtime.execute.kernel_calls import Coverage, coverage


def replay(intervals: list[tuple[int, int]], coverage: Coverage, length: int) -> list[str]:
    """What happens to each row, in order."""
    rows = [""] * length
    for start, stop in coverage.untouched:
        for row in range(start, stop):
            rows[row] += "0"
    for (start, stop), stretches in zip(intervals, coverage.stretches, strict=True):
        at = start
        for stretch in stretches:
            assert stretch.start == at < stretch.stop
            at = stretch.stop
            for row in range(stretch.start, stretch.stop):
                rows[row] += "s" if stretch.fresh else "+"
        assert at == stop or start == stop
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_stored_by_the_first_call_and_added_to_by_the_rest(seed: int) -> None:
    choose = random.Random(seed)
    length = choose.randint(1, 20)
    intervals = []
    for _ in range(choose.randint(0, 6)):
        start = choose.randint(0, length - 1)
        intervals.append((start, choose.randint(start + 1, length)))
    touched = [sum(a <= row < b for a, b in intervals) for row in range(length)]
    fresh = replay(intervals, coverage(intervals, length, fresh=True), length)
    assert fresh == ["s" + "+" * (times - 1) if times else "0" for times in touched]
    older = replay(intervals, coverage(intervals, length, fresh=False), length)
    assert older == ["+" * times for times in touched]


def test_a_call_over_all_rows_is_one_stretch() -> None:
    state = coverage([(0, 8), (0, 8)], 8, fresh=True)
    assert [len(stretches) for stretches in state.stretches] == [1, 1]
    assert state.untouched == ()
