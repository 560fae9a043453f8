"""The entry of `mesh-attention`: finds the subcommand, runs it, turns errors into exit codes.

Exit codes: 0 done, 1 the answer is no (a plan that does not verify), 2 asked for the impossible.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mesh_attention.cli import bench, demo, draw, plan, simulate, verify, volume
from mesh_attention.cli.command import Command, Parser, UsageError, did_you_mean, with_flags
from mesh_attention.errors import MeshAttentionError
from mesh_attention.version import __version__

PROGRAM = "mesh-attention"
_MODULES = (plan, volume, verify, simulate, draw, demo, bench)
COMMANDS: dict[str, Command] = {module.COMMAND.name: module.COMMAND for module in _MODULES}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()  # here, where a closed pipe can still be answered
        return code
    except (UsageError, MeshAttentionError) as error:
        return _complain(words, str(error))
    except BrokenPipeError:
        # The reader (such as head) has seen enough; keep the interpreter's last flush quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _complain(words, f"{error.filename or 'input or output'}: {error.strerror}")
    except UnicodeDecodeError as error:
        return _complain(words, f"the file is not text: {error}")
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, *rest = words
    if name == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise UsageError(
            f"unknown {kind} {name}{did_you_mean(name, COMMANDS)}; "
            f"commands: {', '.join(COMMANDS)}; see {PROGRAM} --help"
        )
    command = COMMANDS[name]
    parser = Parser(PROGRAM, command)
    try:
        return command.run(parser.parse(rest))
    except SystemExit as done:  # argparse leaves this way after --help
        return int(done.code or 0)
    except MeshAttentionError as error:
        raise UsageError(with_flags(str(error), parser)) from error


def _help() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [options]",
            "",
            "Plans for exact attention over a sequence that is split across ranks.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
            "",
            f"{PROGRAM} COMMAND --help lists the options of a command, --version the version.",
        ]
    )


def _complain(words: list[str], message: str) -> int:
    """One line, whatever the message holds."""
    name = f"{PROGRAM} {words[0]}" if words and words[0] in COMMANDS else PROGRAM
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return 2
