"""The steps of a program: its operations with all that is known of them before any tensor is there.

What each waits for and what it marks for others follows from the program alone, so it is worked out
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mesh_attention.plan.language.program import Communication, Free, Operation
from mesh_attention.runtime.device.streams import ComputeStreams, Marks
from mesh_attention.runtime.execute.binding import Bindings


class ProgramStep(NamedTuple):
    at: int
    op: Operation
    communicates: bool
    waits: tuple[int, ...]  # communications
    after: Marks  # on the compute stream, for a communication
    marked: bool  # a communication waits for this computation
    fixed: bool  # touches nothing of the caller's


def program_steps(
    operations: Sequence[Operation],
    waits: Sequence[tuple[int, ...]],
    streams: ComputeStreams,
    bindings: Bindings,
    *,
    in_order: bool,
) -> tuple[ProgramStep, ...]:
    """`waits`: the operations that each must come after. `in_order`: communications follow each
    other by themselves."""
    communicates = [isinstance(op, Communication) for op in operations]
    marked = {i for at, before in enumerate(waits) if communicates[at] for i in before}
    steps: list[ProgramStep] = []
    first = True  # no communication so far
    for at, op in enumerate(operations):
        if isinstance(op, Free):
            continue  # offsets were planned from it; `dependencies` guards the reuse
        others = tuple([i for i in waits[at] if communicates[i]])
        after: Marks = ()
        if communicates[at]:
            before = [i for i in waits[at] if not communicates[i]]
            after = streams.after(before, begin=first)
            first = False
            if in_order:
                others = ()  # it follows them by itself; the compute stream need not wait
        steps.append(
            ProgramStep(
                *(at, op, communicates[at], others, after),
                marked=at in marked and not communicates[at],
                fixed=bindings.in_workspace(op),
            )
        )
    return tuple(steps)
