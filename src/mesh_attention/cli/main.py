"""The entry point of `mesh-attention`: finds the subcommand and runs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from mesh_attention.cli.command import Command, UsageError, exit_code, run_command
from mesh_attention.errors import did_you_mean
from mesh_attention.version import __version__

PROGRAM = "mesh-attention"
_EXAMPLES = (
    "advise --ranks 32 --model llama-70b --tokens 128k  # which method, and how fast",
    "advise --ranks 8 --model qwen3-8b --tokens 1M --step  # does a training step fit?",
    "report --ranks 32 --model llama-70b --tokens 128k  # the same as a page to look at",
    "selftest  # is attention exact on this computer?",
)
# The files of subcommands, in the order of the help: those that plan, and those that run on ranks.
_PLANNING = ("plan", "volume", "verify", "simulate", "advise", "draw", "report")
_ON_RANKS = ("profile", "tune", "demo", "selftest")
COMMANDS: dict[str, Command] = {
    name: import_module(f"mesh_attention.cli.{name}").COMMAND for name in _PLANNING + _ON_RANKS
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
