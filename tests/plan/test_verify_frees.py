"""Buffers freed too early or never are caught at the rank that does it."""

from __future__ import annotations

from mutants import caught, places, random_places

from mesh_attention.plan.language.program import AllGather, Free
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.problem.problem import Problem


def test_a_buffer_freed_early_is_caught_at_that_rank_where_it_is_used_or_freed() -> None:
    for rng, place in random_places(6, lambda op: isinstance(op, Free)):
        assert isinstance(place.op, Free)
        ops = place.program.operations
        name = rng.choice(place.op.buffers)
        rest = tuple(n for n in place.op.buffers if n != name)
        later = (Free(rest),) if rest else ()
        last_use = max(i for i in range(place.at) if name in ops[i].touched)
        early = rng.randint(0, last_use)
        moved = (*ops[:early], Free((name,)), *ops[early : place.at], *later, *ops[place.at + 1 :])
        finding = caught(place, place.with_operations(moved))
        assert finding.rank == place.rank
        assert name in finding.message


def test_a_buffer_that_is_never_freed_is_caught_at_that_rank() -> None:
    for _, place in random_places(7, lambda op: isinstance(op, Free)):
        finding = caught(place, place.put())
        assert finding.rank == place.rank
        assert "never frees" in finding.message


def test_what_is_used_or_written_again_after_its_free_is_said_to_be_freed() -> None:
    """Not taken for something that never arrived, nor for a buffer that begins anew."""
    plan = box_plan(Problem(32, 1, 4), 4, MeshSetting(tile=(2, 2)))
    place = places(plan, lambda op: isinstance(op, AllGather) and op.name == "AG-Q-0")[0]
    assert isinstance(place.op, AllGather)
    (name,) = (move.whole.buffer for move in place.op.moves)
    used = caught(place, place.put(place.op, Free((name,))))
    assert (used.rank, f"uses {name} after it was freed" in used.message) == (place.rank, True)
    rest = place.program.operations[place.at + 1 :]
    at = next(i for i, op in enumerate(rest) if isinstance(op, Free) and name in op.buffers)
    again = place.with_operations(
        (*place.program.operations[: place.at + 1], *rest[: at + 1], place.op, *rest[at + 1 :])
    )
    assert caught(place, again).rank in place.pass_.groups[place.op.group]
