"""What a subcommand is, and how all of them are parsed, run and answered with an exit code.

A subcommand is a file of this folder that makes one `Command`; `main.py` lists them. Exit codes: 0
done, 1 the answer is no (a plan that does not verify), 2 the caller made a mistake (one line on
standard error says how to avoid it), 3 a mistake in this library.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

from mesh_attention.errors import MeshAttentionError, did_you_mean, printable

if TYPE_CHECKING:
    from mesh_attention.measure.ranks import Ranks


class Flag(NamedTuple):
    """A flag of the command line. `reader` turns text into a value or raises with an example of
    what fits; a flag without a reader is a switch."""

    name: str
    help: str
    reader: Callable[[str], Any] | None = None
    metavar: str = ""
    default: Any = None
    to: str | None = None  # the attribute that keeps the value; None: named as the flag
    both: bool = False  # a switch that has a --no- form

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        arguments: dict[str, Any] = {"help": self.help, "default": self.default}
        if self.to is not None:
            arguments["dest"] = self.to
        if self.reader is None:
            arguments["action"] = argparse.BooleanOptionalAction if self.both else "store_true"
        else:
            arguments |= {"type": self.reader, "metavar": self.metavar}
        parser.add_argument(self.name, **arguments)


@dataclass(frozen=True, slots=True)
class Command:
    """`run` returns the exit code; `more_flags` adds flags that several commands share."""

    summary: str
    run: Callable[[argparse.Namespace], int]
    flags: tuple[Flag, ...] = ()
    more_flags: Callable[[argparse.ArgumentParser], None] | None = None
    examples: tuple[str, ...] = ()


SELDOM = ("more of the ", "options of ")  # how titles of groups of seldom used flags begin


class UsageError(ValueError):
    """The command cannot be carried out as it was written; the message says what would work."""


class Parser(argparse.ArgumentParser):
    """argparse without its page of usage on an error, and without guessing at options. `--help`
    leaves out groups whose titles begin as `SELDOM` says; `--help-all` has them."""

    def __init__(self, prog: str, command: Command) -> None:
        examples = [f"  {example}" for example in command.examples]
        super().__init__(
            prog=prog,
            usage=f"{prog} [options]",
            description="\n".join([command.summary, "", "examples:", *examples]),
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        # -5MiB is a value that does not fit, not an unknown option.
        self._negative_number_matcher = re.compile(r"^-[0-9]")
        self.add_argument("--help-all", "--all", action=_HelpAll, nargs=0, help=argparse.SUPPRESS)
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
        """Like parse_args, but an unknown option is answered with the nearest known one."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown {kind} {name}{did_you_mean(name, known)}")
        return args

    def format_help(self, *, seldom: bool = False) -> str:
        formatter, left_out = self._get_formatter(), 0
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        # First the groups, which ask the question; then flags of the command itself and its output.
        for group in sorted(self._action_groups, key=lambda group: group is self._optionals):
            if (group.title or "").startswith(SELDOM) and not seldom:
                left_out += len(group._group_actions)
                continue
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        if left_out:
            formatter.add_text(f"{left_out} more options: --help-all")
        return with_flags(formatter.format_help(), self)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raises where the message cannot be written; argparse ignores that."""
        print(message, end="", file=file or sys.stderr)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(seldom=True), end="")
        parser.exit()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(100, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=32, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # names of methods have hyphens


def flags_beside(args: argparse.Namespace, *flags: str) -> list[str]:
    """The flags on this command line, as written, other than `flags` and --json."""
    words = [word.partition("=")[0] for word in shlex.split(args.command_line)]
    written = dict.fromkeys(word for word in words if word.startswith("--"))
    return [flag for flag in written if flag not in ("--json", *flags)]


def run_command(prog: str, command: Command, words: list[str]) -> int:
    """Parses `words`, runs the command and returns its exit code. Errors name options as flags."""
    parser = Parser(prog, command)
    try:
        args = parser.parse(words)
        args.command_line = shlex.join([*prog.split(), *words])
        return command.run(args)
    except SystemExit as done:  # argparse leaves this way after --help
        return int(done.code or 0)
    except MeshAttentionError as error:
        raise UsageError(with_flags(str(error), parser)) from error


def exit_code(prog: str, work: Callable[[], int]) -> int:
    """Runs `work` and returns its exit code. If it raises, prints a line on standard error, and
    returns the exit code of the error."""
    is_closed = sys.stdout is None  # by the parent process; `work` may still write files
    sys.stdout, sys.stderr = (stream or _null_stream() for stream in (sys.stdout, sys.stderr))
    try:
        code = work()
        sys.stdout.flush()  # here, so that a closed pipe is handled below
        if is_closed:
            raise UsageError("standard output is closed, and the answer is lost")
        return code
    except (UsageError, MeshAttentionError) as error:
        message = str(error)
    except BrokenPipeError:  # the reader (such as head) has seen enough
        _drop_output()
        return 141
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        message = f"{error.filename or 'input or output'}: {error.strerror}"
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return _own_mistake(prog)
        message = (
            "this needs torch, which is not installed: pip install torch (plan, verify, volume, "
            "simulate, advise, report and draw work without it)"
        )
    except UnicodeDecodeError as error:
        message = f"the file is not text: {error}"
    except KeyboardInterrupt:
        return 130
    except MemoryError:
        message = "there is not enough memory for this"
    except Exception:
        return _own_mistake(prog)
    print(f"{prog}: {printable(' '.join(message.split()))}", file=sys.stderr)
    return 2


def _own_mistake(prog: str) -> int:
    traceback.print_exc()
    print(f"{prog}: this is a mistake in {prog} itself; please report it", file=sys.stderr)
    return 3


def _null_stream() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # stays open to the end


def _drop_output() -> None:
    """Discards what standard output still holds, as the flush at exit would fail again."""
    with suppress(OSError):  # a stream without a descriptor is not flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def on_ranks(command: str, ranks_per_node: int | None, work: Callable[[Ranks], int]) -> int:
    """Runs `work` on the ranks that torchrun started, and returns the exit code. Without torchrun,
    the error shows how it starts `command`. All ranks raise alike, so only the first reports it."""
    from mesh_attention.measure.ranks import MeasureError, ranks_of_launcher  # imports torch

    try:
        with ranks_of_launcher(ranks_per_node, command=command) as ranks:
            return work(ranks)
    except (MeasureError, UsageError):
        if os.environ.get("RANK", "0") == "0":
            raise
        return 2


def with_flags(text: str, parser: argparse.ArgumentParser) -> str:
    """Replaces the planner's names of options by flags of the command line.

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
        bare = rf"|(?<![\w-]){name}\b" if "_" in name else ""  # else an English word
        text = re.sub(f"['`]{name}['`]{bare}", flag, text)
    before, options, names = text.partition("options: ")
    if options and not names.startswith("-"):
        names = ", ".join(flags.get(name, [name])[0] for name in names.split(", "))
    return (before + options + names).replace("`", "")
