"""`LinkMeter` measures links for `profile.py`: each collective at a few sizes, inside nodes and
between them, with the calls that the runtime makes.

Inside nodes all nodes measure at once. Groups of half a node measure too, which tells the time of a
hop from the fixed time of a collective. Between nodes the first ranks of all nodes measure alone,
then all ranks of each node at once: the loss of speed tells how many NICs the ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mesh_attention.machine.cluster import CollectiveLink, ManyPeersLink, Network, Node, PeerLink
from mesh_attention.measure.curve_fit import fit_terms, short
from mesh_attention.measure.ranks import Ranks
from mesh_attention.measure.transfers import Begin, TimedTransfers, done

_SLOW = 3.0  # after a transfer of so many times `lasting`, larger transfers are not tried


@dataclass(frozen=True)
class Sample:
    """A measured transfer; a part is one message, or the data that one rank hands over."""

    name: str
    members: int
    part_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}, {self.part_bytes >> 10} KiB a part: {self.seconds * 1e6:.4g} us"


class LinkMeter:
    """`measure` fits links to samples, which stay in `samples`, by section of the cluster's file.
    `largest`: the largest size at which all transfers so far were measured. `lasting`: seconds for
    each measurement; `tell` is called after each."""

    def __init__(
        self, ranks: Ranks, sizes: Sequence[int], lasting: float, tell: Callable[[], None]
    ) -> None:
        self.ranks, self.transfers = ranks, TimedTransfers(ranks)
        self._sizes, self._lasting, self._tell = sizes, lasting, tell
        self.largest = max(sizes)
        self.samples: dict[str, list[Sample]] = {}
        n, k = ranks.size, ranks.per_node
        self._all = [tuple(range(n))]
        self._nodes = [tuple(range(first, first + k)) for first in range(0, n, k)]
        self._columns = [tuple(range(place, n, k)) for place in range(k)]

    def measure(self) -> tuple[Node, Network]:
        node = self._node() if self.ranks.per_node > 1 else None
        network = self._network(node) if self.ranks.num_nodes > 1 else None
        if node is None:
            assert network is not None  # there are two ranks at least
            node = Node(1, network.peer, network.collective, network.many_peers.gb_per_second)
        if network is None:
            # There is one node: between nodes links are assumed to be as inside.
            k, rate = node.ranks, node.peer.gb_per_second
            network = Network(k, node.peer, k * rate, 2.0, node.collective)
        return node, network

    # Inside nodes.

    def _node(self) -> Node:
        k = self.ranks.per_node
        halves = [half for node in self._nodes for half in (node[: k // 2], node[k // 2 :])]
        shapes = [self._nodes, *([halves] if k >= 4 and k % 2 == 0 else [])]
        collectives = [
            sample for groups in shapes for sample in self._collectives(groups, "inside a node")
        ]
        base, hop, per_byte = _latency_and_rate(collectives)
        own = self._nodes[self.ranks.rank // k]
        at = own.index(self.ranks.rank)
        neighbours = [(own[(at + 1) % k], True), (own[at - 1], False)]
        ring = self._messages(neighbours, "ring inside a node", k, self.ranks.size)
        exchanges = self._all_to_alls(own, "inside a node")
        moved = [(s.members - 1.0) * s.part_bytes for s in exchanges]
        _, per_exchanged = _beyond([base] * len(moved), 0.0, moved, exchanges)
        self.samples["node.collective"], self.samples["node.peer"] = collectives, ring
        self.samples["node.all_to_all_gb_per_second"] = exchanges
        return Node(
            k,
            _peer_link(ring),
            CollectiveLink(_gb(per_byte), _micro(base), _micro(hop)),
            _gb(per_exchanged),
        )

    # Between nodes.

    def _network(self, node: Node | None) -> Network:
        ranks, k = self.ranks, self.ranks.per_node
        hops = ranks.num_nodes - 1.0
        alone = self._collectives([self._columns[0]], "one rank of each node")
        in_columns = "all ranks of each node, in groups of one"
        together = self._collectives(self._columns, in_columns) if k > 1 else []
        flow = self._counterparts(1, "one rank of each node to the next")
        flows = self._counterparts(k, "all ranks of each node to the next") if k > 1 else flow
        pair = self._flows_of_a_pair(flows[-1].part_bytes)
        # The greater loss counts: a single flow or gather may be too slow to fill a NIC.
        nics = min(nics_of(k, alone, together or alone), nics_of(k, flow, flows))
        # Gathers alone: a reduction over gloo is no ring.
        gathers = ("all-gather",)
        every = self._collectives(self._all, "over all nodes", gathers) if k > 1 else []
        base, local = 0.0, 0.0
        if node is not None:
            base = node.collective.base_microseconds * 1e-6
            local = (ranks.size - ranks.num_nodes) * node.collective.hop_microseconds * 1e-6
        # Groups that share a NIC take turns, so each waits for as many times its bytes; a ring of
        # all ranks has one link into each node, spread over its NICs.
        samples = [*alone, *together, *every]
        moved = [hops * s.part_bytes for s in alone]
        moved += [hops * s.part_bytes * k / nics for s in together]
        moved += [(ranks.size - 1.0) * s.part_bytes / nics for s in every]
        known = [base] * (len(samples) - len(every)) + [base + local] * len(every)
        hop, per_byte = _beyond(known, hops, moved, samples)
        exchanges = self._all_to_alls(self._all[0], "over all nodes")
        crossing = float(ranks.size - k)
        moved = [crossing * s.part_bytes * k / nics for s in exchanges]
        message, per_exchanged = _beyond([base] * len(moved), crossing, moved, exchanges)
        self.samples["network.peer"] = flow
        self.samples["network.peer_node_gb_per_second"] = flows
        self.samples["network.flows_of_a_pair"] = pair
        self.samples["network.collective"] = samples
        self.samples["network.all_to_all"] = exchanges
        peer = _peer_link(flow)
        node_rate = k * flows[-1].part_bytes / flows[-1].seconds * 1e-9
        one_way, both_ways = pair
        return Network(
            nics,
            peer,
            short(max(node_rate, peer.gb_per_second)),
            short(min(max(2 * one_way.seconds / both_ways.seconds, 1), 2)),
            CollectiveLink(_gb(per_byte), _micro(base), _micro(hop)),
            ManyPeersLink(_gb(per_exchanged), _micro(message)),
        )

    def _flows_of_a_pair(self, part_bytes: int) -> list[Sample]:
        """Messages between the first ranks of two nodes: one way, and both ways at once."""
        first, second = 0, self.ranks.per_node
        samples = []
        for name, both_ways in (("one way", False), ("both ways", True)):
            peers = {first: [(second, True)], second: [(first, False)]}.get(self.ranks.rank, [])
            peers += [(peer, not sent) for peer, sent in peers if both_ways]
            work = done(self.transfers.messages(peers, part_bytes)) if peers else None
            lasts = self.ranks.seconds(work, lasting=self._lasting, members=2)
            samples.append(Sample(f"{name} between two ranks", 2, part_bytes, lasts))
            self._tell()
        return samples

    # Samples.

    def _collectives(
        self,
        groups: Sequence[tuple[int, ...]],
        where: str,
        kinds: Sequence[str] = ("all-gather", "reduce-scatter"),
    ) -> list[Sample]:
        members = next((group for group in groups if self.ranks.rank in group), None)
        size, num_ranks = len(groups[0]), sum(map(len, groups))
        samples = []
        for kind in kinds:
            begin = partial(self.transfers.collective, kind, members) if members else None
            samples += self._samples(f"{kind} of {size} ranks, {where}", size, num_ranks, begin)
        return samples

    def _all_to_alls(self, members: tuple[int, ...], where: str) -> list[Sample]:
        size, begin = len(members), partial(self.transfers.all_to_all, members)
        return self._samples(f"all-to-all of {size} ranks, {where}", size, self.ranks.size, begin)

    def _counterparts(self, first: int, where: str) -> list[Sample]:
        """Messages from the `first` ranks of each node to their counterparts in the next node."""
        rank, n, k = self.ranks.rank, self.ranks.size, self.ranks.per_node
        peers = [((rank + k) % n, True), ((rank - k) % n, False)] if rank % k < first else []
        return self._messages(peers, where, self.ranks.num_nodes, first * self.ranks.num_nodes)

    def _messages(
        self, peers: Sequence[tuple[int, bool]], where: str, size: int, num_ranks: int
    ) -> list[Sample]:
        """`peers`: the ranks that this rank sends to (True) or receives from (False)."""
        begin = partial(self.transfers.messages, peers) if peers else None
        return self._samples(where, size, num_ranks, begin)

    def _samples(
        self, name: str, members: int, num_ranks: int, begin: Callable[[int], Begin] | None
    ) -> list[Sample]:
        """Samples of growing sizes, until one takes too long. `num_ranks` take part, in groups of
        `members`; `begin` is None on other ranks."""
        samples: list[Sample] = []
        for part in self._sizes:
            if len(samples) > 1 and samples[-1].seconds > _SLOW * self._lasting:
                break
            work = done(begin(part)) if begin else None
            lasts = self.ranks.seconds(work, lasting=self._lasting, members=num_ranks)
            samples.append(Sample(name, members, part, lasts))
            self._tell()
        self.largest = min(self.largest, samples[-1].part_bytes)
        return samples


def _peer_link(samples: Sequence[Sample]) -> PeerLink:
    terms = [(1.0, s.part_bytes) for s in samples]
    latency, per_byte = fit_terms(terms, [s.seconds for s in samples], needed=(1,))
    return PeerLink(_gb(per_byte), _micro(latency))


def _latency_and_rate(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Seconds of the base, of a hop and of a byte. The base is 0 if all groups have one size, which
    cannot tell it from hops."""
    terms = [(1.0, s.members - 1.0, (s.members - 1.0) * s.part_bytes) for s in samples]
    seconds = [s.seconds for s in samples]
    if len({s.members for s in samples}) > 1:
        base, hop, per_byte = fit_terms(terms, seconds, needed=(2,))
        return base, hop, per_byte
    hop, per_byte = fit_terms([term[1:] for term in terms], seconds, needed=(1,))
    return 0.0, hop, per_byte


