"""The ranks that measure together: who they are, and seconds on which all of them agree.

Whatever is measured begins on all ranks at once and is averaged over them, so every rank sees the
same numbers and decides alike: how often to repeat, and what to measure next.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from mesh_attention.errors import MeshAttentionError
from mesh_attention.version import __version__

Work = Callable[[], object]
MOST_REPEATS = 50
LEAST_REPEATS = 3
TIMEOUT = timedelta(minutes=5)
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class MeasureError(MeshAttentionError):
    """Something that cannot be measured here; the same on all ranks."""


@dataclass(frozen=True)
class Ranks:
    """A process group, node by node: rank r is on node r // per_node."""

    group: dist.ProcessGroup
    rank: int
    size: int
    per_node: int
    device: torch.device

    @property
    def num_nodes(self) -> int:
        return self.size // self.per_node

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        return str(dist.get_backend(self.group))

    def wait_for_all(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1, device=self._agreeing), group=self.group)
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    @property
    def _agreeing(self) -> torch.device:
        """Where tensors lie that ranks agree on: gloo is slow with those of GPUs."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def average(self, numbers: Sequence[float]) -> list[float]:
        """Over all ranks."""
        found = torch.tensor(numbers, dtype=torch.float64, device=self._agreeing)
        dist.all_reduce(found, group=self.group)
        return [float(x) / self.size for x in found]

    def longest(self, seconds: float) -> float:
        """Of all ranks."""
        return self._most([seconds])[0]

    def _most(self, numbers: Sequence[float]) -> list[float]:
        found = torch.tensor(numbers, dtype=torch.float64, device=self._agreeing)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return [float(x) for x in found]

    def everyones(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def of_first(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes; where that fails it fails on all of them."""
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found = [make(), None]
            except (MeshAttentionError, OSError) as error:
                found = [None, _one_line(error)]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        if found[1] is not None:
            raise MeasureError(found[1])
        return found[0]

    def seconds(
        self,
        work: Work | None,
        *,
        lasting: float,
        members: int | None = None,
        of_last: bool = False,
    ) -> float:
        """Of one call of `work` on the ranks that take part, at once: the median of repeats, as
        many as fit into `lasting` seconds, each averaged over those ranks. Others give None and
        wait; `members` says how many take part where that is not all. `of_last`: from the end of
        one repeat on the last rank to that of the next, as a transfer is over when its last member
        is done."""
        share = self.size / (members or self.size)
        once = 0.0
        for _ in range(2):  # the first is a warm-up
            self.wait_for_all()
            once = self._elapsed(work, 1)[0] if work else 0.0
        once = self.average([once])[0] * share
        repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(lasting / max(once, 1e-9))))
        self.wait_for_all()
        times = self._elapsed(work, repeats) if work else [0.0] * repeats
        if of_last:
            ends = [0.0, *self._most([*accumulate(times)])]
            return max(statistics.median(b - a for a, b in pairwise(ends)), 1e-9)
        return max(statistics.median(self.average(times)) * share, 1e-9)

    def _elapsed(self, work: Work, repeats: int) -> list[float]:
        if not self.is_cuda:
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                work()
                times.append(time.perf_counter() - begin)
            return times
        events = [cuda_event() for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events)]


def cuda_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'input or output'}: {error.strerror}"
    return str(error)


@contextmanager
def ranks_of_launcher(
    ranks_per_node: int | None, *, command: str, least: int = 2
) -> Iterator[Ranks]:
    """The default process group of the job that torchrun, or anything that sets the same variables,
    has started. `command` is what a person would start."""
    environment = os.environ
    line = f"torchrun --nproc-per-node 8 -m mesh_attention {command}"
    if missing := [name for name in _NEEDED if name not in environment]:
        raise MeasureError(
            f"this measures on real ranks, and {missing[0]} is not set: start it with a launcher, "
            f"as in: {line}"
        )
    cuda = torch.cuda.is_available()
    local = int(environment.get("LOCAL_RANK", 0))
    device = (
        torch.device("cuda", local % torch.cuda.device_count()) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    if int(environment["WORLD_SIZE"]) < least:
        raise MeasureError(f"there is one rank, and nothing travels: start more, as in: {line}")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    leave = True
    try:
        yield ranks_of_group(dist.group.WORLD, device, ranks_per_node)
    except (RuntimeError, dist.DistBackendError) as error:
        leave = not cuda  # NCCL would wait for what is in flight, and so for ranks that never come
        lines = str(error).splitlines() or [type(error).__name__]
        told = " ... ".join(dict.fromkeys((lines[0], lines[-1])))  # NCCL ends with the cause
        raise MeshAttentionError(
            f"rank {environment['RANK']}: a communication failed, most often as one ended: {told}"
        ) from error
    finally:
        if leave:
            dist.destroy_process_group()


def ranks_of_group(
    group: dist.ProcessGroup | None, device: torch.device, ranks_per_node: int | None = None
) -> Ranks:
    """All of a group's ranks call this; refused on all of them where they do not fit together.
    Where nobody says how large a node is, all are taken for one."""
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    told = ranks_per_node or (int(said) if said.isdecimal() else 0)
    per_node = told or size
    per_node = size if per_node > size and ranks_per_node is None else per_node
    ranks = Ranks(group, rank, size, per_node, device)
    mine = {
        "versions": f"mesh-attention {__version__}, torch {torch.__version__}, "
        f"Python {sys.version_info.major}.{sys.version_info.minor}",
        "device": device.type,
        "ranks of a node": per_node,
    }
    every: list[Mapping[str, Any]] = ranks.everyones(mine)
    for what in mine:
        for other, told_there in enumerate(every):
            if told_there[what] != every[0][what]:
                raise MeasureError(
                    f"ranks differ in their {what}: rank 0 has {every[0][what]}, rank {other} has "
                    f"{told_there[what]}; they would measure different things"
                )
    if per_node < 1 or size % per_node:
        raise MeasureError(
            f"ranks_per_node={per_node}: {size} ranks are no whole nodes of that many; every node "
            "must have as many, rank by rank"
        )
    return ranks
