"""What a cluster is: GPUs, links inside a node, the network between nodes, and how they disturb
each other. Small frozen data; `load` reads it from TOML, the cost files turn it into seconds.

Rates are what one direction of one rank (or NIC) carries. `half` sizes are those at which a kernel
reaches half of its rate by that side alone: `1 / (1 + half_rows / rows + half_columns / columns)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import CallKind
from mesh_attention.plan.schedule.tasks import Costs


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    peak_tflops: float  # what MFU is measured against
    memory_gib: float
    memory_gb_per_second: float  # reached by merging and packing


@dataclass(frozen=True, slots=True)
class KernelRate:
    """A curve over the size of a call. Rows count as many heads as `REFERENCE_HEADS`."""

    tflops: float
    half_rows: float
    half_columns: float


REFERENCE_HEADS = 64  # a call with fewer heads fills the GPU as fewer rows would


@dataclass(frozen=True, slots=True)
class ComputeRates:
    """`launch` is the host's time for a call, which a shorter kernel cannot hide."""

    forward: dict[CallKind, KernelRate]
    backward: dict[CallKind, KernelRate]
    launch_microseconds: float
    gap_microseconds: float

    def rate(self, direction: Direction, kind: CallKind) -> KernelRate:
        return (self.forward if direction is Direction.FORWARD else self.backward)[kind]


@dataclass(frozen=True, slots=True)
class PeerLink:
    """Point-to-point: one flow between two ranks."""

    gb_per_second: float
    latency_microseconds: float


@dataclass(frozen=True, slots=True)
class CollectiveLink:
    """Collectives: a base latency, one more for each hop of the ring, and a rate."""

    gb_per_second: float
    base_microseconds: float
    hop_microseconds: float


@dataclass(frozen=True, slots=True)
class Node:
    ranks: int
    peer: PeerLink
    collective: CollectiveLink
    all_to_all_gb_per_second: float


@dataclass(frozen=True, slots=True)
class Network:
    """Rates of the collective are per NIC; ranks share the NICs of their node in equal blocks.

    `peer_node_gb_per_second` is what all point-to-point flows of a node carry together, one way.
    `flows_of_a_pair`: flows between the same two ranks that run at full speed at once. 2 is full
    duplex; 1 means that sending to and receiving from one peer take turns.
    """

    nics: int
    peer: PeerLink
    peer_node_gb_per_second: float
    flows_of_a_pair: float
    collective: CollectiveLink


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The part of its speed that each stream of a rank loses while both are busy.

    Communication takes SMs and memory from attention. Attention holds up the kernels that move
    data: collectives little, as they run on many channels; point-to-point flows, which have few,
    more, and most beside backward kernels, which leave no SM free for as long as they run.

    `waits_for_forward_calls`: forward kernels hold every SM until a call is over (persistent
    kernels), so that a communication begins only between two calls. Backward calls last long
    beside their communications and free SMs well before their end: there it was not seen to matter.
    """

    compute_slowdown: float
    collective_slowdown: float
    peer_forward_slowdown: float
    peer_backward_slowdown: float
    waits_for_forward_calls: bool

    def waits_for_calls(self, direction: Direction) -> bool:
        return self.waits_for_forward_calls and direction is Direction.FORWARD

    def peer_slowdown(self, direction: Direction) -> float:
        forward = direction is Direction.FORWARD
        return self.peer_forward_slowdown if forward else self.peer_backward_slowdown


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    description: str
    nodes: int
    gpu: Gpu
    compute: ComputeRates
    node: Node
    network: Network
    disturbance: Disturbance

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.node.ranks

    def node_of(self, device: int) -> int:
        return device // self.node.ranks

    def nic_of(self, device: int) -> tuple[int, int]:
        """(node, NIC) through which a rank reaches the network."""
        node, place = divmod(device, self.node.ranks)
        return node, place * self.network.nics // self.node.ranks

    @property
    def ranks_share_nics(self) -> bool:
        return self.network.nics < self.node.ranks

    def planning_costs(self, num_ranks: int) -> Costs:
        """Rough costs by which schedulers order tasks, for so many ranks."""
        inside = num_ranks <= self.node.ranks
        link = self.node.collective if inside else self.network.collective
        best = max(rate.tflops for rate in self.compute.forward.values())
        return Costs(
            link.gb_per_second * 1e9,
            best * 1e12,
            (link.base_microseconds + link.hop_microseconds) * 1e-6,
        )
