"""The kernel calls of one attention of a program: their inputs, and the rows for their results.

Views are made once, when the operation is bound to its tensors. Accumulators hold nothing at first:
the first call to touch a row stores there (`fresh`), the others add. A kernel may write its result
to the accumulator itself, where nothing is that it must be added to.

A backward kernel declares which inputs it needs (`BackwardNeeds`), but a plan has either `out` or
`delta`. The other is made for all calls at once. A finite log-sum-exp is made for every run of rows
that a call takes, since it must be contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import BackwardInputs, BackwardNeeds, Kernel, RowKernels
from mesh_attention.plan.language.program import AttendBackward
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.runtime.device import ComputeStreams
from mesh_attention.runtime.execute.binding import cut

Into = tuple[Tensor | None, ...]  # where a kernel may write its results
_Parts = Sequence[tuple[Any, ...]]  # tensors, rows of the result or None for all, whether fresh
Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Missing:
    """The query rows of an operation for which inputs of its kernel calls have to be made."""

    out: Interval | None
    delta: Interval | None
    lse: tuple[Interval, ...]

    @classmethod
    def of(
        cls, calls: Sequence[tuple[BackwardNeeds, Interval]], *, has_out: bool, has_delta: bool
    ) -> Missing:
        return cls(
            _hull([rows for needs, rows in calls if needs.out and not has_out]),
            _hull([rows for needs, rows in calls if needs.delta and not has_delta]),
            tuple(dict.fromkeys(rows for needs, rows in calls if needs.finite_lse)),
        )

    def head_bytes(self, problem: Problem) -> int:
        """Bytes of what is made, for one head of one batch element."""
        statistics = sum(stop - start for start, stop in (self.delta or (0, 0), *self.lse))
        start, stop = self.out or (0, 0)
        out_bytes = (stop - start) * problem.v_dim * problem.element_bytes
        return statistics * problem.accumulate_bytes + out_bytes


def _hull(intervals: Sequence[Interval]) -> Interval | None:
    """The smallest interval that has all of these in it."""
    if not intervals:
        return None
    return min(start for start, _ in intervals), max(stop for _, stop in intervals)


class Preparation:
    """Makes the inputs of the kernel calls of one backward operation. `calls`: what each needs, and
    its rows of queries; `whole`: the inputs of the operation, for all its rows."""

    def __init__(
        self,
        kernels: RowKernels,
        calls: Sequence[tuple[BackwardNeeds, Interval]],
        whole: BackwardInputs,
    ) -> None:
        has_out, has_delta = whole.out is not None, whole.delta is not None
        if not has_out and not has_delta:
            raise MeshAttentionError("backward needs `out` or `delta`, and was given neither")
        self._kernels = kernels
        self._calls = [(needs, rows, _rows(whole, rows)) for needs, rows in calls]
        missing = Missing.of(calls, has_out=has_out, has_delta=has_delta)
        self._lse = {rows: cut(whole.lse, 2, *rows) for rows in missing.lse}
        # Where the rows that are made begin, and what they are made of.
        self._for_out = missing.out and (missing.out[0], _rows(whole, missing.out))
        self._for_delta = missing.delta and (missing.delta[0], _rows(whole, missing.delta))

    def make(self) -> list[BackwardInputs]:
        first_out = first_delta = 0
        made_out = made_delta = None
        if self._for_out is not None:
            first_out, (grad_out, _, _, delta) = self._for_out
            assert delta is not None
            made_out = self._kernels.stand_in(grad_out, delta)
        if self._for_delta is not None:
            first_delta, (grad_out, out, lse, _) = self._for_delta
            assert out is not None
            made_delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
            self._kernels.delta(out, grad_out, made_delta)
        finite = {rows: self._kernels.finite_lse(lse) for rows, lse in self._lse.items()}
        prepared = []
        for needs, rows, inputs in self._calls:
            start, stop = rows
            if needs.out and made_out is not None:
                inputs = inputs._replace(out=cut(made_out, 1, start - first_out, stop - first_out))
            if needs.delta and made_delta is not None:
                delta = cut(made_delta, 2, start - first_delta, stop - first_delta)
                inputs = inputs._replace(delta=delta)
            if needs.finite_lse:
                inputs = inputs._replace(lse=finite[rows])
            prepared.append(inputs)
        return prepared


def _rows(whole: BackwardInputs, rows: Interval) -> BackwardInputs:
    grad_out, out, lse, delta = whole
    return BackwardInputs(
        cut(grad_out, 1, *rows),
        None if out is None else cut(out, 1, *rows),
        cut(lse, 2, *rows),
        None if delta is None else cut(delta, 2, *rows),
    )


def needs_of_calls(
    op: AttendBackward, kernels: Mapping[str, Kernel]
) -> list[tuple[BackwardNeeds, Interval]]:
    """What the kernel of each call needs, and the rows of queries that the call takes."""
    calls = []
    for call in op.calls:
        needs = kernels[call.kernel].backward_needs
        assert needs is not None, f"{call.kernel} was chosen for a pass that it has not"
        calls.append((needs, (call.q_start, call.q_stop)))
    return calls


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


class MergedRows:
    """Where the result of a forward call goes: rows of (out_BSHE, lse_BHS), into which it is
    merged."""

    def __init__(
        self, kernels: RowKernels, out: Tensor, lse: Tensor, stretches: Sequence[Stretch]
    ) -> None:
        self._merge = kernels.merge_into
        self._parts: _Parts = [
            (cut(out, 1, start, stop), cut(lse, 2, start, stop), rows, fresh)
            for (start, stop, fresh), rows in rows_in_result(stretches)
        ]

    def into(self, dtype: torch.dtype) -> Into:
        """The rows themselves, for a kernel that can write its result there; else None."""
        return (_into(self._parts, dtype),)

    def take(self, *results: Tensor) -> None:
        out, lse = results
        for acc_out, acc_lse, rows, fresh in self._parts:
            if out is acc_out:  # written there by the kernel
                acc_lse.copy_(lse)
            elif rows is None:
                self._merge(acc_out, acc_lse, out, lse, fresh=fresh)
            else:
                self._merge(acc_out, acc_lse, out[:, rows], lse[:, :, rows], fresh=fresh)


class SummedRows:
    """Where the results of a backward call go: rows of gradients (B, S, H, D), to which they are
    added."""

    def __init__(
        self, kernels: RowKernels, sums: Sequence[tuple[Tensor, Sequence[Stretch]]]
    ) -> None:
        self._sum = kernels.sum
        self._sums: list[_Parts] = [
            [
                (cut(total, 1, start, stop), rows, fresh)
                for (start, stop, fresh), rows in rows_in_result(stretches)
            ]
            for total, stretches in sums
        ]

    def into(self, dtype: torch.dtype) -> Into:
        return tuple(_into(parts, dtype) for parts in self._sums)

    def take(self, *results: Tensor) -> None:
        for grad, parts in zip(results, self._sums, strict=True):
            for total, rows, fresh in parts:
                part = grad if rows is None else grad[:, rows]
                if part is not total:  # or the kernel has written it there
                    self._sum((part,) if fresh else (total, part), total)


def _into(parts: _Parts, dtype: torch.dtype) -> Tensor | None:
    if len(parts) != 1:
        return None
    target, *_, fresh = parts[0]
    return target if fresh and target.dtype == dtype else None


class KernelCalls:
    """All kernel calls of one attention, to be made in every call of the program."""

    def __init__(
        self,
        calls: Sequence[tuple[Callable[..., tuple[Tensor, ...]], MergedRows | SummedRows]],
        untouched: Sequence[tuple[Tensor, float]],
        preparation: Preparation | None,
        turns: ComputeStreams | None,
        *,
        follows: bool,
    ) -> None:
        """`calls`: each with what takes its results. `untouched`: rows that no call computes, and
        what they shall hold. `turns`: streams on which calls take turns, if they do. `follows`: the
        first call reads what was computed right before it."""
        self._calls, self._untouched = calls, untouched
        self._preparation, self._turns, self._follows = preparation, turns, follows
        two = turns is not None and preparation is not None
        self._prepared: Any = torch.cuda.Event() if two else None  # type: ignore[no-untyped-call]

    def __call__(self) -> None:
        turns = self._turns
        for rows, value in self._untouched:
            rows.fill_(value)
        inputs: list[BackwardInputs] = []
        for at, (call, target) in enumerate(self._calls):
            if turns is not None:
                turns.turn()
                if at == 0 and self._follows:
                    turns.follow()
                if at == 1 and self._prepared is not None:
                    turns.wait_for(self._prepared)
            if at == 0 and self._preparation is not None:
                inputs = self._preparation.make()
                if turns is not None:
                    turns.record(self._prepared)
            results = call(*inputs[at : at + 1])
            if turns is not None:
                turns.follow()
            target.take(*results)
            del results  # before the next call asks for as much memory again
        if turns is not None and self._preparation is not None:
            turns.hold(inputs)
