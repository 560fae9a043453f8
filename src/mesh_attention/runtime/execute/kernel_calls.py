"""The kernel calls of one attention of a program, and the rows that their results go to.

Views are made once, when the operation is bound to its tensors. Accumulators hold nothing at first:
the first call to touch a row stores there (`fresh`), the others add. A kernel may write its result
to the accumulator itself, where nothing is that it must be added to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mesh_attention.kernels import BackwardInputs, RowKernels
from mesh_attention.runtime.device import ComputeStreams
from mesh_attention.runtime.execute.backward import Preparation
from mesh_attention.runtime.execute.binding import cut
from mesh_attention.runtime.execute.steps import Stretch, rows_in_result

Into = tuple[Tensor | None, ...]  # where a kernel may write its results
_Parts = Sequence[tuple[Any, ...]]  # tensors, rows of the result or None for all, whether fresh


class MergedRows:
    """Rows of (out_BSHE, lse_BHS), into which a partial result is merged."""

    def __init__(
        self, kernels: RowKernels, out: Tensor, lse: Tensor, stretches: Sequence[Stretch]
    ) -> None:
        self._merge = kernels.merge_into
        self._parts: _Parts = [
            (cut(out, 1, start, stop), cut(lse, 2, start, stop), rows, fresh)
            for (start, stop, fresh), rows in rows_in_result(stretches)
        ]

    def into(self, dtype: torch.dtype) -> Into:
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
    """Rows of gradients (B, S, H, D), to which others are added."""

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
    """To be made in every call of the program."""

    def __init__(
        self,
        calls: Sequence[tuple[Callable[..., tuple[Tensor, ...]], MergedRows | SummedRows]],
        untouched: Sequence[tuple[Tensor, float]],
        preparation: Preparation | None,
        turns: ComputeStreams | None,
        *,
        follows: bool,
    ) -> None:
        """`untouched`: rows that no call sees, and what they hold. `turns`: streams on which calls
        take turns. `follows`: the first call reads what was computed right before it."""
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
