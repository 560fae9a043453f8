"""The masks of kernel calls: what each query sees of the rows of a buffer, as they lie there.

The executor makes them once for a plan, on the device, from a few numbers: runs of positions and
segments of the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mesh_attention.kernels import BlockMask, Causal, Full, RowRange
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.program import Attend, AttendBackward, Call, CallKind, Program
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import Run, join_runs
from mesh_attention.plan.problem.spans import slice_spans

Masks = dict[int, tuple[BlockMask, ...]]  # of the calls of an attention, by its place
Column = NDArray[np.int32]  # of numbers of segments, or of those of each of several intervals
Spread = Callable[[Column], Tensor]
KnownRanges = dict[tuple[tuple[Run, ...], tuple[Run, ...]], RowRange]  # by queries and keys


def masks_of(plan: Plan, program: Program, device: torch.device, known: KnownRanges) -> Masks:
    """The masks of a program's kernel calls. Attentions with the same rows share a mask, and with
    it what kernels make of it; `known` keeps them, so that both passes may share them too."""
    table, problem = program.buffer_table(), plan.problem

    def mask(op: Attend | AttendBackward, call: Call) -> BlockMask:
        if call.kind is CallKind.FULL:
            return Full()
        if call.kind is CallKind.CAUSAL:
            return Causal()
        queries = slice_spans(op.q.spans(table[op.q.buffer]), call.q_start, call.q_stop)
        keys = slice_spans(op.k.spans(table[op.k.buffer]), call.k_start, call.k_stop)
        key = _runs(plan.q_layout, queries), _runs(plan.kv_layout, keys)
        tokens = problem.q_tokens, problem.keys
        real = all(run.stop <= n for n, runs in zip(tokens, key, strict=True) for run in runs)
        if problem.mask.is_full and real:  # all see all: one mask for all calls of a size
            key = _from_first(key[0]), _from_first(key[1])
        if key not in known:
            known[key] = row_range(problem.rows, *key, device)
        return known[key]

    return {
        at: tuple(mask(op, call) for call in op.calls)
        for at, op in enumerate(program.operations)
        if isinstance(op, Attend | AttendBackward)
    }


@lru_cache(maxsize=64)  # slices of heads have the same rows, and where heads come first all masks
def _runs(layout: Layout, spans: tuple[tuple[int, int], ...]) -> tuple[Run, ...]:
    return join_runs(run for span in spans for run in layout.runs(*span))


def _from_first(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """As many rows, from the first position on."""
    return (Run(0, sum(run.num_tokens for run in runs)),)


def row_range(
    rows: RowRanges, queries: tuple[Run, ...], keys: tuple[Run, ...], device: torch.device
) -> RowRange:
    """What these queries see of these keys, by positions. Padding is seen by nobody and sees
    nothing: padded keys have the position -1, so that a kernel can leave out what lies there."""
    position = positions(keys, device)
    query = position if queries == keys else positions(queries, device)
    if not rows.segments:
        nothing = torch.zeros_like(query)
        return RowRange(nothing, nothing, position)
    most = max(rows.intervals_between(run.start, run.stop) for run in queries)
    # Lines on the segments of the mask.
    lo_base, lo_slope, hi_base, hi_slope = rows.table(most).astype(np.int32)
    spread = _spread(rows, queries, query)
    lo, hi = _line(lo_base, lo_slope, spread, query), _line(hi_base, hi_slope, spread, query)
    if any(run.stop > rows.q_tokens for run in queries):
        real = query < rows.q_tokens
        lo, hi = lo * real, hi * real
    if any(run.stop > rows.kv_tokens for run in keys):
        position.masked_fill_(position >= rows.kv_tokens, -1)
    if keys[-1].stop > rows.kv_tokens or any(a.stop > b.start for a, b in pairwise(keys)):
        return RowRange(lo, hi, position)
    begin, slope, _, _ = rows.table(1)
    from_first = most == 1 and not slope.any() and bool((begin <= keys[0].start).all())
    return RowRange(lo, hi, position, ascending=True, from_first=from_first)


def _line(base: Column, slope: Column, spread: Spread, query: Tensor) -> Tensor:
    """base + slope * position, for each query. Slopes are 0 or 1, and mostly the same in all
    segments."""
    bound = spread(base)
    if slope.all():
        return bound.add_(query)
    return torch.addcmul(bound, spread(slope), query) if slope.any() else bound


def _spread(rows: RowRanges, queries: tuple[Run, ...], query: Tensor) -> Spread:
    """A function from values of segments to values of queries: each has that of its segment."""
    device = query.device
    if device.type != "cpu" or sum(run.count for run in queries) > _MANY_BLOCKS:
        starts = _on(device, torch.from_numpy(rows.edges[0].astype(np.int32)))
        index = (torch.searchsorted(starts, query, right=True) - 1).clamp_(min=0)
        return lambda column: _on(device, torch.from_numpy(column)).index_select(-1, index)
    # Consecutive queries need not be looked up: as many of each segment as the block has.
    at: list[int] = []
    counts: list[int] = []
    for start, stop in (block for run in queries for block in run.blocks()):
        between = rows.segments_between(start, stop)
        cuts = [start, *rows.edges[0, between.start + 1 : between.stop].tolist(), stop]
        at += between or (0,)
        counts += [b - a for a, b in pairwise(cuts)]
    return lambda column: torch.from_numpy(np.repeat(column[..., at], counts, axis=-1))


_MANY_BLOCKS = 256  # of consecutive queries; then the processor looks every query up


def _on(device: torch.device, x: Tensor) -> Tensor:
    """A copy on the device, for which the host does not wait."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def positions(runs: tuple[Run, ...], device: torch.device) -> Tensor:
    """The positions of all rows, one run after the other."""
    parts = []
    for run in runs:
        rows = torch.arange(run.start, run.start + run.block, dtype=torch.int32, device=device)
        if run.count > 1:
            turns = torch.arange(run.count, dtype=torch.int32, device=device)
            rows = (turns[:, None] * run.stride + rows).flatten()
        parts.append(rows)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
