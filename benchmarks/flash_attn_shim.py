"""A `flash_attn` made of PyTorch's own flash kernels, for peers that import it.

flash-attn is built for one version of PyTorch and CUDA, and cannot be installed everywhere; its
FlashAttention 2 is also inside PyTorch. `install()` puts modules of that name in place, unless the
real package is there. They hold what ring-flash-attention and yunchang call: forward and backward
of dense and packed calls, whose arguments have names there but for the dense backward pass. On CPUs
dense calls without a window are PyTorch's, the others refused.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "2.8.0"  # whose functions these are
# Cumulative starts of documents of queries and of keys, and the longest of each.
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
Lengths = tuple[Any, ...]


def install() -> str:
    """Says what peers get by `import flash_attn`."""
    if "flash_attn" not in sys.modules and find_spec("flash_attn") is None:
        package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
        vars(interface).update(
            _flash_attn_forward=_flash_attn_forward,
            _flash_attn_backward=_flash_attn_backward,
            _flash_attn_varlen_forward=_flash_attn_varlen_forward,
            _flash_attn_varlen_backward=_flash_attn_varlen_backward,
        )
        vars(package).update(__version__=VERSION, __path__=[], flash_attn_func=flash_attn_func)
        vars(package)["flash_attn_interface"] = interface
        sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    shim = (
        vars(sys.modules.get("flash_attn", ModuleType(""))).get("flash_attn_func")
        is flash_attn_func
    )
    return "PyTorch's flash kernels by a shim" if shim else "flash-attn"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **others: Any,
) -> Tensor:
    """Differentiable: PyTorch knows the gradient of its own kernels."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _flash_attn_forward(q, k, v, scale, causal, *window_size, **others)[0]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    *,
    lengths: Lengths | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, None, Tensor]:
    _refuse(**others)
    seed = torch.empty(0)
    if q.device.type == "cpu":
        _refuse_on_cpus(window_size_left, window_size_right, lengths)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, scale=softmax_scale
        )
        return out.transpose(1, 2), lse, None, seed
    out, lse, seed, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *(lengths or _dense(q, k)), 0.0, causal, False),
        scale=softmax_scale,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
    )
    return out, lse, None, seed


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    *,
    lengths: Lengths | None = None,
) -> None:
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    if q.device.type == "cpu":
        _refuse_on_cpus(window_size_left, window_size_right, lengths)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (dout, q, k, v, out)),
            *(softmax_lse, 0.0, causal),
            scale=softmax_scale,
        )
        grads = [x.transpose(1, 2) for x in grads]
    else:
        grads = torch.ops.aten._flash_attention_backward(
            *(dout, q, k, v, out, softmax_lse, *(lengths or _dense(q, k)), 0.0, causal),
            *_random_state(q),
            scale=softmax_scale,
            window_size_left=window_size_left,
            window_size_right=window_size_right,
        )
    for buffer, grad in zip((dq, dk, dv), grads, strict=True):
        buffer.copy_(grad)


def _flash_attn_varlen_forward(**packed: Any) -> tuple[Tensor, Tensor, None, Tensor]:
    lengths = tuple(packed.pop(name) for name in LENGTHS)
    return _flash_attn_forward(**packed, lengths=lengths)


def _flash_attn_varlen_backward(**packed: Any) -> None:
    lengths = tuple(packed.pop(name) for name in LENGTHS)
    _flash_attn_backward(**packed, lengths=lengths)


def _dense(q: Tensor, k: Tensor) -> Lengths:
    return None, None, q.shape[1], k.shape[1]


def _random_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Never read without dropout; shapes and dtypes are the forward pass's."""
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    return seed, torch.empty((), dtype=torch.uint64, device=q.device)


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value:
            raise NotImplementedError(f"the shim of flash_attn has no {name}")


def _refuse_on_cpus(left: int, right: int, lengths: Lengths | None) -> None:
    if left >= 0 or right >= 0 or lengths is not None:
        raise NotImplementedError("the shim of flash_attn has no windows or documents on CPUs")
