"""The simulator: discrete events over the real programs of all ranks (design.md, "five readers").

Each rank has two streams, as in the executor: computation in program order, communication in
program order, and between them the dependencies that follow from buffers and workspace offsets. A
collective begins when its last member has come to it, a point-to-point flow when both ends have.
While both streams of a rank are busy each slows the other, as the cluster says; and where a kernel
holds the GPU until it ends, a communication begins between two of its calls only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mesh_attention.cost.operation_costs import (
    Compiled,
    OperationCosts,
    Overlap,
    compiled_on,
    transfers_at_once,
)
from mesh_attention.cost.planning import collector_paused
from mesh_attention.cost.shared_work import SharedWork, ranks_to_simulate
from mesh_attention.cost.state import Activity, Capacities, Capacity, Clock, RankState
from mesh_attention.cost.timeline import Timeline
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import ClusterError, a_cluster
from mesh_attention.plan.language.plan import Direction, Plan, a_plan
from mesh_attention.plan.language.program import Collective, SendRecv
from mesh_attention.plan.language.traffic import SharedFlows
from mesh_attention.plan.passes.seconds import TransferCosts
from mesh_attention.plan.problem.arguments import choice


def simulate(
    plan: Plan,
    cluster: Cluster | str | Path,
    direction: Direction | str = Direction.FORWARD,
    *,
    overlap: Overlap | str = Overlap.EVENTS,
    kernel: str | None = None,
    costs: OperationCosts | None = None,
) -> Timeline:
    """When everything happens if `plan` runs on `cluster` (or on the one of that name or file).

    The plan is compiled for the cluster (`plan/passes/`), unless it is compiled already.
    `kernel`: a name in the cluster's file, for all calls that it can do."""
    plan, cluster = a_plan(plan), a_cluster(cluster)
    overlap = choice(Overlap, "overlap", overlap)
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
    pass_ = plan.direction(direction)
    with collector_paused():
        if costs is not None:  # of a caller's own: they may differ between any two ranks
            common = TransferCosts(cluster.links, plan, pass_), SharedFlows(plan.problem)
            compiled = Compiled(plan, pass_, costs, None, *common, {}, {})
            ranks: Sequence[int] = range(plan.num_ranks)
        else:
            compiled = compiled_on(plan, direction, cluster, kernel)
            ranks = ranks_to_simulate(plan, compiled.pass_, cluster, overlap)
        return _Simulation(compiled, cluster, overlap, ranks).run()


def seconds_of_few(
    compiled: Compiled, cluster: Cluster, ranks: Sequence[int], overlap: Overlap
) -> float:
    """Seconds until the last of these ranks ends, if nobody waits for other ranks than these: no
    more than all ranks take. For programs without flows, whose other end may not be there."""
    with collector_paused():
        return _Simulation(compiled, cluster, overlap, ranks).seconds()


_Flow = tuple[str, int, int]  # group, sending rank, receiving rank
_Place = tuple[int, int]  # rank, index of the operation


