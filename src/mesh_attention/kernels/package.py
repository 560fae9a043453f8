"""Calling functions of packages whose signatures differ from release to release.

FlashAttention's low-level functions have gained, renamed and reordered parameters. The adapters
say which values they have and which further parameters may be left None; this file looks at the
function that was found and either makes the call's arguments or says what does not fit.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any


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


def call(module: str, function: str, given: Mapping[str, Any], may_be_none: frozenset[str]) -> Any:
    found = load(module, function)
    assert not isinstance(found, str), found
    arguments = arguments_for(found, given, may_be_none)
    assert not isinstance(arguments, str), arguments
    return found(**arguments)


def why_unusable(
    module: str, function: str, names: tuple[str, ...], may_be_none: frozenset[str]
) -> str | None:
    found = load(module, function)
    if isinstance(found, str):
        return found
    arguments = arguments_for(found, dict.fromkeys(names), may_be_none)
    return arguments if isinstance(arguments, str) else None
