"""Ranks as processes of this machine: started together, heard while they run, ended together.

`namespaces.py` gives each rank a network of its own; in `sockets.py` they share a GPU.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Self, TextIO

Command = tuple[str, ...]
Heard = Callable[[list[str]], None]
SAY_AFTER = 15.0  # seconds without a word from rank 0


class LaunchError(RuntimeError):
    """The machine cannot run the ranks, or a rank failed; the message says which."""


def torchrun_environment(
    rank: int, num_ranks: int, *, ranks_per_node: int, address: str, port: int, interface: str
) -> dict[str, str]:
    """What torchrun sets, and what gloo needs to find its interface."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",  # ranks share the cores of one machine
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it would warn that addresses have no names
    }


class RankProcesses:
    """A context manager: what ranks need stands inside, and is gone afterwards."""

    def __init__(self, num_ranks: int, say: Callable[[str], None] | None = None) -> None:
        self._ranks = range(num_ranks)
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._processes: list[subprocess.Popen[str]] = []

    def _open(self) -> None:
        """Make what ranks need."""

    def _release(self) -> None:
        """Remove it, or the part of it that was made."""

    def _started(self, rank: int, command: Sequence[str]) -> tuple[Command, dict[str, str]]:
        """The command of a rank, and what is added to its environment."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, _exit)
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def run(
        self, command: Sequence[str], *, seconds: float, heard: Heard | None = None
    ) -> list[str]:
        """Runs a process for each rank, and returns what each wrote to stdout.

        Lines that rank 0 writes to stderr are shown at once. With each of them, and at the end,
        `heard` gets what all ranks wrote to stdout until then. If a rank fails, or after so many
        seconds, all are killed, and the error has the last words of the rank that failed first.
        """
        with tempfile.TemporaryDirectory() as folder:
            files = [(Path(folder) / f"{r}.out", Path(folder) / f"{r}.err") for r in self._ranks]

            def outputs() -> list[str]:
                return [out.read_text() for out, _ in files]

            try:
                for rank, (out, err) in zip(self._ranks, files, strict=True):
                    self._processes.append(self._start(command, rank, out, err))
                with files[0][1].open() as spoken:
                    for _ in self._wait(spoken, [err for _, err in files], seconds):
                        if heard is not None:
                            heard(outputs())
            finally:
                started = len(self._processes) == len(files)
                self._kill()
                if heard is not None and started:
                    heard(outputs())
            return outputs()

    def _start(
        self, command: Sequence[str], rank: int, out: Path, err: Path
    ) -> subprocess.Popen[str]:
        started, environment = self._started(rank, command)
        with out.open("w") as stdout, err.open("w") as stderr:
            return subprocess.Popen(
                started,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C is for us: we end the ranks
                preexec_fn=_die_with_parent,
                text=True,
            )

    def _wait(self, spoken: TextIO, errors: list[Path], seconds: float) -> Iterator[None]:
        """Waits until all are done; yields whenever rank 0 has written a line to stderr."""
        begun = last = time.monotonic()
        while True:
            states = [process.poll() for process in self._processes]
            lines = spoken.readlines()
            for line in lines:
                self._say(line.rstrip("\n"))
            for rank, state in enumerate(states):
                if state:
                    words = _last(errors[rank], 20) if rank else []  # 0 was shown
                    raise LaunchError("\n".join([f"rank {rank} ended with {state}", *words]))
            if all(state == 0 for state in states):
                return
            now = time.monotonic()
            running = " ".join(str(rank) for rank, state in enumerate(states) if state is None)
            if now - begun > seconds:
                words = [f"rank {r}: {x}" for r in self._ranks[1:] for x in _last(errors[r], 2)]
                late = f"not done after {seconds:.0f} s; still running: ranks {running}"
                raise LaunchError("\n".join([late, *words]))
            if lines:
                last = now
                yield
            elif now - last > SAY_AFTER:
                self._say(f"... {now - begun:.0f} s, running: ranks {running}")
                last = now
            time.sleep(0.1)

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def _close(self) -> None:
        try:
            self._kill()
            self._release()
        finally:
            signal.signal(signal.SIGTERM, self._before)


def _last(file: Path, lines: int) -> list[str]:
    return file.read_text().splitlines()[-lines:]


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
