"""What links carry: each collective at a few sizes, inside nodes and between them.

The calls are those that the runtime makes. Inside nodes all nodes measure at once, and groups of
half a node too, so that a hop and the beginning of a collective can be told apart. Between nodes
the first ranks of all nodes measure alone, and then all ranks of each node at once: what they lose
by that tells how many NICs they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mesh_attention.machine.cluster import (
    CollectiveLink,
    ManyPeersLink,
    Network,
    Node,
    PeerLink,
)
from mesh_attention.measure.curve_fit import fit_terms
from mesh_attention.measure.ranks import Ranks
from mesh_attention.measure.timed_transfers import Begin, TimedTransfers, done

KIB = 1 << 10
_KINDS = ("all-gather", "reduce-scatter")
_SLOW = 3.0  # times the seconds of a measurement: larger transfers are not tried


@dataclass(frozen=True)
class Sample:
    """One measured transfer: bytes of a part (what one rank hands over, or one message)."""

    what: str
    members: int
    part_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.what}, {self.part_bytes >> 10} KiB a part: {self.seconds * 1e6:.4g} us"


@dataclass
class Measured:
    """Links with the samples that they were fitted to, by section of the file."""

    node: Node
    network: Network
    samples: dict[str, list[Sample]] = field(default_factory=dict)


class LinkMeter:
    def __init__(
        self, ranks: Ranks, sizes: Sequence[int], lasting: float, tell: Callable[[], None]
    ) -> None:
        self.ranks, self.transfers = ranks, TimedTransfers(ranks)
        self._sizes, self._lasting, self._tell = sizes, lasting, tell
        self.largest = max(sizes)  # that all transfers so far could be measured at
        n, k = ranks.size, ranks.per_node
        self._nodes = [tuple(range(first, first + k)) for first in range(0, n, k)]
        self._columns = [tuple(range(place, n, k)) for place in range(k)]

    def measure(self) -> Measured:
        found: dict[str, list[Sample]] = {}
        inside = self.ranks.per_node > 1
        between = self.ranks.num_nodes > 1
        node = self._node(found) if inside else None
        network = self._network(found, node) if between else None
        if node is None:
            assert network is not None  # there are two ranks at least
            node = Node(1, network.peer, network.collective, network.many_peers.gb_per_second)
        if network is None:
            # Nothing was measured, so nothing is better or worse than inside.
            k, rate = node.ranks, node.peer.gb_per_second
            network = Network(k, node.peer, k * rate, 2.0, node.collective)
        return Measured(node, network, found)

    # Inside nodes.

    def _node(self, found: dict[str, list[Sample]]) -> Node:
        k = self.ranks.per_node
        halves = [tuple(half) for node in self._nodes for half in (node[: k // 2], node[k // 2 :])]
        shapes = [self._nodes, *([halves] if k >= 4 and k % 2 == 0 else [])]
        collectives = [
            sample for groups in shapes for sample in self._collectives(groups, "inside a node")
        ]
        terms = [(1.0, s.members - 1.0, (s.members - 1.0) * s.part_bytes) for s in collectives]
        base, hop, per_byte = _latency_and_rate(terms, collectives)
        ring = self._ring([*self._nodes], "ring inside a node")
        exchanges = self._all_to_alls([*self._nodes], "inside a node")
        many = [(s.members - 1.0) * s.part_bytes for s in exchanges]
        _, per_many = _beyond([base] * len(many), 0.0, many, exchanges)
        found["node.collective"], found["node.peer"] = collectives, ring
        found["node.all_to_all_gb_per_second"] = exchanges
        latency, per_message = fit_terms(
            [(1.0, s.part_bytes) for s in ring], _seconds(ring), needed=(1,)
        )
        return Node(
            k,
            PeerLink(_gb(per_message), _micro(latency)),
            CollectiveLink(_gb(per_byte), _micro(base), _micro(hop)),
            _gb(per_many),
        )

    # Between nodes.

    def _network(self, found: dict[str, list[Sample]], node: Node | None) -> Network:
        ranks, k = self.ranks, self.ranks.per_node
        hops = ranks.num_nodes - 1.0
        alone = self._collectives([self._columns[0]], "one rank of each node")
        together = alone
        if k > 1:
            together = self._collectives(self._columns, "all ranks of each node, in groups of one")
        peer, peer_node, pair = self._peers(found, k)
        flows = (found[f"network.{name}"] for name in ("peer", "peer_node_gb_per_second"))
        # Whatever loses by the others: one flow may be too slow to fill a NIC, or one gather.
        nics = min(nics_of(k, alone, together), nics_of(k, *flows))
        every: list[Sample] = []
        if k > 1:  # gathers alone: a reduction over gloo is no ring
            all_ranks = [tuple(range(ranks.size))]
            every = self._collectives(all_ranks, "over all nodes", ("all-gather",))
        base, local = 0.0, 0.0
        if node is not None:
            base = node.collective.base_microseconds * 1e-6
            local = (ranks.size - ranks.num_nodes) * node.collective.hop_microseconds * 1e-6
        # Groups that share a NIC take turns, so each waits for as many times its bytes; a ring of
        # all ranks has one link into each node, spread over its NICs.
        samples = [*alone, *(together if k > 1 else ()), *every]
        moved = [hops * s.part_bytes for s in alone]
        moved += [hops * s.part_bytes * k / nics for s in together] if k > 1 else []
        moved += [(ranks.size - 1.0) * s.part_bytes / nics for s in every]
        known = [base] * (len(samples) - len(every)) + [base + local] * len(every)
        hop, per_byte = _beyond(known, hops, moved, samples)
        found["network.collective"] = samples
        exchanges = self._all_to_alls([tuple(range(ranks.size))], "over all nodes")
        crossing = float(ranks.size - k)
        moved = [crossing * s.part_bytes * k / nics for s in exchanges]
        message, per_many = _beyond([base] * len(moved), crossing, moved, exchanges)
        found["network.all_to_all"] = exchanges
        return Network(
            nics,
            peer,
            peer_node,
            pair,
            CollectiveLink(_gb(per_byte), _micro(base), _micro(hop)),
            ManyPeersLink(_gb(per_many), _micro(message)),
        )

    def _peers(self, found: dict[str, list[Sample]], k: int) -> tuple[PeerLink, float, float]:
        """One flow, all flows of a node together, and flows between the same two ranks."""
        ranks = self.ranks
        one = self._counterparts(1, "one rank of each node to the next")
        latency, per_byte = fit_terms(
            [(1.0, s.part_bytes) for s in one], _seconds(one), needed=(1,)
        )
        rate = _gb(per_byte)
        all_flows = one
        if k > 1:
            all_flows = self._counterparts(k, "all ranks of each node to the next")
        size = all_flows[-1].part_bytes
        whole = k * size / all_flows[-1].seconds * 1e-9
        found["network.peer"] = one
        found["network.peer_node_gb_per_second"] = all_flows
        turns = {}
        for name, both_ways in (("one way", False), ("both ways", True)):
            peers: list[tuple[int, bool]] = []
            if ranks.rank == 0:
                peers = [(k, True), (k, False)] if both_ways else [(k, True)]
            elif ranks.rank == k:
                peers = [(0, True), (0, False)] if both_ways else [(0, False)]
            work = done(self.transfers.messages(peers, size)) if peers else None
            lasts = ranks.seconds(work, lasting=self._lasting, members=2, of_last=True)
            turns[name] = Sample(f"{name} between two ranks", 2, size, lasts)
            self._tell()
        found["network.flows_of_a_pair"] = [*turns.values()]
        flows = 2 * turns["one way"].seconds / turns["both ways"].seconds
        return (
            PeerLink(rate, _micro(latency)),
            _short(max(whole, rate)),
            _short(_within(flows, 1, 2)),
        )

    # Samples.

    def _collectives(
        self, groups: Sequence[tuple[int, ...]], where: str, kinds: Sequence[str] = _KINDS
    ) -> list[Sample]:
        members = self.transfers.group(groups)
        size, taking = len(groups[0]), sum(map(len, groups))
        found = []
        for kind in kinds:

            def begin(part: int, kind: str = kind) -> Begin | None:
                return self.transfers.collective(kind, members, part) if members else None

            found += self._samples(f"{kind} of {size} ranks, {where}", size, taking, begin)
        return found

    def _all_to_alls(self, groups: Sequence[tuple[int, ...]], where: str) -> list[Sample]:
        mine = next(members for members in groups if self.ranks.rank in members)
        begin = partial(self.transfers.all_to_all, mine)
        what = f"all-to-all of {len(mine)} ranks, {where}"
        return self._samples(what, len(mine), self.ranks.size, begin)

    def _ring(self, groups: Sequence[tuple[int, ...]], where: str) -> list[Sample]:
        """Each rank to the next of its group, and from the one before it."""
        mine = next(members for members in groups if self.ranks.rank in members)
        at = mine.index(self.ranks.rank)
        peers = [(mine[(at + 1) % len(mine)], True), (mine[at - 1], False)]
        return self._flows(peers, where, len(mine), self.ranks.size)

    def _counterparts(self, taking: int, where: str) -> list[Sample]:
        """The first ranks of each node to those of the next node, round all nodes."""
        n, k = self.ranks.size, self.ranks.per_node
        peers = [((self.ranks.rank + k) % n, True), ((self.ranks.rank - k) % n, False)]
        mine = peers if self.ranks.rank % k < taking else []
        return self._flows(mine, where, self.ranks.num_nodes, taking * self.ranks.num_nodes)

    def _flows(
        self, peers: Sequence[tuple[int, bool]], where: str, size: int, taking: int
    ) -> list[Sample]:
        def begin(part: int) -> Begin | None:
            return self.transfers.messages(peers, part) if peers else None

        return self._samples(where, size, taking, begin)

    def _samples(
        self,
        what: str,
        size: int,
        taking: int,
        begin: Callable[[int], Begin | None],
    ) -> list[Sample]:
        """At all sizes, but not at larger ones than links carry in a moment; `begin` gives None on
        ranks that do not take part."""
        found: list[Sample] = []
        for part in self._sizes:
            if len(found) > 1 and found[-1].seconds > _SLOW * self._lasting:
                break
            one = begin(part)
            work = None if one is None else done(one)
            lasts = self.ranks.seconds(work, lasting=self._lasting, members=taking, of_last=True)
            found.append(Sample(what, size, part, lasts))
            self._tell()
        self.largest = min(self.largest, found[-1].part_bytes)
        return found


def _seconds(samples: Sequence[Sample]) -> list[float]:
    return [s.seconds for s in samples]


def _latency_and_rate(
    terms: Sequence[tuple[float, float, float]], samples: Sequence[Sample]
) -> tuple[float, float, float]:
    """Base, hop and seconds of a byte. Groups of one size cannot tell a base from hops: then all
    of it is hops."""
    if len({s.members for s in samples}) > 1:
        base, hop, per_byte = fit_terms(terms, _seconds(samples), needed=(2,))
        return base, hop, per_byte
    hop, per_byte = fit_terms([t[1:] for t in terms], _seconds(samples), needed=(1,))
    return 0.0, hop, per_byte


def _beyond(
    known: Sequence[float], times: float, num_bytes: Sequence[float], samples: Sequence[Sample]
) -> tuple[float, float]:
    """Seconds of what happens `times` in each sample, and of a byte, beside those that are known.
    What is left of a sample is a tenth of it at least: what is known was fitted, too."""
    left = [max(s.seconds - x, s.seconds / 10) for s, x in zip(samples, known, strict=True)]
    each, per_byte = fit_terms([(times, b) for b in num_bytes], left, needed=(1,))
    return each, per_byte


def nics_of(per_node: int, alone: Sequence[Sample], together: Sequence[Sample]) -> int:
    """Among the divisors of the ranks of a node the one that explains best what a rank loses when
    all of them use the network, by the largest transfers that were measured of both."""
    size = min(max(s.part_bytes for s in samples) for samples in (alone, together))
    times = [[s.seconds for s in one if s.part_bytes == size] for one in (alone, together)]
    few = min(map(len, times))  # larger transfers of slow kinds were left out
    wanted = per_node * sum(times[0][:few]) / sum(times[1][:few])
    divisors = [n for n in range(1, per_node + 1) if per_node % n == 0]
    return min(divisors, key=lambda n: max(n / wanted, wanted / n))


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _gb(seconds_of_a_byte: float) -> float:
    return _short(1e-9 / seconds_of_a_byte)


def _micro(seconds: float) -> float:
    return _short(seconds * 1e6)
