"""Seconds of a kernel call, of a pass over memory and of a transfer, when nothing disturbs them.

A call lasts as long as its pairs at the rate its rows and columns allow, but no less than the host
needs to launch it. Merging a partial result and adding gradients are passes over memory.

A collective is a pipelined ring: parts enter a node through its NICs while the node hands others
on, so the slower of the two counts, after a latency for each hop. Every link carries the parts of
all members but one; the NICs of a node's members share the load of the link into the node.

An all-to-all is a flow to every member at once, as NCCL makes it of grouped sends and receives.
Each flow is no faster than point-to-point. The flows of all members behind one NIC share the rate
that the NIC has for many peers, and each flow to another node adds the time of a message.

Passes of `plan/passes/` choose by these seconds, `cost/` adds them up, and `step/costs.py` asks for
transfers of parameters. The rules for transfers are those of algorithm.md, section 10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mesh_attention.machine.cluster import Gpu, Links
from mesh_attention.machine.kernel_facts import REFERENCE_HEADS, PassRates

_FEW_ROUNDS = 2  # of a call whose last round others do not fill


class CallSize(NamedTuple):
    """`pairs` of queries and keys that see each other, as if there were one head."""

    kind: str  # full, causal or range
    rows: int
    columns: int
    pairs: int
    heads: int
    kv_heads: int


def kernel_seconds(
    rates: PassRates, gpu: Gpu, size: CallSize, flops: float, *, rounds: float | None = None
) -> float | None:
    """How long a call takes; None where the kernel does not take such calls. `rounds`: how many
    rounds its tiles take over the SMs, where other calls fill the last."""
    rate = rates.curve(size.kind)
    if rate is None:
        return None
    by_pairs = rates.ranges and size.kind != "full"
    seen = 2 * size.pairs / size.rows if by_pairs else size.columns
    slower = 1.0 + rate.half_rows / (size.rows * size.heads / REFERENCE_HEADS)
    slower += rate.half_columns / seen if seen else 0.0
    if rounds is None:
        slower *= unfilled(rates, gpu.sms, size)
    else:
        slower *= rounds * gpu.sms / num_tiles(rates, size)
    seconds = gpu.gap_microseconds * 1e-6 + flops * slower / (rate.tflops * 1e12)
    return max(seconds, rates.launch_microseconds * 1e-6)


def unfilled(rates: PassRates, sms: int, size: CallSize) -> float:
    """How much longer a call takes because it lasts a whole number of rounds of tiles over all SMs;
    the next call fills half of the last round. Tiles of a causal square are unlike, and are shared
    out as SMs fall free: the call lasts at least as long as its largest tile, twice the mean."""
    if not rates.tile_rows or not size.rows:
        return 1.0
    tiles = num_tiles(rates, size)
    if size.kind == "full":
        return filled_rounds(tiles, sms) * sms / tiles
    return max(1.0, 2 * sms / tiles)


def filled_rounds(tiles: int, sms: int) -> float:
    """
    >>> filled_rounds(264, 132), filled_rounds(198, 132), filled_rounds(462, 132)
    (2, 2, 3.75)
    """
    rounds = -(-tiles // sms)
    return rounds if rounds <= _FEW_ROUNDS else (rounds + tiles / sms) / 2


def num_tiles(rates: PassRates, size: CallSize) -> int:
    return -(-size.rows // (rates.tile_rows or size.rows)) * size.heads


def lost_by_leaving(rates: PassRates, sms: int, size: CallSize, leave_sms: int) -> float:
    """The part of its speed that a call loses while a transfer has the SMs that it leaves; the next
    call fills them once the transfer is over. A full call of one or two rounds lasts a round more:
    sometimes the next call fills that round, sometimes not."""
    lost = leave_sms / sms
    if not rates.tile_rows or size.kind != "full" or not size.rows:
        return lost
    tiles = num_tiles(rates, size)
    rounds, fewer = -(-tiles // sms), -(-tiles // (sms - leave_sms))
    return max(lost, 1 - rounds / fewer) if rounds <= _FEW_ROUNDS else lost


def sms_left(tiles: int, sms: int, asked: int) -> int:
    """SMs that a call without a mask leaves: as many as cost it no round, and no less than asked.

    Programs have a fixed share of the tiles, so fewer of them may last as many rounds. They come in
    pairs that share what they load, if a head has an even number of tiles. Two free SMs in
    different parts of the GPU are no place for a pair: without a place beside a transfer it begins
    when the transfer or another pair ends, with all of its tiles to do (on an H200 5.4 ms for 3.5).

    >>> sms_left(512, 132, 16)  # 104 programs of five tiles or less, as 116 would be
    28
    >>> sms_left(515, 132, 16), sms_left(0, 132, 16)  # 103 would do, and none: pairs all the same
    (28, 130)
    """
    programs = sms - asked
    if programs < 2:
        return asked
    rounds = max(1, -(-tiles // programs))
    needed = max(1, -(-tiles // rounds))
    return sms - min(programs, needed + needed % 2)


def late_pairs(rates: PassRates, sms: int, size: CallSize, leave_sms: int) -> float:
    """The part of its length by which a call lasts longer if pairs of its programs find no place
    beside a transfer. Such pairs begin when the first of the others have no tile left.

    >>> fa3 = PassRates(False, True, 16, 38.0, tile_rows=128, pair_sms=24)
    >>> calls = [CallSize("full", tiles * 128, 65536, 0, 1, 1) for tiles in (232, 231, 512, 1024)]
    >>> [late_pairs(fa3, 132, call, 16) for call in calls]  # 512 leave 28 SMs, and 1024 leave 18
    [1.0, 0.0, 0.0, 1.0]
    """
    if rates.pair_sms is None or not rates.tile_rows or size.kind != "full" or not size.rows:
        return 0.0
    tiles, beside = num_tiles(rates, size), sms - rates.pair_sms
    programs = sms - sms_left(tiles, sms, leave_sms)
    if programs <= beside or tiles // size.heads % 2:
        return 0.0
    each, more = divmod(tiles, programs)  # as many have one tile more
    first, late = each + (more >= beside), each + (more > beside)
    return (first + late) / (each + (more > 0)) - 1


def rounds_of_parts(first: int, leaving: int, sms: int, leave_sms: int) -> int:
    """Rounds of a call in two parts: `first` tiles on the whole GPU, then `leaving` tiles that
    leave SMs. The second part begins on the SMs that had one tile less, unless transfers take
    them."""
    rounds, one_more = divmod(first, sms)
    others, others_more = divmod(leaving, sms - leave_sms)
    soon = max(0, sms - one_more - leave_sms)
    begin_late = one_more > 0 and others_more > soon
    return rounds + others + (one_more + others_more > 0) + begin_late


def memory_seconds(gpu: Gpu, num_bytes: float) -> float:
    """How long a pass over so many bytes takes."""
    return gpu.gap_microseconds * 1e-6 + num_bytes / (gpu.memory_gb_per_second * 1e9)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How a group lies on the nodes, which decides what its transfers cost."""

    nodes: tuple[int, ...]  # of each member; the first member's node is 0, the next new node 1
    num_nodes: int
    crossing: float  # parts of a ring that enter the busiest NIC
    behind_nic: tuple[int, ...]  # for each member: how many members share its NIC

    @staticmethod
    def of(links: Links, devices: tuple[int, ...]) -> GroupShape:
        numbers: dict[int, int] = {}
        nodes = tuple([numbers.setdefault(links.node_of(d), len(numbers)) for d in devices])
        members = Counter(nodes)
        nic_of = [links.nic_of(device) for device in devices]
        sharing = Counter(nic_of)
        nics = Counter(node for node, _ in sharing)  # of each node
        crossing = (len(nodes) - 1) / min(nics.values()) if len(members) > 1 else 0.0
        behind_nic = tuple(sharing[nic] for nic in nic_of)
        return GroupShape(nodes, len(members), crossing, behind_nic)


