"""How long a pass takes as one rank sees it: its own program, with the others there on time.

A search looks at hundreds of settings, and to simulate all ranks takes seconds each; the program of
one rank takes milliseconds. Two numbers come of it. `seconds` is the estimate by which settings are
ranked: both streams, slowed by each other as the cluster says, and links shared with the ranks of
the node as if they did the same. `least_seconds` is a bound: no simulation of all ranks is shorter,
since to wait for others and to share links can only delay what a program does in its order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.compute_cost import TimedCall
from mesh_attention.cluster.operation_costs import ClusterCosts
from mesh_attention.cluster.simulate import collector_paused
from mesh_attention.cluster.waits import Overlap, waits_of_rank
from mesh_attention.plan.buffers import Role
from mesh_attention.plan.plan import Direction, Pass, Plan
from mesh_attention.plan.program import Collective, Free, SendRecv
from mesh_attention.plan.split_calls import splits_wanted
from mesh_attention.plan.traffic import TrafficMeter

_ROUNDING = 1 - 1e-9  # sums in another order differ in the last digits


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of the slowest of the ranks that were looked at. `num_operations` is what a simulation of all
    ranks would have to go through, about; `moving_seconds` those of all transfers, each alone."""

    seconds: float
    least_seconds: float
    moving_seconds: float
    peak_bytes: int
    num_operations: int


