"""The inputs of the backward kernel calls of one operation, which are prepared together.

A kernel declares which inputs it needs (`BackwardNeeds`); a plan has either `out` or `delta`. The
missing one is made for all rows of the operation at once. A finite log-sum-exp is made for every
run of rows that a call takes, since it must be contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import BackwardInputs, BackwardNeeds, Kernel, RowKernels
from mesh_attention.plan.language.program import AttendBackward
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.runtime.execute.binding import cut

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
        self._calls = [
            (
                needs,
                rows,
                BackwardInputs(
                    cut(grad_out_BSHE, 1, *rows),
                    None if out_BSHE is None else cut(out_BSHE, 1, *rows),
                    cut(lse_BHS, 2, *rows),
                    None if delta_BHS is None else cut(delta_BHS, 2, *rows),
                ),
            )
            for needs, rows in calls
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
            dtype = self._calls[0][2].lse.dtype
            made_delta = torch.empty(B, H, S, dtype=dtype, device=out.device)
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