def ring_seconds(links: Links, shape: GroupShape, part_bytes: int) -> float:
    """How long an all-gather or a reduce-scatter takes, with `part_bytes` of each member."""
    inside, network = links.node.collective, links.network.collective
    size = len(shape.nodes)
    if size == 1:
        return 0.0
    local_hops, network_hops = size - shape.num_nodes, shape.num_nodes - 1
    base = network.base_microseconds if network_hops else inside.base_microseconds
    latency = base + local_hops * inside.hop_microseconds + network_hops * network.hop_microseconds
    crossing = shape.crossing * part_bytes / (network.gb_per_second * 1e9)
    handing_on = 0.0
    if local_hops:
        handing_on = (size - 1) * part_bytes / (inside.gb_per_second * 1e9)
    return latency * 1e-6 + max(crossing, handing_on)


def all_to_all_seconds(
    links: Links, shape: GroupShape, sent: Mapping[int, int], received: Mapping[int, int], at: int
) -> float:
    """How long an all-to-all takes the member at place `at`, which sends and receives these bytes
    by member."""
    if len(shape.nodes) == 1:
        return 0.0
    nodes, sharing, many = shape.nodes, shape.behind_nic[at], links.network.many_peers
    slowest = 0.0
    for flows in (sent, received):
        crossing = [size for m, size in flows.items() if size and nodes[m] != nodes[at]]
        inside = sum(flows.values()) - flows.get(at, 0) - sum(crossing)
        slowest = max(
            slowest,
            inside / (links.node.all_to_all_gb_per_second * 1e9),
            len(crossing) * many.message_microseconds * 1e-6
            + sharing * sum(crossing) / (many.gb_per_second * 1e9),
            max(crossing, default=0) / (links.network.peer.gb_per_second * 1e9),
        )
    link = links.network if shape.num_nodes > 1 else links.node
    return link.collective.base_microseconds * 1e-6 + slowest


def flow_seconds(links: Links, source: int, target: int, num_bytes: int) -> float:
    """How long a message between two devices takes."""
    inside = links.node_of(source) == links.node_of(target)
    link = links.node.peer if inside else links.network.peer
    return link.latency_microseconds * 1e-6 + num_bytes / (link.gb_per_second * 1e9)
