"""Which module of a model is running, as a label of the call that it makes: ranks then find out
that they are at different layers.

The stack of this thread says it when a call comes. Hooks on every module would be part of what
`torch.compile` compiles and guards.
"""

from __future__ import annotations

from inspect import unwrap
from types import FrameType
from weakref import WeakKeyDictionary

from torch.autograd.graph import _engine_run_backward
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

_CALL = Module._call_impl.__code__
_BACKWARD = _engine_run_backward.__code__
# A checkpointed function runs again without what was around it, and must have the same label.
_ENDS = (unwrap(checkpoint).__code__, _BACKWARD)

# Kept: a layer that is checkpointed runs again without the model that it is a part of.
_NAMES: WeakKeyDictionary[Module, str] = WeakKeyDictionary()


def running_module(frame: FrameType | None) -> str | None:
    """The class of the model and the name in it of the innermost module whose forward pass has
    come to `frame`; None in a function that is checkpointed or called outside any module."""
    while frame is not None and frame.f_code not in _ENDS:
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            return _NAMES.get(module) or _named(module, frame)
        frame = frame.f_back
    return None


def _named(module: Module, frame: FrameType | None) -> str:
    model = module
    while frame is not None and frame.f_code is not _BACKWARD:
        if frame.f_code is _CALL:
            model = frame.f_locals["self"]
        frame = frame.f_back
    kind = type(model).__name__
    for name, part in model.named_modules():
        _NAMES[part] = f"{kind}.{name}" if name else kind
    # A module that the model does not have among its own.
    return _NAMES.setdefault(module, f"{kind}: {type(module).__name__}")
