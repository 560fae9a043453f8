"""Seconds of single operations on a cluster of round numbers, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fixed_costs import undisturbed
from simulated_cases import compiled_rank, timed_calls

from mesh_attention import Mask
from mesh_attention.choose.ask import make_plan
from mesh_attention.cost import Cluster, load_cluster
from mesh_attention.machine.cluster import CollectiveLink, ManyPeersLink, PeerLink
from mesh_attention.machine.kernel_facts import KernelRate, KernelRates, PassRates
from mesh_attention.machine.rates import costs_of
from mesh_attention.machine.seconds import (
    GroupShape,
    all_to_all_seconds,
    flow_seconds,
    ring_seconds,
)
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attention, Call, CallKind, Merge
from mesh_attention.plan.problem.problem import Problem

MICRO = 1e-6


def cluster(*, launch: float = 0.0, gap: float = 0.0) -> Cluster:
    """One byte of memory a nanosecond; kernels of 1 (full), 2 (causal) and 4 (range) FLOP a
    nanosecond forward, half of that backward; four ranks and two NICs a node."""
    forward, backward = (
        PassRates(
            *(False, False, 0, launch),
            *(KernelRate(speed * scale, 32.0, 16.0) for speed in (1.0, 2.0, 4.0)),
        )
        for scale in (1e-3, 5e-4)
    )
    base = undisturbed()
    node = replace(
        base.node, ranks=4, peer=PeerLink(8.0, 3.0), collective=CollectiveLink(4.0, 10.0, 2.0),
        all_to_all_gb_per_second=2.0,
    )  # fmt: skip
    network = replace(
        base.network, nics=2, peer=PeerLink(1.0, 7.0), collective=CollectiveLink(0.5, 20.0, 5.0),
        all_to_all=None,
    )  # fmt: skip
    return replace(
        base,
        gpu=replace(base.gpu, memory_gb_per_second=1.0, gap_microseconds=gap),
        kernels={"dense": KernelRates(forward, backward)},
        node=node,
        network=network,
    )


def ring(*, causal: bool = False) -> Plan:
    """64 rows a rank, four heads of 8 on two KV heads, values of 4 numbers, two bytes each."""
    problem = Problem(128, 4, 8, num_kv_heads=2, v_head_dim=4, mask=Mask(causal=causal))
    return make_plan(problem, 2, method="ring", layout="contiguous")


def seconds(plan: Plan, direction: Direction, where: Cluster) -> tuple[float, ...]:
    """Of rank 0's first attention."""
    return tuple(call.seconds for call in timed_calls(plan, where, direction))


# 64 rows of four heads fill the GPU as four rows of 64 heads would: 32 / 4 more time for the rows,
# and 16 / 64 for the columns.
SLOWER = 1.0 + 8.0 + 0.25


def test_a_full_call_takes_its_pairs_at_the_rate_of_its_size_and_a_pass_over_its_result() -> None:
    flops = 2 * 64 * 64 * 4 * (8 + 4)
    stored = 64 * 4 * 4 * (2 + 4)
    call_seconds = seconds(ring(), Direction.FORWARD, cluster())
    assert call_seconds == pytest.approx((flops * SLOWER * 1e-9 + stored * 1e-9,), rel=1e-12, abs=0)


def test_backward_takes_two_and_a_half_times_the_work_and_a_pass_over_three_gradients() -> None:
    flops = 2.5 * 2 * 64 * 64 * 4 * (8 + 4)
    stored = (64 * 4 * 8 + 64 * 2 * (8 + 4)) * (2 + 4)
    call_seconds = seconds(ring(), Direction.BACKWARD, cluster())
    assert call_seconds == pytest.approx((flops * SLOWER * 2e-9 + stored * 1e-9,), rel=1e-12, abs=0)


