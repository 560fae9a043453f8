"""Ranges for profilers: every operation of a program under its own name."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from mesh_attention.plan.program import Operation

__all__ = ["nvtx_span"]


def nvtx_span(op: Operation) -> AbstractContextManager[None]:
    span: AbstractContextManager[None] = torch.cuda.nvtx.range(op.name)
    return span
