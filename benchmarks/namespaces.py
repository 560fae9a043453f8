"""Ranks on a network of their own: namespaces as machines, shaped links between them.

    python benchmarks/namespaces.py --nodes 2 --ranks-per-node 4 --between 100 --inside 400 \\
        script.py its arguments

starts a script as torchrun would, each rank in a network namespace with one link:

    rank --inside-- node switch --between-- core --between-- node switch --inside-- rank

or straight to the core at the `between` rate where nodes have one rank. Every link has its rate in
each direction (`links.py`), so what several ranks send to one queues as on real cables; there is no
latency but that of queues. Switches are namespaces too: the machine's own network gets no
interface, and all that was made goes with the namespaces, also after an error or Ctrl-C. What a run
that was killed left behind is removed when the next one begins. It must be run as root on Linux
with iproute2.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO

from links import (
    INTERFACE,
    PREFIX,
    Command,
    Links,
    NamespaceError,
    commands,
    environment,
    in_namespace,
    leftovers,
    namespaces,
)

__all__ = ["Links", "NamespaceError", "Namespaces", "wire_bytes"]

SAY_AFTER = 15.0  # seconds without a word from rank 0


def check_machine() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        lacks = ", ".join(missing) or "Linux"
        raise NamespaceError(f"network namespaces need Linux with iproute2; missing: {lacks}")
    if os.geteuid() != 0:
        raise NamespaceError("network namespaces are made by root only: run this with sudo")


def wire_bytes() -> tuple[int, int]:
    """Received and sent so far on the link of the rank that asks, headers of packets included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    raise NamespaceError(f"there is no {INTERFACE}: is this rank in a namespace?")


class Namespaces:
    """A context manager: the network stands inside, and is gone afterwards."""

    def __init__(self, links: Links, say: Callable[[str], None] | None = None) -> None:
        self.links = links
        self._prefix = f"{PREFIX}-{os.getpid()}"
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Namespaces:
        check_machine()
        self._before = signal.signal(signal.SIGTERM, _exit)
        try:
            listing = _run(("ip", "netns", "list"))
            old = leftovers(listing, lambda maker: Path(f"/proc/{maker}").exists())
            if old:
                self._say(f"removing what a killed run left: {', '.join(old)}")
                _remove(old)
            for command in commands(self.links, self._prefix):
                _run(command)
        except BaseException:
            self._close()
            raise
        self._say(f"network: {self.links.words}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def run(self, command: Sequence[str], *, seconds: float) -> list[str]:
        """A process for each rank, with torchrun's environment; what each wrote to stdout.

        What rank 0 writes to stderr is shown meanwhile. If a rank fails, or after so many seconds,
        all are killed, and the error has the last words of the one that failed first.
        """
        with tempfile.TemporaryDirectory() as folder:
            files = [(Path(folder) / f"{r}.out", Path(folder) / f"{r}.err") for r in self._ranks]
            try:
                for rank, (out, err) in zip(self._ranks, files, strict=True):
                    self._processes.append(self._start(command, rank, out, err))
                with files[0][1].open() as told:
                    self._wait(told, [err for _, err in files], seconds)
            finally:
                self._kill()
            return [out.read_text() for out, _ in files]

    @property
    def _ranks(self) -> range:
        return range(self.links.num_ranks)

    def _start(
        self, command: Sequence[str], rank: int, out: Path, err: Path
    ) -> subprocess.Popen[str]:
        inside = in_namespace(f"{self._prefix}-rank{rank}", command)
        with out.open("w") as stdout, err.open("w") as stderr:
            return subprocess.Popen(
                inside,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=os.environ | environment(self.links, rank),
                start_new_session=True,  # Ctrl-C is for us: we end the ranks
                preexec_fn=_die_with_parent,
                text=True,
            )

    def _wait(self, told: TextIO, errors: list[Path], seconds: float) -> None:
        begun = last = time.monotonic()
        while True:
            states = [process.poll() for process in self._processes]
            for line in told:
                self._say(line.rstrip("\n"))
                last = time.monotonic()
            for rank, state in enumerate(states):
                if state:
                    lines = errors[rank].read_text().splitlines() if rank else []  # 0 was shown
                    raise NamespaceError(
                        "\n".join([f"rank {rank} ended with {state}", *lines[-20:]])
                    )
            if all(state == 0 for state in states):
                return
            now = time.monotonic()
            running = " ".join(str(rank) for rank, state in enumerate(states) if state is None)
            if now - begun > seconds:
                raise NamespaceError(
                    f"not done after {seconds:g} s; still running: ranks {running}"
                )
            if now - last > SAY_AFTER:
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
            _remove(namespaces(self.links, self._prefix))
        finally:
            signal.signal(signal.SIGTERM, self._before)


def _run(command: Command) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NamespaceError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _remove(names: Sequence[str]) -> None:
    """With the processes inside, which are ranks that outlived the run that started them."""
    there = set(re.findall(r"^\S+", _run(("ip", "netns", "list")), re.MULTILINE))
    for name in there.intersection(names):
        for process in _run(("ip", "netns", "pids", name)).split():
            os.kill(int(process), signal.SIGKILL)
        _run(("ip", "netns", "delete", name))


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument("--between", type=float, default=100, help="Mbit/s of a node")
    parser.add_argument("--inside", type=float, default=400, help="Mbit/s of a rank in a node")
    parser.add_argument("--seconds", type=float, default=600, help="then the ranks are ended")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a Python script, its arguments")
    given = parser.parse_args()
    if not given.script:
        parser.error("no script given")
    try:
        links = Links(given.nodes, given.ranks_per_node, given.between, given.inside)
        with Namespaces(links) as network:
            outputs = network.run((sys.executable, *given.script), seconds=given.seconds)
    except (NamespaceError, KeyboardInterrupt) as error:
        raise SystemExit(f"error: {str(error) or 'ended by Ctrl-C'}") from None
    for rank, output in enumerate(outputs):
        for line in output.splitlines():
            print(f"{rank}: {line}")


if __name__ == "__main__":
    main()
