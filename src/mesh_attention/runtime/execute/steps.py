"""What is known of a program before any tensor is there, worked out once for the executor.

`program_steps`: what each operation waits for and marks. `coverage`: which call is the first to
touch a row. `must_follow`: which attentions may not run beside the kernel call before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.program import (
    Attend,
    AttendBackward,
    Communication,
    Free,
    Operation,
    reads,
    writes,
)
from mesh_attention.plan.language.workspace import WorkspaceMap
from mesh_attention.runtime.device import ComputeStreams, Marks
from mesh_attention.runtime.execute.binding import Bindings


class ProgramStep(NamedTuple):
    at: int  # the place of the operation in the program
    op: Operation
    communicates: bool
    waits: tuple[int, ...]  # places of communications that must be over before
    after: Marks  # of the compute stream, for which a communication waits
    marked: bool  # a communication waits for this computation
    fixed: bool  # touches nothing of the caller's, and so is bound once
    poisoned: tuple[str, ...]  # buffers that it is the first to use, if those are to be poisoned


def program_steps(
    operations: Sequence[Operation],
    waits: Sequence[tuple[int, ...]],
    streams: ComputeStreams | None,
    bindings: Bindings,
    poisoned: Mapping[int, tuple[str, ...]],
    *,
    in_order: bool,
) -> tuple[ProgramStep, ...]:
    """What the executor does, operation by operation. `waits`: the operations that each must come
    after. `poisoned`: buffers that an operation is the first to use, by its place. `in_order`:
    communications follow each other by themselves. Without `streams` computations are done when
    they return."""
    communicates = [isinstance(op, Communication) for op in operations]
    marked = {i for at, before in enumerate(waits) if communicates[at] for i in before}
    steps: list[ProgramStep] = []
    first = True  # no communication so far
    for at, op in enumerate(operations):
        if isinstance(op, Free):
            continue  # offsets were planned from it; `dependencies` guards the reuse
        others = tuple([i for i in waits[at] if communicates[i]])
        after: Marks = ()
        if communicates[at] and streams is not None:
            before = [i for i in waits[at] if not communicates[i]]
            after = streams.after(before, begin=first)
            first = False
        if communicates[at] and in_order and at not in poisoned:
            others = ()  # it follows them by itself; the compute stream need not wait
        steps.append(
            ProgramStep(
                at,
                op,
                communicates[at],
                others,
                after,
                marked=streams is not None and at in marked and not communicates[at],
                fixed=bindings.in_workspace(op),
                poisoned=poisoned.get(at, ()),
            )
        )
    return tuple(steps)


class Stretch(NamedTuple):
    """Rows `start..stop` of the accumulator; `fresh` if they hold nothing yet."""

    start: int
    stop: int
    fresh: bool


def rows_in_result(stretches: Sequence[Stretch]) -> list[tuple[Stretch, slice | None]]:
    """The stretches of one call, each with its rows in the result of the call; None is all."""
    if len(stretches) == 1:
        return [(stretches[0], None)]
    return [
        (s, slice(s.start - stretches[0].start, s.stop - stretches[0].start)) for s in stretches
    ]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Accumulators need no pass that clears them: the first call to touch a row stores there, the
    others add. Rows that no call touches are cleared."""

    stretches: tuple[tuple[Stretch, ...], ...]  # of each interval, in its order
    untouched: tuple[tuple[int, int], ...]


def coverage(intervals: Sequence[tuple[int, int]], length: int, *, fresh: bool) -> Coverage:
    """Of the rows that the calls of an operation touch, in order, among `length` rows. `fresh`: the
    operation is the first to touch them.

    >>> covered = coverage([(0, 4), (2, 6)], 8, fresh=True)
    >>> [tuple(stretch) for stretch in covered.stretches[1]]
    [(2, 4, False), (4, 6, True)]
    >>> covered.untouched
    ((6, 8),)
    """
    if not fresh:
        return Coverage(tuple((Stretch(a, b, False),) for a, b in intervals), ())
    untouched = [(0, length)]
    stretches = []
    for start, stop in intervals:
        inside = (x for part in untouched for x in part if start < x < stop)
        cuts = pairwise(sorted({start, stop, *inside}))
        stretches.append(
            tuple(Stretch(a, b, any(c <= a < d for c, d in untouched)) for a, b in cuts)
        )
        untouched = [
            part
            for a, b in untouched
            for part in ((a, min(b, start)), (max(a, stop), b))
            if part[0] < part[1]
        ]
    return Coverage(tuple(stretches), tuple(untouched))


def must_follow(operations: Sequence[Operation], memory: WorkspaceMap) -> set[int]:
    """Attentions that may not run beside the kernel call before them, by their place: they read
    what was computed after the last kernel call but one, or write where it is used, and beside the
    last call and its merge it may not be there yet, or still be read."""
    following = set()
    calls = 0
    computed: dict[str, int] = {}  # calls that had begun when a buffer was last computed
    used: dict[str, list[Piece]] = {}  # by computations since the last call
    for at, op in enumerate(operations):
        if isinstance(op, Attend | AttendBackward):
            late = any(computed.get(name, -1) >= calls for name in _kernel_inputs(op))
            if late or any(_shares(piece, used, memory) for piece in _written_by_kernels(op)):
                following.add(at)
            if op.calls:
                calls += len(op.calls)
                used = {}
        if not isinstance(op, Communication):
            computed.update(dict.fromkeys(op.written, calls))
            for piece in (*reads(op), *writes(op)):
                used.setdefault(piece.buffer, []).append(piece)
    return following


def _written_by_kernels(op: Attend | AttendBackward) -> list[Piece]:
    """What a kernel may write itself, since nothing is there that results are added to."""
    if isinstance(op, Attend):
        return [op.out] if op.fresh else []
    return [op.grad_q] * op.fresh_q + [op.grad_k, op.grad_v] * op.fresh_kv


def _shares(piece: Piece, used: Mapping[str, Sequence[Piece]], memory: WorkspaceMap) -> bool:
    """Whether a piece has memory in common with others, listed by their buffers."""
    if any(piece.overlaps(other) for other in used.get(piece.buffer, ())):
        return True
    if piece.buffer not in memory.offsets:
        return False
    start = memory.offsets[piece.buffer]
    stop = start + memory.sizes[piece.buffer]
    return any(
        memory.offsets[name] < stop and start < memory.offsets[name] + memory.sizes[name]
        for name in used
        if name != piece.buffer and name in memory.offsets
    )


def _kernel_inputs(op: Attend | AttendBackward) -> Iterator[str]:
    inputs: tuple[Piece | None, ...] = (op.q, op.k, op.v)
    if isinstance(op, AttendBackward):
        inputs += (op.grad_out, op.lse, op.out, op.delta)
    return (piece.buffer for piece in inputs if piece is not None)
