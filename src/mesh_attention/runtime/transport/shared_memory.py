"""The memory that the ranks of a host share: who takes part, and the block that they all made.

Whether memory can be shared is found out by trying, together: each step (is it possible at all, is
there memory for it, can it be mapped) is followed by a round in which every rank tells all others
how it went. So all of them come to the same end, with the same reason.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.workspace import ALIGNMENT_BYTES
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.transport.groups import Groups, default_store
from mesh_attention.runtime.transport.job_store import forget, wait_for
from mesh_attention.runtime.transport.symmetric_memory import SymmetricBlock, obstacle


class SharedMemory:
    """The memory of the ranks of one node, and the workspace that lies in it.

    `node` are the global ranks that plans hold to be on the node of this one; `timeout` limits how
    long one waits for another.
    """

    def __init__(
        self, groups: Groups, node: Sequence[int], timeout: timedelta, workspace: Workspace
    ) -> None:
        self._groups = groups
        self._me = groups.global_rank_of_self
        self._timeout = timeout
        self._name = f"{groups.name}/shared/{'-'.join(map(str, node))}/{timeout.total_seconds()}s"
        # The ranks on this host: each enters itself, and reads no other host's list.
        host = hashlib.sha256(this_host().encode()).hexdigest()[:16]
        self._host = PrefixStore(f"{self._name}/hosts/{host}", default_store())
        self._host.set(str(self._host.add("entries", 1)), str(self._me))
        self._store: Store | None = None  # of the members, once they have met
        self._node = tuple(node)
        self._blocks = self._rounds = 0
        self.workspace = workspace
        # Global ranks that share, once they have met, by their place in the block.
        self.members: tuple[int, ...] = ()
        self.block: SymmetricBlock | None = None
        self.staging_offset = 0
        self.reason = ""  # why there is no block

    def may_be_shared(self, device: torch.device) -> bool:
        """As far as this rank knows; where not, no other rank will read its workspace."""
        return len(self._node) > 1 and not self.reason and obstacle(device) is None

    def meet(self, device: torch.device) -> bool:
        """Find those of the node that are on this host, and learn whether all of them are able."""
        if not self.members:
            # Complete, since all ranks have met for another reason.
            entries = range(1, 1 + self._host.add("entries", 0))
            here = {int(self._host.get(str(entry))) for entry in entries}
            self.members = tuple(rank for rank in self._node if rank in here)
            if len(self.members) == 1:
                self.reason = f"no other rank of its node is on the host of rank {self._me}"
                return False
            self._store = PrefixStore(f"{self._name}/from{self.members[0]}", default_store())
            self._all_well(obstacle(device) or "")
        return not self.reason

    def grow(self, workspace_bytes: int, staging_bytes: int, device: torch.device) -> None:
        """A block at least as large as this on all members, or a reason why not.

        Called by all of them with the same numbers.
        """
        workspace_bytes = -(-workspace_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self.block is not None:
            staging = self.block.own.numel() - self.staging_offset
            if workspace_bytes <= self.staging_offset and staging_bytes <= staging:
                return
            workspace_bytes = max(workspace_bytes, self.staging_offset)
            staging_bytes = max(staging_bytes, staging)
            self.release()
        self._make(workspace_bytes, staging_bytes, device)
        if self.block is not None:
            self.workspace.adopt(self.block.own[: self.staging_offset])

    def covers(self, ranks: Sequence[int]) -> bool:
        """Can these global ranks reach each other through the block?"""
        return self.block is not None and set(ranks) <= set(self.members)

    def why_not(self, ranks: Sequence[int]) -> str:
        """Why they cannot."""
        outside = sorted(set(ranks) - set(self._node))
        if outside:
            return f"rank {self._me} is on another node than ranks {outside}"
        if self.reason:
            return self.reason
        if self.block is None:
            return f"the shared memory of rank {self._me} was released"
        apart = sorted(set(ranks) - set(self.members))
        return f"rank {self._me} is on another host than ranks {apart}"

    @property
    def device(self) -> torch.device | None:
        return None if self.block is None else self.block.own.device

    def release(self, *, abandon: bool = False) -> None:
        """`abandon`: signals that will never come may hold the device; do not wait for it."""
        self.workspace.release()  # or it would keep a block that is outgrown
        if self.block is not None:
            if abandon:
                self.block.abandon()
            else:
                self.block.release()
            self.block = None

    def _make(self, workspace_bytes: int, staging_bytes: int, device: torch.device) -> None:
        block: SymmetricBlock | None = None
        failure = ""
        try:
            block = SymmetricBlock(max(workspace_bytes + staging_bytes, 1), device)
        except Exception as error:  # whatever it is, the others must not wait for us
            failure = _in_short("no symmetric memory could be allocated", error)
        if not self._all_well(failure):
            if block is not None:
                block.release()
            return
        assert block is not None
        assert self._store is not None
        self._blocks += 1
        store = PrefixStore(f"block {self._blocks}", self._store)
        place = self.members.index(self._me)
        try:
            block.connect(self._groups.parent, store, place, len(self.members), self._timeout)
        except Exception as error:
            failure = _in_short("the ranks could not map each other's memory", error)
        if not self._all_well(failure):
            block.release()
            return
        block.connected()
        self.block = block
        self.staging_offset = workspace_bytes

    def _all_well(self, failure: str) -> bool:
        """A round in which every member says how it went, and reads what all others say."""
        assert self._store is not None
        self._rounds += 1
        keys = {rank: f"{self._rounds}/{rank}" for rank in self.members}
        self._store.set(keys[self._me], failure)
        try:
            wait_for(self._store, keys.values(), self._timeout)
        except RuntimeError as late:
            silent = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise MeshAttentionError(
                f"ranks {silent} on this host did not answer within "
                f"{self._timeout.total_seconds():.0f} s"
            ) from late
        if self._rounds > 1:  # all are in this round, so nobody reads the one before
            forget(self._store, f"{self._rounds - 1}/{self._me}")
        failures = {rank: self._store.get(key).decode() for rank, key in keys.items()}
        self.reason = next((f"rank {rank}: {text}" for rank, text in failures.items() if text), "")
        return not self.reason


def _in_short(what: str, error: Exception) -> str:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    hint = ""
    if "overlapping devices" in message:
        hint = "; ranks that share a GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
    return f"{what} ({message}){hint}"


def this_host() -> str:
    """Equal for processes that can hand each other memory: one kernel, one space of process ids."""
    marks = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        marks.append(boot.read_text().strip())
    space = Path("/proc/self/ns/pid")
    if space.exists():
        marks.append(os.readlink(space))
    return " ".join(marks)
