"""The step table of a schedule: the communication lane beside the compute lane (section 5)."""

from __future__ import annotations

from mesh_attention.plan.schedule.tasks import Schedule

__all__ = ["draw_steps"]

_HEADS = ("step", "communication", "compute")


def draw_steps(schedule: Schedule) -> str:
    """One row a step, with the paper's names; an idle lane is a dash.

    >>> print(draw_steps(Schedule.parse("1 AG-Q-0 + C-0-0\\n2 compute only C-1-0")))
    step  communication  compute
       1  AG-Q-0         C-0-0
       2  -              C-1-0
    """
    rows = [
        (str(number), str(step.communication or "-"), " ".join(map(str, step.compute)) or "-")
        for number, step in enumerate(schedule.steps, 1)
    ]
    width = max(len(_HEADS[1]), *(len(row[1]) for row in rows)) if rows else len(_HEADS[1])
    lines = [f"{_HEADS[0]}  {_HEADS[1]:<{width}}  {_HEADS[2]}"]
    lines += [f"{number:>4}  {left:<{width}}  {right}" for number, left, right in rows]
    return "\n".join(lines)
