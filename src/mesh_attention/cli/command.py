"""What a subcommand is, and the parser that all of them share.

A subcommand file makes one `Command` and `main.COMMANDS` lists it. Mistakes of the caller are one
line on standard error with the way out, and exit code 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

__all__ = ["Command", "Parser", "UsageError", "did_you_mean"]


@dataclass(frozen=True, slots=True)
class Command:
    """`run` returns the exit code: 0 done, 1 the answer is no, 2 (as UsageError) asked wrongly."""

    name: str
    summary: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: tuple[str, ...] = ()


class UsageError(ValueError):
    """What was asked for cannot be done; the message says what would do."""


class Parser(argparse.ArgumentParser):
    """argparse without its page of usage on an error, and without guessing at options."""

    def __init__(self, *, prog: str, description: str, examples: Iterable[str] = ()) -> None:
        lines = [f"  {example}" for example in examples]
        super().__init__(
            prog=prog,
            description=description,
            epilog="\n".join(["examples:", *lines]) if lines else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        message = message.replace("expected one argument", "needs a value")
        raise UsageError(f"{message}; see {self.prog} --help")

    def options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Like parse_args; an unknown option is answered with the nearest one that exists."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            self.error(f"unknown {kind} {name}{did_you_mean(name, self.options())}")
        return args


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """
    >>> did_you_mean("zigzg", ["zigzag", "striped"]), did_you_mean("?", ["zigzag"])
    (' (did you mean zigzag?)', '')
    """
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
