"""A case run on all ranks in one process, held against the float64 truth, with every byte counted.

Workspaces and outputs begin as NaN, so nothing can be read before it is written.
"""

from __future__ import annotations

from mesh_attention import Plan, count
from mesh_attention.testing import LocalResult, run_local
from support.cases import Case
from support.reference import NAMES, attention, errors, tolerance

__all__ = ["check", "check_bytes"]


def check(case: Case, bound: float | None = None) -> LocalResult:
    """Errors are at most `bound`: the tolerance of the dtype, if nothing else is said."""
    plan, tensors = case.plan(), case.tensors()
    result = run_local(plan, *tensors)
    results = {name: getattr(result, name) for name in NAMES}
    assert all(value.dtype == case.dtype for name, value in results.items() if name != "lse")
    distances = errors(results, attention(*tensors, case.mask))
    limit = tolerance(case.dtype) if bound is None else bound
    assert max(distances.values()) <= limit, (distances, case)
    check_bytes(plan, result, case)
    return result


def check_bytes(plan: Plan, result: LocalResult, case: Case) -> None:
    """What each rank handed to the transport is what the plan says, kind by kind."""
    for direction, counted in count(plan).items():
        for rank in counted.ranks:
            handed = result.traffic[direction.value][rank.rank].by_operation
            assert {kind: (t.sent_bytes, t.received_bytes) for kind, t in handed.items()} == {
                kind: (case.batch * t.sent_bytes, case.batch * t.received_bytes)
                for kind, t in rank.by_operation.items()
            }, (direction, rank.rank, case)
