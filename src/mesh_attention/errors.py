"""The one family of errors a caller can meet.

Every error names the values it saw and the way out. All are `ValueError`s, because each is
about something the caller passed in; our own broken invariants are `assert`s instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class MeshAttentionError(ValueError):
    """Base of all errors that this library raises on purpose."""


def raise_fault(fault: MeshAttentionError | None) -> None:
    """Raise what is wrong, if anything is."""
    if fault is not None:
        raise fault


class MissingPackageError(MeshAttentionError, ImportError):
    """A package that is not installed is needed; the message has the line that installs it."""


class PlanError(MeshAttentionError):
    """A plan cannot be made from these settings."""


class PlanTextError(MeshAttentionError):
    """A text is not the text form of a plan."""


def printable(text: str) -> str:
    """The text without codes of a terminal, which names and answers of others may hold."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """
    >>> did_you_mean("zigzg", ["zigzag", "striped"]), did_you_mean("?", ["zigzag"])
    (' (did you mean zigzag?)', '')
    """
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
