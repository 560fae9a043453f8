"""Kernel calls and passes over memory of a compiled program, as a simulation has them."""

from __future__ import annotations

from collections.abc import Mapping

from mesh_attention.cost.timed_call import TimedCall, joined
from mesh_attention.machine.call_time import (
    CallSize,
    filled_rounds,
    late_pairs,
    lost_by_leaving,
    memory_seconds,
    num_tiles,
)
from mesh_attention.machine.kernel_facts import PassRates
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import (
    Attend,
    AttendBackward,
    Attention,
    Call,
    CallKind,
    Free,
    Merge,
    Operation,
)
from mesh_attention.plan.passes.seconds import CallSeconds

_ENDS_OF_A_ROUND = 2  # programs of a round are not alike: fitted to 24 replayed backward passes


class ComputeCosts:
    def __init__(self, plan: Plan, direction: Direction, clock: CallSeconds) -> None:
        assert plan.target is not None, "a plan is timed as it was compiled"
        self._problem, self._direction, self._target = plan.problem, direction, plan.target
        self._clock = clock
        self._two_streams = plan.target.takes_turns and direction is Direction.FORWARD
        self._beside = plan.num_ranks > 1 and plan.target.own_stream
        self._known: dict[tuple[object, ...], TimedCall] = {}

    def calls(self, op: Operation, table: Mapping[str, Buffer]) -> tuple[TimedCall, ...]:
        """In turn."""
        match op:
            case Attend() | AttendBackward():
                return self._attention(op, table)
            case Merge():
                touched = (*op.inputs, *op.outputs)
                moved = sum(p.num_bytes(table[p.buffer], self._problem) for p in touched)
                return (TimedCall(memory_seconds(self._target.gpu, moved)),)
            case Free():
                return ()
        raise AssertionError(op)  # communication has costs of its own

    def _attention(self, op: Attention, table: Mapping[str, Buffer]) -> tuple[TimedCall, ...]:
        if not op.calls:
            return ()
        fresh = self._clock.fresh(op) if len(op.calls) == 1 else (False, False)
        found = []
        for at, call in enumerate(op.calls):
            rounds = self._rounds(op, table, at)
            size = self._clock.size(op, table, call)
            # Calls take turns on two streams: a result is merged while the next call runs.
            hidden = self._two_streams and at + 1 < len(op.calls)
            key = (size, call.kernel, call.leave_sms, fresh, rounds, hidden)
            if key not in self._known:
                timed = self._call(call, size, rounds)
                merge = 0.0 if hidden else self._clock.merge(size, fresh)
                self._known[key] = timed._replace(seconds=timed.seconds + merge)
            found.append(self._known[key])
        return joined(found)

    def _rounds(self, op: Attention, table: Mapping[str, Buffer], at: int) -> float | None:
        """Of a call that was split so that its second part leaves SMs: both together last a whole
        number of rounds."""
        first = at if not op.calls[at].leave_sms else at - 1
        if not 0 <= first < len(op.calls) - 1:
            return None
        a, b = op.calls[first : first + 2]
        rates = _rates(self._target, a.kernel, self._direction)
        alike = (a.kind, a.k_start, a.k_stop, a.q_stop) == (b.kind, b.k_start, b.k_stop, b.q_start)
        split = alike and b.leave_sms and not a.leave_sms and a.kind is CallKind.FULL
        if not split or not rates.tile_rows:
            return None
        sms = self._target.gpu.sms
        before, after = (num_tiles(rates, self._clock.size(op, table, part)) for part in (a, b))
        return before / sms if at == first else filled_rounds(before + after, sms) - before / sms

    def _call(self, call: Call, size: CallSize, rounds: float | None) -> TimedCall:
        """A call that leaves SMs loses them while a transfer is in flight; one that could and does
        not keeps transfers waiting."""
        rates, sms = _rates(self._target, call.kernel, self._direction), self._target.gpu.sms
        seconds = self._clock.kernel(rates, size, rounds)
        assert seconds is not None, f"{call.kernel} does no {size.kind} calls"
        waits, lost, late = False, rates.lost(sms), 0.0
        if self._beside and call.leave_sms:
            lost = lost_by_leaving(rates, sms, size, call.leave_sms)
            late = seconds * late_pairs(rates, sms, size, call.leave_sms)
        elif self._beside:
            waits = not rates.lets_transfers_begin or bool(rates.sm_margin)
        keys, turn = rates.tile_keys, 0.0
        if keys and self._beside:
            programs = -(-size.columns // keys) * size.heads
            turn = seconds / (_ENDS_OF_A_ROUND * -(-programs // sms))
        return TimedCall(seconds, call.kernel, waits=waits, lost=lost, round=turn, late=late)


def _rates(target: Target, kernel: str, direction: Direction) -> PassRates:
    found = target.kernels[kernel].of(direction) if kernel else None
    assert found is not None, f"no kernel for {direction} calls"
    return found
