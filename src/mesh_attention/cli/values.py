"""Readers of option values: `128k`, `3x3`, `512MiB`, `128:0`, `0,100,400`, JSON files.

Flags are read by what `READERS` has for their metavar, or by a reader of their own. A reader takes
the text of a value, and raises an error with an example if the text does not fit. Only `json_file`
reads a file; none writes. Patterns say [0-9], since \\d would also match digits of other scripts.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

from mesh_attention.errors import did_you_mean
from mesh_attention.files import FileError, read_text

_UNIT_BYTES = {"": 1, "b": 1} | {
    letter + ending: base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("ib", 1024), ("b", 1000))
}
_NUMBER = r"[0-9]{1,18}(?:(?:\.[0-9]{1,6})?[kKmMgG])?"  # 18 digits fit into 64 bits
_MOST_BYTES = 1 << 26  # of a JSON file


class UsageError(ValueError, ArgumentTypeError):
    """The command cannot be carried out as it was written; the message says what would work. It is
    an error of argparse too, for scripts that read values as commands do."""


def _matched(text: str, pattern: str, expected: str) -> re.Match[str]:
    """The match of the whole text; `expected` says in the error what the text should be."""
    match = re.fullmatch(pattern, text)
    if not match:
        raise UsageError(f"{text!r} is not {expected}")
    return match


def size(text: str) -> int:
    """A whole number of at least 1, with k, M and G as powers of 1,024.

    >>> size("8"), size("128k"), size("1M"), size("1.5M")
    (8, 131072, 1048576, 1572864)
    """
    return _whole_number(text, at_least=1)


def count(text: str) -> int:
    """A whole number of at least 0, otherwise as `size`."""
    return _whole_number(text, at_least=0)


def _whole_number(text: str, *, at_least: int) -> int:
    if re.fullmatch(r"[0-9]{19,}", text):
        raise UsageError(f"a number of {len(text)} digits is too large")
    match = _matched(text, f"-?{_NUMBER}", "a whole number such as 8, 128k or 1M")
    number = _number(match[0])
    if number < at_least:
        raise UsageError(f"{text} is not possible; give a whole number of at least {at_least}")
    return number


def _number(text: str) -> int:
    """The whole number that a text such as 1.5M means. k, M and G are powers of 1,024, as is usual
    for the length of a context."""
    power = " kmg".find(text[-1].lower())
    value = Fraction(text.rstrip("kKmMgG")) * 1024 ** max(power, 0)
    if value.denominator != 1:
        raise UsageError(f"{text} is not a whole number: it is {float(value):g}")
    return int(value)


def fraction(text: str) -> float:
    """A decimal number above 0."""
    pattern = r"(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,9})?"
    return float(_matched(text, pattern, "a number above 0 such as 1.05")[0])


def pair(expected: str) -> Callable[[str], tuple[int, int]]:
    """A reader of two numbers such as 3x3; `expected` says in the error what they should be."""

    def read(text: str) -> tuple[int, int]:
        match = _matched(text, r"([0-9]{1,18})x([0-9]{1,18})", expected)
        first, second = int(match[1]), int(match[2])
        if first < 1 or second < 1:
            raise UsageError(f"{text}: both numbers must be at least 1")
        return first, second

    return read


def byte_size(text: str) -> int:
    """A number of bytes, at least 1: KiB is 1,024 bytes, KB is 1,000, a number alone counts bytes.

    >>> byte_size("512MiB"), byte_size("1.5KiB"), byte_size("2GB"), byte_size("100")
    (536870912, 1536, 2000000000, 100)
    """
    if re.match(r"\s*-\s*[0-9]", text):
        raise UsageError(f"{text} is not possible; give at least one byte")
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _UNIT_BYTES:
        raise UsageError(f"{text!r} is not a size such as 512MiB, 2GiB or 1000000")
    number = int(float(match[1]) * _UNIT_BYTES[match[2]])
    if number < 1:
        raise UsageError(f"{text} is not possible; give at least one byte")
    return number


def window(text: str) -> tuple[int | None, int | None]:
    """(LEFT, RIGHT) of LEFT or LEFT:RIGHT, with None for `inf`, no limit. LEFT alone is the causal
    sliding window: RIGHT is 0.

    >>> window("4k"), window("128:64"), window("inf:0")
    ((4096, 0), (128, 64), (None, 0))
    """
    side = f"{_NUMBER}|inf"
    match = _matched(text, f"({side})(?::({side}))?", "a window such as 128, 128:64 or 128:inf")
    left, right = (None if end == "inf" else _number(end) for end in (match[1], match[2] or "0"))
    return left, right


def starts(text: str) -> tuple[int, ...]:
    """Where documents start, and the number of all tokens: numbers as `size` reads them."""
    pattern = f"{_NUMBER}(,{_NUMBER})+"
    match = _matched(text, pattern, "a list of document starts such as 0,100,400 or 0,4k,1M")
    return tuple(map(_number, match[0].split(",")))


def json_file(path: str) -> Any:
    """The contents of a JSON file."""
    try:
        return json.loads(read_text(path, most_bytes=_MOST_BYTES))
    except FileError as error:
        raise UsageError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


def one_of(kind: str, names: Iterable[str]) -> Callable[[str], str]:
    """A reader of one of `names`; `kind` says in the error what they are."""
    known = tuple(names)

    def read(text: str) -> str:
        if text not in known:
            raise UsageError(
                f"{text!r} is not a {kind}{did_you_mean(text, known)}; known: {', '.join(known)}"
            )
        return text

    return read


READERS: dict[str, Callable[[str], Any]] = {
    "N": size,
    "R": count,
    "SIZE": byte_size,
    "STARTS": starts,
    "LEFT[:RIGHT]": window,
    "FILE": Path,
    "FILE.json": Path,
    "FILE.toml": Path,
    "FOLDER": Path,
    "NAME": str,
    "NAME|FILE": str,
}
