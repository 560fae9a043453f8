"""How long the kernel calls of each computation last, worked out once for ranks that are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mesh_attention.cluster.operation_costs import OperationCosts
from mesh_attention.plan.forms import FormKey, FormKeys
from mesh_attention.plan.plan import Pass
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Attend, AttendBackward, CallKind, Free, Operation
from mesh_attention.plan.split_calls import splits_wanted
from mesh_attention.plan.traffic import TrafficMeter

__all__ = ["CallSeconds", "meters_of"]


def meters_of(problem: Problem, one: Pass) -> Iterator[TrafficMeter]:
    """One for each rank, shared by ranks whose buffers are alike."""
    keys = FormKeys()
    known: dict[FormKey, TrafficMeter] = {}
    for program in one.programs:
        key = keys.of(program)
        if key not in known:
            known[key] = TrafficMeter(problem, program.buffer_table())
        yield known[key]


class CallSeconds:
    """`apart`: call by call, cut as the executor cuts them; else all calls of a computation in one.

    Operations that ranks share cost the same where their buffers (their meters) are alike; only
    row ranges depend on the places of rows.
    """

    def __init__(
        self, one: Pass, costs: OperationCosts, meters: Sequence[TrafficMeter], *, apart: bool
    ) -> None:
        self._costs, self._meters = costs, meters
        self._tables = [program.buffer_table() for program in one.programs]
        self._pieces = [splits_wanted(p) if apart else 1 for p in one.programs]
        self._apart = apart
        self._known: dict[tuple[int, int, int], tuple[float, ...]] = {}

    def of(self, rank: int, op: Operation) -> tuple[float, ...]:
        """Of the calls in turn; nothing where there is nothing to do."""
        if isinstance(op, Free):
            return ()
        key = (id(op), id(self._meters[rank]), self._pieces[rank])
        known = self._known.get(key)
        if known is None:
            calls = self._costs.compute(op, self._tables[rank], self._pieces[rank])
            known = calls if self._apart else (sum(calls),)
            known = tuple(seconds for seconds in known if seconds)
            by_place = isinstance(op, Attend | AttendBackward) and any(
                call.kind is CallKind.RANGE for call in op.calls
            )
            if not by_place:
                self._known[key] = known
        return known
