"""Checks of what people write: numbers, pairs and flags as plans take them, or a clear refusal.

Problems, masks, settings, plan files and the command line read their values here. A bool is not a
number and a string is not a flag: `causal="no"` must never mean True.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from enum import StrEnum
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from mesh_attention.errors import PlanError

Member = TypeVar("Member", bound=StrEnum)

_MOST = 2**63 - 1  # that numpy and PyTorch count with


def number(name: str, value: Any, *, least: int | None = 1) -> int:
    """A whole number; `least` None leaves the bound to the caller.

    >>> number("ranks", 4)
    4
    """
    if type(value) is int and (-_MOST if least is None else least) <= value <= _MOST:
        return value  # the usual case; batches bring many
    bound = "" if least is None else f" of at least {least}"
    try:
        if isinstance(value, bool):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        raise PlanError(f"{name}={value!r}: must be a whole number{bound}") from None
    if least is not None and whole < least:
        raise PlanError(f"{name}={whole}: must be a whole number{bound}")
    if abs(whole) > _MOST:
        raise PlanError(f"{name}={whole}: must be a whole number below 2**63")
    return whole


def real(name: str, value: Any) -> float:
    """A finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PlanError(f"{name}={value!r}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise PlanError(f"{name}={value!r}: must be finite and above 0")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise PlanError(f"{name}={value!r}: must be True or False")
    return bool(value)


def choice(kind: type[Member], name: str, value: Any) -> Member:
    """A member of a closed choice, or its text."""
    try:
        return kind(value)
    except ValueError:
        raise PlanError(f"{name}={value!r} is unknown; known: {', '.join(kind)}") from None


def pair(name: str, value: Any) -> tuple[int, int]:
    """
    >>> pair("tile", "4x2"), pair("tile", [4, 2])
    ((4, 2), (4, 2))
    """
    parts: Any = value.lower().split("x") if isinstance(value, str) else value
    try:
        parts = parts.tolist() if hasattr(parts, "tolist") else parts
        if isinstance(parts, str | bytes) or not isinstance(parts, Sequence):
            raise TypeError
        a, b = (_digits(p) if isinstance(value, str) else operator.index(p) for p in parts)
        if any(isinstance(p, bool) for p in parts):
            raise TypeError
    except (TypeError, ValueError, RuntimeError):  # the last of tensors that hold no list
        raise PlanError(f"{name}={value!r}: give two numbers, as in (2, 4) or '2x4'") from None
    return a, b


def _digits(text: str) -> int:
    """`int` alone would also read 1_0, +1 and the digits of other scripts."""
    if not (text.isascii() and text.isdecimal()):
        raise ValueError
    return int(text)


def bytes_text(num_bytes: float) -> str:
    """
    >>> bytes_text(0), bytes_text(1536), bytes_text(2028994560)
    ('0 B', '1.50 KiB', '1.89 GiB')
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
