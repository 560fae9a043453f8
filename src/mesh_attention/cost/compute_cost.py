"""Kernel calls and passes over memory of a compiled program, as a simulation has them."""

from __future__ import annotations

from collections.abc import Mapping

from mesh_attention.cost.machine.call_time import (
    CallSize,
    memory_seconds,
    num_tiles,
    rounds_of_parts,
)
from mesh_attention.cost.machine.kernel_facts import PassRates
from mesh_attention.cost.machine.target import Target
from mesh_attention.cost.timed_call import TimedCall, joined
from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.passes.seconds import CallSeconds
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.program import (
    Attend,
    AttendBackward,
    Attention,
    Call,
    CallKind,
    Free,
    Merge,
    Operation,
)

_ENDS_OF_A_ROUND = 2  # programs of a round are not alike: fitted to 24 replayed backward passes


class ComputeCosts:
    def __init__(self, plan: Plan, direction: Direction, clock: CallSeconds) -> None:
        assert plan.target is not None, "a plan is timed as it was compiled"
        self._problem, self._direction, self._target = plan.problem, direction, plan.target
        self._clock = clock
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
            key = (size, call.kernel, call.leave_sms, fresh, rounds)
            if key not in self._known:
                self._known[key] = self._call(call, size, fresh, rounds)
            found.append(self._known[key])
        return joined(found)

    def _rounds(self, op: Attention, table: Mapping[str, Buffer], at: int) -> float | None:
        """Of the parts of a call that was split so that the second leaves SMs: the second begins
        where SMs of the first fall free."""
        call, sms = op.calls[at], self._target.gpu.sms
        first = at if not call.leave_sms else at - 1
        if not 0 <= first < len(op.calls) - 1 or call.kind is not CallKind.FULL:
            return None
        a, b = op.calls[first], op.calls[first + 1]
        keys = (a.k_start, a.k_stop) == (b.k_start, b.k_stop)
        if not (keys and a.q_stop == b.q_start and b.leave_sms and not a.leave_sms):
            return None
        rates = _rates(self._target, call.kernel, self._direction)
        if not rates.tile_rows:
            return None
        tiles = [num_tiles(rates, self._clock.size(op, table, part)) for part in (a, b)]
        begun = tiles[0] / sms
        if at == first:
            return begun
        return rounds_of_parts(tiles[0], tiles[1], sms, b.leave_sms) - begun

    def _call(
        self, call: Call, size: CallSize, fresh: tuple[bool, bool], rounds: float | None
    ) -> TimedCall:
        """A kernel that leaves SMs does so to its end. One that does not loses some while a
        transfer is in flight beside it, or keeps transfers waiting."""
        rates = _rates(self._target, call.kernel, self._direction)
        seconds = self._clock.kernel(rates, size, call.leave_sms, rounds)
        assert seconds is not None, f"{call.kernel} does no {size.kind} calls"
        waits, lost = False, rates.lost(self._target.gpu.sms)
        if self._beside and call.leave_sms:
            lost = 0.0
        elif self._beside:
            waits = not rates.lets_transfers_begin or bool(rates.sm_margin)
        keys, turn = rates.tile_keys, 0.0
        if keys and self._beside:
            programs = -(-size.columns // keys) * size.heads
            turn = seconds / (_ENDS_OF_A_ROUND * -(-programs // self._target.gpu.sms))
        return TimedCall(
            seconds + self._clock.merge(size, fresh),
            call.kernel,
            waits=waits,
            lost=lost,
            round=turn,
        )


def _rates(target: Target, kernel: str, direction: Direction) -> PassRates:
    found = target.kernels[kernel].of(direction) if kernel else None
    assert found is not None, f"no kernel for {direction} calls"
    return found
