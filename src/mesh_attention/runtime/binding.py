"""The tensors behind a program's buffers.

Workspace buffers lie at planned offsets of a block; views of them are made once and kept with it.
The caller's tensors come and go with every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mesh_attention.plan.buffers import Buffer, Piece, Precision, Role
from mesh_attention.plan.offsets import WorkspaceMap
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Operation, Program, reads, writes

__all__ = ["Bindings", "CallViews", "Form", "Views"]


@dataclass(frozen=True, slots=True)
class Form:
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
        self, program: Program, problem: Problem, memory: WorkspaceMap, form: Form
    ) -> None:
        self._form = form
        self._memory = memory
        self._sizes = {b.name: b.num_bytes(problem) * form.batch for b in program.buffers}
        self._forms: dict[Role, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
            role: {
                b.name: (
                    (b.num_rows, form.batch, b.num_heads, b.kind.width(problem)),
                    form.dtype_of(b),
                )
                for b in program.buffers
                if b.role is role
            }
            for role in Role
        }

    def workspace(self, memory: Tensor) -> dict[str, Tensor]:
        tensors = {}
        for name, (shape, dtype) in self._forms[Role.WORKSPACE].items():
            start = self._memory.offsets[name] * self._form.batch
            tensors[name] = memory[start : start + self._sizes[name]].view(dtype).view(shape)
        return tensors

    def inputs(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = {}
        for name, (shape, dtype) in self._forms[Role.INPUT].items():
            x = tensors[name] = given[name]
            assert x.shape == shape, (name, x.shape, shape)
            assert x.dtype == dtype, (name, x.dtype, dtype)
        return tensors

    def outputs(self) -> dict[str, Tensor]:
        device = self._form.device
        return {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in self._forms[Role.OUTPUT].items()
        }

    def in_workspace(self, op: Operation) -> bool:
        """Whether an operation touches nothing of the caller's."""
        known = self._forms[Role.WORKSPACE]
        return all(p.buffer in known for side in (reads(op), writes(op)) for p in side)


class Views:
    """The rows of pieces. Those of the workspace are kept, by the piece's identity."""

    def __init__(self, workspace: Mapping[str, Tensor]) -> None:
        self._workspace = workspace
        self._kept: dict[int, Tensor] = {}

    def of_workspace(self, piece: Piece) -> Tensor:
        found = self._kept.get(id(piece))
        if found is None:
            found = self._kept[id(piece)] = _rows(self._workspace[piece.buffer], piece)
        return found


class CallViews:
    """The same with the caller's tensors of one call."""

    def __init__(self, views: Views, passed: Mapping[str, Tensor]) -> None:
        self._views = views
        self._passed = passed

    def __call__(self, piece: Piece) -> Tensor:
        whole = self._passed.get(piece.buffer)
        return self._views.of_workspace(piece) if whole is None else _rows(whole, piece)


def _rows(whole: Tensor, piece: Piece) -> Tensor:
    rows = whole
    if piece.start or piece.stop != len(whole):
        rows = whole[piece.start : piece.stop]
    return rows if piece.heads is None else rows[:, :, piece.heads[0] : piece.heads[1]]
