"""The transports of a session: which of them carries what, and why.

Memory is shared by the ranks of a node where that is possible, and the network does the rest. The
choice goes by place, not by method, and all ranks that it concerns make it together. Workspaces are
here too, since the memory that is shared is the workspace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from enum import StrEnum

import torch

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.buffers import Precision
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import AllGather, Communication, ReduceScatter
from mesh_attention.runtime.device import Workspace, transfer_stream
from mesh_attention.runtime.execute.executor import CallShape
from mesh_attention.runtime.session.rank_plan import RankPlan
from mesh_attention.runtime.transport.copies import Owner
from mesh_attention.runtime.transport.distributed import DistributedTransport
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Transport
from mesh_attention.runtime.transport.shared_memory import SharedMemory
from mesh_attention.runtime.transport.symmetric import SymmetricTransport
from mesh_attention.runtime.transport.symmetric_memory import obstacle


class TransportName(StrEnum):
    AUTO = "auto"  # shared memory inside a node where it works, torch.distributed elsewhere
    DISTRIBUTED = "distributed"
    SYMMETRIC = "symmetric"  # shared memory, or an error that says why not


class Transports:
    """What the transports of all calls on a process group share: memory, streams, workspaces."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.poison = False  # workspaces begin as NaN, for tests
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._memories: dict[tuple[tuple[int, ...], timedelta], SharedMemory] = {}
        self._workspace: Workspace | None = None

    @property
    def workspace(self) -> Workspace:
        """The one that is not shared."""
        if self._workspace is None:
            self._workspace = Workspace(poison=self.poison)
        return self._workspace

    def memory(self, rank_plan: RankPlan, timeout: timedelta) -> SharedMemory:
        """Of the ranks that the plan holds to be on the node of this one."""
        plan = rank_plan.plan
        node = tuple(
            self.groups.global_rank(plan, other)
            for other in sorted(range(plan.num_ranks), key=plan.devices.__getitem__)
            if plan.node_of(other) == plan.node_of(rank_plan.rank)
        )
        if (node, timeout) not in self._memories:
            workspace = Workspace(poison=self.poison)
            self._memories[node, timeout] = SharedMemory(self.groups, node, timeout, workspace)
        return self._memories[node, timeout]

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """On which communications run."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = transfer_stream(device)
        return self._streams[device]

    def close(self, *, abandon: bool = False) -> None:
        for memory in self._memories.values():
            memory.release(abandon=abandon)
        self._memories.clear()
        if self._workspace is not None:
            self._workspace.release()
            self._workspace = None


class CallTransport:
    """How calls of one plan on tensors of one shape communicate. All ranks make it before they
    agree on the call; afterwards they connect it together, by `share` and `make_groups`."""

    def __init__(
        self,
        shared: Transports,
        wanted: TransportName,
        rank_plan: RankPlan,
        call_shape: CallShape,
        timeout: timedelta | None,
    ) -> None:
        self._groups = shared.groups
        self._wanted = wanted
        self._plan, self._rank = rank_plan.plan, rank_plan.rank
        self._call_shape = call_shape
        self._timeout = timeout
        self.stream = shared.stream(call_shape.device)
        shares = wanted is not TransportName.DISTRIBUTED and self._plan.num_ranks > 1
        self._memory: SharedMemory | None = None
        if shares and self.stream is not None:
            self._memory = shared.memory(rank_plan, self._groups.timeout(timeout))
        self.workspace = shared.workspace if self._memory is None else self._memory.workspace

    def make(self, direction: Direction) -> Transport:
        """The transport of this rank's program."""
        plan, rank = self._plan, self._rank
        pass_ = plan.direction(direction)
        ranks = self._groups.global_ranks(plan, pass_, rank)
        far = DistributedTransport(self._groups, ranks, self._timeout, self.stream)
        # What others read has places that they know, at the cost of copies and memory.
        memory, device = self._memory, self._call_shape.device
        if memory is None or self.stream is None or not memory.may_be_shared(device):
            return far
        dtypes = {
            Precision.ELEMENT: self._call_shape.dtype,
            Precision.ACCUMULATE: self._call_shape.accumulate_dtype,
        }
        batch = self._call_shape.batch
        return SymmetricTransport(plan, pass_, rank, batch, dtypes, memory, self.stream, far)

    def check(self) -> None:
        """Raises what this rank knows by itself against such calls."""
        device = self._call_shape.device
        self._groups.check_device(device)
        if self._memory is not None and self._memory.device not in (None, device):
            raise MeshAttentionError(
                f"the tensors are on {device}, but calls on this process group share memory of "
                f"{self._memory.device} with other ranks; use one group for each device"
            )
        if self._wanted is TransportName.SYMMETRIC and self._plan.num_ranks > 1:
            reason = obstacle(device)
            if reason is not None:
                raise MeshAttentionError(_impossible(reason))

    def share(self, directions: Iterable[Direction]) -> None:
        """Share memory that is large enough for these passes, where memory can be shared.

        Called by all ranks, after they have agreed on the call. The programs of the other ranks of
        the node say how large it must be and where in it they keep their data.
        """
        memory, plan, call_shape = self._memory, self._plan, self._call_shape
        if memory is not None and memory.meet(call_shape.device):
            owners = [
                Owner(plan, plan.direction(direction), other, call_shape.batch)
                for direction in directions
                for other in range(plan.num_ranks)
                if self._groups.global_rank(plan, other) in memory.members
            ]
            memory.grow(
                max(owner.workspace_bytes for owner in owners),
                max(owner.staging_bytes for owner in owners),
                call_shape.device,
            )

    def refusal(self, directions: Iterable[Direction]) -> MeshAttentionError | None:
        """Why `transport='symmetric'` is not possible, once memory is shared; None if it is."""
        for name, (chosen, reason) in self.choices(directions).items():
            if chosen != TransportName.SYMMETRIC:
                return MeshAttentionError(_impossible(f"{name}: {reason}"))
        return None

    def make_groups(self, directions: Iterable[Direction]) -> None:
        """Make the process groups that are still missing; ranks that share memory need none."""
        for _, ranks in self._used(directions, collectives=True):
            if self._memory is None or not self._memory.covers(ranks):
                self._groups.of(ranks)

    def is_connected(self, directions: Iterable[Direction]) -> bool:
        """Whether there is nothing left that ranks would have to make together."""
        used = self._used(directions, collectives=True)
        has = self._groups.has
        return self._memory is None and has(self._groups.ranks) and all(has(x) for _, x in used)

    def _used(
        self, directions: Iterable[Direction], *, collectives: bool = False
    ) -> Iterator[tuple[str, list[int]]]:
        """The groups in which this rank communicates, in an order that their members share: (pass
        and name, global ranks). `collectives`: by these, which need process groups of their own."""
        plan, rank = self._plan, self._rank
        kinds = AllGather | ReduceScatter if collectives else Communication
        for direction in directions:
            pass_ = plan.direction(direction)
            operations = pass_.programs[rank].operations
            used = {op.group for op in operations if isinstance(op, kinds)}
            for name, ranks in self._groups.global_ranks(plan, pass_, rank).items():
                if name in used:
                    yield f"{direction} {name}", ranks

    def choices(self, directions: Iterable[Direction]) -> dict[str, tuple[str, str]]:
        """For each group in which this rank communicates: the transport, and why not the other."""
        used = self._used(directions)
        return {name: self._choice(ranks) for name, ranks in used if len(ranks) > 1}

    def _choice(self, ranks: Sequence[int]) -> tuple[str, str]:
        if self._wanted is TransportName.DISTRIBUTED:
            reason = (
                "transport='distributed' was asked for, or the call has documents or is a graph"
            )
        elif self._memory is None:
            reason = obstacle(self._call_shape.device) or ""
        elif self._memory.covers(ranks):
            return TransportName.SYMMETRIC.value, f"ranks {list(ranks)} share memory"
        else:
            reason = self._memory.why_not(ranks)
        return TransportName.DISTRIBUTED.value, reason


def _impossible(reason: str) -> str:
    return (
        f"transport='symmetric' is not possible: {reason}; "
        "transport='auto' shares memory where it can and uses torch.distributed elsewhere"
    )