class _Simulation:
    """The simulation of some ranks of a pass."""

    def __init__(
        self, compiled: Compiled, cluster: Cluster, overlap: Overlap, ranks: Sequence[int]
    ) -> None:
        self._plan, self._pass, self._costs = compiled.plan, compiled.pass_, compiled.costs
        self._cluster, self._overlap, self._target = cluster, overlap, compiled.target
        self._clock, at_once = Clock(), transfers_at_once(cluster, overlap)
        self._work = SharedWork(compiled, cluster, overlap, ranks)
        self._kernel_seconds: dict[str, float] = {}
        # Members that have come to a collective, with its seconds as each sees them.
        self._arrived: defaultdict[tuple[str, int], list[tuple[_Place, float]]] = defaultdict(list)
        self._met: dict[tuple[str, int], int] = {}  # collectives of a group, by rank
        # Ends of flows that wait for the other end, by whether they send.
        self._ends: defaultdict[tuple[_Flow, bool], deque[_Place]] = defaultdict(deque)
        self._open: dict[_Place, int] = {}  # transfers that a communication waits for
        self._capacities = Capacities(cluster, at_once=at_once)
        self._received, self._far = ([0] * self._plan.num_ranks for _ in range(2))
        self._ranks = {
            rank: RankState(
                rank, self._work.waits(rank), self._pass.programs[rank].operations, at_once=at_once
            )
            for rank in ranks
        }
        # By group: the members that are simulated, and what its collectives share with others.
        self._meetings: dict[str, tuple[int, tuple[Capacity, ...]]] = {}

    def seconds(self) -> float:
        """Runs until all ranks have ended, and returns the time."""
        for state in self._ranks.values():
            self._advance(state)
        self._clock.run()
        stuck = [rank for rank, state in self._ranks.items() if not state.finished]
        if stuck:
            raise ClusterError(f"ranks {stuck[:4]} deadlock; run `verify` for the reason")
        return self._clock.now

    def run(self) -> Timeline:
        self.seconds()
        copies = self._plan.num_ranks // len(self._ranks)
        simulated = [rank - rank % copies for rank in range(self._plan.num_ranks)]
        return Timeline(
            self._plan,
            self._pass,
            self._cluster,
            self._overlap,
            tuple(self._ranks[rank].times for rank in simulated),
            self._work.workspace_bytes,
            tuple(self._received[rank] for rank in simulated),
            tuple(self._far[rank] for rank in simulated),
            {name: copies * seconds for name, seconds in self._kernel_seconds.items()},
            self._target,
        )

    def _advance(self, state: RankState) -> None:
        """Begins whatever this rank can begin now, then lets each stream know of the other."""
        while self._begin_communication(state) or self._begin_computation(state):
            pass
        if state.running is not None:
            activity, call = state.running
            # A communication kernel that waits for other ranks occupies its SMs too.
            lost = call.lost if state.in_flight else 0.0
            if lost is None:
                lost = self._cluster.disturbance.compute_slowdown
            self._clock.set_speed(activity, 1.0 - lost)
        computing = state.running is not None
        if computing != state.known_computing:
            state.known_computing = computing
            for transfer in state.transfers:
                transfer.computing += 1 if computing else -1
                self._clock.set_speed(transfer, transfer.disturbed_speed)

    def _begin_communication(self, state: RankState) -> bool:
        if state.running is not None and state.running[1].waits:
            return False  # it finds no SM until the call is over
        at = state.take_communication()
        if at is None:
            return False
        until = self._until_sms(state)
        if until:
            state.waiting = at
            self._clock.start(Activity(until, partial(self._found_sms, state, at)))
            return False
        self._arrive(state, at)
        return True

    def _until_sms(self, state: RankState) -> float:
        """Seconds until a communication finds SMs. Attention takes back at once the SMs that a
        finished one frees, so every communication waits until programs of the call have ended."""
        if state.running is None:
            return 0.0
        activity, call = state.running
        done = (self._clock.now - activity.since) * activity.speed
        return call.until_sms(activity.left - done)

    def _found_sms(self, state: RankState, at: int, _: Activity) -> None:
        state.waiting = None
        self._arrive(state, at)
        self._advance(state)

    def _begin_computation(self, state: RankState) -> bool:
        """Begins the next kernel call of the current computation, or the first of the next."""
        if state.running is not None:
            return False
        if not state.calls:
            at = state.take_computation()
            if at is None:
                return False
            state.times.issued[at] = state.times.start[at] = self._clock.now
            state.computing_at = at
            state.calls = [*reversed(self._work.calls(state.rank, state.operations[at]))]
            if not state.calls:
                state.finish(at, self._clock.now)
                return True
        call = state.calls.pop()
        if call.kernel:
            seconds = self._kernel_seconds
            seconds[call.kernel] = seconds.get(call.kernel, 0.0) + call.seconds
        late = call.late if state.began_idle else 0.0
        state.is_late = late > 0.0
        activity = Activity(call.seconds + late, partial(self._computed, state))
        state.running = activity, call
        self._clock.start(activity)
        return True

    def _computed(self, state: RankState, _: Activity) -> None:
        state.running = None
        state.computed_until = self._clock.now
        if not state.calls:
            state.finish(state.computing_at, self._clock.now)
        self._advance(state)

    def _arrive(self, state: RankState, at: int) -> None:
        op = state.operations[at]
        state.in_flight.append(at)
        if state.running is None and state.computed_until < self._clock.now:
            state.began_idle.add(at)
        state.times.issued[at] = state.times.start[at] = self._clock.now
        if isinstance(op, SendRecv):
            self._arrive_at_peers(state, at, op)
        else:
            assert isinstance(op, Collective)
            self._arrive_at_collective(state, at, op)

    def _arrive_at_collective(self, state: RankState, at: int, op: Collective) -> None:
        rank, group = state.rank, op.group
        number = self._met.get((group, rank), 0)
        self._met[group, rank] = number + 1
        member, flows = self._pass.members[group][rank], self._work.flows(rank, op)
        received, far = self._work.received_bytes(op, flows, member)
        self._received[rank] += received
        self._far[rank] += far
        self._open[rank, at] = 1
        arrived = self._arrived[group, number]
        arrived.append(((rank, at), self._costs.collective(op, flows, member)))
        if group not in self._meetings:
            ranks = self._pass.groups[group]
            uses = self._capacities.of_collective([self._plan.devices[other] for other in ranks])
            self._meetings[group] = sum(other in self._ranks for other in ranks), uses
        simulated, uses = self._meetings[group]
        if len(arrived) == simulated:
            del self._arrived[group, number]
            slowest = max(seconds for _, seconds in arrived)
            slowdown = self._cluster.disturbance.collective_slowdown
            self._begin(slowest, uses, slowdown, [place for place, _ in arrived])

    def _arrive_at_peers(self, state: RankState, at: int, op: SendRecv) -> None:
        rank, ranks = state.rank, self._pass.groups[op.group]
        self._open[rank, at] = bool(op.sends) + bool(op.receives)
        flows = self._work.flows(rank, op)
        if op.sends:
            flow, num_bytes = (op.group, rank, ranks[op.to_member]), flows.sent[op.to_member]
            self._pair(flow, (rank, at), num_bytes, sends=True)
        if op.receives:
            flow = (op.group, ranks[op.from_member], rank)
            self._pair(flow, (rank, at), flows.received[op.from_member][0], sends=False)
        if not op.sends and not op.receives:
            self._communicated([(rank, at)])

    def _pair(self, flow: _Flow, end: _Place, num_bytes: int, *, sends: bool) -> None:
        """Begins a flow if the other end waits for this one; otherwise this end waits."""
        waiting = self._ends[flow, not sends]
        if not waiting:
            self._ends[flow, sends].append(end)
            return
        _, source, target = flow
        self._received[target] += num_bytes
        nodes = self._work.nodes
        self._far[target] += num_bytes * (nodes[source] != nodes[target])
        devices = self._plan.devices[source], self._plan.devices[target]
        seconds, uses = self._costs.flow(*devices, num_bytes), self._capacities.of_flow(*devices)
        slowdown = self._cluster.disturbance.peer_slowdown(self._pass.direction)
        self._begin(seconds, uses, slowdown, [waiting.popleft(), end])

    def _begin(
        self, seconds: float, uses: tuple[Capacity, ...], slowdown: float, ends: list[_Place]
    ) -> None:
        transfer = Activity(seconds, partial(self._ended, ends), uses, slowdown)
        for rank, at in ends:
            state = self._ranks[rank]
            state.times.start[at] = self._clock.now
            state.transfers.append(transfer)
            transfer.computing += state.known_computing
        self._clock.start(transfer)

    def _ended(self, ends: list[_Place], transfer: Activity) -> None:
        finished = []
        for place in ends:
            self._ranks[place[0]].transfers.remove(transfer)
            self._open[place] -= 1
            if not self._open[place]:
                finished.append(place)
        self._communicated(finished)

    def _communicated(self, ends: list[_Place]) -> None:
        for rank, at in ends:
            state = self._ranks[rank]
            del self._open[rank, at]
            state.in_flight.remove(at)
            state.began_idle.discard(at)
            if state.is_late and state.running is not None:
                activity, call = state.running
                self._clock.shorten(activity, call.seconds)
            state.finish(at, self._clock.now)
        for rank, _ in ends:
            self._advance(self._ranks[rank])
