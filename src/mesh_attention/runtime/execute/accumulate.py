"""Where the results of kernel calls go: into accumulators, stored by the first, added by the rest.

Which call is the first to touch a row is known beforehand, so accumulators need no pass that clears
them; only rows that no call touches are cleared. All views are made once; a call's result is cut
only if some of its rows are fresh and some are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mesh_attention.kernels import RowKernels
from mesh_attention.runtime.execute.binding import cut


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows `start..stop` of the accumulator; `fresh` if they hold nothing yet."""

    start: int
    stop: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Coverage:
    stretches: tuple[tuple[Stretch, ...], ...]  # of each interval, in its order
    untouched: tuple[tuple[int, int], ...]


def coverage(intervals: Sequence[tuple[int, int]], length: int, *, fresh: bool) -> Coverage:
    """
    >>> found = coverage([(0, 4), (2, 6)], 8, fresh=True)
    >>> [(s.start, s.stop, s.fresh) for s in found.stretches[1]]
    [(2, 4, False), (4, 6, True)]
    >>> found.untouched
    ((6, 8),)
    """
    if not fresh:
        return Coverage(tuple((Stretch(a, b, False),) for a, b in intervals), ())
    untouched = [(0, length)]
    stretches = []
    for start, stop in intervals:
        new = [(max(a, start), min(b, stop)) for a, b in untouched if a < stop and start < b]
        stretches.append(_alternating(start, stop, new))
        untouched = [
            part
            for a, b in untouched
            for part in ((a, min(b, start)), (max(a, stop), b))
            if part[0] < part[1]
        ]
    return Coverage(tuple(stretches), tuple(untouched))


def _alternating(start: int, stop: int, new: list[tuple[int, int]]) -> tuple[Stretch, ...]:
    """`start..stop` cut into what is new and what is not."""
    result = []
    at = start
    for a, b in new:
        if at < a:
            result.append(Stretch(at, a, False))
        result.append(Stretch(a, b, True))
        at = b
    if at < stop:
        result.append(Stretch(at, stop, False))
    return tuple(result)


class MergedRows:
    """The rows of (out_BSHE, lse_BHS) that one call's partial result is merged into."""

    def __init__(
        self, kernels: RowKernels, out: Tensor, lse: Tensor, stretches: Sequence[Stretch]
    ) -> None:
        self._kernels = kernels
        start = stretches[0].start if stretches else 0
        self._parts = [
            (
                cut(out, 1, s.start, s.stop),
                cut(lse, 2, s.start, s.stop),
                None if len(stretches) == 1 else slice(s.start - start, s.stop - start),
                s.fresh,
            )
            for s in stretches
        ]

    def take(self, out: Tensor, lse: Tensor) -> None:
        merge = self._kernels.merge_into
        for acc_out, acc_lse, rows, fresh in self._parts:
            if out is acc_out:  # written there by the kernel
                acc_lse.copy_(lse)
            elif rows is None:
                merge(acc_out, acc_lse, out, lse, fresh=fresh)
            else:
                merge(acc_out, acc_lse, out[:, rows], lse[:, :, rows], fresh=fresh)


class SummedRows:
    """The rows of a gradient (B, S, H, D) that one call's gradient is added to."""

    def __init__(self, kernels: RowKernels, total: Tensor, stretches: Sequence[Stretch]) -> None:
        self._kernels = kernels
        start = stretches[0].start if stretches else 0
        self._parts = [
            (
                cut(total, 1, s.start, s.stop),
                None if len(stretches) == 1 else slice(s.start - start, s.stop - start),
                s.fresh,
            )
            for s in stretches
        ]

    def take(self, grad: Tensor) -> None:
        for total, rows, fresh in self._parts:
            part = grad if rows is None else grad[:, rows]
            if part is total:  # written there by the kernel
                continue
            self._kernels.sum((part,) if fresh else (total, part), total)


def wanted(parts: MergedRows | SummedRows, dtype: torch.dtype) -> Tensor | None:
    """Where a kernel may write its result, if nothing is there yet that it is to be added to."""
    if len(parts._parts) != 1:
        return None
    target, *_, fresh = parts._parts[0]
    return target if fresh and target.dtype == dtype else None


def clear(out: Tensor, lse: Tensor | None = None) -> None:
    """What rows that no call touches hold."""
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
