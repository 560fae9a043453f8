"""Why a ready-made kernel cannot be used: limits of the hardware, and functions that are not there.

PyTorch's attention ops are private names: they are looked up, with the arguments an adapter
needs, when a kernel is chosen, and the answer says what was found. FlashAttention's low-level
functions have gained, renamed and reordered parameters from release to release: an adapter says
which values it has and which further parameters may be left None, and the call's arguments are made
for the function that was found.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from mesh_attention.kernels.interface import MaskKind, Request


@cache
def aten(name: str) -> Any:
    """An op of PyTorch's by its name, as `torch.ops.aten` has it."""
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


def load(module: str, function: str) -> Callable[..., Any] | str:
    """The function, or one line that says why there is none."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except ImportError as error:
        return f"{module} is not installed ({error})"
    except AttributeError:
        return f"{module} has no {function}"
    except Exception as error:  # a broken binary fails in its own ways; it is then not usable
        return f"{module} does not load ({type(error).__name__}: {error})"
    return found


def arguments_for(
    function: Callable[..., Any], given: Mapping[str, Any], may_be_none: frozenset[str]
) -> dict[str, Any] | str:
    """Keyword arguments for `function`, or one line that says what does not fit.

    A key of `given` such as "is_causal|causal" names one value under the names it has had.
    """
    # Functions registered as torch custom operators hide their signature behind a wrapper.
    parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
    arguments: dict[str, Any] = {}
    for names, value in given.items():
        name = next((n for n in names.split("|") if n in parameters), None)
        if name is None:
            return f"{function} takes {list(parameters)}, without {names}"
        arguments[name] = value
    for name, parameter in parameters.items():
        if name in arguments or parameter.default is not inspect.Parameter.empty:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name not in may_be_none:
            return f"{function} wants {name}, which this adapter does not know"
        arguments[name] = None
    return arguments


class PackageFunction(NamedTuple):
    """A function of a package that may not be there, called by the names of its arguments."""

    module: str
    name: str
    arguments: tuple[str, ...]
    may_be_none: frozenset[str] = frozenset()

    def why_unusable(self) -> str | None:
        found = load(self.module, self.name)
        if isinstance(found, str):
            return found
        arguments = arguments_for(found, dict.fromkeys(self.arguments), self.may_be_none)
        return arguments if isinstance(arguments, str) else None

    def __call__(self, *values: Any) -> Any:
        found = load(self.module, self.name)
        assert not isinstance(found, str), found
        given = dict(zip(self.arguments, values, strict=True))
        arguments = arguments_for(found, given, self.may_be_none)
        assert not isinstance(arguments, str), arguments
        with torch.no_grad():
            return found(**arguments)
