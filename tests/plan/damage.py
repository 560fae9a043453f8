"""What damages the text of a plan has in common: where things stand in it, and how a line is put
back.

A mutation takes the lines of a plan and gives others, or None where it found nothing to change. It
knows the syntax and no meaning, so that what it makes is not what a builder would think of.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

__all__ = [
    "CALL", "PIECE", "PIECE_FIELD", "Lines", "Mutation", "any_match", "buffers_of", "is_operation",
    "operations", "other_interval", "program_of", "put", "put_for_a_match", "replaced",
]  # fmt: skip

PIECE = re.compile(r"(?<==|\+|\||<)([\w.-]+)\[(\d+):(\d+)\](?:\{(\d+):(\d+)\})?")
CALL = re.compile(r"(full|causal|range)\((\d+):(\d+),(\d+):(\d+)\)")
PIECE_FIELD = re.compile(r"(\w+)=([\w.-]+\[[\d:]+\](?:\{[\d:]+\})?)(?= |$)")
Lines = list[str]
Mutation = Callable[[Random, Lines], Lines | None]


def is_operation(line: str) -> bool:
    return line.startswith("  ") and not line.startswith("  buffer ")


def operations(lines: Lines, containing: str = "") -> list[int]:
    return [i for i, line in enumerate(lines) if is_operation(line) and containing in line]


def program_of(lines: Lines, at: int) -> range:
    """The lines of the program that a line belongs to, without its head."""
    first = next(i for i in range(at, -1, -1) if lines[i].startswith("rank "))
    after = (i for i in range(first + 1, len(lines)) if not lines[i].startswith("  "))
    return range(first + 1, next(after, len(lines)))


def buffers_of(lines: Lines, at: int) -> list[list[str]]:
    """The words of the buffers of that program."""
    split_lines = (lines[i].split() for i in program_of(lines, at))
    return [words for words in split_lines if words[0] == "buffer"]


def put(rng: Random, lines: Lines, at: int, new: str) -> Lines:
    """In one place, or in every place of the same line: what all ranks do wrong alike still fits
    together."""
    old = lines[at]
    if rng.random() < 0.35:
        return [new if line == old else line for line in lines]
    return [*lines[:at], new, *lines[at + 1 :]]


def replaced(line: str, match: re.Match[str], new: str) -> str:
    return line[: match.start()] + new + line[match.end() :]


def any_match(
    rng: Random, lines: Lines, pattern: re.Pattern[str], containing: str = ""
) -> tuple[int, re.Match[str]] | None:
    places = [i for i in operations(lines, containing) if pattern.search(lines[i])]
    if not places:
        return None
    at = rng.choice(places)
    return at, rng.choice(list(pattern.finditer(lines[at])))


def put_for_a_match(
    rng: Random, lines: Lines, pattern: re.Pattern[str], new: Callable[[re.Match[str]], str]
) -> Lines | None:
    """What `new` makes of a match, in its place."""
    place_and_match = any_match(rng, lines, pattern)
    if place_and_match is None:
        return None
    at, match = place_and_match
    return put(rng, lines, at, replaced(lines[at], match, new(match)))


def other_interval(rng: Random, start: int, stop: int) -> tuple[int, int]:
    by = rng.choice((-2, -1, 1, 2, stop - start, start - stop))
    a, b = rng.choice(((start + by, stop + by), (start + by, stop), (start, stop + by)))
    return max(a, 0), max(b, 0)
