"""A kernel call as a simulation has it: how long it lasts, and when transfers may begin."""

from __future__ import annotations

from typing import NamedTuple

_AT_ONCE = 1e-9  # seconds: what is left of a round by rounding


class TimedCall(NamedTuple):
    """`waits`: no communication begins before its end. `lost` is the part of its speed that goes to
    a communication in flight beside it; None is what the cluster says for all. `round`: seconds
    after which enough programs end for a communication to begin. `late`: seconds more that it takes
    where it begins beside a communication that began on an idle GPU, as some of its programs find
    no place; no more than its own length after the end of that."""

    seconds: float
    kernel: str = ""  # none for a pass over memory
    waits: bool = False
    lost: float | None = None
    round: float = 0.0  # none: at any time
    late: float = 0.0  # none: it finds its place

    def until_sms(self, left: float) -> float:
        """Seconds until a communication finds SMs, where so many are left of it."""
        rest = left % self.round if self.round else 0.0
        return rest if _AT_ONCE < rest < self.round - _AT_ONCE else 0.0


def joined(calls: list[TimedCall]) -> tuple[TimedCall, ...]:
    """Neighbours that share a GPU with transfers alike are one for a simulation: fewer events."""
    found: list[TimedCall] = []
    for call in calls:
        before = found[-1] if found else None
        if (
            before is None
            or before._replace(seconds=0, round=0, late=0)
            != call._replace(seconds=0, round=0, late=0)
            or call.waits
        ):
            found.append(call)
        else:
            found[-1] = before._replace(
                seconds=before.seconds + call.seconds,
                round=max(before.round, call.round),
                late=before.late + call.late,
            )
    return tuple(found)
