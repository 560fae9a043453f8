"""Work on rows between the attention calls: merging, adding, rescaling, and what backward needs.

`RowKernels` is what the runtime asks for. `PlainRows` answers with PyTorch operations, on any
device and dtype, and is the truth; `fused.rows.FusedRows` answers with one Triton kernel each, on
CUDA. The choice is made once and can say why.

Shapes as in `interface.py`: tokens are (B, S, H, E), statistics (B, H, S), both strided views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mesh_attention.kernels.plain_rows import PlainRows
from mesh_attention.kernels.probe import load


class RowKernels(Protocol):
    @property
    def name(self) -> str: ...

    def merge_into(
        self, acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor, *, fresh: bool
    ) -> None:
        """Merge a partial result into the accumulators; `fresh` ones hold nothing yet."""
        ...

    def merge_all(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor
    ) -> None:
        """The softmax merge of at least one partial result, rounded once."""
        ...

    def merge_lse(self, parts: Sequence[Tensor], target: Tensor) -> None:
        """The log-sum-exp of the whole, from those of at least one part."""
        ...

    def rescale(
        self, out: Tensor, partial_lse: Tensor, global_lse: Tensor, target: Tensor
    ) -> None: ...

    def sum(self, parts: Sequence[Tensor], target: Tensor) -> None:
        """At least one part, added in wide precision and rounded once; the target may be a part."""
        ...

    def delta(self, out: Tensor, grad_out: Tensor, target: Tensor) -> None: ...

    def stand_in(self, grad_out: Tensor, delta: Tensor) -> Tensor:
        """A contiguous `out` whose row sums with `grad_out` are `delta` (algorithm.md, section 4):
        flash backward kernels take `out` but use it only through those sums."""
        ...

    def finite_lse(self, lse: Tensor) -> Tensor:
        """A contiguous copy in which rows that saw nothing take no part: with their -inf
        exp(score - lse) would be inf, so they get `UNSEEN_LSE`, which makes it zero."""
        ...


@dataclass(frozen=True)
class RowChoice:
    rows: RowKernels
    reasons: tuple[tuple[str, str], ...]  # (name, why not, or "chosen"), in the order asked


def choose_rows(device_type: str, dtype: torch.dtype) -> RowChoice:
    why_not = _why_not_fused(device_type, dtype)
    if why_not is None:
        # Imported here: it needs Triton, which comes with CUDA builds of PyTorch only.
        from mesh_attention.kernels.fused.rows import FusedRows

        return RowChoice(FusedRows(), (("fused", "chosen"),))
    return RowChoice(PlainRows(), (("fused", why_not), ("plain", "chosen")))


def _why_not_fused(device_type: str, dtype: torch.dtype) -> str | None:
    if device_type != "cuda":
        return f"runs on cuda, not on {device_type}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes float32, bfloat16 and float16, not {dtype}"
    found = load("triton", "jit")
    return found if isinstance(found, str) else None
