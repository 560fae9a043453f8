"""The tensors behind a program's buffers, and its transfers and merges bound to them.

`Frame` binds operations on the workspace once, the executor those on the caller's tensors in every
call. Views of workspace buffers are made once and kept with their block of memory. Nothing keeps
the caller's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.kernels import RowKernels
from mesh_attention.plan.language.buffers import Buffer, Piece, Precision, Role
from mesh_attention.plan.language.program import (
    Communication,
    Merge,
    MergeRule,
    Operation,
    Program,
)
from mesh_attention.plan.language.workspace import WorkspaceMap
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.runtime.transport.interface import Transport

Work = Callable[..., Any]  # a bound operation: a communication takes its marks, others nothing
GRAD_LSE = "grad_lse"  # beside the inputs of a backward program: rows as those of `lse`


@dataclass(frozen=True, slots=True)
class CallShape:
    """What the tensors of a call have in common."""

    batch: int
    dtype: torch.dtype
    device: torch.device

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def dtype_of(self, buffer: Buffer) -> torch.dtype:
        return self.dtype if buffer.precision is Precision.ELEMENT else self.accumulate_dtype


@dataclass(frozen=True, slots=True)
class Views:
    """The tensors of pieces: the caller's anew in every call, those of the workspace once."""

    workspace: Mapping[str, Tensor]
    passed: Mapping[str, Tensor] = field(default_factory=dict)
    # Of the workspace: three views of each piece, and what transports make of its rows.
    pieces: dict[tuple[object, ...], _PieceViews] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)

    def rows(self, piece: Piece) -> Tensor:
        """(rows, batch, heads, width)"""
        whole = self.passed.get(piece.buffer)
        if whole is None:
            return self._of_workspace(piece).rows
        rows = cut(whole, 0, piece.start, piece.stop)
        return rows if piece.heads is None else cut(rows, 2, *piece.heads)

    __call__ = rows  # for transports

    def tokens(self, piece: Piece) -> Tensor:
        """(batch, rows, heads, width)"""
        if piece.buffer in self.passed:
            return self.rows(piece).transpose(0, 1)
        return self._of_workspace(piece).tokens

    def statistics(self, piece: Piece) -> Tensor:
        """(batch, heads, rows)"""
        if piece.buffer in self.passed:
            return self.rows(piece).squeeze(-1).permute(1, 2, 0)
        return self._of_workspace(piece).statistics

    def _of_workspace(self, piece: Piece) -> _PieceViews:
        key = piece.buffer, piece.start, piece.stop, piece.heads
        views = self.pieces.get(key)
        if views is None:
            rows = cut(self.workspace[piece.buffer], 0, piece.start, piece.stop)
            rows = rows if piece.heads is None else cut(rows, 2, *piece.heads)
            statistics = rows.select(-1, 0).permute(1, 2, 0)
            views = self.pieces[key] = _PieceViews(rows, rows.transpose(0, 1), statistics)
        return views


class _PieceViews(NamedTuple):
    rows: Tensor
    tokens: Tensor
    statistics: Tensor  # of a piece of width 1


