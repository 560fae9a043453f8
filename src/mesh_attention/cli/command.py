"""What a subcommand is: what it runs, and its page of help, which declares its flags.

A file of this folder makes each `Command`, and `main.py` lists them. Reading a command line, the
pages of `--help` and `--help-all`, and errors that name options as flags follow from its page.
"""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from mesh_attention.cli.values import READERS, UsageError, one_of
from mesh_attention.errors import MeshAttentionError, did_you_mean

Read = Callable[[str], Any]
# Under these names the planner has what flags of other names say; `pass` is a word of Python.
_ATTRIBUTES = {
    "tokens": "q_tokens",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "pass": "passes",
}
_PLACE_OF_HELP, _MOST_COLUMNS = 32, 100


class Flag(NamedTuple):
    """A flag of the command line. `read` turns text into a value, or raises a `UsageError` with an
    example of what fits; a switch has none, and may have a second name, `--no-...`."""

    names: tuple[str, ...]
    metavar: str
    help: str
    read: Read | None = None
    group: str = "options"  # the title that the help shows it under
    is_seldom: bool = False  # only `--help-all` shows it
    default: str = ""  # a text, as people would write it; empty: none

    @property
    def attribute(self) -> str:
        """The attribute of `Args` that has its value."""
        name = self.names[0].lstrip("-").replace("-", "_")
        return _ATTRIBUTES.get(name, name)

    @property
    def left_out(self) -> Any:
        """Its value where a command line does not have it."""
        if self.read is None:
            return False if len(self.names) == 1 else None
        return self.read(self.default) if self.default else None


def flags(
    page: str,
    group: str = "options",
    *,
    seldom: bool = False,
    read: Mapping[str, Read] | None = None,
) -> list[Flag]:
    """The flags of a page that is written as help shows it: two spaces before the help of a flag,
    which goes on in lines that begin with spaces. `N=1` is a metavar with a default. Values are
    read as their metavar says (a list of words: one of them), or by what `read` has for the
    attribute of the flag.

    >>> [(flag.names, flag.attribute, flag.metavar, flag.help) for flag in flags('''
    ... --tokens N         query tokens
    ... --fast, --no-fast  whether it is
    ...                    fast
    ... ''')]  # doctest: +NORMALIZE_WHITESPACE
    [(('--tokens',), 'q_tokens', 'N', 'query tokens'),
     (('--fast', '--no-fast'), 'fast', '', 'whether it is fast')]
    """
    made = []
    for text in re.split(r"\n(?=-)", page.strip()):
        head, help = re.split(r"\s{2,}", text, maxsplit=1)
        *names, last = head.split(", ")
        last, _, value = last.partition(" ")
        metavar, _, default = value.partition("=")
        help = " ".join(help.split())
        flag = Flag((*names, last), metavar, help, None, group, seldom, default)
        reader = (read or {}).get(flag.attribute) or READERS.get(metavar)
        if metavar and reader is None:
            reader = one_of(last.lstrip("-"), metavar.split("|"))
        made.append(flag._replace(read=reader))
    return made


class Args(SimpleNamespace):
    """The values of a command line, by the attributes of its flags: None where one was left out
    that has no default, or False of a switch without a second name. `command_line` is the whole of
    it, `written` the flags on it."""


@dataclass(frozen=True)
class Command:
    """`run` returns the exit code. `page`: what it does in a line, examples, and its flags as
    `flags` takes them, with an empty line between. `more_flags` makes flags that several commands
    share, and `read` has readers of values that no metavar names."""

    run: Callable[[Args], int]
    page: str
    more_flags: Callable[[], Iterable[Flag]] = tuple
    read: Mapping[str, Read] | None = None

    @property
    def summary(self) -> str:
        return self.page.partition("\n")[0]

    @property
    def examples(self) -> list[str]:
        """Those of the page; an example goes on in lines that begin with more spaces."""
        lines = re.split(r"\n  (?! )", self.page.split("\n\n")[1])[1:]
        return [" ".join(line.split()) for line in lines]

    def flags(self) -> list[Flag]:
        own = flags(self.page.split("\n\n")[2], read=self.read)
        json = Flag(("--json",), "", "print one line of JSON instead")
        return [*own, json, *self.more_flags()]


_HELP = Flag(("-h", "--help"), "", "show this help message and exit")
_HELP_ALL = Flag(("--help-all", "--all"), "", "the same with all options")  # a line below names it


