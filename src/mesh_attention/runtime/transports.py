"""The transports of an engine: which of them carries what, and why.

Memory is shared by the ranks of a node where that is possible, and the network does the rest. The
choice goes by place, not by method, and all ranks that it concerns make it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.buffers import Precision
from mesh_attention.plan.plan import Direction, Pass, Plan
from mesh_attention.plan.program import Communication
from mesh_attention.runtime.executor import CallShape
from mesh_attention.runtime.transport.distributed import DistributedTransport
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Counters, Transport
from mesh_attention.runtime.transport.regions import Owner
from mesh_attention.runtime.transport.routed import RoutedTransport
from mesh_attention.runtime.transport.shared import SharedMemory
from mesh_attention.runtime.transport.symmetric import SymmetricTransport
from mesh_attention.runtime.transport.symmetric_memory import obstacle

__all__ = ["TransportName", "Transports"]


class TransportName(StrEnum):
    AUTO = "auto"  # shared memory inside a node where it works, torch.distributed elsewhere
    DISTRIBUTED = "distributed"
    SYMMETRIC = "symmetric"  # shared memory, or an error that says why not


class Transports:
    def __init__(
        self, wanted: TransportName, groups: Groups, look_around: Callable[[], None]
    ) -> None:
        self._wanted = wanted
        self._groups = groups
        self._look_around = look_around
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        shares = wanted is not TransportName.DISTRIBUTED
        self._memory = SharedMemory(groups, groups.timeout) if shares else None
        self._device: torch.device | None = None  # of the shared memory

    def make(
        self, plan: Plan, one: Pass, rank: int, call_shape: CallShape, counters: Counters | None
    ) -> tuple[Transport, Counters]:
        """The transport of one rank's program, and where it counts its bytes."""
        groups = self._groups
        stream = self._stream(call_shape.device)
        far = DistributedTransport(plan, one, rank, groups, stream, self._look_around)
        if counters is not None:
            far.meter.counters = counters
        if self._memory is None or stream is None:
            return far, far.meter.counters
        dtypes = {
            Precision.ELEMENT: call_shape.dtype,
            Precision.ACCUMULATE: call_shape.accumulate_dtype,
        }
        near = SymmetricTransport(
            plan, one, rank, call_shape.batch, dtypes, groups, self._memory, stream
        )
        routed = RoutedTransport(plan, one, rank, groups, self._memory, near, far)
        return routed, far.meter.counters

    def check(self, plan: Plan, device: torch.device) -> None:
        """Raises what this rank knows by itself against a call on this device."""
        if self._memory is not None and self._device not in (None, device):
            raise MeshAttentionError(
                f"the tensors are on {device}, but this ContextParallel shares memory of "
                f"{self._device} with other ranks; use one for each device"
            )
        if self._wanted is TransportName.SYMMETRIC and plan.num_ranks > 1:
            found = obstacle(device)
            if found is not None:
                raise MeshAttentionError(_impossible(found))

    def share(
        self, plan: Plan, rank: int, directions: Iterable[Direction], call_shape: CallShape
    ) -> Tensor | None:
        """Share memory for calls of this shape; the workspace in it, or None if there is none.

        Called by all ranks, after they have agreed on the call.
        """
        memory = self._memory
        if memory is None or call_shape.device.type != "cuda" or plan.num_ranks == 1:
            return None
        node = [
            self._groups.global_rank(plan, other)
            for other in sorted(range(plan.num_ranks), key=plan.devices.__getitem__)
            if plan.node_of(other) == plan.node_of(rank)
        ]
        if memory.meet(node, call_shape.device):
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
        self._device = call_shape.device if memory.block is not None else None
        return memory.workspace

    def must_share(self) -> bool:
        return self._wanted is TransportName.SYMMETRIC

    def refusal(self, choices: dict[str, tuple[str, str]]) -> MeshAttentionError | None:
        """What is wrong with these choices where shared memory was asked for."""
        for name, (chosen, reason) in choices.items():
            if chosen != TransportName.SYMMETRIC:
                return MeshAttentionError(_impossible(f"{name}: {reason}"))
        return None

    def covers(self, ranks: Sequence[int]) -> bool:
        """Do these ranks need no process group?"""
        return self._memory is not None and self._memory.covers(ranks)

    def choices(
        self, plan: Plan, rank: int, directions: Iterable[Direction], device: torch.device
    ) -> dict[str, tuple[str, str]]:
        """For each group in which this rank communicates: the transport, and why not the other."""
        found: dict[str, tuple[str, str]] = {}
        for direction in directions:
            one = plan.direction(direction)
            operations = one.programs[rank].operations
            used = {op.group for op in operations if isinstance(op, Communication)}
            for name, members in one.groups.items():
                if name in used and len(members) > 1:
                    ranks = [self._groups.global_rank(plan, member) for member in members]
                    found[f"{direction} {name}"] = self._choice(ranks, device)
        return found

    def _choice(self, ranks: Sequence[int], device: torch.device) -> tuple[str, str]:
        if self._memory is None:
            reason = "transport='distributed' was asked for"
        elif device.type != "cuda":
            reason = obstacle(device) or ""
        elif self._memory.covers(ranks):
            return TransportName.SYMMETRIC.value, f"ranks {list(ranks)} share memory"
        else:
            reason = self._memory.why_not(ranks)
        return TransportName.DISTRIBUTED.value, reason

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def close(self, *, abandon: bool = False) -> None:
        if self._memory is not None:
            self._memory.release(abandon=abandon)


def _impossible(reason: str) -> str:
    return (
        f"transport='symmetric' is not possible: {reason}; "
        "transport='auto' shares memory where it can and uses torch.distributed elsewhere"
    )
