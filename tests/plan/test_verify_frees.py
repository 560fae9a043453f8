"""Buffers freed too early or never are caught at the rank that does it."""

from __future__ import annotations

from mutants import caught, random_places

from mesh_attention.plan.program import Free


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