def test_a_causal_call_takes_the_pairs_on_and_below_the_diagonal_at_its_own_rate() -> None:
    flops = 2 * (64 * 65 // 2) * 4 * (8 + 4)
    stored = 64 * 4 * 4 * (2 + 4)
    call_seconds = seconds(ring(causal=True), Direction.FORWARD, cluster())
    assert call_seconds == pytest.approx(
        (flops * SLOWER * 0.5e-9 + stored * 1e-9,), rel=1e-12, abs=0
    )


def test_a_call_lasts_no_less_than_its_launch_and_gaps_come_before_the_call_and_its_merge() -> None:
    plain = seconds(ring(), Direction.FORWARD, cluster())[0]
    stored = 64 * 4 * 4 * (2 + 4) * 1e-9
    with_gaps = seconds(ring(), Direction.FORWARD, cluster(gap=3.0))[0]
    assert with_gaps == pytest.approx(plain + 2 * 3.0 * MICRO, rel=1e-12, abs=0)
    launched = seconds(ring(), Direction.FORWARD, cluster(launch=1e6, gap=3.0))[0]
    assert launched == pytest.approx(1.0 + 3.0 * MICRO + stored, rel=1e-12, abs=0)


def test_a_merge_is_a_gap_and_a_pass_over_what_it_reads_and_writes() -> None:
    problem = Problem(128, 4, 8)
    plan = make_plan(problem, 4, method="mesh", tile=(2, 2), chunks=(1, 1), combine="exchange")
    program, costs = compiled_rank(plan, cluster(gap=3.0), Direction.FORWARD)
    table = program.buffer_table()
    op = next(op for op in program.operations if isinstance(op, Merge))
    touched = sum(
        piece.num_bytes(table[piece.buffer], problem) for piece in (*op.inputs, *op.outputs)
    )
    (merge,) = costs.compute(op, table)
    assert merge.seconds == pytest.approx(3.0 * MICRO + touched * 1e-9, rel=1e-12, abs=0)
    assert not merge.kernel


def test_parts_of_a_call_that_was_split_are_calls_of_their_own() -> None:
    """Three transfers for each of two attentions of 2,048 rows and keys with 64 heads, of which the
    first is timed: 16 tiles of 128 rows become 5, 5 and 6, and a call of fewer rows is slower."""
    options: dict[str, Any] = {"tile": (2, 2), "chunks": (1, 1), "head_slices": (64, 64)}
    plan = make_plan(Problem(4 * 1024, 128, 8), 4, method="mesh", **options)
    base = cluster()
    quick = replace(base, gpu=replace(base.gpu, memory_gb_per_second=1e9))  # merges take no time
    call_seconds = seconds(plan, Direction.FORWARD, quick)
    expected = [
        2 * rows * 2048 * 64 * (8 + 8) * (1 + 32 / rows + 16 / 2048) * 1e-9
        for rows in (640, 640, 768)
    ]
    assert call_seconds == pytest.approx(expected, rel=1e-6, abs=0)


def test_both_parts_of_a_call_whose_end_leaves_sms_last_a_whole_number_of_rounds() -> None:
    """Eight heads of 50 and of 14 tiles on 132 SMs; others fill half of the fourth round."""
    plan = make_plan(Problem(4 * 64 * 128, 8, 128), 4, method="ring")
    program, costs = compiled_rank(plan, load_cluster("hgx-h200"), Direction.FORWARD)
    table = program.buffer_table()
    op = next(op for op in program.operations if isinstance(op, Attention))

    def rounds(at: int, *left: int, middle: int = 50 * 128) -> float | None:
        first, rest = (
            Call(CallKind.FULL, start, stop, 0, 64 * 128, "flash_attn3", leave_sms)
            for start, stop, leave_sms in ((0, 50 * 128, left[0]), (middle, 64 * 128, left[1]))
        )
        split = replace(op, calls=(first, rest))
        return costs._rounds(split, costs._clock.sizes(split, table), at)

    first = 400 / 132
    assert rounds(0, 0, 16) == pytest.approx(first)
    assert rounds(1, 0, 16) == pytest.approx((4 + 512 / 132) / 2 - first)
    # Two calls, and no parts of one.
    assert rounds(0, 0, 0) is None
    assert rounds(1, 16, 16) is None
    assert rounds(1, 0, 16, middle=51 * 128) is None


def gather(ranks: tuple[int, ...], where: Cluster) -> float:
    """Of a thousand bytes from each."""
    return ring_seconds(where.links, GroupShape.of(where.links, ranks), 1000)


def exchange(
    ranks: tuple[int, ...], where: Cluster, sent: dict[int, int], received: dict[int, int]
) -> float:
    """As the first rank sees it."""
    shape = GroupShape.of(where.links, ranks)
    return all_to_all_seconds(where.links, shape, sent, received, 0)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((5,), 0.0),
        # Inside a node: base 10, two hops of 2; two parts at 4 bytes a nanosecond.
        ((0, 1, 2), (10 + 2 * 2) * MICRO + 2 * 1000 / 4e9),
        # One rank in each of three nodes: base 20, two hops of 5; two parts into one NIC.
        ((0, 4, 8), (20 + 2 * 5) * MICRO + 2 * 1000 / 0.5e9),
        # Two ranks behind one NIC in each of two nodes: three parts into it, all but that of the
        # rank that receives, since in a ring also its neighbour's comes from outside.
        ((0, 1, 4, 5), (20 + 2 * 2 + 5) * MICRO + 3 * 1000 / 0.5e9),
        # Ranks behind both NICs of each node: two rings, each with a half of every part.
        ((0, 2, 4, 6), (20 + 2 * 2 + 5) * MICRO + 1.5 * 1000 / 0.5e9),
        # Three and one: three parts into the only NIC of the one.
        ((0, 1, 2, 4), (20 + 2 * 2 + 5) * MICRO + 3 * 1000 / 0.5e9),
    ],
)
def test_a_gather_takes_a_latency_for_each_hop_and_the_busiest_nic(
    ranks: tuple[int, ...], expected: float
) -> None:
    assert gather(ranks, cluster()) == pytest.approx(expected, rel=1e-12, abs=0)


