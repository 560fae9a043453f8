"""What a cluster is: GPUs, links inside a node, the network between nodes, and how they disturb
each other. Small frozen data; `load` reads it from TOML, the cost files turn it into seconds.

Rates are what one direction of one rank (or NIC) carries. `half` sizes are those at which a kernel
reaches half of its rate by that side alone: `1 / (1 + half_rows / rows + half_columns / columns)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_attention.machine.kernel_facts import KernelRates, PassRates


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    peak_tflops: float  # what MFU is measured against
    memory_gib: float
    memory_gb_per_second: float  # reached by merging and packing
    sms: int
    gap_microseconds: float  # between two kernels of a stream, and before a merge


_MESSAGES_AT_ONCE = 16  # assumed: of an all-to-all, in flight on one NIC


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
class ManyPeersLink:
    """All-to-alls, which are sends to and receives from many peers at once: the rate of them all
    together through one NIC, and what each message adds, however small it is."""

    gb_per_second: float
    message_microseconds: float


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
    `all_to_all`, left out: as fast as point-to-point flows of a node are together, no faster than
    collectives; and a message adds a sixteenth of the latency of one alone.
    """

    nics: int
    peer: PeerLink
    peer_node_gb_per_second: float
    flows_of_a_pair: float
    collective: CollectiveLink
    all_to_all: ManyPeersLink | None = None

    @property
    def many_peers(self) -> ManyPeersLink:
        """The link of all-to-alls between nodes: `all_to_all`, or what follows without it."""
        if self.all_to_all is not None:
            return self.all_to_all
        together = max(self.peer.gb_per_second, self.peer_node_gb_per_second / self.nics)
        rate = min(self.collective.gb_per_second, together)
        return ManyPeersLink(rate, self.peer.latency_microseconds / _MESSAGES_AT_ONCE)


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a cluster, and which of them a device uses."""

    node: Node
    network: Network

    def node_of(self, device: int) -> int:
        return device // self.node.ranks

    def nodes_of(self, devices: Sequence[int]) -> list[int]:
        ranks = self.node.ranks
        return [device // ranks for device in devices]

    def nic_of(self, device: int) -> tuple[int, int]:
        """(node, NIC) through which a rank reaches the network."""
        node, place = divmod(device, self.node.ranks)
        return node, place * self.network.nics // self.node.ranks


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The part of its speed that each stream of a rank loses while both are busy.

    Communication takes SMs and memory from attention. Attention holds up the kernels that move
    data: collectives little, as they run on many channels; point-to-point flows, which have few,
    more, and most beside backward kernels, which leave no SM free for as long as they run. Beside a
    kernel with a margin (`PassRates`) computation loses the margin in place of `compute_slowdown`.
    """

    compute_slowdown: float
    collective_slowdown: float
    peer_forward_slowdown: float
    peer_backward_slowdown: float

    def peer_slowdown(self, direction: str) -> float:
        forward = direction == "forward"
        return self.peer_forward_slowdown if forward else self.peer_backward_slowdown


@dataclass(frozen=True, slots=True)
class StepRates:
    """What a training step meets besides attention: large matrix products in bf16, and the host, to
    which each GPU copies at this rate, each way, and whose memory the GPUs of a node share."""

    matmul_tflops: float
    host_gb_per_second: float
    host_memory_gib: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """`step` left out: whole steps are not planned.
    `host_driven`: a thread of the host computes and begins all transfers, in program order, and
    those in flight run beside each other, as on processors with gloo. Left out: transfers have a
    stream of their own and follow each other there, as on GPUs."""

    name: str
    description: str
    nodes: int
    gpu: Gpu
    kernels: dict[str, KernelRates]
    node: Node
    network: Network
    disturbance: Disturbance
    step: StepRates | None = None
    host_driven: bool | None = None

    def passes(self, direction: str) -> dict[str, PassRates]:
        """By name, the rates of the kernels that have this pass."""
        return {
            name: rates
            for name, kernel in self.kernels.items()
            if (rates := kernel.of(direction)) is not None
        }

    def best_tflops(self, direction: str) -> float:
        """The TFLOP/s of the fastest kernel in a pass, at its best."""
        passes = self.passes(direction).values()
        return max(rate.tflops for rates in passes for rate in rates.rates.values())

    def __hash__(self) -> int:  # kernels are a dictionary, which has none
        return hash((self.name, self.nodes, self.gpu, self.node, self.network))

    @property
    def links(self) -> Links:
        return Links(self.node, self.network)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.node.ranks

    @property
    def ranks_share_nics(self) -> bool:
        return self.network.nics < self.node.ranks
