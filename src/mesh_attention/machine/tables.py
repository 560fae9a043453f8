"""TOML tables as frozen dataclasses, or an error that names the field and what it must be.

Cluster files (`load.py`), facts of kernels and targets in plan files are read by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from mesh_attention.errors import MeshAttentionError

T = TypeVar("T")


class ClusterError(MeshAttentionError, ValueError):
    """A cluster does not exist, or its description does not hold together."""


# Fields that may be zero: what does not cost anything, or does not disturb.
_MAY_BE_ZERO = ("microseconds", "half_rows", "half_columns", "slowdown", "margin")


def read_table(kind: type[T], table: Mapping[str, Any], source: str) -> T:
    """A dataclass of this kind from a table; `source` names the file in errors."""
    value: T = _read(kind, table, source, ())
    return value


def without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without fields that are None, as files leave them out."""
    return {
        name: without_none(value) if isinstance(value, dict) else value
        for name, value in table.items()
        if value is not None
    }


def _read(kind: Any, value: Any, source: str, path: tuple[str, ...]) -> Any:
    """A value of the type that a field of the dataclasses of `cluster.py` has."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**_read_table(get_type_hints(kind), value, source, path))
    if get_origin(kind) is dict:  # by names that the file gives
        names = value if isinstance(value, dict) else ()
        return _read_table(dict.fromkeys(names, get_args(kind)[1]), value, source, path)
    why_not = _why_not(kind, value, path[-1])
    if why_not is not None:
        raise ClusterError(f"{source}: {'.'.join(path)} = {repr(value)[:40]} must be {why_not}")
    return kind(value)


def _read_table(
    kinds: Mapping[str, Any], value: Any, source: str, path: tuple[str, ...]
) -> dict[str, Any]:
    where = f"{source}: {'.'.join(path) or 'the file'}"
    if not isinstance(value, dict):
        raise ClusterError(f"{where} = {repr(value)[:40]} must be a table")
    if unknown := [name for name in value if name not in kinds]:
        raise ClusterError(f"{where} has no field {unknown[0]!r}; its fields: {', '.join(kinds)}")
    needed = [name for name, kind in kinds.items() if NoneType not in get_args(kind)]
    if missing := [name for name in needed if name not in value]:
        raise ClusterError(f"{where} lacks {missing[0]!r}; its fields: {', '.join(kinds)}")
    # A field that may be left out (X | None) is an X.
    types = {n: get_args(k)[0] if NoneType in get_args(k) else k for n, k in kinds.items()}
    return {
        name: _read(kind, value[name], source, (*path, name))
        for name, kind in types.items()
        if name in value
    }


def _why_not(kind: type, value: Any, name: str) -> str | None:
    """None if a field of this kind and name can have the value, otherwise what it must be."""
    if kind is str:
        # Names go to terminals as they are.
        is_text = isinstance(value, str) and value and value.isprintable()
        return None if is_text else "text without control characters"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Neither NaN nor infinite, and not so large or small that results would be.
    if not is_number or not (value == 0 or 1e-12 < abs(value) < 1e12):
        return "a number of usual size"
    may_be_zero = name.endswith(_MAY_BE_ZERO)
    if kind is int:
        least = 0 if may_be_zero else 1
        whole = isinstance(value, int) and value >= least
        return None if whole else f"a whole number of at least {least}"
    if value < 0 or (value == 0 and not may_be_zero):
        return "at least 0" if may_be_zero else "above 0"
    if name.endswith("slowdown") and value >= 1:
        return "below 1: it is the part of the speed that is lost"
    return None
