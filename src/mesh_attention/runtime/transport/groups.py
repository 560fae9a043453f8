"""Process groups for the groups of a plan: as few as it needs, made once, released by `close`.

Collectives need a group of their own unless they run over everybody; all-to-all and point-to-point
go over the caller's group. Only members make a group, in the plan's order, so ranks outside the
caller's group are never asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import AllGather, ReduceScatter
from mesh_attention.runtime.transport.make_group import (
    default_store,
    is_registered,
    make_group,
    timeout_of,
)

__all__ = ["Groups"]


class Groups:
    """`ranks[i]` is the global rank of device i of the caller's group."""

    def __init__(self, parent: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        self.parent = parent
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(parent))
        self.global_rank_of_self = dist.get_rank()
        self.timeout = timeout or timeout_of(parent)
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # Each rank counts its own objects on these ranks: the n-th here meets the n-th there.
        base = f"mesh_attention/{'-'.join(map(str, self.ranks))}"
        ordinal = default_store().add(f"{base}/objects/{self.global_rank_of_self}", 1)
        self.name = f"{base}/{ordinal}"

    def prepare(
        self, plan: Plan, *, without: Callable[[Sequence[int]], bool] = lambda _: False
    ) -> None:
        """Make the groups that this rank's programs use, in an order that all members share.

        `without`: the global ranks of a group that gets by without one, as all of them agree.
        """
        for one in plan.passes:
            used = {
                op.group
                for program in one.programs
                if self.global_rank(plan, program.rank) == self.global_rank_of_self
                for op in program.operations
                if isinstance(op, AllGather | ReduceScatter)
            }
            for name, members in one.groups.items():
                ranks = [self.global_rank(plan, member) for member in members]
                if name in used and not without(ranks):
                    self.of(ranks)

    def global_rank(self, plan: Plan, rank: int) -> int:
        return self.ranks[plan.devices[rank]]

    def global_ranks(self, plan: Plan, one: Pass, rank: int) -> dict[str, list[int]]:
        """Members of every group of a pass that this logical rank belongs to."""
        return {
            name: [self.global_rank(plan, member) for member in members]
            for name, members in one.groups.items()
            if rank in members
        }

    def of(self, members: Sequence[int]) -> dist.ProcessGroup:
        """The process group of these global ranks, of which this one must be a member."""
        key = tuple(sorted(members))
        if key == tuple(sorted(self.ranks)):
            return self.parent
        if key not in self._made:
            name = f"{self.name}/{'-'.join(map(str, key))}"
            backend = dist.get_backend(self.parent)
            self._made[key] = make_group(key, name, backend, self.timeout)
        return self._made[key]

    def __len__(self) -> int:
        return len(self._made)

    def close(self, *, abort: bool = False) -> None:
        """`abort`: break off what is under way; otherwise the last transfers would be waited for,
        and with them ranks that never come."""
        for group in self._made.values():
            if is_registered(group):  # not if the caller has destroyed all groups already
                if abort and hasattr(group, "abort"):
                    group.abort()
                dist.destroy_process_group(group)
        self._made.clear()
