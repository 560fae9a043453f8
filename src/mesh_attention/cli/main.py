"""The entry point of `mesh-attention`: finds the subcommand, runs it, and ends with its exit code.

Exit codes: 0 done, 1 the answer is no (a plan that does not verify), 2 the caller made a mistake
(one line on standard error says how to avoid it), 3 a mistake in this library.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from mesh_attention.cli import advise, demo, on_ranks, plan, selftest, simulate, volume
from mesh_attention.cli.command import Command, run_command
from mesh_attention.cli.values import UsageError
from mesh_attention.errors import MeshAttentionError, did_you_mean, printable
from mesh_attention.version import __version__

PROGRAM = "mesh-attention"
_EXAMPLES = (
    "advise --ranks 32 --model llama-70b --tokens 128k  # which method, and how fast",
    "advise --ranks 8 --model qwen3-8b --tokens 1M --step  # does a training step fit?",
    "report --ranks 32 --model llama-70b --tokens 128k  # the same as a page to look at",
    "selftest  # is attention exact on this computer?",
)
COMMANDS: dict[str, Command] = {  # in the order of the help: those that plan, those on ranks
    "plan": plan.PLAN,
    "volume": volume.COMMAND,
    "verify": plan.VERIFY,
    "simulate": simulate.COMMAND,
    "advise": advise.ADVISE,
    "draw": plan.DRAW,
    "report": advise.REPORT,
    "profile": on_ranks.PROFILE,
    "tune": on_ranks.TUNE,
    "demo": demo.COMMAND,
    "selftest": selftest.COMMAND,
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    name = f"{PROGRAM} {words[0]}" if words and words[0] in COMMANDS else PROGRAM
    return exit_code(name, lambda: _run(words))


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "--help-all", "--all", "help"):
        print(_help())
        return 0
    name, *rest = words
    if name == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        name = name if name.isprintable() else ascii(name)  # no codes of a terminal in an error
        raise UsageError(
            f"unknown {kind} {name}{did_you_mean(name, COMMANDS)}; "
            f"commands: {', '.join(COMMANDS)}; see {PROGRAM} --help"
        )
    return run_command(f"{PROGRAM} {name}", COMMANDS[name], rest)


def _help() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [options]",
            "",
            "Exact attention over a sequence split across ranks: plan it, check it, time it.",
            "",
            "examples:",
            *(f"  {PROGRAM} {example}" for example in _EXAMPLES),
            "",
            "commands:",
            *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
            "",
            f"{PROGRAM} COMMAND --help has examples and the usual options of a command, --help-all "
            "all of them.",
        ]
    )


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
