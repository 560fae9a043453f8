"""A machine in three numbers, by which schedulers order the tasks of a program: `Costs`.

They are those of the caller's cluster, or of the usual one where nobody names a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mesh_attention.machine.cluster import Cluster, Links
from mesh_attention.machine.load import load_cluster

USUAL = "hgx-h200"  # where nobody says what machine it is


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
