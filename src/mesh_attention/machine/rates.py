"""A machine in a few numbers, for choices that must take no time.

Schedulers order the tasks of a program by `Costs`, of the caller's cluster or of the usual one. The
documents of a batch are shared out by `Rates`, of the usual one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mesh_attention.machine.cluster import Cluster, Links
from mesh_attention.machine.kernel_facts import REFERENCE_HEADS, KernelRate
from mesh_attention.machine.load import load_cluster

USUAL = "hgx-h200"  # where nobody says what machine it is


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank reaches, in one direction of its links.

    flops, half_keys, half_rows   the kernel that is fastest under a mask, forward and backward
    peer        seconds for each other rank that a rank exchanges with
    call        seconds that a kernel call takes at least
    """

    flops: tuple[float, float]
    half_keys: tuple[float, float]
    half_rows: float
    inside_bytes: float  # a second
    between_bytes: float
    latency: float
    peer: float
    call: float
    ranks_per_node: int

    def transfer(self, inside: float, between: float, peers: int) -> float:
        """Seconds of bytes on both kinds of links at once, and something for each message."""
        if inside + between == 0:
            return 0.0
        moved = max(inside / self.inside_bytes, between / self.between_bytes)
        return moved + self.latency + peers * self.peer

    def attention(
        self, flops: float, rows: float, seen: float, heads: float, *, backward: bool
    ) -> float:
        """Seconds of one call, in which a row sees so many keys in the mean."""
        slower = 1 + self.half_rows * REFERENCE_HEADS / (rows * heads)
        slower += self.half_keys[backward] / (2 * seen)
        return self.call + flops * slower / self.flops[backward]


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs by which schedulers order tasks: they need ratios, not truth."""

    bytes_per_second: float
    flops_per_second: float
    latency_seconds: float

    def communication_seconds(self, num_bytes: float) -> float:
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def compute_seconds(self, flops: float) -> float:
        return flops / self.flops_per_second


@cache
def usual_rates() -> Rates:
    """The kernel that is fastest under a mask in each pass, and the links as one rank has them."""
    cluster = usual_cluster()
    forward, backward = _under_a_mask(cluster, "forward"), _under_a_mask(cluster, "backward")
    node, network = cluster.node, cluster.network
    collective = network.collective
    launches = [rates.launch_microseconds for rates in cluster.passes("forward").values()]
    return Rates(
        flops=(forward.tflops * 1e12, backward.tflops * 1e12),
        half_keys=(forward.half_columns, backward.half_columns),
        half_rows=forward.half_rows,
        inside_bytes=node.collective.gb_per_second * 1e9,
        between_bytes=collective.gb_per_second * 1e9 * network.nics / node.ranks,
        latency=(collective.base_microseconds + collective.hop_microseconds) * 1e-6,
        peer=network.many_peers.message_microseconds * 1e-6,
        call=min(launches) * 1e-6,
        ranks_per_node=node.ranks,
    )


def _under_a_mask(cluster: Cluster, direction: str) -> KernelRate:
    rates = [
        rate
        for kernel in cluster.passes(direction).values()
        for kind, rate in kernel.rates.items()
        if kind != "full"
    ]
    return max(rates, key=lambda rate: rate.tflops)


def costs_of(cluster: Cluster, num_ranks: int) -> Costs:
    """The costs on so many ranks of a cluster: inside a node, or between nodes."""
    inside = num_ranks <= cluster.node.ranks
    link = cluster.node.collective if inside else cluster.network.collective
    return Costs(
        link.gb_per_second * 1e9,
        cluster.best_tflops("forward") * 1e12,
        (link.base_microseconds + link.hop_microseconds) * 1e-6,
    )


@cache
def usual_cluster() -> Cluster:
    """The cluster that is taken where nobody names one. It is read once."""
    return load_cluster(USUAL)


def usual_links() -> Links:
    return usual_cluster().links


@cache
def usual_costs() -> Costs:
    """The costs of the usual cluster between nodes."""
    cluster = usual_cluster()
    return costs_of(cluster, 2 * cluster.node.ranks)
