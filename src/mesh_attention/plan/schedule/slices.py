"""One schedule for slices of the heads that need the same tasks, one slice after the other.

What a slice gathers before it can compute is gathered while the slice before it computes, and what
it reduces when it has computed goes while the slice after it computes. So only the first gather and
the last reduction have nothing to hide behind, and both are as small as a slice.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_attention.plan.schedule.tasks import Schedule, Step

__all__ = ["follow_each_other", "one_after_another"]


def follow_each_other(slices: Sequence[Schedule]) -> Schedule:
    """
    >>> slices = [Schedule.parse(f"1 AG-{h}\\n2 compute only C-{h}\\n3 RS-{h}") for h in range(3)]
    >>> print(follow_each_other(slices).text())
    1 AG-0
    2 AG-1 + C-0
    3 AG-2
    4 RS-0 + C-1
    5 RS-1 + C-2
    6 RS-2
    """
    parts = [_Parts(schedule) for schedule in slices]
    steps: list[Step] = [*parts[0].before]
    for at, part in enumerate(parts):
        ahead = parts[at + 1].before if at + 1 < len(parts) else ()
        behind = parts[at - 1].after if at else ()
        steps += _beside([*ahead, *behind], part.middle)
    return Schedule((*steps, *parts[-1].after))


def one_after_another(slices: Sequence[Schedule]) -> Schedule:
    """No slice begins before the one before it is done: the least memory, and nothing hidden."""
    return Schedule(tuple(step for schedule in slices for step in schedule.steps))


class _Parts:
    """Communications before the first computation, those after the last, and all in between."""

    def __init__(self, schedule: Schedule) -> None:
        steps = schedule.steps
        computes = [at for at, step in enumerate(steps) if step.compute]
        first, last = (computes[0], computes[-1]) if computes else (len(steps), len(steps) - 1)
        self.before = steps[:first]
        self.middle = steps[first : last + 1]
        self.after = steps[last + 1 :]


def _beside(communications: Sequence[Step], middle: Sequence[Step]) -> list[Step]:
    """The last of these communications takes the first computations along, where they are free."""
    if not (communications and middle and middle[0].communication is None):
        return [*communications, *middle]
    *others, last = communications
    return [*others, Step(last.communication, middle[0].compute), *middle[1:]]