def estimate(
    plan: Plan,
    cluster: Cluster,
    direction: Direction,
    *,
    overlap: Overlap = Overlap.EVENTS,
    kernel: str | None = None,
    ranks: Sequence[int] | None = None,
) -> Estimate:
    """`ranks`: those to look at; left out, the first, the last and one in between."""
    with collector_paused():
        one, last = plan.direction(direction), plan.num_ranks - 1
        costs = ClusterCosts(cluster, plan, one, kernel)
        seen = sorted({0, last // 2, last}) if ranks is None else ranks
        found = [_Rank(plan, one, cluster, costs, overlap, rank) for rank in seen]
        least = max(rank.least_seconds() for rank in found)
        return Estimate(
            max(least, *(rank.run(disturbed=True) for rank in found)),
            least * _ROUNDING,
            max(rank.moving_seconds for rank in found),
            max(rank.workspace_bytes for rank in found) + max(rank.kept_bytes for rank in found),
            plan.num_ranks * max(rank.num_operations for rank in found),
        )


class _Move(NamedTuple):
    """A communication: seconds alone, the part of its speed that is lost beside computation, and
    how much longer it takes where others of the node do the same."""

    at: int
    seconds: float
    slowdown: float
    sharing: float


class _Rank:
    def __init__(
        self,
        plan: Plan,
        one: Pass,
        cluster: Cluster,
        costs: ClusterCosts,
        overlap: Overlap,
        at: int,
    ) -> None:
        program, problem = one.programs[at], plan.problem
        table = program.buffer_table()
        meter = TrafficMeter(problem, table)
        splits = splits_wanted(program) if one.direction is Direction.FORWARD else 1
        self.waits, self.workspace_bytes = waits_of_rank(plan, one, overlap, at)
        self.compute: list[tuple[int, tuple[TimedCall, ...]]] = []
        self.moves: list[_Move] = []
        self.num_operations = len(program.operations)
        self.kept_bytes = sum(
            b.num_bytes(problem) for b in program.buffers if b.role is not Role.WORKSPACE
        )
        self._usual_loss = cluster.disturbance.compute_slowdown
        for index, op in enumerate(program.operations):
            if isinstance(op, SendRecv):
                ranks = one.groups[op.group]
                seconds, sharing = 0.0, 1.0
                for pieces, other in (
                    (op.sends, (at, ranks[op.to_member])),
                    (op.receives, (ranks[op.from_member], at)),
                ):
                    if pieces:
                        size = sum(p.num_bytes(table[p.buffer], problem) for p in pieces)
                        source, target = (plan.devices[rank] for rank in other)
                        seconds = max(seconds, costs.flow(source, target, size))
                        if cluster.node_of(source) != cluster.node_of(target):
                            sharing = _sharing_of_flows(cluster, plan, ranks, at)
                slowdown = cluster.disturbance.peer_slowdown(one.direction)
                self.moves.append(_Move(index, seconds, slowdown, sharing))
            elif isinstance(op, Collective):
                member = one.members[op.group][at]
                seconds = costs.collective(op, meter.flows(op), member)
                sharing = _sharing_of_collectives(cluster, plan, one.groups[op.group], at)
                slowdown = cluster.disturbance.collective_slowdown
                self.moves.append(_Move(index, seconds, slowdown, sharing))
            elif isinstance(op, Free):
                self.compute.append((index, ()))
            else:
                calls = costs.compute(op, table, splits)
                self.compute.append((index, tuple(call for call in calls if call.seconds)))

    def least_seconds(self) -> float:
        """The longest chain of what waits for each other; and computation, which is no faster than
        the rest of a GPU allows while something is in flight or waits to be."""
        calls = [call for _, several in self.compute for call in several]
        busy = sum(call.seconds for call in calls)
        lost = min(map(self.loss, calls), default=0.0)
        return max(self.run(disturbed=False), busy + lost * self.moving_seconds)

    def loss(self, call: TimedCall) -> float:
        return self._usual_loss if call.lost is None else call.lost

    def run(self, *, disturbed: bool) -> float:
        return _Streams(self, disturbed=disturbed).run()

    @property
    def moving_seconds(self) -> float:
        return sum(move.seconds for move in self.moves)


class _Streams:
    """Two streams of a rank, each in program order, of which each may slow the other."""

    def __init__(self, rank: _Rank, *, disturbed: bool) -> None:
        self._rank, self._disturbed = rank, disturbed
        self._done = bytearray(rank.num_operations)
        self._compute, self._moves = deque(rank.compute), deque(rank.moves)
        self._calls: deque[TimedCall] = deque()  # that are left of the current computation
        self._computing_at = 0
        self._call: TimedCall | None = None
        self._move: _Move | None = None
        self._call_left = self._move_left = 0.0

    def run(self) -> float:
        now = 0.0
        while True:
            while self._begin_move() or self._begin_call():
                pass
            call, move = self._call, self._move
            if call is None and move is None:
                return now
            both = self._disturbed and call is not None and move is not None
            call_speed = 1.0 - self._rank.loss(call) if both and call else 1.0
            move_speed = 1.0 - move.slowdown if both and move else 1.0
            call_needs = self._call_left / call_speed if call else math.inf
            move_needs = self._move_left / move_speed if move else math.inf
            step = min(call_needs, move_needs)
            now += step
            self._call_left -= step * call_speed
            self._move_left -= step * move_speed
            if move is not None and move_needs == step:
                self._done[move.at], self._move = 1, None
            if call is not None and call_needs == step:
                self._call = None
                if not self._calls:
                    self._done[self._computing_at] = 1

    def _may_begin(self, at: int) -> bool:
        return all(self._done[before] for before in self._rank.waits[at])

    def _begin_move(self) -> bool:
        held = self._disturbed and self._call is not None and self._call.waits
        if self._move or held or not self._moves or not self._may_begin(self._moves[0].at):
            return False
        self._move = move = self._moves.popleft()
        self._move_left = move.seconds * (move.sharing if self._disturbed else 1.0)
        return True

    def _begin_call(self) -> bool:
        if self._call is not None:
            return False
        if not self._calls:
            if not self._compute or not self._may_begin(self._compute[0][0]):
                return False
            self._computing_at, calls = self._compute.popleft()
            self._calls.extend(calls)
            if not calls:
                self._done[self._computing_at] = 1
                return True
        self._call = self._calls.popleft()
        self._call_left = self._call.seconds
        return True


def _here(cluster: Cluster, plan: Plan, group: Sequence[int], at: int) -> int:
    """Members of a group in the node of one of them."""
    node = cluster.node_of(plan.devices[at])
    return sum(cluster.node_of(plan.devices[rank]) == node for rank in group)


def _sharing_of_flows(cluster: Cluster, plan: Plan, group: Sequence[int], at: int) -> float:
    """How much longer a flow out of a node takes, if all groups of the node have one at once."""
    network = cluster.network
    flows = min(cluster.node.ranks, plan.num_ranks) / _here(cluster, plan, group, at)
    room = network.peer_node_gb_per_second / network.peer.gb_per_second
    if cluster.ranks_share_nics:
        each = max(1.0, network.collective.gb_per_second / network.peer.gb_per_second)
        room = min(room, each * network.nics)
    return max(1.0, flows / room)


def _sharing_of_collectives(cluster: Cluster, plan: Plan, group: Sequence[int], at: int) -> float:
    """The same of a collective between nodes, for NICs that ranks share."""
    nodes = {cluster.node_of(plan.devices[rank]) for rank in group}
    if not cluster.ranks_share_nics or len(nodes) == 1:
        return 1.0
    nic = cluster.nic_of(plan.devices[at])
    here = sum(cluster.nic_of(plan.devices[rank]) == nic for rank in group)
    return max(1.0, cluster.node.ranks / cluster.network.nics / here)
