"""A network of namespaces as commands: nodes, ranks and shaped links, and nothing done yet.

`namespaces.py` runs them. Every link has its rate in each direction, at both ends: one queue (`tc
tbf`), or a queue for each rank where ranks of a node share a link (`htb`). Nothing is dropped, and
TCP sends as much as it has: what is measured is links, as lossless networks have them, and not how
a congestion control finds out their rate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Links", "NamespaceError", "address", "commands", "environment", "leftovers"]

Command = tuple[str, ...]
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
            mine, port = f"{prefix}-node{node}", f"node{node}"
            behind = [address(node * links.ranks_per_node + i) for i in range(links.ranks_per_node)]
            yield from _cable((mine, "uplink"), (core, port), links.between)
            for end, side in ((mine, "uplink"), "src"), ((core, port), "dst"):
                yield from _in_turns(end, links.between, side, behind)
            yield ("ip", "-n", mine, "link", "set", "uplink", "master", "switch")
            yield ("ip", "-n", core, "link", "set", port, "master", "switch")
    for rank in range(links.num_ranks):
        mine, port, rate = f"{prefix}-rank{rank}", f"rank{rank}", links.between
        switch = core
        if links.ranks_per_node > 1:
            switch, rate = f"{prefix}-node{rank // links.ranks_per_node}", links.inside
        yield from _cable((mine, INTERFACE), (switch, port), rate)
        for end in ((mine, INTERFACE), (switch, port)):
            yield _in_order(end, rate)
        yield ("ip", "-n", switch, "link", "set", port, "master", "switch")
        yield ("ip", "-n", mine, "address", "add", f"{address(rank)}/16", "dev", INTERFACE)
        way = ("route", "replace", "10.77.0.0/16", "dev", INTERFACE)
        yield ("ip", "-n", mine, *way, *ROUTE.split())


def _cable(one: End, other: End, mbit: float) -> Iterator[Command]:
    peer = ("peer", "name", other[1], "netns", other[0])
    yield ("ip", "link", "add", one[1], "netns", one[0], "type", "veth", *peer)
    for name, interface in (one, other):
        size = ("gso_max_size", str(_packet(mbit)))
        yield ("ip", "-n", name, "link", "set", interface, *size)
        yield ("ip", "-n", name, "link", "set", interface, "up")


def _packet(mbit: float) -> int:
    least, most = PACKET_BYTES
    return min(max(int(mbit * 1e6 / 8 * PACKET_SECONDS), least), most)


def _in_order(end: End, mbit: float) -> Command:
    """What leaves there waits in one queue."""
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
        mine = ("classid", f"1:{number}", "htb", "rate", _bits(mbit / len(ranks)), *bucket)
        yield (*tc, "class", "add", *dev, "parent", "1:1", *mine)
        yield (*tc, "qdisc", "add", *dev, "parent", f"1:{number}", *queue)
        chosen = f"protocol ip prio 1 u32 match ip {side} {rank}/32 flowid 1:{number}"
        yield (*tc, "filter", "add", *dev, "parent", "1:", *chosen.split())


def _bits(mbit: float) -> str:
    return f"{mbit * 1e6:.0f}bit"


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


def in_namespace(name: str, command: Sequence[str]) -> Command:
    """A command in a namespace with its settings of TCP. One that the kernel refuses ends it: under
    another congestion control the two directions of a link take turns, and nobody would notice."""
    settings = "".join(
        f"echo '{x}' > {SETTINGS}/{n} || {{ echo 'the kernel refuses {n}={x}' >&2; exit 1; }}; "
        for n, x in TCP.items()
    )
    return ("ip", "netns", "exec", name, "sh", "-c", f'{settings}exec "$@"', "sh", *command)
