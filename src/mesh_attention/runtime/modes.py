"""Modes that surround a caller, and must change nothing in a call.

A backward pass sees those of whoever calls it, also in autograd's own threads, so it leaves them as
the forward pass does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

_NOTHING = nullcontext()


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """What is kept from call to call (workspaces, bound tensors) must serve training too, and
    tensors made in inference mode never can."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def outside_autocast() -> AbstractContextManager[object]:
    """A call is computed in the dtype of its tensors. Autocast would multiply float32 in bfloat16
    wherever a kernel, ours or a user's, is written in plain PyTorch."""
    ambient = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not ambient:
        return _NOTHING
    stack = ExitStack()
    for kind in ambient:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
