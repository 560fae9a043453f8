"""Estimates the seconds of a pass from the program of one rank, as if no rank waited for another.

A search looks at hundreds of settings. A simulation of all ranks takes seconds for each, an
estimate milliseconds. `choose/` ranks settings by `seconds`: two streams slow each other as the
cluster says, and the ranks of a node share links as if all did the same. `least_seconds` is a
bound: no simulation of all ranks is shorter, since waiting and sharing links only delay a program.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mesh_attention.cost.operation_costs import (
    Compiled,
    Overlap,
    TimedCall,
    compiled_on,
    transfers_at_once,
    waits_of_rank,
)
from mesh_attention.cost.planning import collector_paused
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Collective, Free, SendRecv

_ROUNDING = 1 - 1e-9  # sums in another order differ in the last digits


@dataclass(frozen=True, slots=True)
class Estimate:
    """The most of any rank that was looked at. A simulation of all ranks goes through about
    `num_operations`. `busy_seconds`: of computation, undisturbed."""

    seconds: float
    least_seconds: float
    busy_seconds: float
    peak_bytes: int
    num_operations: int


def estimate(
    plan: Plan | Compiled,
    cluster: Cluster,
    direction: Direction,
    *,
    ranks: Sequence[int],
    overlap: Overlap = Overlap.EVENTS,
    kernel: str | None = None,
) -> Estimate:
    """The estimate of a pass by the programs of these ranks."""
    with collector_paused():
        compiled = compiled_on(plan, direction, cluster, kernel)
        sharing = _LinkSharing(cluster, compiled)
        timed = [_Rank(compiled, cluster, sharing, overlap, rank) for rank in ranks]
        least = max(rank.least_seconds() for rank in timed)
        return Estimate(
            max(least, *(_Streams(rank, disturbed=True).run() for rank in timed)),
            least * _ROUNDING,
            max(rank.busy_seconds() for rank in timed),
            max(rank.workspace_bytes for rank in timed) + max(rank.kept_bytes for rank in timed),
            compiled.plan.num_ranks * max(rank.num_operations for rank in timed),
        )


class _LinkSharing:
    """The delay of a rank's transfers on links that it shares, as if all ranks did the same."""

    def __init__(self, cluster: Cluster, compiled: Compiled) -> None:
        self._cluster, self._members = cluster, compiled.pass_.members
        self._shape, devices = compiled.transfers.shape, compiled.plan.devices
        self._ranks_of_node = min(cluster.node.ranks, len(devices))
        self.nodes = cluster.links.nodes_of(devices)

    def flow(self, group: str, rank: int, ends: tuple[int, int]) -> float:
        """The factor by which a flow out of a node takes longer, as every group of the node has a
        flow at once: as many as it has members if sender and receiver have the same place in their
        nodes, otherwise one."""
        cluster, network, places = self._cluster, self._cluster.network, self._members[group]
        nodes = self._shape(group).nodes
        members = nodes.count(nodes[places[rank]])
        flows = self._ranks_of_node / members
        if (places[ends[1]] - places[ends[0]]) % members == 0:
            flows *= members
        room = network.peer_node_gb_per_second / network.peer.gb_per_second
        if cluster.ranks_share_nics:
            of_nic = max(1.0, network.collective.gb_per_second / network.peer.gb_per_second)
            room = min(room, of_nic * network.nics)
        return max(1.0, flows / room)

    def collective(self, group: str, rank: int) -> tuple[float, bool]:
        """The factor by which a collective takes longer on NICs that ranks share, and whether it
        leaves the node."""
        cluster, shape = self._cluster, self._shape(group)
        if shape.num_nodes == 1 or not cluster.ranks_share_nics:
            return 1.0, shape.num_nodes > 1
        members = shape.behind_nic[self._members[group][rank]]
        return max(1.0, cluster.node.ranks / cluster.network.nics / members), True


class _Move(NamedTuple):
    """A communication: its index in the program, seconds alone, the part of its speed that it loses
    beside computation, the factor of `_LinkSharing`, and whether it leaves the node."""

    at: int
    seconds: float
    slowdown: float
    sharing: float
    leaves: bool


