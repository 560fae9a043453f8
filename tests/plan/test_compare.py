"""Methods side by side: each at its best setting, and how far the comparison has come."""

from __future__ import annotations

from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.compare import Compared, compare

PROBLEM = Problem(64, 4, 8)


def by_name(rows: list[Compared]) -> dict[str, Compared]:
    return {row.method: row for row in rows}


def test_progress_is_told_after_each_setting_up_to_the_last() -> None:
    progress_calls: list[tuple[int, int]] = []
    compare(PROBLEM, 4, None, progress=lambda done, total: progress_calls.append((done, total)))
    settings = sum(len(method.candidates(PROBLEM, 4, None)) for method in METHODS.values())
    assert progress_calls == [(done, settings) for done in range(1, settings + 1)]


def test_collectives_and_messages_are_counted_apart() -> None:
    methods = by_name(compare(PROBLEM, 4, None))
    assert list(methods) == list(METHODS)
    ring = methods["ring"].counts[Direction.FORWARD]
    assert (ring.collectives, ring.point_to_point) == (0, 3)
    gathered = methods["allgather-kv"].counts[Direction.FORWARD]
    assert gathered.point_to_point == 0
    assert gathered.collectives > 0


def test_a_method_that_cannot_run_says_why_and_the_others_are_compared() -> None:
    methods = by_name(compare(Problem(60, 4, 8), 5, None))
    assert "5 ranks" in str(methods["ulysses"].reason)
    assert "4 heads" in str(methods["ulysses"].reason)
    assert methods["ulysses"].counts == {}
    assert methods["ring"].reason is None
    assert set(methods["ring"].to_json()) == {"method", "setting", "reason", "forward", "backward"}
