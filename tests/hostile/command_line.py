"""The command line with random options and values: an answer, or one sentence and exit status 2;
never a traceback, and never silence for long."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections import Counter
from random import Random

from hostile.campaign import Hang, Verdict, within
from mesh_attention.cli.command import Parser
from mesh_attention.cli.main import COMMANDS, main
from mesh_attention.plan.methods.table import METHODS

__all__ = ["CommandLine"]

LIMIT = 30.0  # seconds of one line
TRIED = ("plan", "volume", "verify", "simulate", "advise", "draw")
SMALL = ("--tokens", "96", "--ranks", "4", "--heads", "4", "--head-dim", "8")
VALUES = (
    "0", "1", "2", "3", "4", "8", "12", "96", "-1", "1.5", "1e3", "nan", "inf", "", " ", "x", "2x2",
    "1x4", "4x1", "3x3", "0x0", "2x", "9x9", "0,96", "0,40,96", "0,96,40", "1,2,3", "8:0", "inf:0",
    "8", "-5:0", "1KiB", "64MiB", "10XB", "999999999999", "99999999999999999999", "both", "forward",
    "hgx-h100", "paper", "nowhere", "auto", "zigzag", "striped", "listed", "yes", "no", "é", "٣",
    "--json", "-", "/no/such/file", "/dev/null", "\x1b[31m", "a" * 300, "none", "events", "search",
)  # fmt: skip


class CommandLine:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._folder = tempfile.TemporaryDirectory(prefix="hostile")

    def case(self, number: int) -> Verdict:
        draw = Random(f"command line {self._seed} {number}")
        words = random_line(draw)
        out, err = io.StringIO(), io.StringIO()
        before = os.getcwd()
        os.chdir(self._folder.name)  # files that a line asks for are written there
        try:
            with within(LIMIT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status: int | str = main(words)
        except (Exception, SystemExit, Hang) as error:
            status = f"{type(error).__name__}: {error}"
        finally:
            os.chdir(before)
        wrong = fault_of(status, out.getvalue(), err.getvalue())
        counts = Counter({f"exit status {status}" if isinstance(status, int) else "raised": 1})
        shown = " ".join(word if word.strip() else repr(word) for word in words)
        return Verdict(counts, (f"{shown}: {wrong}",) if wrong else ())

    def close(self) -> None:
        self._folder.cleanup()


def random_line(draw: Random) -> list[str]:
    """Small sizes first, so that most lines take no time; later words win over them."""
    command = draw.choice(TRIED) if draw.randrange(30) else "report"  # which takes seconds
    parser = Parser("mesh-attention", COMMANDS[command])
    words = [command, *SMALL]
    for known in draw.sample(parser.flags, draw.randint(1, 4)):
        flag = draw.choice(known.names)
        if draw.randrange(12) == 0:
            flag = flag[:-1]
        takes_value = known.read is not None
        value = draw.choice([*METHODS]) if flag == "--method" and draw.randrange(3) else None
        value = value or draw.choice(VALUES)
        if takes_value == bool(draw.randrange(15)):  # now and then the other way round
            words += [f"{flag}={value}"] if draw.randrange(4) == 0 else [flag, value]
        else:
            words.append(flag)
    if draw.randrange(15) == 0:
        words.insert(draw.randrange(len(words)), draw.choice(VALUES))
    return words


def fault_of(status: int | str, out: str, err: str) -> str:
    """What is wrong with an answer, if anything."""
    if not isinstance(status, int):
        return status
    if "Traceback" in err or "Traceback" in out or status not in (0, 1, 2):
        return f"exit status {status}, {err[-600:]}"
    if status == 2:
        messages = [line for line in err.splitlines() if line.startswith("mesh-attention")]
        if len(messages) != 1 or " " not in messages[0].partition(": ")[2]:
            return f"exit status 2 without one sentence: {err!r}"
        if any(not character.isprintable() for character in messages[0]):
            return f"control characters: {messages[0]!r}"
    return ""
