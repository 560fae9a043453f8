"""A kernel call as a simulation has it: how long it lasts, and when transfers may begin."""

from __future__ import annotations

from typing import NamedTuple

from mesh_attention.plan.leave_sms import leaves_whole
from mesh_attention.plan.program import Call

_AT_ONCE = 1e-9  # seconds: what is left of a round by rounding


class TimedCall(NamedTuple):
    """`waits`: no communication begins before its end. `lost` is the part of its speed that goes to
    a communication in flight beside it; None is what the cluster says for all. `whole`: it cannot
    be split for transfers (`plan/leave_sms.py`): it leaves SMs to its end, or they wait for it.
    `round`: seconds after which enough programs end for a communication to begin."""

    seconds: float
    kernel: str = ""  # none for a pass over memory
    waits: bool = False
    lost: float | None = None
    whole: bool = False
    round: float = 0.0  # none: at any time

    def until_sms(self, left: float) -> float:
        """Seconds until a communication finds SMs, where so many are left of it."""
        rest = left % self.round if self.round else 0.0
        return rest if _AT_ONCE < rest < self.round - _AT_ONCE else 0.0

    def beside(self, transfers: float) -> TimedCall:
        """As the executor would have it, if transfers are in flight that last so long."""
        if not self.whole:
            return self
        if not leaves_whole(transfers, self.seconds):
            return self._replace(waits=True)
        return self._replace(seconds=self.seconds / (1.0 - (self.lost or 0.0)), lost=0.0)


def score(calls: list[TimedCall]) -> float:
    """To choose by: a transfer that comes while a call holds the GPU loses half of it."""
    held = max((call.seconds for call in calls if call.waits), default=0.0)
    return sum(call.seconds for call in calls) + held / 2


def divided(call: TimedCall, split: list[Call]) -> list[TimedCall]:
    """By rows. Splits are free: a call begins while the last programs of the one before end."""
    if not call.waits:
        return [call]
    rows = [one.q_stop - one.q_start for one in split]
    return [call._replace(seconds=call.seconds * r / sum(rows)) for r in rows]


def joined(calls: list[TimedCall]) -> tuple[TimedCall, ...]:
    """Calls that keep nobody waiting are one for each kernel: fewer events to simulate. Beside
    others that are split for transfers, those that cannot be have none to keep waiting."""
    if all(call.whole for call in calls):
        return tuple(calls)
    calls = [call._replace(whole=False) for call in calls]
    free: dict[tuple[object, ...], TimedCall] = {}
    for call in calls:
        if not call.waits:
            key = call.kernel, call.lost
            before = free[key] if key in free else TimedCall(0.0)
            free[key] = call._replace(
                seconds=before.seconds + call.seconds, round=max(before.round, call.round)
            )
    return (*(call for call in calls if call.waits), *free.values())
