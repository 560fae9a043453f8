"""Which module of a model is running, as a label of the call that it makes: ranks then find out
that they are at different layers.

The stack of this thread says it: hooks on every module would be compiled and guarded.
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

# By model and part. A layer that is checkpointed runs again in a backward pass, without the model
# that it is a part of: then its name is that of its latest forward pass.
_PARTS: WeakKeyDictionary[Module, WeakKeyDictionary[Module, str]] = WeakKeyDictionary()
_LATEST: WeakKeyDictionary[Module, str] = WeakKeyDictionary()


def running_module(frame: FrameType | None) -> str | None:
    """The class of the model and the name in it of the innermost module whose forward pass has
    come to `frame`; None in a function that is checkpointed or called outside any module."""
    while frame is not None and frame.f_code not in _ENDS:
        if frame.f_code is _CALL:
            return _named(frame.f_locals["self"], frame)
        frame = frame.f_back
    return None


def _named(module: Module, inner: FrameType) -> str:
    outermost, frame = inner, inner.f_back
    while frame is not None:
        if frame.f_code is _BACKWARD and module in _LATEST:
            return _LATEST[module]
        if frame.f_code is _CALL:
            outermost = frame
        frame = frame.f_back
    model: Module = outermost.f_locals["self"]
    kind, parts = type(model).__name__, _PARTS.get(model)
    if parts is None or module not in parts:
        parts = _PARTS[model] = WeakKeyDictionary()
        for name, part in model.named_modules():
            parts[part] = f"{kind}.{name}" if name else kind
        # A module that the model does not have among its own.
        parts.setdefault(module, f"{kind}: {type(module).__name__}")
    _LATEST[module] = parts[module]
    return parts[module]
