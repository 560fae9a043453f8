"""TimedTransfers to be timed: the calls that the runtime makes, on tensors that hold nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.measure.ranks import Ranks, Work
from mesh_attention.runtime.transport.torch_operations import (
    Exchange,
    Gather,
    PointToPoint,
    Works,
    gathers_by_messages,
    reduce_kind,
)

Begin = Callable[[], Works]  # begins a transfer


class TimedTransfers:
    """Makes the transfers to be timed; process groups are made once for the same ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._global = dist.get_process_group_ranks(ranks.group)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {
            tuple(range(ranks.size)): ranks.group
        }

    def group(self, every: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """The members of the group of this rank among groups that have no rank in common; all
        ranks of the job take part in making them, in this order."""
        mine = None
        for members in map(tuple, every):
            if members not in self._groups:
                made = dist.new_group([self._global[m] for m in members])
                if self._ranks.rank in members:
                    self._groups[members] = made
            if self._ranks.rank in members:
                mine = members
        return mine

    def tensor(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes // 4, device=self._ranks.device)

    def collective(self, kind: str, members: tuple[int, ...], part_bytes: int) -> Begin:
        """Begins one; returns its works."""
        group = self._groups[members]
        part, whole = (self.tensor(n * part_bytes) for n in (1, len(members)))
        over_gloo = self._ranks.backend != "nccl"
        if kind == "all-gather" and gathers_by_messages(len(members), host_driven=over_gloo):
            return self.all_to_all(members, part_bytes)
        made = Gather if kind == "all-gather" else reduce_kind(host_driven=over_gloo)
        stretch = made(part, whole, group, [*range(len(members))])

        def begin() -> Works:
            works: Works = []
            stretch.begin(works, [])
            return works

        return begin

    def messages(self, peers: Sequence[tuple[int, bool]], part_bytes: int) -> Begin:
        """Begins one message for each peer: (rank, whether it is sent or received)."""
        tensors = [
            PointToPoint(self.tensor(part_bytes), self._global[peer], 0, sent)
            for peer, sent in peers
        ]
        host = self._ranks.backend != "nccl"
        exchange = Exchange(tensors, (), self._ranks.group, host_driven=host)

        def begin() -> Works:
            works: Works = []
            exchange.begin(works, [])
            return works

        return begin

    def all_to_all(self, members: Sequence[int], part_bytes: int) -> Begin:
        others = [m for m in members if m != self._ranks.rank]
        return self.messages([(m, sent) for m in others for sent in (True, False)], part_bytes)


def done(begin: Begin) -> Work:
    """A transfer from its beginning to its end, as seen by this rank."""

    def work() -> None:
        for one in begin():
            one.wait()

    return work
