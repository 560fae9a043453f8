"""The tensors behind a program's buffers.

Workspace buffers lie at planned offsets of a block; views of them are made once and kept with it.
The caller's tensors come and go with every call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mesh_attention.plan.language.buffers import Buffer, Piece, Precision, Role
from mesh_attention.plan.language.program import Operation, Program
from mesh_attention.plan.language.workspace import WorkspaceMap
from mesh_attention.plan.problem.problem import Problem

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


class Bindings:
    """How the buffers of a program become tensors."""

    def __init__(
        self, program: Program, problem: Problem, memory: WorkspaceMap, call_shape: CallShape
    ) -> None:
        self._call_shape = call_shape
        self._memory = memory
        self._sizes: dict[str, int] = {}
        self._shapes: dict[Role, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
            role: {} for role in Role
        }
        for b in program.buffers:
            shape = (b.num_rows, call_shape.batch, b.num_heads, b.kind.width(problem))
            self._sizes[b.name] = math.prod(shape) * b.precision.num_bytes(problem)
            self._shapes[b.role][b.name] = shape, call_shape.dtype_of(b)

    def workspace(self, memory: Tensor) -> dict[str, Tensor]:
        tensors = {}
        for name, (shape, dtype) in self._shapes[Role.WORKSPACE].items():
            start = self._memory.offsets[name] * self._call_shape.batch
            tensors[name] = memory[start : start + self._sizes[name]].view(dtype).view(shape)
        return tensors

    def inputs(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = {}
        for name, (shape, dtype) in self._shapes[Role.INPUT].items():
            x = tensors[name] = given[name]
            assert x.shape == shape, (name, x.shape, shape)
            assert x.dtype == dtype, (name, x.dtype, dtype)
        if GRAD_LSE in given:
            tensors[GRAD_LSE] = given[GRAD_LSE]
        return tensors

    def outputs(self) -> dict[str, Tensor]:
        device = self._call_shape.device
        return {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in self._shapes[Role.OUTPUT].items()
        }

    def in_workspace(self, op: Operation) -> bool:
        """Whether an operation touches nothing of the caller's."""
        known = self._shapes[Role.WORKSPACE]
        return known.keys() >= set(op.touched)


class Views:
    """The tensors of pieces: the caller's anew in every call, those of the workspace once."""

    def __init__(
        self,
        workspace: Mapping[str, Tensor],
        passed: Mapping[str, Tensor] | None = None,
        kept: tuple[dict[Piece, Tensor], ...] | None = None,
    ) -> None:
        self._workspace = workspace
        self._passed = passed or {}
        self._kept = kept or ({}, {}, {})
        self._rows, self._tokens, self._statistics = self._kept

    def with_passed(self, passed: Mapping[str, Tensor]) -> Views:
        """The same with the caller's tensors of one call."""
        return Views(self._workspace, passed, self._kept)

    def rows(self, piece: Piece) -> Tensor:
        """(rows, batch, heads, width)"""
        found = self._rows.get(piece)
        if found is None:
            passed = self._passed.get(piece.buffer)
            whole = self._workspace[piece.buffer] if passed is None else passed
            found = cut(whole, 0, piece.start, piece.stop)
            if piece.heads is not None:
                found = cut(found, 2, *piece.heads)
            if passed is None:
                self._rows[piece] = found
        return found

    def whole(self, name: str) -> Tensor:
        """A buffer of the workspace."""
        return self._workspace[name]

    def has(self, name: str) -> bool:
        """Whether the caller passed this, which no program asks for."""
        return name in self._passed

    def tokens(self, piece: Piece) -> Tensor:
        """(batch, rows, heads, width)"""
        found = self._tokens.get(piece)
        if found is None:
            found = self.rows(piece).transpose(0, 1)
            if piece.buffer not in self._passed:
                self._tokens[piece] = found
        return found

    def statistics(self, piece: Piece) -> Tensor:
        """(batch, heads, rows)"""
        found = self._statistics.get(piece)
        if found is None:
            found = self.rows(piece).squeeze(-1).permute(1, 2, 0)
            if piece.buffer not in self._passed:
                self._statistics[piece] = found
        return found


def cut(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """`start..stop` of a dimension; the tensor itself where that is all of it, as most often."""
    return x if stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)
