"""The simulator: discrete events over the real programs of all ranks (design.md, "five readers").

Each rank has two lanes, as in the executor: computation in program order, communication in program
order, and between them the dependencies that follow from buffers and workspace offsets. A
collective begins when its last member has come to it, a point-to-point flow when both ends have.
While both lanes of a rank are busy each slows the other, as the cluster says; and where forward
kernels hold the GPU until they end, a communication begins between two of their calls only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mesh_attention.cluster.call_seconds import CallSeconds, meters_of
from mesh_attention.cluster.clock import Activity, Clock
from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.garbage import no_garbage_collection
from mesh_attention.cluster.lanes import Lanes
from mesh_attention.cluster.load import ClusterError, a_cluster
from mesh_attention.cluster.operation_costs import ClusterCosts, Collective, OperationCosts
from mesh_attention.cluster.order import Overlap, Waits, an_overlap
from mesh_attention.cluster.timeline import Timeline
from mesh_attention.cluster.transfer import Shares, Transfer
from mesh_attention.plan.plan import Direction, Pass, Plan, a_plan
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.plan.traffic import traffic_of

__all__ = ["simulate"]


def simulate(
    plan: Plan,
    cluster: Cluster | str | Path,
    direction: Direction | str = Direction.FORWARD,
    *,
    overlap: Overlap | str = Overlap.EVENTS,
    costs: OperationCosts | None = None,
) -> Timeline:
    """When everything happens if `plan` runs on `cluster` (or on the one of that name or file)."""
    plan, cluster = a_plan(plan), a_cluster(cluster)
    overlap = an_overlap(overlap)
    if plan.num_ranks > cluster.num_ranks:
        raise ClusterError(
            f"the plan has {plan.num_ranks} ranks, but {cluster.name} has "
            f"{cluster.num_ranks} ({cluster.nodes} nodes of {cluster.node.ranks})"
        )
    if plan.ranks_per_node not in (None, cluster.node.ranks):
        raise ClusterError(
            f"the plan is for nodes of {plan.ranks_per_node} ranks, those of {cluster.name} have "
            f"{cluster.node.ranks}; make it with plan_on(cluster, ...)"
        )
    one = plan.direction(direction)
    given = costs or ClusterCosts(cluster, plan, one)
    with no_garbage_collection():
        return _Simulation(plan, one, cluster, given, overlap).run()


_Flow = tuple[str, int, int]  # group, sending rank, receiving rank
_Place = tuple[int, int]  # rank, index of the operation


@dataclass(slots=True)
class _Meeting:
    """A collective that waits for its members."""

    arrived: list[_Place]
    seconds: float = 0.0


@dataclass(slots=True)
class _End:
    """One end of a flow that waits for the other."""

    rank: int
    at: int
    num_bytes: int


def _nothing() -> None:
    """Until it is known what follows the end of an activity."""


class _Simulation:
    def __init__(
        self, plan: Plan, one: Pass, cluster: Cluster, costs: OperationCosts, overlap: Overlap
    ) -> None:
        self._plan, self._one, self._cluster, self._costs = plan, one, cluster, costs
        self._overlap = overlap
        self._clock = Clock()
        self._meters = list(meters_of(plan.problem, one))
        self._between_calls = cluster.disturbance.waits_for_calls(one.direction)
        self._seconds = CallSeconds(one, costs, self._meters, apart=self._between_calls)
        self._member = {
            name: {rank: member for member, rank in enumerate(ranks)}
            for name, ranks in one.groups.items()
        }
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._met: dict[tuple[str, int], int] = {}
        self._senders: dict[_Flow, deque[_End]] = {}
        self._receivers: dict[_Flow, deque[_End]] = {}
        self._halves: dict[_Place, int] = {}
        self._shares = Shares(cluster)
        self._received = [0] * plan.num_ranks
        self._waits = waits = Waits(plan, one, overlap)
        self._lanes = [
            Lanes(rank, waits.of(rank), program.operations)
            for rank, program in enumerate(one.programs)
        ]

    def run(self) -> Timeline:
        for lanes in self._lanes:
            self._advance(lanes)
        self._clock.run()
        stuck = [lanes.rank for lanes in self._lanes if not lanes.finished]
        if stuck:
            raise ClusterError(
                f"ranks {stuck[:4]} never finish: this plan waits for itself; `verify` says why"
            )
        times = tuple(lanes.times for lanes in self._lanes)
        return Timeline(
            self._plan,
            self._one,
            self._cluster,
            self._overlap,
            times,
            self._waits.workspace_bytes,
            tuple(self._received),
        )

    def _advance(self, lanes: Lanes) -> None:
        """Begin whatever this rank can begin now, then let each lane know of the other."""
        while self._begin_communication(lanes) or self._begin_computation(lanes):
            pass
        disturbance = self._cluster.disturbance
        if lanes.computation is not None:
            # A communication kernel that waits for other ranks occupies its SMs too.
            lost = disturbance.compute_slowdown if lanes.communicating else 0.0
            self._clock.set_speed(lanes.computation, 1.0 - lost)
        computing = lanes.computation is not None
        if computing != lanes.known_computing:
            lanes.known_computing = computing
            for transfer in lanes.transfers:
                transfer.computing += 1 if computing else -1
                self._clock.set_speed(transfer.activity, transfer.speed)

    def _begin_communication(self, lanes: Lanes) -> bool:
        if self._between_calls and lanes.computation is not None:
            return False  # it finds no SM until the call is over
        at = lanes.take_communication()
        if at is None:
            return False
        self._arrive(lanes, at)
        return True

    def _begin_computation(self, lanes: Lanes) -> bool:
        """The next kernel call of the computation under way, or the first of the next."""
        if lanes.computation is not None:
            return False
        if not lanes.calls:
            at = lanes.take_computation()
            if at is None:
                return False
            lanes.times.issued[at] = lanes.times.start[at] = self._clock.now
            lanes.computing_at = at
            lanes.calls = [*reversed(self._seconds.of(lanes.rank, lanes.operations[at]))]
            if not lanes.calls:
                lanes.finish(at, self._clock.now)
                return True
        lanes.computation = Activity(lanes.calls.pop(), partial(self._computed, lanes))
        self._clock.start(lanes.computation)
        return True

    def _computed(self, lanes: Lanes) -> None:
        lanes.computation = None
        if not lanes.calls:
            lanes.finish(lanes.computing_at, self._clock.now)
        self._advance(lanes)

    def _arrive(self, lanes: Lanes, at: int) -> None:
        op = lanes.operations[at]
        lanes.communicating = True
        lanes.times.issued[at] = lanes.times.start[at] = self._clock.now
        if isinstance(op, SendRecv):
            self._arrive_at_peers(lanes, at, op)
        else:
            assert isinstance(op, AllGather | ReduceScatter | AllToAll)
            self._arrive_at_meeting(lanes, at, op)

    def _arrive_at_meeting(self, lanes: Lanes, at: int, op: Collective) -> None:
        rank = lanes.rank
        times = self._met.get((op.group, rank), 0)
        self._met[op.group, rank] = times + 1
        meeting = self._meetings.setdefault((op.group, times), _Meeting([]))
        member = self._member[op.group][rank]
        flows = self._meters[rank].flows(op)
        seconds = self._costs.collective(op, flows, member)
        meeting.seconds = max(meeting.seconds, seconds)
        size = len(self._one.groups[op.group])
        self._received[rank] += traffic_of(op, flows, member, size).received_bytes
        meeting.arrived.append((rank, at))
        if len(meeting.arrived) == size:
            del self._meetings[op.group, times]
            devices = [self._plan.devices[member] for member, _ in meeting.arrived]
            self._begin(
                Activity(meeting.seconds, _nothing, self._shares.of_collective(devices)),
                self._cluster.disturbance.collective_slowdown,
                meeting.arrived,
                self._communicated,
            )

    def _arrive_at_peers(self, lanes: Lanes, at: int, op: SendRecv) -> None:
        ranks = self._one.groups[op.group]
        flows = self._meters[lanes.rank].flows(op)
        sent = flows.sent[op.to_member] if op.sends else 0
        received = flows.received[op.from_member][0] if op.receives else 0
        self._halves[lanes.rank, at] = bool(op.sends) + bool(op.receives)
        if op.sends:
            key = (op.group, lanes.rank, ranks[op.to_member])
            self._pair(key, _End(lanes.rank, at, sent), self._senders, self._receivers)
        if op.receives:
            key = (op.group, ranks[op.from_member], lanes.rank)
            self._pair(key, _End(lanes.rank, at, received), self._receivers, self._senders)
        if not op.sends and not op.receives:
            self._communicated([(lanes.rank, at)])

    def _pair(
        self,
        key: _Flow,
        end: _End,
        own: dict[_Flow, deque[_End]],
        others: dict[_Flow, deque[_End]],
    ) -> None:
        waiting = others.get(key)
        if not waiting:
            own.setdefault(key, deque()).append(end)
            return
        other = waiting.popleft()
        _, source, target = key
        devices = self._plan.devices
        seconds = self._costs.flow(devices[source], devices[target], end.num_bytes)
        self._received[target] += end.num_bytes
        ends = [(other.rank, other.at), (end.rank, end.at)]
        shares = self._shares.of_flow(devices[source], devices[target])
        held_up = self._cluster.disturbance.peer_slowdown(self._one.direction)
        self._begin(Activity(seconds, _nothing, shares), held_up, ends, self._half_done)

    def _begin(
        self,
        activity: Activity,
        held_up: float,
        ends: list[_Place],
        done: Callable[[list[_Place]], None],
    ) -> None:
        transfer = Transfer(activity, held_up)
        activity.done = partial(self._ended, transfer, ends, done)
        for rank, at in ends:
            lanes = self._lanes[rank]
            lanes.times.start[at] = self._clock.now
            lanes.transfers.append(transfer)
            transfer.computing += lanes.known_computing
        self._clock.start(transfer.activity, transfer.speed)

    def _ended(
        self,
        transfer: Transfer,
        ends: list[_Place],
        done: Callable[[list[_Place]], None],
    ) -> None:
        for rank, _ in ends:
            self._lanes[rank].transfers.remove(transfer)
        done(ends)

    def _half_done(self, ends: list[_Place]) -> None:
        finished = []
        for end in ends:
            self._halves[end] -= 1
            if not self._halves[end]:
                del self._halves[end]
                finished.append(end)
        self._communicated(finished)

    def _communicated(self, ends: list[_Place]) -> None:
        for rank, at in ends:
            lanes = self._lanes[rank]
            lanes.communicating = False
            lanes.finish(at, self._clock.now)
        for rank, _ in ends:
            self._advance(self._lanes[rank])
