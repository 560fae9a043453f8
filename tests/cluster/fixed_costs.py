"""Costs by name, so that timelines can be computed by hand, and a cluster that disturbs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from mesh_attention.cost import Cluster, load_cluster
from mesh_attention.cost.operation_costs import TimedCall
from mesh_attention.machine.cluster import Disturbance
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.program import Attend, AttendBackward, Operation
from mesh_attention.plan.language.traffic import Flows


class FixedCosts:
    """`compute` and `communication` give seconds by the name of an operation; merges are free.

    `waits`: calls hold the GPU, and a communication begins between two of them only. `late`: what
    each call takes longer beside a communication that began on an idle GPU."""

    def __init__(
        self,
        compute: Callable[[str], float],
        communication: Callable[[str], float] = lambda name: 0.0,
        flow: float = 0.0,
        waits: bool = False,
        late: float = 0.0,
    ) -> None:
        self._compute, self._communication, self._flow = compute, communication, flow
        self._waits, self._late = waits, late

    def compute(self, op: Operation, table: Mapping[str, Buffer]) -> tuple[TimedCall, ...]:
        """All calls of an attention last equally long."""
        if not isinstance(op, Attend | AttendBackward):
            return ()
        count = max(1, len(op.calls))
        seconds = self._compute(op.name) / count
        return (TimedCall(seconds, "fixed", self._waits, late=self._late),) * count

    def collective(self, op: Operation, flows: Flows, member: int) -> float:
        return self._communication(op.name)

    def flow(self, source: int, target: int, num_bytes: int) -> float:
        return self._flow


def undisturbed() -> Cluster:
    """Nothing slows or shares anything: each operation lasts as long as it costs."""
    cluster = load_cluster("paper")
    free = cluster.network.peer.gb_per_second * cluster.node.ranks
    network = replace(cluster.network, peer_node_gb_per_second=free, flows_of_a_pair=2.0)
    return replace(cluster, network=network, disturbance=Disturbance(0.0, 0.0, 0.0, 0.0))
