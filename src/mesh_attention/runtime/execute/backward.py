"""The backward kernel calls of one operation and their inputs, which are prepared together.

A kernel declares which inputs it needs (`BackwardNeeds`); a plan has either `out` or `delta`. The
missing one is made for all rows of the operation at once. A finite log-sum-exp is made for every
run of rows that a call takes, since it must be contiguous. `ComputeOperations` makes these calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import (
    BackwardInputs,
    BackwardNeeds,
    Block,
    CheckedCall,
    Kernel,
    RowKernels,
)
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.runtime.device import ComputeStreams
from mesh_attention.runtime.execute.binding import cut
from mesh_attention.runtime.execute.steps import Stretch, rows_in_result

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Missing:
    """What has to be made for the calls of an operation: by intervals of its query rows."""

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
        """For one head of one batch element."""
        statistics = sum(stop - start for start, stop in (self.delta or (0, 0), *self.lse))
        start, stop = self.out or (0, 0)
        out_bytes = (stop - start) * problem.v_dim * problem.element_bytes
        return statistics * problem.accumulate_bytes + out_bytes


def _hull(intervals: Sequence[Interval]) -> Interval | None:
    if not intervals:
        return None
    return min(start for start, _ in intervals), max(stop for _, stop in intervals)


class Preparation:
    """The inputs of each call, from the tensors of the operation that they are rows of."""

    def __init__(
        self,
        kernels: RowKernels,
        calls: Sequence[tuple[BackwardNeeds, Interval]],
        whole: BackwardInputs,
    ) -> None:
        grad_out_BSHE, out_BSHE, lse_BHS, delta_BHS = whole
        if out_BSHE is None and delta_BHS is None:
            raise MeshAttentionError("backward needs `out` or `delta`, and was given neither")
        self._kernels = kernels
        self._calls = calls
        self._inputs = [
            BackwardInputs(
                cut(grad_out_BSHE, 1, *rows),
                None if out_BSHE is None else cut(out_BSHE, 1, *rows),
                cut(lse_BHS, 2, *rows),
                None if delta_BHS is None else cut(delta_BHS, 2, *rows),
            )
            for _, rows in calls
        ]
        missing = Missing.of(calls, has_out=out_BSHE is not None, has_delta=delta_BHS is not None)
        self._lse = {rows: cut(lse_BHS, 2, *rows) for rows in missing.lse}
        # Where the rows that are made begin, and what they are made of.
        self._for_out: tuple[int, Tensor, Tensor] | None = None
        self._for_delta: tuple[int, Tensor, Tensor] | None = None
        if (rows := missing.out) is not None and delta_BHS is not None:
            self._for_out = rows[0], cut(grad_out_BSHE, 1, *rows), cut(delta_BHS, 2, *rows)
        if (rows := missing.delta) is not None and out_BSHE is not None:
            self._for_delta = rows[0], cut(out_BSHE, 1, *rows), cut(grad_out_BSHE, 1, *rows)

    def make(self) -> list[BackwardInputs]:
        first_out = first_delta = 0
        made_out = made_delta = None
        if self._for_out is not None:
            first_out, grad_out, delta = self._for_out
            made_out = self._kernels.stand_in(grad_out, delta)
        if self._for_delta is not None:
            first_delta, out, grad_out = self._for_delta
            B, S, H, _ = out.shape
            dtype = self._inputs[0].lse.dtype
            made_delta = torch.empty(B, H, S, dtype=dtype, device=out.device)
            self._kernels.delta(out, grad_out, made_delta)
        finite = {rows: self._kernels.finite_lse(lse) for rows, lse in self._lse.items()}
        prepared = []
        for (needs, rows), inputs in zip(self._calls, self._inputs, strict=True):
            grad_out_rows, out_rows, lse_rows, delta_rows = inputs
            if needs.out and made_out is not None:
                out_rows = cut(made_out, 1, rows[0] - first_out, rows[1] - first_out)
            if needs.delta and made_delta is not None:
                delta_rows = cut(made_delta, 2, rows[0] - first_delta, rows[1] - first_delta)
            if needs.finite_lse:
                lse_rows = finite[rows]
            prepared.append(BackwardInputs(grad_out_rows, out_rows, lse_rows, delta_rows))
        return prepared


class AccumulatorRows:
    """The rows of accumulators that one call's result goes to. Views are made once; a result is cut
    only if some of its rows are fresh and some are not."""

    _parts: Sequence[tuple[Any, ...]]  # tensors, rows of the result or None for all, if fresh

    def into(self, dtype: torch.dtype) -> Tensor | None:
        """Where a kernel may write its result: where nothing is that it must be added to."""
        if len(self._parts) != 1:
            return None
        target, *_, fresh = self._parts[0]
        return target if fresh and target.dtype == dtype else None


class SummedRows(AccumulatorRows):
    """The rows of a gradient (B, S, H, D) that one call's gradient is added to."""

    def __init__(self, kernels: RowKernels, total: Tensor, stretches: Sequence[Stretch]) -> None:
        self._kernels = kernels
        self._parts = [
            (cut(total, 1, start, stop), rows, fresh)
            for (start, stop, fresh), rows in rows_in_result(stretches)
        ]

    def take(self, grad: Tensor) -> None:
        for total, rows, fresh in self._parts:
            part = grad if rows is None else grad[:, rows]
            if part is not total:  # or the kernel has written it there
                self._kernels.sum((part,) if fresh else (total, part), total)


class BackwardCall(NamedTuple):
    kernel: Kernel
    block: Block
    queries: Interval
    targets: Sequence[SummedRows]  # of dq, dk, dv


class BackwardCalls:
    """All kernel calls of one operation on its tensors, to be made in every call of the program.

    `untouched` rows of the gradients are seen by no call; `turns`: streams on which calls take
    turns; `follows`: the first call reads what was computed right before it.
    """

    def __init__(
        self,
        rows: RowKernels,
        calls: Sequence[BackwardCall],
        whole: BackwardInputs,
        *,
        untouched: Sequence[Tensor],
        turns: ComputeStreams | None,
        follows: bool,
    ) -> None:
        self._untouched = untouched
        self._turns = turns
        self._follows = follows
        self._prepared: Any = None if turns is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._calls = [
            (CheckedCall(call.kernel, Direction.BACKWARD, call.block), call.targets)
            for call in calls
        ]
        needed = [(backward_needs(call.kernel), call.queries) for call in calls]
        self._preparation = Preparation(rows, needed, whole)

    def __call__(self) -> None:
        turns = self._turns
        for rows in self._untouched:
            rows.zero_()
        inputs: list[BackwardInputs] = []
        for at, (call, targets) in enumerate(self._calls):
            if turns is not None:
                turns.turn()
                if at == 0 and self._follows:
                    turns.follow()
                if at == 1:
                    turns.wait_for(self._prepared)
            if at == 0:
                inputs = self._preparation.make()
                if turns is not None:
                    turns.record(self._prepared)
            grads = call(inputs[at])
            if turns is not None:
                turns.follow()
            for target, grad in zip(targets, grads, strict=True):
                target.take(grad)
            del grads, grad  # before the next call asks for as much memory again
        if turns is not None:
            turns.hold(inputs)


def backward_needs(kernel: Kernel) -> BackwardNeeds:
    needs = kernel.backward_needs
    assert needs is not None, f"{kernel.name} was chosen for a pass that it has not"
    return needs
