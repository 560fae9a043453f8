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
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
from rank_processes import RankProcesses

__all__ = ["Links", "NamespaceError", "Namespaces", "wire_bytes"]


def check_machine() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        lacks = ", ".join(missing) or "Linux"
        raise NamespaceError(f"network namespaces need Linux with iproute2; missing: {lacks}")
    if os.geteuid() != 0:
        raise NamespaceError("network namespaces are made by root only: run this with sudo")


def wire_bytes(interface: str = INTERFACE) -> tuple[int, int]:
    """Received and sent so far on the link of the rank that asks, headers of packets included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    raise NamespaceError(f"there is no {interface}: is this rank in a namespace?")


class Namespaces(RankProcesses):
    """The network stands inside, and is gone afterwards."""

    def __init__(self, links: Links, say: Callable[[str], None] | None = None) -> None:
        super().__init__(links.num_ranks, say)
        self.links = links
        self._prefix = f"{PREFIX}-{os.getpid()}"
        self._made = False

    def _open(self) -> None:
        check_machine()
        listing = _run(("ip", "netns", "list"))
        old = leftovers(listing, lambda maker: Path(f"/proc/{maker}").exists())
        if old:
            self._say(f"removing what a killed run left: {', '.join(old)}")
            _remove(old)
        self._made = True
        for command in commands(self.links, self._prefix):
            _run(command)
        self._say(f"network: {self.links.words}")

    def _started(self, rank: int, command: Sequence[str]) -> tuple[Command, dict[str, str]]:
        inside = in_namespace(f"{self._prefix}-rank{rank}", command)
        return inside, environment(self.links, rank)

    def _release(self) -> None:
        if self._made:
            _remove(namespaces(self.links, self._prefix))


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
