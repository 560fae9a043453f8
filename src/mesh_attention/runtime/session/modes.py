"""Modes that surround a caller, and must change nothing in a call.

A backward pass sees those of whoever calls it, also in autograd's own threads, so it leaves them as
the forward pass does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")
OUTSIDE_BACKWARD = -1  # number of the pass that autograd makes


def outside_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled code ends its graph here and begins another one afterwards; `fullgraph=True`, which
    forbids that, names the function. Nothing in it is traced: it plans, compares calls among ranks
    and makes what outlives them."""
    untraced = _disable_dynamo(function)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            return untraced(*args, **kwargs)
        return function(*args, **kwargs)  # without an import that takes seconds

    return called


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled code calls the function when it is traced, and holds its result as a constant. As
    `torch.compiler.assume_constant_result`, which imports all of `torch._dynamo` at once."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """What is kept from call to call (workspaces, bound tensors) must serve training too, and
    tensors made in inference mode never can."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def ambient_autocast() -> list[str]:
    """Kinds of device for which autocast is on."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


def as_under_autocast(*tensors: Any) -> tuple[Any, ...]:
    """As autocast has those of `scaled_dot_product_attention`: in its dtype, unless in float64."""
    if not ambient_autocast():
        return tensors
    return tuple([_cast(x) if isinstance(x, Tensor) else x for x in tensors])


def _cast(x: Tensor) -> Tensor:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point():
        return x
    return x if x.dtype is torch.float64 else x.to(torch.get_autocast_dtype(kind))


def outside_autocast() -> AbstractContextManager[object]:
    """A call is computed in the dtype of its tensors. Autocast would multiply float32 in bfloat16
    wherever a kernel, ours or a user's, is written in plain PyTorch."""
    stack = ExitStack()
    for kind in ambient_autocast():
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
