"""The backward pass of one operation: its calls, and what those that share rows prepare together.

Ready-made kernels want `out` and a finite, contiguous log-sum-exp. A stand-in for `out` is made
once for all rows of the operation, the log-sum-exp once for every run of rows that a call takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mesh_attention.kernels import BlockMask, Kernel, RowKernels
from mesh_attention.kernels.dense import DenseKernel
from mesh_attention.kernels.unseen import require_delta
from mesh_attention.runtime.accumulate import SummedRows
from mesh_attention.runtime.binding import cut
from mesh_attention.runtime.streams import ComputeStreams

__all__ = ["BackwardCall", "BackwardWork"]


@dataclass(frozen=True, slots=True)
class BackwardCall:
    kernel: Kernel
    mask: BlockMask
    queries: tuple[int, int]
    keys: tuple[int, int]
    targets: Sequence[SummedRows]  # of dq, dk, dv


class BackwardWork:
    def __init__(
        self,
        rows: RowKernels,
        calls: Sequence[BackwardCall],
        softmax_scale: float,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGE: Tensor,
        grad_out_BSHE: Tensor,
        lse_BHS: Tensor,
        out_BSHE: Tensor | None,
        delta_BHS: Tensor | None,
        *,
        streams: ComputeStreams,
        follows: bool,
    ) -> None:
        self._streams = streams
        self._follows = follows
        self._prepared = torch.cuda.Event() if streams.two else None  # type: ignore[no-untyped-call]
        self._rows = rows
        self._calls = calls
        self._softmax_scale = softmax_scale
        self._tensors = [
            (
                cut(grad_out_BSHE, 1, *call.queries),
                cut(q_BSHD, 1, *call.queries),
                cut(k_BTGD, 1, *call.keys),
                cut(v_BTGE, 1, *call.keys),
            )
            for call in calls
        ]
        self._lse = [cut(lse_BHS, 2, *call.queries) for call in calls]
        self._out = [
            None if out_BSHE is None else cut(out_BSHE, 1, *call.queries) for call in calls
        ]
        self._delta = [
            None if delta_BHS is None else cut(delta_BHS, 2, *call.queries) for call in calls
        ]
        # The rows of all calls whose kernels need `out`.
        ready_made = [call.queries for call in calls if isinstance(call.kernel, DenseKernel)]
        self._runs = {
            call.queries: self._lse[at]
            for at, call in enumerate(calls)
            if isinstance(call.kernel, DenseKernel)
        }
        self._first = min((a for a, _ in ready_made), default=0)
        self._last = max((b for _, b in ready_made), default=0)
        self._makes_out = bool(ready_made) and out_BSHE is None
        hull = (self._first, self._last)
        self._grad_out_rows = cut(grad_out_BSHE, 1, *hull)
        self._delta_rows = None if delta_BHS is None else cut(delta_BHS, 2, *hull)

    def __call__(self) -> None:
        scale, streams = self._softmax_scale, self._streams
        stand_in: Tensor | None = None
        finite: dict[tuple[int, int], Tensor] = {}
        for at, call in enumerate(self._calls):
            streams.turn()
            if at == 0:
                if self._follows:
                    streams.follow()
                if self._makes_out:
                    delta = require_delta(self._delta_rows)
                    stand_in = self._rows.stand_in(self._grad_out_rows, delta)
                finite = {run: self._rows.finite_lse(lse) for run, lse in self._runs.items()}
                if self._prepared is not None:
                    streams.record(self._prepared)
            elif at == 1 and self._prepared is not None:
                streams.wait_for(self._prepared)
            if isinstance(call.kernel, DenseKernel):
                out, lse = self._out_of(at, stand_in), finite[call.queries]
                grads = call.kernel.backward_prepared(
                    *(*self._tensors[at], out, lse), mask=call.mask, softmax_scale=scale
                )
            else:
                state = (self._out[at], self._lse[at], self._delta[at])
                grads = call.kernel.backward(
                    *(*self._tensors[at], *state), mask=call.mask, softmax_scale=scale
                )
            streams.follow()
            for target, grad in zip(call.targets, grads, strict=True):
                target.take(grad)
            del grads, grad  # before the next call asks for as much memory again
        streams.hold(stand_in, finite)

    def _out_of(self, at: int, stand_in: Tensor | None) -> Tensor:
        if stand_in is None:
            out = self._out[at]
            assert out is not None
            return out
        start, stop = self._calls[at].queries
        return cut(stand_in, 1, start - self._first, stop - self._first)