class _Rank:
    """The program of one rank, with the seconds of its operations."""

    def __init__(
        self, compiled: Compiled, cluster: Cluster, links: _LinkSharing, overlap: Overlap, rank: int
    ) -> None:
        plan, pass_, costs = compiled.plan, compiled.pass_, compiled.costs
        program, problem = pass_.programs[rank], plan.problem
        table = program.buffer_table()
        number = compiled.tables.get(rank, rank)
        self.at_once = transfers_at_once(cluster, overlap)
        self.waits, self.workspace_bytes = waits_of_rank(
            compiled, rank, overlap, at_once=self.at_once
        )
        self.compute: list[tuple[int, tuple[TimedCall, ...]]] = []
        self.moves: list[_Move] = []
        self.num_operations = len(program.operations)
        self.kept_bytes = sum(
            b.num_bytes(problem) for b in program.buffers if b.role is not Role.WORKSPACE
        )
        self._usual_loss = cluster.disturbance.compute_slowdown
        flows, collectives = 0.0, {True: 0.0, False: 0.0}  # by whether they leave the node
        for index, op in enumerate(program.operations):
            if isinstance(op, SendRecv):
                group, flow = pass_.groups[op.group], compiled.flows.of(op, number, table)
                seconds, sharing, leaves = 0.0, 1.0, False
                for pieces, size, ends in (
                    (op.sends, flow.sent[op.to_member], (rank, group[op.to_member])),
                    (op.receives, flow.received[op.from_member][0], (group[op.from_member], rank)),
                ):
                    if pieces:
                        source, target = (plan.devices[end] for end in ends)
                        seconds = max(seconds, costs.flow(source, target, size))
                        if links.nodes[ends[0]] != links.nodes[ends[1]]:
                            leaves, sharing = True, links.flow(op.group, rank, ends)
                slowdown = cluster.disturbance.peer_slowdown(pass_.direction)
                self.moves.append(_Move(index, seconds, slowdown, sharing, leaves))
                flows += seconds
            elif isinstance(op, Collective):
                flow, member = compiled.flows.of(op, number, table), pass_.members[op.group][rank]
                seconds = costs.collective(op, flow, member)
                sharing, leaves = links.collective(op.group, rank)
                slowdown = cluster.disturbance.collective_slowdown
                self.moves.append(_Move(index, seconds, slowdown, sharing, leaves))
                collectives[leaves] += seconds
            elif isinstance(op, Free):
                self.compute.append((index, ()))
            else:
                calls = costs.compute(op, table)
                self.compute.append((index, tuple(call for call in calls if call.seconds)))
        # Collectives in flight together divide their link; flows may have room.
        one_by_one = flows + sum(collectives.values())
        self._moving_seconds = max(collectives.values()) if self.at_once else one_by_one

    def least_seconds(self) -> float:
        """The longer of two times: the longest chain of operations that wait for each other, and
        all computation, slowed for as long as transfers are in flight at least."""
        lost = min((self.loss(call) for _, calls in self.compute for call in calls), default=0.0)
        busy = self.busy_seconds() + lost * self._moving_seconds
        return max(_Streams(self, disturbed=False).run(), busy)

    def busy_seconds(self) -> float:
        return sum(call.seconds for _, calls in self.compute for call in calls)

    def loss(self, call: TimedCall) -> float:
        return self._usual_loss if call.lost is None else call.lost


class _Streams:
    """Two streams of a rank, each in program order, which slow each other; or one thread and the
    transfers that it has in flight."""

    def __init__(self, rank: _Rank, *, disturbed: bool) -> None:
        self._rank, self._disturbed = rank, disturbed
        self._done = bytearray(rank.num_operations)
        self._compute, self._moves = deque(rank.compute), deque(rank.moves)
        self._calls: deque[TimedCall] = deque()  # the rest of the current computation
        self._computing_at = 0
        self._call: TimedCall | None = None
        self._moving: list[tuple[_Move, float]] = []  # in flight, with the seconds left
        self._call_left = 0.0
        self._until_sms = math.inf  # until the next move finds SMs, if it waits for them
        self._now, self._computed_until = 0.0, -1.0
        self._began_idle: set[int] = set()  # moves in flight that began beside no computation
        self._is_late = False  # whether such a move leaves no place for programs of the call

    def run(self) -> float:
        while True:
            self._until_sms = math.inf
            while self._begin_move() or self._begin_call():
                pass
            call, moving = self._call, self._moving
            if call is None and not moving:
                return self._now
            both = self._disturbed and call is not None and bool(moving)
            call_speed = 1.0 - self._rank.loss(call) if both and call else 1.0
            call_needs = self._call_left / call_speed if call else math.inf
            speeds = [self._speed(move, beside=both) for move, _ in moving]
            needs = [left / speed for (_, left), speed in zip(moving, speeds, strict=True)]
            step = min(call_needs, self._until_sms, min(needs, default=math.inf))
            self._now += step
            self._call_left -= step * call_speed
            self._moving = []
            for (move, left), needed, speed in zip(moving, needs, speeds, strict=True):
                if needed == step:
                    self._done[move.at] = 1
                    self._began_idle.discard(move.at)
                    if self._is_late and call is not None:
                        self._call_left = min(self._call_left, call.seconds)
                else:
                    self._moving.append((move, left - step * speed))
            if call is not None and call_needs == step:
                self._call, self._computed_until = None, self._now
                if not self._calls:
                    self._done[self._computing_at] = 1

    def _speed(self, move: _Move, *, beside: bool) -> float:
        """Transfers that leave the node divide one link, and other transfers divide another link.
        For the bound no link is divided."""
        if not self._disturbed:
            return 1.0
        speed = 1.0 - move.slowdown if beside else 1.0
        if len(self._moving) == 1:
            return speed
        return speed / sum(other.leaves == move.leaves for other, _ in self._moving)

    def _may_begin(self, at: int) -> bool:
        done = self._done
        for before in self._rank.waits[at]:  # noqa: SIM110  (most of the time of an estimate)
            if not done[before]:
                return False
        return True

    def _begin_move(self) -> bool:
        held = self._disturbed and self._call is not None and self._call.waits
        if held or not self._moves or not self._may_begin(self._moves[0].at):
            return False
        if self._rank.at_once:
            computes = self._call is not None or self._calls
            if computes or (self._compute and self._compute[0][0] < self._moves[0].at):
                return False
        elif self._moving:
            return False
        if self._disturbed and self._call is not None:
            until = self._call.until_sms(self._call_left)
            if until:
                self._until_sms = until
                return False
        move = self._moves.popleft()
        if self._disturbed and self._call is None and self._computed_until < self._now:
            self._began_idle.add(move.at)
        left = move.seconds * (move.sharing if self._disturbed else 1.0)
        self._moving.append((move, left))
        return True

    def _begin_call(self) -> bool:
        if self._call is not None:
            return False
        if not self._calls:
            if not self._compute or not self._may_begin(self._compute[0][0]):
                return False
            if self._rank.at_once and self._moves and self._moves[0].at < self._compute[0][0]:
                return False
            self._computing_at, calls = self._compute.popleft()
            self._calls.extend(calls)
            if not calls:
                self._done[self._computing_at] = 1
                return True
        self._call = self._calls.popleft()
        late = self._call.late if self._began_idle else 0.0
        self._is_late = late > 0.0
        self._call_left = self._call.seconds + late
        return True
