"""The attentions of a program on real tensors, by kernel calls under the masks of a plan.

The executor (`executor.py`) calls `Attentions.bind` for each attention, before its tensors hold
anything. It gets a function without arguments that makes the kernel calls when it is called, and
writes their results to the buffers of the program.

A buffer has rows first, (rows, batch, heads, width), so that any of its rows are contiguous memory
and can be sent as they are. Kernels take (batch, rows, heads, width) by stride, and statistics as
(batch, heads, rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache, partial
from math import inf

import torch

from mesh_attention.kernels import BackwardInputs, Block, BlockMask, BlockSize, CheckedCall, Kernel
from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import (
    Attend,
    AttendBackward,
    Communication,
    Operation,
    Program,
    reads,
    writes,
)
from mesh_attention.plan.language.workspace import WorkspaceMap
from mesh_attention.runtime.execute.binding import Views, cut
from mesh_attention.runtime.execute.call_masks import KnownRanges, masks_of
from mesh_attention.runtime.execute.frame import Frame
from mesh_attention.runtime.execute.kernel_calls import (
    KernelCalls,
    MergedRows,
    Preparation,
    SummedRows,
    coverage,
    needs_of_calls,
)
from mesh_attention.runtime.execute.memory import call_size, stand_in_block

Work = Callable[[], object]  # makes the kernel calls of an attention


class Attentions:
    """The attentions of the program of `frame`, which has its memory and streams.

    plan              the plan of the program, with the mask
    kernels           by name
    scores            softmax scale and softcap
    mask_device       the device on which kernels read row ranges
    known_ranges      masks that exist already; new masks are added to it
    program_for_mask  makes the program for the mask of a plan, if the mask decides how many SMs
                      the calls leave to transfers; None: it does not
    """

    def __init__(
        self,
        frame: Frame,
        plan: Plan,
        kernels: Mapping[str, Kernel],
        scores: tuple[float, float],
        *,
        deterministic: bool,
        mask_device: torch.device,
        known_ranges: KnownRanges,
        program_for_mask: Callable[[Plan], Program] | None = None,
    ) -> None:
        program = frame.program
        self.kernels = kernels
        self._frame, self.operations = frame, program.operations
        self._scores, self._deterministic = scores, deterministic
        self._program_for_mask = program_for_mask
        # The two streams on which kernel calls take turns; None: all calls are on one stream.
        self._turns = frame.streams if frame.two_streams else None
        self._follow = must_follow(program.operations, frame.memory) if self._turns else set()
        self._masks_for = partial(masks_of, program=program, device=mask_device)
        self.masks = self._masks_for(plan, known=known_ranges)
        covered = cache(coverage)  # the same for every slice of heads
        self._coverage = {
            at: [
                covered(rows, length, fresh=fresh)
                for rows, length, fresh in _rows_of_calls(program.operations[at])
            ]
            for at in self.masks
        }

    def for_mask(self, plan: Plan, known_ranges: KnownRanges, *, by_mask: bool) -> Attentions:
        """The same attentions for another plan, which differs in nothing but its mask. `by_mask`:
        the calls also leave as many SMs to transfers as that mask needs."""
        other = copy(self)
        other.masks = self._masks_for(plan, known=known_ranges)
        if by_mask and self._program_for_mask is not None:
            other.operations = self._program_for_mask(plan).operations
        return other

    def prepare_kernels(self) -> None:
        """Let kernels make their own tables of the masks before the first call."""
        frame = self._frame
        table = frame.program.buffer_table()
        done: set[tuple[BlockMask, BlockSize]] = set()  # the same for every slice of heads
        for at, masks in self.masks.items():
            op = self.operations[at]
            assert isinstance(op, Attend | AttendBackward)
            for call, mask in zip(op.calls, masks, strict=True):
                prepare = getattr(self.kernels[call.kernel], "prepare", None)
                if prepare is None:
                    continue
                size = call_size(frame.problem, table, op, call)
                if (mask, size) not in done:
                    done.add((mask, size))
                    prepare(frame.direction, stand_in_block(frame.call_shape, size, mask))

    def bind(self, at: int, views: Views) -> Work:
        """The kernel calls of the attention at place `at` of the program, with the tensors of its
        pieces, as a function without arguments."""
        op, row_kernels = self.operations[at], self._frame.row_choice.rows
        assert isinstance(op, Attend | AttendBackward), f"{op.name} is no attention"
        q, k, v = (views.tokens(p) for p in (op.q, op.k, op.v))
        preparation: Preparation | None = None
        targets: list[MergedRows | SummedRows]
        if isinstance(op, Attend):
            direction = Direction.FORWARD
            out, lse = views.tokens(op.out), views.statistics(op.lse)
            (covered,) = self._coverage[at]
            targets = [MergedRows(row_kernels, out, lse, rows) for rows in covered.stretches]
            untouched = [(out[:, a:b], 0.0) for a, b in covered.untouched]
            untouched += [(lse[:, :, a:b], -inf) for a, b in covered.untouched]
        else:
            direction = Direction.BACKWARD
            by_query, by_key = self._coverage[at]
            grads = [views.tokens(p) for p in (op.grad_q, op.grad_k, op.grad_v)]
            sums = [*zip(grads, (by_query, by_key, by_key), strict=True)]
            targets = [
                SummedRows(row_kernels, [(grad, c.stretches[i]) for grad, c in sums])
                for i in range(len(op.calls))
            ]
            untouched = [(grad[:, a:b], 0.0) for grad, c in sums for a, b in c.untouched]
            whole = BackwardInputs(
                views.tokens(op.grad_out),
                None if op.out is None else views.tokens(op.out),
                views.statistics(op.lse),
                None if op.delta is None else views.statistics(op.delta),
            )
            needs = needs_of_calls(op, self.kernels)
            preparation = Preparation(row_kernels, needs, whole)
        calls = []
        for call, mask, target in zip(op.calls, self.masks[at], targets, strict=True):
            block = Block(
                cut(q, 1, call.q_start, call.q_stop),
                cut(k, 1, call.k_start, call.k_stop),
                cut(v, 1, call.k_start, call.k_stop),
                mask,
                *self._scores,
                call.leave_sms,
                target.into(q.dtype),
                deterministic=self._deterministic,
            )
            calls.append((CheckedCall(self.kernels[call.kernel], direction, block), target))
        follows = at in self._follow
        return KernelCalls(calls, untouched, preparation, self._turns, follows=follows)


def _rows_of_calls(op: Operation) -> Iterator[tuple[tuple[tuple[int, int], ...], int, bool]]:
    """For queries, and in a backward pass for keys too: the rows that each call takes, the number
    of all rows, and whether their results hold nothing yet."""
    assert isinstance(op, Attend | AttendBackward)
    queries = tuple([(call.q_start, call.q_stop) for call in op.calls])
    yield queries, op.q.num_rows, op.fresh if isinstance(op, Attend) else op.fresh_q
    if isinstance(op, AttendBackward):
        keys = tuple([(call.k_start, call.k_stop) for call in op.calls])
        yield keys, op.k.num_rows, op.fresh_kv


def must_follow(operations: Sequence[Operation], memory: WorkspaceMap) -> set[int]:
    """The places of attentions that may not run beside the kernel call before them. They read what
    that call, its merge or a later computation writes, which may not be there yet; or they let a
    kernel write to memory that one of these still uses."""
    following = set()
    calls = 0
    computed: dict[str, int] = {}  # number of calls made when a buffer was last computed
    used: dict[str, list[Piece]] = {}  # pieces by buffer, from the last attention with calls on
    for at, op in enumerate(operations):
        if isinstance(op, Attend | AttendBackward):
            late = any(computed.get(name, -1) >= calls for name in _kernel_inputs(op))
            if late or any(_overlaps(piece, used, memory) for piece in _written_by_kernels(op)):
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
    """The pieces to which a kernel may write directly, as they hold nothing to add results to."""
    if isinstance(op, Attend):
        return [op.out] if op.fresh else []
    return [op.grad_q] * op.fresh_q + [op.grad_k, op.grad_v] * op.fresh_kv


def _overlaps(piece: Piece, used: Mapping[str, Sequence[Piece]], memory: WorkspaceMap) -> bool:
    """Whether a piece has memory in common with a piece in `used`, a list for each buffer."""
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
