"""Which kernel calls an attention of a program becomes: its rectangles, or one call for all.

A plan holds rectangles, which any dense kernel can do. Where a kernel takes row ranges, one call
sees exactly what the mask shows of all gathered rows, in whatever order they lie, and nothing has
to be merged. The faster way is taken, as `kernels/speed.py` predicts it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from mesh_attention.kernels import (
    Block,
    BlockMask,
    BlockSize,
    Causal,
    Choice,
    Full,
    Kernel,
    KernelRefusedError,
    MaskKind,
    Request,
    RowRange,
    choose,
)
from mesh_attention.kernels.speed import predicted_seconds, takes_whole_attentions
from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.draw.work import CallPairs
from mesh_attention.plan.layout import Layout, LayoutKind, slice_spans
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Attend, AttendBackward, Call, CallKind, Program
from mesh_attention.plan.row_ranges import RowRanges
from mesh_attention.plan.runs import Run
from mesh_attention.runtime.binding import CallShape

Kernels = Mapping[MaskKind, Kernel]
Masks = dict[int, tuple[BlockMask, ...]]  # of the calls of an attention, by its place
KnownRanges = dict[tuple[tuple[Run, ...], tuple[Run, ...]], RowRange]  # by queries and keys


def choose_kernels(
    plan: Plan,
    call_shape: CallShape,
    direction: Direction,
    force: str | None,
    *,
    softcap: bool,
    deterministic: bool,
    lse_gradient: bool,
) -> dict[MaskKind, Choice | KernelRefusedError]:
    """For every kind of mask, also those that no call of the program may have."""
    problem = plan.problem
    cuda = call_shape.device.type == "cuda"
    padded = any(x.padded_tokens > x.num_tokens for x in (plan.q_layout, plan.kv_layout))
    found: dict[MaskKind, Choice | KernelRefusedError] = {}
    for kind in MaskKind:
        request = Request(
            direction=direction,
            device_type=call_shape.device.type,
            capability=torch.cuda.get_device_capability(call_shape.device) if cuda else None,
            dtype=call_shape.dtype,
            head_dim=problem.head_dim,
            v_head_dim=problem.v_dim,
            num_heads=problem.num_heads,
            num_kv_heads=problem.kv_heads,
            mask=kind,
            softcap=softcap,
            padded=padded,
            scattered=plan.kv_layout.kind is LayoutKind.STRIPED,
            intervals=problem.rows.most_intervals,
            deterministic=deterministic,
            lse_gradient=lse_gradient,
        )
        try:
            found[kind] = choose(request, force=force)
        except KernelRefusedError as refused:
            found[kind] = refused
    return found


def chosen(found: Choice | KernelRefusedError) -> Choice:
    if isinstance(found, KernelRefusedError):
        raise found
    return found


@dataclass(frozen=True)
class FasterCalls:
    """What was chosen for the attentions of a program, and why: predicted seconds of all calls."""

    program: Program
    whole: int = 0  # attentions that are one call
    cut: int = 0  # and those that are rectangles
    seconds_whole: float = 0.0
    seconds_cut: float = 0.0

    def __str__(self) -> str:
        if not self.whole + self.cut:
            return "rectangles: no kernel takes any mask at a good rate"
        if math.isinf(self.seconds_cut):
            return "all attentions in one call: the kernel asked for takes no rectangles"
        return (
            f"{self.whole} of {self.whole + self.cut} attentions in one call; by rates of an H200 "
            f"{self.seconds_whole * 1e3:.3g} ms if all were, {self.seconds_cut * 1e3:.3g} ms cut "
            "into rectangles"
        )


def faster_calls(
    program: Program, plan: Plan, kernels: Kernels, direction: Direction
) -> FasterCalls:
    """The program with one call in place of rectangles, where that is predicted to be faster."""
    if not takes_whole_attentions(kernels.get(MaskKind.RANGE)):
        return FasterCalls(program)
    pairs_of, table = CallPairs(plan), program.buffer_table()
    operations = list(program.operations)
    numbers = [0, 0]
    seconds = [0.0, 0.0]
    for at, op in enumerate(operations):
        if not isinstance(op, Attend | AttendBackward) or not op.calls:
            continue
        pairs = [pairs_of(op, table, call) for call in op.calls]

        one = whole_call(op)
        cut, whole = (
            _seconds(
                kernels,
                direction,
                [(call, n, call_size(plan.problem, table, op, call)) for call, n in calls],
            )
            for calls in (zip(op.calls, pairs, strict=True), [(one, sum(pairs))])
        )
        better = whole < cut
        numbers[better] += 1
        seconds[0] += whole
        seconds[1] += cut
        if better:
            operations[at] = replace(op, calls=(one,))
    changed = replace(program, operations=tuple(operations)) if numbers[1] else program
    return FasterCalls(changed, numbers[1], numbers[0], *seconds)


def _seconds(
    kernels: Kernels, direction: Direction, calls: Sequence[tuple[Call, int, BlockSize]]
) -> float:
    kinds = [MaskKind(call.kind) for call, _, _ in calls]
    if any(kind not in kernels for kind in kinds):
        return math.inf  # the kernel that was asked for by name refuses them
    given = [
        (kernels[kind], kind, pairs, size)
        for kind, (_, pairs, size) in zip(kinds, calls, strict=True)
    ]
    return predicted_seconds(direction, given)


def whole_call(op: Attend | AttendBackward) -> Call:
    return Call(CallKind.RANGE, 0, op.q.stop - op.q.start, 0, op.k.stop - op.k.start)


def call_size(
    problem: Problem, table: Mapping[str, Buffer], op: Attend | AttendBackward, call: Call
) -> BlockSize:
    heads, kv_heads = (piece.num_heads(table[piece.buffer]) for piece in (op.q, op.k))
    return BlockSize(
        *(call.q_stop - call.q_start, call.k_stop - call.k_start, heads, kv_heads),
        *(problem.head_dim, problem.v_dim),
        *(problem.element_bytes, problem.accumulate_bytes),
    )


def stand_in_block(call_shape: CallShape, size: BlockSize, mask: BlockMask) -> Block:
    """A block with the shapes of a call, and nothing behind them."""
    nothing = torch.empty((), dtype=call_shape.dtype, device=call_shape.device)

    def stand_in(rows: int, heads: int, width: int) -> Tensor:
        whole = (call_shape.batch, rows, heads, width)
        return nothing.new_empty(1, 1, heads, width).expand(whole)

    q = stand_in(size.num_queries, size.num_heads, size.head_dim)
    k = stand_in(size.num_keys, size.num_kv_heads, size.head_dim)
    v = stand_in(size.num_keys, size.num_kv_heads, size.v_head_dim)
    return Block(q, k, v, mask, softmax_scale=1.0)


# Masks.


def masks_of(
    plan: Plan, program: Program, kernels: Kernels, device: torch.device, known: KnownRanges
) -> Masks:
    """The masks of a program's kernel calls, made once, on the device from a few numbers. Kernels
    in plain PyTorch have them on the CPU, to skip what is hidden without asking the device. Those
    of both passes may be the same, and are kept in `known`."""
    by_device = takes_whole_attentions(kernels.get(MaskKind.RANGE))
    made = _Ranges(plan, device if by_device else torch.device("cpu"), known)
    table = program.buffer_table()
    return {
        at: tuple(made.mask(table, op, call) for call in op.calls)
        for at, op in enumerate(program.operations)
        if isinstance(op, Attend | AttendBackward)
    }


class _Ranges:
    """Attentions with the same rows share a mask, and with it what kernels make of it."""

    def __init__(self, plan: Plan, device: torch.device, known: KnownRanges) -> None:
        self._plan = plan
        self._rows = plan.problem.rows
        self._device = device
        self._known = known
        self._runs = cache(_runs)  # slices of heads have the same rows

    def mask(
        self, table: Mapping[str, Buffer], op: Attend | AttendBackward, call: Call
    ) -> BlockMask:
        if call.kind is CallKind.FULL:
            return Full()
        if call.kind is CallKind.CAUSAL:
            return Causal()
        queries = slice_spans(op.q.spans(table[op.q.buffer]), call.q_start, call.q_stop)
        keys = slice_spans(op.k.spans(table[op.k.buffer]), call.k_start, call.k_stop)
        key = self._runs(self._plan.q_layout, queries), self._runs(self._plan.kv_layout, keys)
        if key not in self._known:
            self._known[key] = row_range(self._rows, *key, self._device)
        return self._known[key]


def _runs(layout: Layout, spans: tuple[tuple[int, int], ...]) -> tuple[Run, ...]:
    """Consecutive ones made one: a rank may hold the tokens of many."""
    found: list[Run] = []
    for run in (run for span in spans for run in layout.runs(*span)):
        before = found[-1] if found else None
        if before and before.count == run.count == 1 and before.stop == run.start:
            found[-1] = Run(before.start, before.block + run.block)
        else:
            found.append(run)
    return tuple(found)


def row_range(
    rows: RowRanges, queries: tuple[Run, ...], keys: tuple[Run, ...], device: torch.device
) -> RowRange:
    """What these queries see of these keys. Padding is seen by nobody and sees nothing: padded keys
    have the position -1, so that a kernel can leave out what lies there."""
    position = positions(keys, device)
    query = positions(queries, device)
    if not rows.segments:
        nothing = torch.zeros_like(query)
        return RowRange(nothing, nothing, position)
    most = max(rows.intervals_between(run.start, run.stop) for run in queries)
    lines = _on(device, torch.tensor(rows.table(most), dtype=torch.int32))
    lo, lo_slope, hi, hi_slope = lines.index_select(-1, _segments(rows, queries, query))
    lo, hi = torch.addcmul(lo, lo_slope, query), torch.addcmul(hi, hi_slope, query)
    if any(run.stop > rows.q_tokens for run in queries):
        real = query < rows.q_tokens
        lo, hi = lo * real, hi * real
    if any(run.stop > rows.kv_tokens for run in keys):
        position.masked_fill_(position >= rows.kv_tokens, -1)
    first = keys[0].start
    if len(keys) > 1 or keys[0].count > 1 or keys[0].stop > rows.kv_tokens:
        return RowRange(lo, hi, position)
    begin, slope, _, _ = rows.table(1)
    from_first = most == 1 and not slope.any() and bool((begin <= first).all())
    return RowRange(lo, hi, position, first, from_first)


def _segments(rows: RowRanges, queries: tuple[Run, ...], query: Tensor) -> Tensor:
    """The segment of the mask in which each query lies."""
    device = query.device
    if any(run.count > 1 for run in queries):
        starts = _on(device, torch.tensor([s.start for s in rows.segments], dtype=torch.int32))
        return (torch.searchsorted(starts, query, right=True) - 1).clamp_(min=0)
    # Consecutive queries: as many of each segment as the run has.
    at: list[int] = []
    counts: list[int] = []
    for run in queries:
        between = rows.segments_between(run.start, run.stop)
        cuts = [run.start, *(rows.segments[i].start for i in between[1:]), run.stop]
        at += between or (0,)
        counts += [b - a for a, b in pairwise(cuts)]
    both = _on(device, torch.tensor([at, counts], dtype=torch.int64))
    return torch.repeat_interleave(*both, output_size=len(query))


def _on(device: torch.device, x: Tensor) -> Tensor:
    """A copy there, for which the host does not wait."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def positions(runs: tuple[Run, ...], device: torch.device) -> Tensor:
    """Of all rows, one run after the other."""
    found = [
        torch.arange(run.count, dtype=torch.int32, device=device)[:, None] * run.stride
        + torch.arange(run.start, run.start + run.block, dtype=torch.int32, device=device)
        for run in runs
    ]
    return torch.cat([x.flatten() for x in found])
