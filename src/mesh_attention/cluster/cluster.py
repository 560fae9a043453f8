"""What a cluster is: GPUs, links inside a node, the network between nodes, and how they disturb
each other. Small frozen data; `load` reads it from TOML, the cost files turn it into seconds.

Rates are what one direction of one rank (or NIC) carries. `half` sizes are those at which a kernel
reaches half of its rate by that side alone: `1 / (1 + half_rows / rows + half_columns / columns)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import CallKind
from mesh_attention.plan.schedule.tasks import Costs


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    peak_tflops: float  # what MFU is measured against
    memory_gib: float
    memory_gb_per_second: float  # reached by merging and packing
    sms: int
    gap_microseconds: float  # between two kernels of a stream, and before a merge


@dataclass(frozen=True, slots=True)
class KernelRate:
    """A curve over the size of a call. Rows count as many heads as `REFERENCE_HEADS`."""

    tflops: float
    half_rows: float
    half_columns: float


REFERENCE_HEADS = 64  # a call with fewer heads fills the GPU as fewer rows would


@dataclass(frozen=True, slots=True)
class PassRates:
    """One pass of a kernel, with curves for the kinds of calls that it takes.

    `ranges`: it does a whole attention in one call, whatever the mask. Its curve `range` counts the
    columns of a call by what a row sees: as a causal square of so many columns, twice the mean.
    `lets_transfers_begin`: a communication finds SMs in the middle of a call; otherwise the kernel
    holds all of them until the call is over, and a communication begins between two calls.
    `sm_margin`: SMs that its calls leave to a communication in flight beside them.
    `launch` is the host's time for a call, which a shorter kernel cannot hide. `tile_rows`: rows of
    a tile of one head, of which each SM computes one after the other, where rounds show.
    `tile_keys`: keys that a program has of one head, where a communication finds enough SMs only
    when a round of programs ends. `slowdown`: the part of its speed that it loses beside a
    communication, where it has no margin; left out, what the cluster says for all.
    """

    ranges: bool
    lets_transfers_begin: bool
    sm_margin: int
    launch_microseconds: float
    full: KernelRate | None = None
    causal: KernelRate | None = None
    range: KernelRate | None = None
    tile_rows: int | None = field(default=None, kw_only=True)
    tile_keys: int | None = field(default=None, kw_only=True)
    slowdown: float | None = field(default=None, kw_only=True)

    def lost(self, sms: int) -> float | None:
        """Beside a communication, of its speed on a GPU with so many SMs; None: as all."""
        return self.sm_margin / sms if self.sm_margin else self.slowdown

    def rate(self, kind: CallKind) -> KernelRate | None:
        match kind:
            case CallKind.FULL:
                return self.full
            case CallKind.CAUSAL:
                return self.causal
            case CallKind.RANGE:
                return self.range

    @property
    def rates(self) -> dict[CallKind, KernelRate]:
        return {kind: rate for kind in CallKind if (rate := self.rate(kind)) is not None}


@dataclass(frozen=True, slots=True)
class KernelRates:
    """A kernel, by the name that the runtime has for it; it may have one pass only."""

    forward: PassRates | None = None
    backward: PassRates | None = None


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
        """What all-to-alls between nodes are reckoned by."""
        if self.all_to_all is not None:
            return self.all_to_all
        together = max(self.peer.gb_per_second, self.peer_node_gb_per_second / self.nics)
        rate = min(self.collective.gb_per_second, together)
        return ManyPeersLink(rate, self.peer.latency_microseconds / _MESSAGES_AT_ONCE)


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

    def peer_slowdown(self, direction: Direction) -> float:
        forward = direction is Direction.FORWARD
        return self.peer_forward_slowdown if forward else self.peer_backward_slowdown


@dataclass(frozen=True, slots=True)
class Cluster:
    """`host_driven`: a thread of the host computes and begins all transfers, in program order, and
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
    host_driven: bool | None = None

    def passes(self, direction: Direction) -> dict[str, PassRates]:
        """That pass of the kernels that have it, by name."""
        both = {name: (one.forward, one.backward) for name, one in self.kernels.items()}
        at = 0 if direction is Direction.FORWARD else 1
        return {name: found for name, pair in both.items() if (found := pair[at]) is not None}

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
        forward = self.passes(Direction.FORWARD).values()
        best = max(rate.tflops for kernel in forward for rate in kernel.rates.values())
        return Costs(
            link.gb_per_second * 1e9,
            best * 1e12,
            (link.base_microseconds + link.hop_microseconds) * 1e-6,
        )
