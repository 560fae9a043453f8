"""Cases run over real processes, held against the float64 truth, with every byte counted."""

from __future__ import annotations

from support.cases import Case
from support.gloo_case import Part, attend, context, expected_bytes, whole
from support.pool import WorkerPool
from support.reference import attention, errors, tolerance

__all__ = ["check"]


def check(pool: WorkerPool, cases: list[Case]) -> None:
    """All of the same number of ranks, which run them one after the other."""
    by_rank = pool.run(_run, cases[0].ranks, cases)
    for number, case in enumerate(cases):
        parts: list[Part] = [parts[number] for parts in by_rank]
        distances = errors(whole(parts, case), attention(*case.tensors(), case.mask))
        assert max(distances.values()) <= tolerance(case.dtype), (distances, case)
        expected = expected_bytes(case)
        for part in parts:
            assert part.traffic == expected[part.rank], (part.rank, case)


def _run(rank: int, world_size: int, cases: list[Case]) -> list[Part]:
    parts = []
    for case in cases:
        with context(case) as cp:
            parts.append(attend(cp, case))
    return parts