class Parser:
    """Reads the words of a command line, and writes the pages of help."""

    def __init__(self, prog: str, command: Command) -> None:
        self.prog, self.command = prog, command
        self.flags = command.flags()

    def parse(self, words: Iterable[str]) -> Args:
        """The values, or a `UsageError`. `--help` prints its page, and ends the program."""
        args = Args(**{flag.attribute: flag.left_out for flag in self.flags})
        known = (_HELP, _HELP_ALL, *self.flags)
        by_name = {name: flag for flag in known for name in flag.names}
        args.written, unknown, rest = [], [], iter(words)
        for word in rest:
            name, is_joined, text = word.partition("=")
            flag = by_name.get(name)
            if flag is None:
                unknown.append(name)
                continue
            args.written.append(name)
            if flag.read is None:
                if is_joined:
                    raise self._refusal(f"is given or not, without a value: {text!r}", flag)
                if flag in (_HELP, _HELP_ALL):
                    print(self.help(seldom=flag is _HELP_ALL), end="")
                    raise SystemExit(0)
                value: Any = not name.startswith("--no-")
            else:
                text = text if is_joined else next(rest, "--")
                if not is_joined and re.match(r"-[^0-9]", text):  # -5 is a value that may not fit
                    raise self._refusal("needs a value", flag)
                try:
                    value = flag.read(text)
                except UsageError as error:
                    raise self._refusal(str(error), flag) from error
            setattr(args, flag.attribute, value)
        if unknown:
            kind = "option" if unknown[0].startswith("-") else "argument"
            raise self._refusal(f"unknown {kind} {unknown[0]}{did_you_mean(unknown[0], by_name)}")
        return args

    def _refusal(self, message: str, flag: Flag | None = None) -> UsageError:
        where = "" if flag is None else f"{'/'.join(flag.names)}: "
        return UsageError(f"{where}{message}; see {self.prog} --help")

    def help(self, *, seldom: bool = False) -> str:
        """The page of `--help`, or with `seldom` that of `--help-all`."""
        groups: dict[str, list[tuple[str, str]]] = {"options": []}
        left_out = 0
        for flag in (_HELP, *self.flags):
            if flag.is_seldom and not seldom:
                left_out += 1
                continue
            head = f"  {', '.join(flag.names)} {flag.metavar}".rstrip()
            groups.setdefault(flag.group, []).append((head, flag.help))
        # First the groups, which ask the question; then flags of the command itself.
        groups["options"] = groups.pop("options")
        place = min(
            _PLACE_OF_HELP, 2 + max(len(head) for rows in groups.values() for head, _ in rows)
        )
        columns = min(_MOST_COLUMNS, shutil.get_terminal_size().columns) - place
        lines = [f"usage: {self.prog} [options]", "", self.command.summary, "", "examples:"]
        lines += [f"  {example}" for example in self.command.examples]
        for title, rows in groups.items():
            lines += ["", f"{title}:"]
            for head, text in rows:
                # Names of methods have hyphens.
                help = textwrap.wrap(text, max(11, columns), break_on_hyphens=False)
                if len(head) > place - 2:
                    lines.append(head)
                    head = ""
                lines.append(f"{head:<{place}}{help[0]}")
                lines += [" " * place + line for line in help[1:]]
        if left_out:
            lines += ["", f"{left_out} more options: --help-all"]
        return with_flags("\n".join([*lines, ""]), self.flags)


def flags_beside(args: Args, *flags: str) -> list[str]:
    """The flags on this command line, as written, other than `flags` and --json."""
    return [flag for flag in dict.fromkeys(args.written) if flag not in ("--json", *flags)]


def run_command(prog: str, command: Command, words: list[str]) -> int:
    """Parses `words`, runs the command and returns its exit code. Errors name options as flags."""
    parser = Parser(prog, command)
    try:
        args = parser.parse(words)
        args.command_line = shlex.join([*prog.split(), *words])
        return command.run(args)
    except SystemExit as done:  # after --help
        return int(done.code or 0)
    except MeshAttentionError as error:
        raise UsageError(with_flags(str(error), parser.flags)) from error


def with_flags(text: str, flags: Iterable[Flag]) -> str:
    """Replaces the planner's names of options by flags of the command line.

    The planner writes `name=value`, and a name alone in quotes or in a list.

    >>> known = flags('''
    ... --heads N                  of queries
    ... --tile AxB                 cells of a rank
    ... --rotation, --no-rotation  of keys
    ... ''', read={"tile": str})
    >>> with_flags("num_heads=7: 'tile' needs rotation=False; options: tile, num_heads", known)
    '--heads 7: --tile needs --no-rotation; options: --tile, --heads'
    """
    names = {flag.attribute: flag.names for flag in flags}
    for name, (flag, *others) in names.items():
        text = re.sub(rf"\b{name}=True\b", flag, text)
        text = re.sub(rf"\b{name}=False\b", [flag, *others][-1], text)
        text = re.sub(rf"(?<![\w-]){name}=", f"{flag} ", text)
        bare = rf"|(?<![\w-]){name}\b" if "_" in name else ""  # else an English word
        text = re.sub(f"['`]{name}['`]{bare}", flag, text)
    before, options, listed = text.partition("options: ")
    if options and not listed.startswith("-"):
        listed = ", ".join(names.get(name, [name])[0] for name in listed.split(", "))
    return (before + options + listed).replace("`", "")
