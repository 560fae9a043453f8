"""Ranks on a network of their own: namespaces as machines, shaped links between them.

    python benchmarks/namespaces.py --nodes 2 --ranks-per-node 4 --between 100 --inside 400 \\
        script.py its arguments

starts a script as torchrun would, each rank in a network namespace with one link:

    rank --inside-- node switch --between-- core --between-- node switch --inside-- rank

or straight to the core at the `between` rate where nodes have one rank. Every link has its rate in
each direction (`tc tbf`, at both ends), so what several ranks send to one queues as on real cables;
there is no latency but that of queues. Switches are namespaces too: the machine's own network gets
no interface, and all that was made goes with the namespaces, also after an error or Ctrl-C. What a
run that was killed left behind is removed when the next one begins. It must be run as root on Linux
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO

__all__ = ["Links", "NamespaceError", "Namespaces", "wire_bytes"]

Command = tuple[str, ...]

PREFIX = "mesh-attention"
INTERFACE = "eth0"  # of every rank
PORT = 29500
# What the stack hands over at once: so little that no message waits long behind another's packets,
# and no more of them than cores can bear.
PACKET_SECONDS = 0.5e-3
PACKET_BYTES = (2048, 16384)  # least and most
QUEUE_BYTES = 8 * 1024 * 1024  # of a link; so long that what seven ranks send to one is not dropped
SAY_AFTER = 15.0  # seconds without a word from rank 0


class NamespaceError(RuntimeError):
    """Of the machine, or of a rank; the message says which."""


@dataclass(frozen=True)
class Links:
    """Rates are in Mbit/s, of each direction: `between` of a node, `inside` of a rank in it."""

    num_nodes: int
    ranks_per_node: int = 1
    between: float = 100.0
    inside: float = 400.0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1 or self.num_ranks > 1000:
            raise NamespaceError(f"{self}: 1 to 1000 ranks")
        if min(self.between, self.inside) <= 0:
            raise NamespaceError(f"{self}: rates are positive")

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def words(self) -> str:
        if self.ranks_per_node == 1:
            return f"{self.num_ranks} ranks, {self.between:g} Mbit/s each"
        return (
            f"{self.num_nodes} nodes of {self.ranks_per_node} ranks, {self.between:g} Mbit/s a "
            f"node and {self.inside:g} a rank"
        )


# What is made, as commands.


def namespaces(links: Links, prefix: str) -> list[str]:
    """All that a network consists of, and so all that is to be removed."""
    switches = [f"node{node}" for node in range(links.num_nodes)]
    ranks = [f"rank{rank}" for rank in range(links.num_ranks)]
    return [
        f"{prefix}-{x}" for x in ["core", *(switches if links.ranks_per_node > 1 else ()), *ranks]
    ]


def address(rank: int) -> str:
    return f"10.77.{rank // 250}.{rank % 250 + 1}"


def commands(links: Links, prefix: str) -> Iterator[Command]:
    """Those that make the network, in order."""
    for name in namespaces(links, prefix):
        yield ("ip", "netns", "add", name)
        yield ("ip", "-n", name, "link", "set", "lo", "up")
        if "-rank" not in name.removeprefix(prefix):
            yield ("ip", "-n", name, "link", "add", "switch", "type", "bridge")
            yield ("ip", "-n", name, "link", "set", "switch", "up")
    core = f"{prefix}-core"
    if links.ranks_per_node > 1:
        for node in range(links.num_nodes):
            mine = f"{prefix}-node{node}"
            yield from _cable((mine, "uplink"), (core, f"node{node}"), links.between)
            yield ("ip", "-n", mine, "link", "set", "uplink", "master", "switch")
            yield ("ip", "-n", core, "link", "set", f"node{node}", "master", "switch")
    for rank in range(links.num_ranks):
        mine, port, rate = f"{prefix}-rank{rank}", f"rank{rank}", links.between
        switch = core
        if links.ranks_per_node > 1:
            switch, rate = f"{prefix}-node{rank // links.ranks_per_node}", links.inside
        yield from _cable((mine, INTERFACE), (switch, port), rate)
        yield ("ip", "-n", switch, "link", "set", port, "master", "switch")
        yield ("ip", "-n", mine, "address", "add", f"{address(rank)}/16", "dev", INTERFACE)


def _cable(one: tuple[str, str], other: tuple[str, str], mbit: float) -> Iterator[Command]:
    peer = ("peer", "name", other[1], "netns", other[0])
    yield ("ip", "link", "add", one[1], "netns", one[0], "type", "veth", *peer)
    least, most = PACKET_BYTES
    packet = min(max(int(mbit * 1e6 / 8 * PACKET_SECONDS), least), most)
    # Two packets may pass unshaped after a rest: a bucket smaller than one would cut it up.
    shape = f"tbf rate {mbit * 1e6:.0f}bit burst {2 * packet} limit {QUEUE_BYTES}"
    for name, interface in (one, other):
        yield ("ip", "-n", name, "link", "set", interface, "gso_max_size", str(packet))
        yield ("tc", "-n", name, "qdisc", "add", "dev", interface, "root", *shape.split())
        yield ("ip", "-n", name, "link", "set", interface, "up")


def leftovers(listing: str, alive: Callable[[int], bool]) -> list[str]:
    """Names in what `ip netns list` printed whose makers live no more."""
    found = re.findall(rf"^({PREFIX}-(\d+)-\S+)", listing, re.MULTILINE)
    return [name for name, maker in found if not alive(int(maker))]


def environment(links: Links, rank: int) -> dict[str, str]:
    """As torchrun sets it, and what gloo needs to find its interface."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(links.num_ranks),
        "LOCAL_RANK": str(rank % links.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(links.ranks_per_node),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",  # ranks share the cores of one machine
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it would warn that addresses have no names
    }


# On the machine.


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
        inside = ("ip", "netns", "exec", f"{self._prefix}-rank{rank}", *command)
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