class Bindings:
    """Makes tensors of the buffers of a program, for calls of one shape, and binds transfers and
    merges to them. `rows`: the kernels that merge."""

    def __init__(
        self,
        program: Program,
        problem: Problem,
        memory: WorkspaceMap,
        call_shape: CallShape,
        transport: Transport,
        rows: RowKernels,
    ) -> None:
        self._transport, self._row_kernels = transport, rows
        self._call_shape = call_shape
        self._memory = memory
        self._sizes = {b.name: b.num_bytes(problem) * call_shape.batch for b in program.buffers}
        self._shapes: dict[Role, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
            role: {} for role in Role
        }
        for b in program.buffers:
            shape = (b.num_rows, call_shape.batch, b.num_heads, b.kind.width(problem))
            self._shapes[b.role][b.name] = shape, call_shape.dtype_of(b)

    def in_workspace(self, op: Operation) -> bool:
        """Whether an operation touches nothing of the caller's."""
        return self._shapes[Role.WORKSPACE].keys() >= set(op.touched)

    def workspace(self, memory: Tensor) -> Views:
        """The tensors of workspace buffers, as views of a block of memory."""
        tensors = {}
        for name, (shape, dtype) in self._shapes[Role.WORKSPACE].items():
            start = self._memory.offsets[name] * self._call_shape.batch
            tensors[name] = memory[start : start + self._sizes[name]].view(dtype).view(shape)
        return Views(tensors)

    def call(self, views: Views, inputs: Mapping[str, Tensor]) -> tuple[Views, dict[str, Tensor]]:
        """(`views` with the caller's tensors of one call, new tensors for all that it returns: its
        outputs and what is kept for the backward pass)"""
        device = self._call_shape.device
        outputs = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for role in (Role.OUTPUT, Role.KEPT)
            for name, (shape, dtype) in self._shapes[role].items()
        }
        passed = dict(outputs)
        filled = (*self._shapes[Role.INPUT].items(), *self._shapes[Role.RECALLED].items())
        for name, (shape, dtype) in filled:
            x = passed[name] = inputs[name]
            assert x.shape == shape, (name, x.shape, shape)
            assert x.dtype == dtype, (name, x.dtype, dtype)
        if GRAD_LSE in inputs:
            passed[GRAD_LSE] = inputs[GRAD_LSE]
        return Views(views.workspace, passed, views.pieces, views.kept), outputs

    def work(self, op: Operation, views: Views) -> Work:
        """A transfer or a merge on its tensors."""
        if isinstance(op, Communication):
            return self._transport.prepare(op, views)
        assert isinstance(op, Merge), f"{op.name} is neither a transfer nor a merge"
        return merge_work(self._row_kernels, op, views)


def cut(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """`start..stop` of a dimension; the tensor itself where that is all of it, as most often."""
    return x if stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)


def merge_work(rows: RowKernels, op: Merge, views: Views) -> Work:
    tokens, statistics = views.tokens, views.statistics
    inputs, outputs = op.inputs, op.outputs
    match op.rule:
        case MergeRule.SOFTMAX:
            out, lse = tokens(outputs[0]), statistics(outputs[1])
            if not inputs:
                return partial(_clear, out, lse)
            outs, lses = map(tokens, inputs[::2]), map(statistics, inputs[1::2])
            return partial(rows.merge_all, tuple(outs), tuple(lses), out, lse)
        case MergeRule.LSE:
            if not inputs:
                return partial(statistics(outputs[0]).fill_, -inf)
            return partial(rows.merge_lse, [*map(statistics, inputs)], statistics(outputs[0]))
        case MergeRule.RESCALE:
            out, partial_lse, global_lse = tokens(inputs[0]), *map(statistics, inputs[1:])
            return partial(rows.rescale, out, partial_lse, global_lse, tokens(outputs[0]))
        case MergeRule.SUM:
            total = tokens(outputs[0])
            if not inputs:
                return total.zero_
            return partial(rows.sum, tuple(map(tokens, inputs)), total)
        case MergeRule.DELTA:
            out, grad_out = map(tokens, inputs)
            delta = statistics(outputs[0])
            if GRAD_LSE not in views.passed:
                return partial(rows.delta, out, grad_out, delta)
            grad_lse = statistics(replace(inputs[0], buffer=GRAD_LSE))
            return partial(_delta_less, rows, out, grad_out, grad_lse, delta)


def _clear(out: Tensor, lse: Tensor) -> None:
    """Rows that have seen no key."""
    out.zero_()
    lse.fill_(-inf)


def _delta_less(
    rows: RowKernels, out: Tensor, grad_out: Tensor, grad_lse: Tensor, delta: Tensor
) -> None:
    """Delta less the gradient of lse. In the gradient of a score both are multiplied by the weight
    of the score, with opposite signs."""
    rows.delta(out, grad_out, delta)
    delta.sub_(grad_lse)
