"""The simulator against timelines computed by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from fixed_costs import FixedCosts, undisturbed

from mesh_attention import Mask
from mesh_attention.choose.ask import make_plan
from mesh_attention.cost import Overlap, load_cluster, simulate
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.planning import plan_on
from mesh_attention.cost.timeline import Stream
from mesh_attention.machine.cluster import Disturbance
from mesh_attention.machine.rates import Costs
from mesh_attention.machine.tables import ClusterError
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import SendRecv
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import count

FORWARD = (Direction.FORWARD,)


def ring(ranks: int) -> Plan:
    problem = Problem(q_tokens=64 * ranks, num_heads=2, head_dim=8)
    return make_plan(problem, ranks, method="ring", directions=FORWARD)


def test_the_same_simulation_has_the_same_times_to_the_last_digit() -> None:
    """Where transfers of several ranks share links: ranks compare what they choose by these."""
    plan = make_plan(Problem(4096, 16, 64), 16, method="double-ring", ranks_per_node=8)
    timelines = [simulate(plan, "paper", Direction.BACKWARD) for _ in range(4)]
    assert all(timeline.ranks == timelines[0].ranks for timeline in timelines)


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_a_ring_bound_by_computation_takes_its_computation_alone(ranks: int) -> None:
    timeline = simulate(ring(ranks), undisturbed(), costs=FixedCosts(lambda _: 3.0, flow=2.0))
    assert timeline.runtime_seconds == pytest.approx(3.0 * ranks)
    assert timeline.exposed_communication_seconds == pytest.approx(0.0)


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_a_ring_bound_by_communication_takes_its_hops_and_the_last_computation(ranks: int) -> None:
    timeline = simulate(ring(ranks), undisturbed(), costs=FixedCosts(lambda _: 1.0, flow=4.0))
    assert timeline.runtime_seconds == pytest.approx(4.0 * (ranks - 1) + 1.0)
    idle = 4.0 * (ranks - 1) + 1.0 - ranks
    assert timeline.exposed_communication_seconds == pytest.approx(idle)
    assert timeline.open_communication_seconds == pytest.approx(idle)
    assert timeline.waiting_for_ranks_seconds == pytest.approx(0.0)
    for busy in timeline.busy_seconds:
        assert busy[Stream.COMPUTE] == pytest.approx(ranks)
        assert busy[Stream.COMMUNICATION] == pytest.approx(4.0 * (ranks - 1))


@pytest.mark.parametrize("ranks", [3, 4])
def test_without_overlap_a_ring_takes_the_sum(ranks: int) -> None:
    costs = FixedCosts(lambda _: 1.0, flow=4.0)
    timeline = simulate(ring(ranks), undisturbed(), overlap=Overlap.NONE, costs=costs)
    assert timeline.runtime_seconds == pytest.approx(4.0 * (ranks - 1) + ranks)


@pytest.mark.parametrize(
    ("ranks", "flow", "late", "seconds"),
    [
        (
            2,
            4.0,
            2.0,
            5.0 + 3.0,
        ),  # the transfer begins on an idle GPU, the call beside it
        (2, 4.0, 9.0, 4.0 + 3.0 + 3.0),  # late programs begin no later than the transfer ends
        (2, 1.0, 2.0, 1.0 + 3.0 + 3.0),
        (3, 4.0, 2.0, 5.0 + 3.0 + 3.0),  # the second transfer begins beside a call: no other waits
    ],
)
def test_programs_that_find_no_place_beside_a_transfer_begin_late(
    ranks: int, flow: float, late: float, seconds: float
) -> None:
    costs = FixedCosts(lambda _: 3.0, flow=flow, late=late)
    assert simulate(ring(ranks), undisturbed(), costs=costs).runtime_seconds == seconds


@pytest.mark.parametrize(
    ("direction", "rank", "replayed"),
    [("forward", 63, 27.36), ("forward", 0, 27.33), ("backward", 7, 57.8)],
)
def test_a_ring_of_many_small_calls_is_predicted_as_it_was_replayed(
    direction: str, rank: int, replayed: float
) -> None:
    """Forward 2026-11-18-ring-with-room-for-pairs-h200.txt, backward
    2026-11-17-replay-ring-and-window-h200.json. Forward, transfers begin while the rank waits for
    keys, and so on an idle GPU: without room for pairs of programs half of the calls would take
    twice as long, and the ring 33.0 ms."""
    problem = Problem(256 * 1024, 32, 128, num_kv_heads=8, mask=Mask(causal=True))
    cluster, passes = load_cluster("hgx-h200"), (Direction(direction),)
    plan = plan_on(cluster, problem, 64, method="ring", directions=passes)
    rank_estimate = estimate(plan, cluster, *passes, ranks=[rank])
    assert rank_estimate.seconds * 1e3 == pytest.approx(replayed, rel=0.03)
    assert rank_estimate.least_seconds <= rank_estimate.seconds


def test_flows_between_the_same_two_ranks_take_turns_where_a_pair_has_room_for_one() -> None:
    cluster = replace(undisturbed(), node=replace(undisturbed().node, ranks=1))
    cluster = replace(cluster, network=replace(cluster.network, nics=1))
    costs = FixedCosts(lambda _: 1.0, flow=4.0)
    for room, hop in ((2.0, 4.0), (1.0, 8.0), (1.6, 5.0)):
        paired = replace(cluster, network=replace(cluster.network, flows_of_a_pair=room))
        timeline = simulate(ring(2), paired, costs=costs)
        assert timeline.runtime_seconds == pytest.approx(hop + 1.0)


@pytest.mark.parametrize("collective", [1.0, 0.5])
@pytest.mark.parametrize(("nics", "node", "hop"), [(2, 4, 4.0), (2, 1, 8.0), (1, 4, 8.0)])
def test_flows_out_of_a_node_divide_what_it_and_its_nics_can_send(
    nics: int, node: int, hop: float, collective: float
) -> None:
    """Two ranks a node and USP of degree two: both ranks of a node send to the next node. A NIC has
    room for one of these flows, even where a collective is slower, and the node for so many."""
    base = undisturbed()
    rate = base.network.peer.gb_per_second
    network = replace(
        base.network,
        nics=nics,
        peer_node_gb_per_second=node * rate,
        collective=replace(base.network.collective, gb_per_second=collective * rate),
    )
    cluster = replace(base, node=replace(base.node, ranks=2), network=network)
    problem = Problem(q_tokens=384, num_heads=2, head_dim=8)
    plan = make_plan(problem, 6, method="usp", ulysses=2, ranks_per_node=2, directions=FORWARD)
    timeline = simulate(plan, cluster, costs=FixedCosts(lambda _: 1.0, flow=4.0))
    assert timeline.runtime_seconds == pytest.approx(hop * 2 + 1.0)


def test_of_ranks_that_wait_in_vain_four_are_named() -> None:
    """Rank 0 of a ring does nothing: no other comes to its end."""
    plan = ring(6)
    idle = replace(plan.forward.programs[0], operations=())
    broken = replace(plan.forward, programs=(idle, *plan.forward.programs[1:]))
    with pytest.raises(
        ClusterError, match=r"^ranks \[1, 2, 3, 4\] deadlock; run `verify` for the reason$"
    ):
        simulate(replace(plan, passes=(broken,)), undisturbed(), costs=FixedCosts(lambda _: 1.0))


@pytest.mark.parametrize(("nics", "seconds"), [(1, 8.0), (2, 4.0)])
def test_collectives_of_ranks_behind_one_nic_divide_it(nics: int, seconds: float) -> None:
    """Two groups, each with one rank in either of two nodes, gather at the same time."""
    base = undisturbed()
    cluster = replace(
        base, node=replace(base.node, ranks=2), network=replace(base.network, nics=nics)
    )
    plan = make_plan(
        Problem(64, 2, 8),
        4,
        method="mesh",
        tile=(2, 2),
        chunks=(1, 1),
        ranks_per_node=2,
        directions=FORWARD,
    )
    assert sorted(plan.forward.groups.values()) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    costs = FixedCosts(lambda _: 0.0, lambda name: 4.0 * (name == "AG-KV-0"))
    assert simulate(plan, cluster, costs=costs).runtime_seconds == pytest.approx(seconds)


def gathers_at_once(*, per_node: int, nics: int, overlap: Overlap, host_driven: bool) -> float:
    """Q is gathered in 3 seconds among ranks 0 and 1, and 2 and 3; KV in 4 among 0 and 2, and 1 and
    3; then each rank computes for a second."""
    base = undisturbed()
    cluster = replace(
        base,
        node=replace(base.node, ranks=per_node),
        network=replace(base.network, nics=nics),
        host_driven=host_driven,
    )
    how: dict[str, Any] = {"chunks": (1, 1), "ranks_per_node": per_node, "directions": FORWARD}
    plan = make_plan(Problem(64, 2, 8), 4, method="mesh", tile=(2, 2), **how)
    costs = FixedCosts(lambda _: 1.0, lambda name: {"AG-Q-0": 3.0, "AG-KV-0": 4.0}.get(name, 0.0))
    return simulate(plan, cluster, overlap=overlap, costs=costs).runtime_seconds


@pytest.mark.parametrize(
    ("per_node", "nics", "streams", "host"),
    [
        (2, 2, 8.0, 5.0),  # one gather inside the node, the other on a NIC of its own
        (2, 1, 12.0, 9.0),  # on a NIC that both ranks share
        (4, 4, 8.0, 8.0),  # both inside: they divide the links of a rank
    ],
)
def test_transfers_that_a_host_drives_run_beside_each_other(
    per_node: int, nics: int, streams: float, host: float
) -> None:
    for host_driven, seconds in ((False, streams), (True, host)):
        runtimes = {
            overlap: gathers_at_once(
                per_node=per_node, nics=nics, overlap=overlap, host_driven=host_driven
            )
            for overlap in Overlap
        }
        assert runtimes[Overlap.EVENTS] == pytest.approx(seconds)
        # One operation after the other is that for everybody.
        assert runtimes[Overlap.NONE] == pytest.approx(streams)


def test_a_host_begins_nothing_while_it_computes() -> None:
    """The second hop of a ring is begun after the first attention, though it needs but the first
    hop; while a stream would begin it at once."""
    costs = FixedCosts(lambda _: 10.0, flow=1.0)
    cluster = undisturbed()
    for host_driven in (False, True):
        timeline = simulate(ring(3), replace(cluster, host_driven=host_driven), costs=costs)
        assert timeline.runtime_seconds == pytest.approx(30.0)
        begun = [event.issued for event in timeline.events(0) if event.name.startswith("KV")]
        assert begun == pytest.approx([0.0, 10.0 if host_driven else 1.0])


def test_a_rank_that_only_sends_or_only_receives_is_done_when_the_transfer_is() -> None:
    """A ring of two, of which rank 0 gives its keys away and gets none."""
    plan = ring(2)
    forward = plan.forward
    shifts = [
        next(op for op in program.operations if isinstance(op, SendRecv))
        for program in forward.programs
    ]
    halves = (replace(shifts[0], receives=()), replace(shifts[1], sends=()))
    programs = tuple(
        replace(program, operations=tuple(half if op is old else op for op in program.operations))
        for program, old, half in zip(forward.programs, shifts, halves, strict=True)
    )
    changed = replace(plan, passes=(replace(forward, programs=programs),))
    timeline = simulate(changed, undisturbed(), costs=FixedCosts(lambda _: 1.0, flow=4.0))
    for rank in range(2):
        (transfer,) = (e for e in timeline.events(rank) if e.stream is Stream.COMMUNICATION)
        assert (transfer.start, transfer.end) == (0.0, 4.0)
    attentions = [e for e in timeline.events(1) if e.kind == "Attend"]
    assert [(e.start, e.end) for e in attentions] == [(0.0, 1.0), (4.0, 5.0)]


def test_busy_streams_slow_each_other() -> None:
    """2 s of work beside a transfer of 4 s: at half speed the work takes 4 s, and the transfer,
    at three quarters of its speed in that time, has 1 s left."""
    cluster = replace(undisturbed(), disturbance=Disturbance(0.5, 0.0, 0.25, 0.0))
    timeline = simulate(ring(2), cluster, costs=FixedCosts(lambda _: 2.0, flow=4.0))
    assert timeline.runtime_seconds == pytest.approx(4.0 + 1.0 + 2.0)


GOLDEN = {"AG-KV": 1.0, "AG-Q": 0.5, "RS-Q": 0.5}


def golden_plan() -> Plan:
    """The golden example of algorithm.md, section 5, as a real plan of nine ranks."""
    problem = Problem(q_tokens=9 * 96, num_heads=2, head_dim=64)
    gathered = 2 * 32 * 2 * 64 * 2  # bytes of AG-Q: two remote chunks of 32 rows
    flops = problem.flops((3 * 32) ** 2)
    # RS-Q carries the LSE too, 4 bytes beside 128: C-i-j shall fill it, so it is as much longer.
    flops_per_second = 2 * flops * 128 / 132
    costs = Costs(2 * gathered, flops_per_second, latency_seconds=0.0)
    return make_plan(
        problem, 9, method="mesh", tile=(3, 3), chunks=(3, 3), gamma=1.0, costs=costs,
        combine="exchange", directions=FORWARD,
    )  # fmt: skip


def golden_costs() -> FixedCosts:
    return FixedCosts(lambda _: 0.5, lambda name: GOLDEN[name.rpartition("-")[0]])


def test_the_golden_example_lasts_seven_units_in_strict_steps() -> None:
    plan = golden_plan()
    assert plan.forward.schedule.text().splitlines() == [
        "1 AG-KV-0",
        "2 AG-Q-0",
        "3 AG-Q-1 + C-0-0",
        "4 AG-KV-1 + C-1-0",
        "5 AG-Q-2 + C-0-1",
        "6 AG-KV-2 + C-1-1, C-2-0",
        "7 compute only C-0-2",
        "8 RS-Q-0 + C-1-2",
        "9 RS-Q-1 + C-2-1",
        "10 compute only C-2-2",
        "11 RS-Q-2",
    ]
    strict = simulate(plan, undisturbed(), overlap=Overlap.STRICT, costs=golden_costs())
    assert strict.runtime_seconds == pytest.approx(7.0)
    events = simulate(plan, undisturbed(), overlap=Overlap.EVENTS, costs=golden_costs())
    assert events.runtime_seconds <= 7.0
    none = simulate(plan, undisturbed(), overlap=Overlap.NONE, costs=golden_costs())
    assert none.runtime_seconds == pytest.approx(3 * 1.0 + 6 * 0.5 + 9 * 0.5)


def test_a_long_computation_holds_up_the_transfers_of_the_next_step_in_strict_steps_alone() -> None:
    """Of three steps the first computes for 4, and the others for 1; hops take 2."""
    costs = FixedCosts(lambda name: 4.0 if name == "C-0-0" else 1.0, flow=2.0)
    strict, events = (
        simulate(ring(3), undisturbed(), overlap=overlap, costs=costs).runtime_seconds
        for overlap in (Overlap.STRICT, Overlap.EVENTS)
    )
    assert strict == pytest.approx(4.0 + 2.0 + 1.0)
    assert events == pytest.approx(4.0 + 1.0 + 1.0)


@pytest.mark.slow
def test_event_order_is_never_later_than_strict_steps_for_200_random_costs() -> None:
    rng = random.Random(5)
    cluster = undisturbed()
    plans = [
        make_plan(
            Problem(q_tokens=256, num_heads=4, head_dim=8, mask=Mask(causal=causal)),
            ranks, method=method, **options,
        )
        for method, ranks, options in (
            ("mesh", 6, {"tile": (2, 3), "chunks": (2, 2)}),
            ("mesh", 4, {"tile": (2, 2), "chunks": (3, 4), "combine": "reduce-scatter"}),
            ("mesh-usp", 8, {"ulysses": 2, "tile": (2, 2), "chunks": (2, 2)}),
            ("ring", 4, {}),
            ("startrail", 4, {"team": 2}),
        )
        for causal in (False, True)
    ]  # fmt: skip
    better = 0
    for number in range(200):
        plan = plans[number % len(plans)]
        direction = rng.choice(list(Direction))
        seconds: dict[str, float] = {}

        def cost(name: str, seconds: dict[str, float] = seconds) -> float:
            return seconds.setdefault(name, rng.uniform(0.1, 2.0))

        costs = FixedCosts(cost, cost, flow=rng.uniform(0.1, 2.0))
        strict = simulate(plan, cluster, direction, overlap="strict", costs=costs).runtime_seconds
        events = simulate(plan, cluster, direction, overlap="events", costs=costs).runtime_seconds
        assert events <= strict * (1 + 1e-9), (plan.method, direction, number)
        better += events < strict * (1 - 1e-9)
    assert better > 40  # it is not the same thing


@pytest.mark.parametrize("method", METHODS)
def test_simulated_bytes_are_the_counted_ones(method: str) -> None:
    problem = Problem(q_tokens=512, num_heads=8, head_dim=16, mask=Mask(causal=True))
    plan = make_plan(problem, 8, method=method, ranks_per_node=4)
    cluster = load_cluster("paper")
    cluster = replace(cluster, node=replace(cluster.node, ranks=4))
    cluster = replace(cluster, network=replace(cluster.network, nics=4))
    for direction, counted in count(plan).items():
        timeline = simulate(plan, cluster, direction)
        assert timeline.received_bytes == tuple(r.total.received_bytes for r in counted.ranks)
        assert timeline.runtime_seconds > 0
