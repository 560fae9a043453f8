"""What subcommands print: one line of JSON, or a table for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mesh_attention.plan.schedule.tasks import Schedule

__all__ = ["print_json", "steps_json", "table"]


def print_json(value: Any) -> None:
    print(json.dumps(value))


def steps_json(schedule: Schedule) -> list[dict[str, Any]]:
    return [
        {"communication": step.communication, "compute": list(step.compute)}
        for step in schedule.steps
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right.

    >>> print(table([("", "forward"), ("received", "1 MiB")]))
              forward
    received    1 MiB
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)
