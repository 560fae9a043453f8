"""Ranks on a network of their own: namespaces as machines, shaped links between them.

Each rank of `predicted_against_measured.py` runs in a network namespace with one link:

    rank --inside-- node switch --between-- core --between-- node switch --inside-- rank

or straight to the core at the `between` rate where nodes have one rank. Every link has its rate in
each direction, at both ends: one queue (`tc tbf`), or a queue for each rank where ranks of a node
share a link (`htb`). So what several ranks send to one queues as on real cables, and there is no
other latency. Nothing is dropped, and TCP sends as much as it has: what is measured is links, as
lossless networks have them, and not how a congestion control finds out their rate.

Switches are namespaces too: the machine's own network gets no interface, and all that was made goes
with the namespaces, also after an error or Ctrl-C. What a killed run left behind is removed when
the next one begins. It needs root on Linux with iproute2.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rank_processes import Command, LaunchError, RankProcesses, torchrun_environment

End = tuple[str, str]  # of a link: a namespace and an interface there

PREFIX = "mesh-attention"
INTERFACE = "eth0"  # of every rank
PORT = 29500
# What the stack hands over at once: so little that no message waits long behind another's packets,
# and no more of them than cores can bear.
PACKET_SECONDS = 0.5e-3
PACKET_BYTES = (2048, 16384)  # least and most
QUEUE_BYTES = 64 * 1024 * 1024  # of a link; so long that what all ranks send at once is not dropped
SETTINGS = "/proc/sys/net/ipv4"
# The same everywhere, whatever the machine has chosen: buffers and windows larger than messages,
# nothing sent twice because a queue is long, and after a pause a rank sends on as before.
TCP = {
    # The one that every kernel grants to every namespace; without losses it does nothing. BBR lets
    # a rank send as much as returns in a round trip without queues: next to nothing where answers
    # wait behind what the other side sends.
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_early_retrans": "0",
    "tcp_wmem": "4096 8388608 16777216",
    "tcp_rmem": "4096 16777216 33554432",
}
ROUTE = "initcwnd 8000 initrwnd 8000 rto_min 30s"


@dataclass(frozen=True)
class Links:
    """Rates are in Mbit/s, of each direction: `between` of a node, `inside` of a rank in it."""

    num_nodes: int
    ranks_per_node: int = 1
    between: float = 100.0
    inside: float = 400.0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1 or self.num_ranks > 1000:
            raise LaunchError(f"{self}: 1 to 1000 ranks")
        if min(self.between, self.inside) <= 0:
            raise LaunchError(f"{self}: rates are positive")

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
    """The commands that make the network, in order."""
    for name in namespaces(links, prefix):
        yield ("ip", "netns", "add", name)
        yield ("ip", "-n", name, "link", "set", "lo", "up")
        if "-rank" not in name.removeprefix(prefix):
            yield ("ip", "-n", name, "link", "add", "switch", "type", "bridge")
            yield ("ip", "-n", name, "link", "set", "switch", "up")
    core = f"{prefix}-core"
    if links.ranks_per_node > 1:
        for node in range(links.num_nodes):
            switch, port = f"{prefix}-node{node}", f"node{node}"
            behind = [address(node * links.ranks_per_node + i) for i in range(links.ranks_per_node)]
            yield from _cable((switch, "uplink"), (core, port), links.between)
            for end, side in ((switch, "uplink"), "src"), ((core, port), "dst"):
                yield from _in_turns(end, links.between, side, behind)
            yield ("ip", "-n", switch, "link", "set", "uplink", "master", "switch")
            yield ("ip", "-n", core, "link", "set", port, "master", "switch")
    for rank in range(links.num_ranks):
        name, port = f"{prefix}-rank{rank}", f"rank{rank}"
        switch, rate = core, links.between
        if links.ranks_per_node > 1:
            switch, rate = f"{prefix}-node{rank // links.ranks_per_node}", links.inside
        yield from _cable((name, INTERFACE), (switch, port), rate)
        for end in ((name, INTERFACE), (switch, port)):
            yield _in_order(end, rate)
        yield ("ip", "-n", switch, "link", "set", port, "master", "switch")
        yield ("ip", "-n", name, "address", "add", f"{address(rank)}/16", "dev", INTERFACE)
        route = ("route", "replace", "10.77.0.0/16", "dev", INTERFACE)
        yield ("ip", "-n", name, *route, *ROUTE.split())


def _cable(end: End, other: End, mbit: float) -> Iterator[Command]:
    peer = ("peer", "name", other[1], "netns", other[0])
    yield ("ip", "link", "add", end[1], "netns", end[0], "type", "veth", *peer)
    for name, interface in (end, other):
        size = ("gso_max_size", str(_packet(mbit)))
        yield ("ip", "-n", name, "link", "set", interface, *size)
        yield ("ip", "-n", name, "link", "set", interface, "up")


def _packet(mbit: float) -> int:
    least, most = PACKET_BYTES
    return min(max(int(mbit * 1e6 / 8 * PACKET_SECONDS), least), most)


def _in_order(end: End, mbit: float) -> Command:
    """One queue for all that leaves there."""
    name, interface = end
    # Two packets may pass unshaped after a rest: a bucket smaller than one would cut it up.
    shape = f"tbf rate {_bits(mbit)} burst {2 * _packet(mbit)} limit {QUEUE_BYTES}"
    return ("tc", "-n", name, "qdisc", "add", "dev", interface, "root", *shape.split())


def _in_turns(end: End, mbit: float, side: str, ranks: Sequence[str]) -> Iterator[Command]:
    """A queue for each rank behind a link, from which packets go in turns, as from the queues of a
    NIC: otherwise whoever comes first has the link until all of it is sent."""
    name, interface = end
    tc, dev, queue = ("tc", "-n", name), ("dev", interface), f"bfifo limit {QUEUE_BYTES}".split()
    packet = _packet(mbit)
    bucket = f"ceil {_bits(mbit)} burst {2 * packet} cburst {2 * packet} quantum {packet}".split()
    yield (*tc, "qdisc", "add", *dev, "root", "handle", "1:", "htb", "default", "10")
    whole = ("classid", "1:1", "htb", "rate", _bits(mbit), *bucket)
    yield (*tc, "class", "add", *dev, "parent", "1:", *whole)
    for number, rank in enumerate(ranks, 10):
        share = ("classid", f"1:{number}", "htb", "rate", _bits(mbit / len(ranks)), *bucket)
        yield (*tc, "class", "add", *dev, "parent", "1:1", *share)
        yield (*tc, "qdisc", "add", *dev, "parent", f"1:{number}", *queue)
        chosen = f"protocol ip prio 1 u32 match ip {side} {rank}/32 flowid 1:{number}"
        yield (*tc, "filter", "add", *dev, "parent", "1:", *chosen.split())


def _bits(mbit: float) -> str:
    return f"{mbit * 1e6:.0f}bit"


def leftovers(listing: str, alive: Callable[[int], bool]) -> list[str]:
    """Names in the output of `ip netns list` whose makers live no more."""
    names = re.findall(rf"^({PREFIX}-(\d+)-\S+)", listing, re.MULTILINE)
    return [name for name, maker in names if not alive(int(maker))]


def in_namespace(name: str, command: Sequence[str]) -> Command:
    """A command in a namespace with its settings of TCP. One that the kernel refuses ends it: under
    another congestion control the two directions of a link take turns, and nobody would notice."""
    settings = "".join(
        f"echo '{x}' > {SETTINGS}/{n} || {{ echo 'the kernel refuses {n}={x}' >&2; exit 1; }}; "
        for n, x in TCP.items()
    )
    return ("ip", "netns", "exec", name, "sh", "-c", f'{settings}exec "$@"', "sh", *command)


def check_machine() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        lacks = ", ".join(missing) or "Linux"
        raise LaunchError(f"network namespaces need Linux with iproute2; missing: {lacks}")
    if os.geteuid() != 0:
        raise LaunchError("network namespaces are made by root only: run this with sudo")


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
        return inside, torchrun_environment(
            rank,
            self.links.num_ranks,
            ranks_per_node=self.links.ranks_per_node,
            address=address(0),
            port=PORT,
            interface=INTERFACE,
        )

    def _release(self) -> None:
        if self._made:
            _remove(namespaces(self.links, self._prefix))


def _run(command: Command) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _remove(names: Sequence[str]) -> None:
    """Removes namespaces, and ends the processes inside: ranks that outlived their run."""
    there = set(re.findall(r"^\S+", _run(("ip", "netns", "list")), re.MULTILINE))
    for name in there.intersection(names):
        for process in _run(("ip", "netns", "pids", name)).split():
            os.kill(int(process), signal.SIGKILL)
        _run(("ip", "netns", "delete", name))