def _beyond(
    known: Sequence[float], times: float, num_bytes: Sequence[float], samples: Sequence[Sample]
) -> tuple[float, float]:
    """Seconds of a hop (or message) and of a byte, fitted to samples of `times` hops less their
    `known` seconds. At least a tenth of each sample is left, as known seconds were fitted too."""
    left = [max(s.seconds - x, s.seconds / 10) for s, x in zip(samples, known, strict=True)]
    each, per_byte = fit_terms([(times, b) for b in num_bytes], left, needed=(1,))
    return each, per_byte


def nics_of(per_node: int, alone: Sequence[Sample], together: Sequence[Sample]) -> int:
    """The number of NICs of a node, a divisor of its ranks, that best explains how much slower the
    largest transfers are when all ranks of a node use the network `together`."""
    size = min(max(s.part_bytes for s in samples) for samples in (alone, together))
    times = [[s.seconds for s in each if s.part_bytes == size] for each in (alone, together)]
    few = min(map(len, times))  # larger transfers of slow kinds were left out
    wanted = per_node * sum(times[0][:few]) / sum(times[1][:few])
    divisors = [n for n in range(1, per_node + 1) if per_node % n == 0]
    return min(divisors, key=lambda n: max(n / wanted, wanted / n))


def _gb(seconds_of_a_byte: float) -> float:
    return short(1e-9 / seconds_of_a_byte)


def _micro(seconds: float) -> float:
    return short(seconds * 1e6)
