"""Why a ready-made kernel cannot be used: limits of the hardware and ops that are not there.

PyTorch's attention ops are private names: they are looked up, with the arguments an adapter
needs, when a kernel is chosen, and the answer says what was found.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mesh_attention.kernels.interface import MaskKind, Request


def aten(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


def why_op_unusable(name: str, arguments: Iterable[str]) -> str | None:
    """None if the private op `aten::name` exists with these arguments."""
    try:
        found = [argument.name for argument in aten(name)._schema.arguments]
    except AttributeError:
        return f"torch {torch.__version__} has no aten::{name}"
    missing = [argument for argument in arguments if argument not in found]
    if missing:
        return f"aten::{name} takes {found}, without {missing}"
    return None


def why_not_dense(request: Request) -> str | None:
    if request.mask is MaskKind.RANGE:
        return "has no row-range mask"
    return why_not_grouped(request)


def why_not_grouped(request: Request) -> str | None:
    if request.num_heads % request.num_kv_heads:
        return f"{request.num_heads} heads are no multiple of {request.num_kv_heads} KV heads"
    return None


def why_not_on_cuda(request: Request) -> str | None:
    """The limits that all CUDA kernels adapted here share."""
    if request.device_type != "cuda":
        return f"runs on cuda, not on {request.device_type}"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    if request.capability is None or request.capability < (8, 0):
        return f"needs compute capability 8.0 or later, found {request.capability}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {request.dtype}"
    if request.head_dim % 8 or request.v_head_dim % 8:
        return f"head sizes must be multiples of 8, not {request.head_dim} and {request.v_head_dim}"
    return why_not_dense(request)