def test_where_the_network_is_fast_a_gather_takes_the_handing_on_inside_the_node() -> None:
    base = cluster()
    network = replace(base.network, collective=CollectiveLink(100.0, 20.0, 5.0))
    expected = (20 + 2 * 2 + 5) * MICRO + 3 * 1000 / 4e9
    gather_seconds = gather((0, 2, 4, 6), replace(base, network=network))
    assert gather_seconds == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("ranks", "sent", "received", "expected"),
    [
        # Inside a node: what goes to oneself does not travel.
        ((0, 1, 2), {0: 9000, 1: 100, 2: 200}, {}, 10 * MICRO + 300 / 2e9),
        ((0, 1, 2), {1: 1}, {1: 300, 2: 400}, 10 * MICRO + 700 / 2e9),
        # To two other nodes: both together through the rank's share of a NIC, as messages of which
        # each adds a sixteenth of the latency of one.
        ((0, 4, 8), {1: 100, 2: 200}, {}, (20 + 2 * 7 / 16) * MICRO + 300 / 0.5e9),
        ((0, 4, 8), {1: 0, 2: 200}, {}, (20 + 7 / 16) * MICRO + 200 / 0.5e9),
        # Two ranks behind one NIC send there as much as the one that is asked; with a NIC for each
        # they do not meet.
        ((0, 1, 4, 5), {2: 100, 3: 200}, {}, (20 + 2 * 7 / 16) * MICRO + 2 * 300 / 0.5e9),
        ((0, 2, 4, 6), {2: 100, 3: 200}, {}, (20 + 2 * 7 / 16) * MICRO + 300 / 0.5e9),
        # Little to another node and much inside: the inside counts.
        ((0, 1, 4), {1: 8000, 2: 100}, {}, 20 * MICRO + 8000 / 2e9),
    ],
)
def test_an_all_to_all_takes_the_slowest_of_what_leaves_and_comes_inside_and_outside(
    ranks: tuple[int, ...], sent: dict[int, int], received: dict[int, int], expected: float
) -> None:
    exchange_seconds = exchange(ranks, cluster(), sent, received)
    assert exchange_seconds == pytest.approx(expected, rel=1e-12, abs=0)


def exchange_of_two(**network: Any) -> float:
    """Of 100 and 200 KB, each to another node."""
    base = cluster()
    where = replace(base, network=replace(base.network, **network))
    return exchange((0, 4, 8), where, {1: 100_000, 2: 200_000}, {})


def test_no_flow_of_an_all_to_all_is_faster_than_point_to_point() -> None:
    exchange_seconds = exchange_of_two(collective=CollectiveLink(100.0, 20.0, 5.0))
    assert exchange_seconds == pytest.approx(20 * MICRO + 200_000 / 1e9, rel=1e-12, abs=0)


def test_all_to_alls_between_nodes_have_a_rate_and_a_cost_for_each_message_of_their_own() -> None:
    own = ManyPeersLink(0.25, 3.0)
    assert exchange_of_two(all_to_all=own) == pytest.approx(
        26 * MICRO + 300_000 / 0.25e9, rel=1e-12, abs=0
    )
    # Left out: what point-to-point flows of a node carry together, through each of its two NICs,
    # but not less than one of them alone, nor more than collectives do.
    fast = CollectiveLink(100.0, 20.0, 5.0)
    for node_gb, rate in ((3.0, 1.5), (1.0, 1.0), (999.0, 100.0)):
        expected = (20 + 2 * 7 / 16) * MICRO + 300_000 / (rate * 1e9)
        expected = max(expected, 20 * MICRO + 200_000 / 1e9)  # the longest message alone
        assert exchange_of_two(collective=fast, peer_node_gb_per_second=node_gb) == pytest.approx(
            expected, rel=1e-12, abs=0
        )


def test_a_message_takes_the_link_inside_a_node_or_the_one_between_nodes() -> None:
    for source, target, expected in (
        (0, 3, 3 * MICRO + 800 / 8e9),
        (3, 4, 7 * MICRO + 800 / 1e9),
    ):
        message_seconds = flow_seconds(cluster().links, source, target, 800)
        assert message_seconds == pytest.approx(expected, rel=1e-12, abs=0)


def test_ranks_share_the_nics_of_their_node_in_equal_blocks() -> None:
    assert [cluster().links.nic_of(device) for device in range(6)] == [
        (0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0),
    ]  # fmt: skip
    assert cluster().ranks_share_nics
    base = cluster()
    assert not replace(base, network=replace(base.network, nics=4)).ranks_share_nics
    assert base.num_ranks == base.nodes * 4


@pytest.mark.parametrize(("ranks", "rate", "latency"), [(4, 4e9, 12.0), (5, 0.5e9, 25.0)])
def test_schedulers_go_by_the_link_that_so_many_ranks_need(
    ranks: int, rate: float, latency: float
) -> None:
    costs = costs_of(cluster(), ranks)
    assert costs.bytes_per_second == pytest.approx(rate)
    assert costs.latency_seconds == pytest.approx(latency * MICRO)
    assert costs.flops_per_second == pytest.approx(4e9)
