"""The backward kernel calls of one operation, and what they are given, prepared once for all.

A kernel declares what it needs (`BackwardNeeds`), a plan has either `out` or `delta`. What is
missing is made for all rows of the operation at once, a finite log-sum-exp for every run of rows
that a call takes: it must be contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import BackwardInputs, BackwardNeeds, Block, Kernel, RowKernels
from mesh_attention.kernels.results import check_backward
from mesh_attention.runtime.device.streams import ComputeStreams
from mesh_attention.runtime.execute.accumulate import SummedRows, clear
from mesh_attention.runtime.execute.binding import cut

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Missing:
    """What has to be made for the calls of an operation: by intervals of its query rows."""

    out: Interval | None
    delta: Interval | None
    lse: tuple[Interval, ...]

    @classmethod
    def find(
        cls, calls: Sequence[tuple[BackwardNeeds, Interval]], *, has_out: bool, has_delta: bool
    ) -> Missing:
        return cls(
            _hull([rows for needs, rows in calls if needs.out and not has_out]),
            _hull([rows for needs, rows in calls if needs.delta and not has_delta]),
            tuple(dict.fromkeys(rows for needs, rows in calls if needs.finite_lse)),
        )

    def num_bytes(
        self, *, num_heads: int, v_head_dim: int, element_bytes: int, accumulate_bytes: int
    ) -> int:
        """For one batch element."""
        statistics = sum(stop - start for start, stop in (self.delta or (0, 0), *self.lse))
        start, stop = self.out or (0, 0)
        out = (stop - start) * v_head_dim
        return num_heads * (statistics * accumulate_bytes + out * element_bytes)


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
        self._given = [
            BackwardInputs(
                cut(grad_out_BSHE, 1, *rows),
                None if out_BSHE is None else cut(out_BSHE, 1, *rows),
                cut(lse_BHS, 2, *rows),
                None if delta_BHS is None else cut(delta_BHS, 2, *rows),
            )
            for _, rows in calls
        ]
        given = {"has_out": out_BSHE is not None, "has_delta": delta_BHS is not None}
        missing = Missing.find(calls, **given)
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
            dtype = self._given[0].lse.dtype
            made_delta = torch.empty(B, H, S, dtype=dtype, device=out.device)
            self._kernels.delta(out, grad_out, made_delta)
        finite = {rows: self._kernels.finite_lse(lse) for rows, lse in self._lse.items()}
        prepared = []
        for (needs, rows), given in zip(self._calls, self._given, strict=True):
            grad_out_rows, out_rows, lse_rows, delta_rows = given
            if needs.out and made_out is not None:
                out_rows = cut(made_out, 1, rows[0] - first_out, rows[1] - first_out)
            if needs.delta and made_delta is not None:
                delta_rows = cut(made_delta, 2, rows[0] - first_delta, rows[1] - first_delta)
            if needs.finite_lse:
                lse_rows = finite[rows]
            prepared.append(BackwardInputs(grad_out_rows, out_rows, lse_rows, delta_rows))
        return prepared


@dataclass(frozen=True, slots=True)
class BackwardCall:
    kernel: Kernel
    block: Block
    queries: Interval
    targets: Sequence[SummedRows]  # of dq, dk, dv


class BackwardCalls:
    """All kernel calls of one operation on its tensors, to be made in every call of the program.

    `untouched` rows of the gradients are seen by no call; `follows`: the first call reads what was
    computed right before it.
    """

    def __init__(
        self,
        rows: RowKernels,
        calls: Sequence[BackwardCall],
        whole: BackwardInputs,
        *,
        untouched: Sequence[Tensor],
        streams: ComputeStreams,
        follows: bool,
    ) -> None:
        self._untouched = untouched
        self._streams = streams
        self._follows = follows
        self._prepared = torch.cuda.Event() if streams.two else None  # type: ignore[no-untyped-call]
        self._calls = calls
        wanted = [(backward_needs(call.kernel), call.queries) for call in calls]
        self._preparation = Preparation(rows, wanted, whole)

    def __call__(self) -> None:
        streams = self._streams
        for rows in self._untouched:
            clear(rows)
        inputs: list[BackwardInputs] = []
        for at, call in enumerate(self._calls):
            streams.turn()
            if at == 0:
                if self._follows:
                    streams.follow()
                inputs = self._preparation.make()
                if self._prepared is not None:
                    streams.record(self._prepared)
            elif at == 1 and self._prepared is not None:
                streams.wait_for(self._prepared)
            grads = call.kernel.backward(call.block, inputs[at])
            check_backward(call.kernel, call.block, grads)
            streams.follow()
            for target, grad in zip(call.targets, grads, strict=True):
                target.take(grad)
            del grads, grad  # before the next call asks for as much memory again
        streams.hold(inputs)


def backward_needs(kernel: Kernel) -> BackwardNeeds:
    needs = kernel.backward_needs
    assert needs is not None, f"{kernel.name} was chosen for a pass that it has not"
    return needs
