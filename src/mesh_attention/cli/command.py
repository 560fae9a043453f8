"""What a subcommand is, and the parser that all of them share.

A subcommand file makes one `Command` and `main.COMMANDS` lists it. Mistakes of the caller are one
line on standard error with the way out. Exit codes: 0 done, 1 the answer is no (a plan that does
not verify), 2 asked for the impossible, 3 a mistake in here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn, TextIO

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.methods.table import RENAMED_OPTIONS


class Flag(NamedTuple):
    """`reader` turns text into a value, or says with an example what fits; without one the flag is
    a switch. What is not given is the default."""

    name: str
    help: str
    reader: Callable[[str], Any] | None = None
    metavar: str = ""
    default: Any = None
    to: str | None = None  # where the value is kept; None: as the flag is called
    both: bool = False  # a switch that has a --no- form

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        how: dict[str, Any] = {"help": self.help, "default": self.default}
        if self.to is not None:
            how["dest"] = self.to
        if self.reader is None:
            how["action"] = argparse.BooleanOptionalAction if self.both else "store_true"
        else:
            how |= {"type": self.reader, "metavar": self.metavar}
        parser.add_argument(self.name, **how)


@dataclass(frozen=True, slots=True)
class Command:
    """`run` returns the exit code: 0 done, 1 the answer is no, 2 (as UsageError) asked wrongly.
    `more_flags` adds those that commands share."""

    name: str
    summary: str
    run: Callable[[argparse.Namespace], int]
    flags: tuple[Flag, ...] = ()
    more_flags: Callable[[argparse.ArgumentParser], None] | None = None
    examples: tuple[str, ...] = ()
    usage: str = "[options]"


class UsageError(ValueError):
    """What was asked for cannot be done; the message says what would do."""


class Parser(argparse.ArgumentParser):
    """argparse without its page of usage on an error, and without guessing at options."""

    def __init__(self, prog: str, command: Command) -> None:
        lines = [f"  {example}" for example in command.examples]
        super().__init__(
            prog=prog,
            usage=f"{prog} {command.usage}",
            description=command.summary,
            epilog="\n".join(["examples:", *lines]) if lines else None,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        # -5MiB is a value that does not fit, not an option that nobody knows.
        self._negative_number_matcher = re.compile(r"^-[0-9]")
        for flag in (*command.flags, Flag("--json", "print one line of JSON instead")):
            flag.add_to(self)
        if command.more_flags is not None:
            command.more_flags(self)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        message = message.replace("expected one argument", "needs a value")
        message = message.replace("ignored explicit argument", "is given or not, without a value:")
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Like parse_args; an unknown option is answered with the nearest one that exists."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            known = [option for action in self._actions for option in action.option_strings]
            renamed = RENAMED_OPTIONS.get(name[2:].replace("-", "_"))
            hint = f"; {with_flags(renamed, self)}" if renamed else did_you_mean(name, known)
            self.error(f"unknown {kind} {name}{hint}")
        return args

    def format_help(self) -> str:
        return with_flags(super().format_help(), self)

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse passes over what cannot be written."""
        print(message, end="", file=file or sys.stderr)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(100, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=32, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # names of methods have hyphens


def run_command(prog: str, command: Command, words: list[str]) -> int:
    parser = Parser(prog, command)
    try:
        return command.run(parser.parse(words))
    except SystemExit as done:  # argparse leaves this way after --help
        return int(done.code or 0)
    except MeshAttentionError as error:
        raise UsageError(with_flags(str(error), parser)) from error


def exit_code(prog: str, work: Callable[[], int]) -> int:
    """That of `work`; what goes wrong is told in one line."""
    is_closed = sys.stdout is None  # by who started us; files are written all the same
    sys.stdout, sys.stderr = (one or _nowhere() for one in (sys.stdout, sys.stderr))
    try:
        code = work()
        sys.stdout.flush()  # here, where a closed pipe can still be answered
        if is_closed:
            raise UsageError("standard output is closed, and the answer is lost")
        return code
    except (UsageError, MeshAttentionError) as error:
        message = str(error)
    except BrokenPipeError:
        # The reader (such as head) has seen enough; keep the interpreter's last flush quiet too.
        _forget_output()
        return 141
    except OSError as error:
        _forget_output_that_fails()
        message = f"{error.filename or 'input or output'}: {error.strerror}"
    except UnicodeDecodeError as error:
        message = f"the file is not text: {error}"
    except KeyboardInterrupt:
        return 130
    except MemoryError:
        message = "there is not enough memory for this"
    except Exception:
        traceback.print_exc()
        print(f"{prog}: this is a mistake in {prog} itself; please report it", file=sys.stderr)
        return 3
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # until the process ends


def _forget_output() -> None:
    """What could not be written would be tried again, and told again, as the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _forget_output_that_fails() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # what has no descriptor is no file either
            _forget_output()


def with_flags(text: str, parser: argparse.ArgumentParser) -> str:
    """The planner's words as a person at the command line knows them.

    The planner writes `name=value`, and a name alone in quotes or in a list.

    >>> parser = argparse.ArgumentParser()
    >>> _ = parser.add_argument("--heads", dest="num_heads")
    >>> _ = parser.add_argument("--tile")
    >>> _ = parser.add_argument("--rotation", action=argparse.BooleanOptionalAction)
    >>> with_flags("num_heads=7: 'tile' needs rotation=False; options: tile, num_heads", parser)
    '--heads 7: --tile needs --no-rotation; options: --tile, --heads'
    """
    flags = {action.dest: action.option_strings for action in parser._actions}
    for name, spellings in flags.items():
        if not spellings:
            continue
        flag = spellings[0]
        text = re.sub(rf"\b{name}=True\b", flag, text)
        text = re.sub(rf"\b{name}=False\b", spellings[-1], text)
        text = re.sub(rf"(?<![\w-]){name}=", f"{flag} ", text)
        bare = rf"|(?<![\w-]){name}\b" if "_" in name else ""  # no word of English
        text = re.sub(f"['`]{name}['`]{bare}", flag, text)
    before, options, names = text.partition("options: ")
    if options and not names.startswith("-"):
        names = ", ".join(flags.get(name, [name])[0] for name in names.split(", "))
    return (before + options + names).replace("`", "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """
    >>> did_you_mean("zigzg", ["zigzag", "striped"]), did_you_mean("?", ["zigzag"])
    (' (did you mean zigzag?)', '')
    """
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
