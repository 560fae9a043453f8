"""The memory that the ranks of a host share: who takes part, and the block that they all made.

Whether memory can be shared is found out by trying, together: each step (is it possible at all, is
there memory for it, can it be mapped) is followed by a round in which every rank hears of every
other. So all of them come to the same end, with the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from mesh_attention.plan.workspace import ALIGNMENT_BYTES
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.make_group import default_store
from mesh_attention.runtime.transport.notices import HostList, Notices
from mesh_attention.runtime.transport.symmetric_memory import Block, obstacle

__all__ = ["SharedMemory"]


class SharedMemory:
    """Made by every rank of the caller's group; `timeout` limits how long one waits for another."""

    def __init__(self, groups: Groups, timeout: timedelta) -> None:
        self._groups = groups
        self._me = groups.global_rank_of_self
        self._timeout = timeout
        self._name = f"{groups.name}/shared"
        self._hosts = HostList(default_store(), f"{self._name}/hosts", self._me)
        self._notices: Notices | None = None
        self._node: tuple[int, ...] = ()
        self._blocks = 0
        self.members: tuple[int, ...] = ()  # global ranks that share, once they have met
        self.block: Block | None = None
        self.staging_offset = 0
        self.reason = ""  # why there is no block

    def meet(self, node: Sequence[int], device: torch.device) -> bool:
        """Find those of a node that are on this host, and hear whether all of them are able.

        `node` are the global ranks that the plan holds to be on one node.
        """
        if not self.members:
            self._node = tuple(node)
            here = self._hosts.ranks()
            self.members = tuple(rank for rank in node if rank in here)
            if len(self.members) == 1:
                self.reason = f"no other rank of its node is on the host of rank {self._me}"
                return False
            name = f"{self._name}/from{self.members[0]}"
            store = default_store()
            self._notices = Notices(store, name, self.members, self._me, self._timeout)
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
        apart = sorted(set(ranks) - set(self.members))
        return f"rank {self._me} is on another host than ranks {apart}"

    def member(self, rank: int) -> int:
        """The place of a global rank in the block."""
        return self.members.index(rank)

    def is_everybody(self, ranks: Sequence[int]) -> bool:
        return set(ranks) == set(self.members)

    @property
    def workspace(self) -> Tensor | None:
        return None if self.block is None else self.block.own[: self.staging_offset]

    def release(self, *, abandon: bool = False) -> None:
        """`abandon`: signals that will never come may hold the device; do not wait for it."""
        if self.block is not None:
            if abandon:
                self.block.abandon()
            else:
                self.block.release()
            self.block = None

    def _make(self, workspace_bytes: int, staging_bytes: int, device: torch.device) -> None:
        block: Block | None = None
        failure = ""
        try:
            block = Block(max(workspace_bytes + staging_bytes, 1), device)
        except Exception as error:  # whatever it is, the others must not wait for us
            failure = _in_short("no symmetric memory could be allocated", error)
        if not self._all_well(failure):
            if block is not None:
                block.release()
            return
        assert block is not None
        self._blocks += 1
        store = PrefixStore(f"{self._name}/from{self.members[0]}/{self._blocks}", default_store())
        place = self.members.index(self._me)
        try:
            block.connect(self._groups.parent, store, place, len(self.members), self._timeout)
        except Exception as error:
            failure = _in_short("the ranks could not map each other's memory", error)
        if not self._all_well(failure):
            block.release()
            return
        self.block = block
        self.staging_offset = workspace_bytes

    def _all_well(self, failure: str) -> bool:
        assert self._notices is not None
        heard = self._notices.exchange({"failure": failure})
        self.reason = _first({rank: said["failure"] for rank, said in heard.items()})
        return not self.reason


def _first(said: dict[int, str]) -> str:
    return next((f"rank {rank}: {text}" for rank, text in said.items() if text), "")


def _in_short(what: str, error: Exception) -> str:
    told = str(error).splitlines()[0] if str(error) else type(error).__name__
    hint = ""
    if "overlapping devices" in told:
        hint = "; ranks that share a GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
    return f"{what} ({told}){hint}"
