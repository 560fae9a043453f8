"""The ranks that measure together: who they are, and seconds and refusals on which all of them
agree.

Measurements begin on all ranks at once and are averaged over them, so every rank sees the same
numbers and decides alike: how often to repeat, and what to measure next. Everything in `measure/`
is built on it, and so are benchmarks that run on several ranks.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from mesh_attention.errors import MeshAttentionError, PlanError
from mesh_attention.kernels.registry import KernelRefusedError
from mesh_attention.runtime.session.session import process_group
from mesh_attention.runtime.transport.groups import backend_of, default_store
from mesh_attention.runtime.transport.job_store import asking_the_store, wait_for
from mesh_attention.version import __version__

Work = Callable[[], object]
Result = TypeVar("Result")
MOST_REPEATS = 50
LEAST_REPEATS = 3
TIMEOUT = timedelta(minutes=5)
_MOST_CHARACTERS = 240  # of a refusal
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class MeasureError(MeshAttentionError):
    """Something that cannot be measured here; the same on all ranks."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group, of which rank r is on node r // per_node."""

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
        return backend_of(self.group)

    def wait_for_device(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def wait_for_all(self) -> None:
        self.wait_for_device()
        dist.all_reduce(torch.zeros(1, device=self._agreeing), group=self.group)
        self.wait_for_device()

    def timed(self, work: Callable[[], Result]) -> tuple[Result, float]:
        """The result, and the seconds of this rank from when all begin until its device is done."""
        self.wait_for_all()
        begin = time.perf_counter()
        result = work()
        self.wait_for_device()
        return result, time.perf_counter() - begin

    @property
    def _agreeing(self) -> torch.device:
        """Where tensors lie that ranks agree on: gloo is slow with those of GPUs."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def average(self, numbers: Sequence[float]) -> list[float]:
        """The mean of each number over all ranks."""
        return [x / self.size for x in self._reduced(numbers, dist.ReduceOp.SUM)]

    def longest(self, seconds: float) -> float:
        """The most seconds of any rank."""
        return self._reduced([seconds], dist.ReduceOp.MAX)[0]

    def _reduced(self, numbers: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self._agreeing)
        dist.all_reduce(tensor, operation, group=self.group)
        return [float(x) for x in tensor]

    def everyones(self, value: Any) -> list[Any]:
        """The value of each rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def of_first(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes; where that fails it fails on all of them."""
        answer: list[Any] = [None, None]  # and the error
        if self.rank == 0:
            try:
                answer = [make(), None]
            except OSError as error:
                where = error.filename or "input or output"
                answer = [None, f"{where}: {error.strerror}" if error.strerror else str(error)]
            except MeshAttentionError as error:
                answer = [None, str(error)]
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if answer[1] is not None:
            raise MeasureError(answer[1])
        return answer[0]

    def seconds(self, work: Work | None, *, lasting: float, members: int | None = None) -> float:
        """Seconds of a call of `work` on all ranks at once: the median of as many repeats as fit
        into `lasting` seconds, each averaged over the ranks. `members`: it is a transfer among so
        many ranks. Other ranks give None and wait, and a repeat lasts from the end of the one
        before on the last rank to its own, as a transfer is over when its last member is done."""
        once = 0.0
        for _ in range(2):  # the first is a warm-up
            self.wait_for_all()
            once = self._elapsed(work, 1)[0] if work else 0.0
        once = self.average([once])[0] * self.size / (members or self.size)
        repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(lasting / max(once, 1e-9))))
        self.wait_for_all()
        times = self._elapsed(work, repeats) if work else [0.0] * repeats
        if members:
            ends = [0.0, *self._reduced([*accumulate(times)], dist.ReduceOp.MAX)]
            return max(statistics.median(b - a for a, b in pairwise(ends)), 1e-9)
        return max(statistics.median(self.average(times)), 1e-9)

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
        self.wait_for_device()
        return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events)]


class Refusal(NamedTuple):
    """Why all ranks refuse a setting."""

    reason: str


def attempt(
    ranks: Ranks, work: Callable[[], Result], *, patience: float = 30.0
) -> Result | Refusal:
    """All ranks make the same attempts, and wait `patience` seconds for others to refuse the same.
    They agree by the store: a rank that is out of memory cannot know at which collective the others
    are. An error that is no refusal (a rank that ended, a lost store, a broken context), or that
    only some ranks see, says nothing about the setting, and is raised."""
    name: str = ranks.of_first(lambda: uuid4().hex)
    try:
        return work()
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        kind = type(error).__name__
    # Not while the error is held, and with it the memory of what has failed.
    store = PrefixStore(f"mesh_attention/attempts/{name}", default_store())
    keys = [str(rank) for rank in range(ranks.size)]
    with asking_the_store():
        store.set(keys[ranks.rank], f"{kind}\n{reason}")
        with suppress(dist.DistStoreError):  # some ranks may never answer
            wait_for(store, keys, timedelta(seconds=patience))
        answers = [store.get(key).decode() for key in keys] if store.check(keys) else []
    if len({answer.split("\n")[0] for answer in answers}) != 1:
        raise MeshAttentionError(
            f"rank {ranks.rank} could not run a setting, and not all ranks say the same: {reason}"
        )
    return Refusal(answers[0].partition("\n")[2])  # as the first rank says


def reason_of(error: BaseException) -> str | None:
    """The refusal in one line; None where the error may be about something else."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {text}"
    return text if isinstance(error, PlanError | KernelRefusedError) else None


def cuda_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@contextmanager
def ranks_of_launcher(ranks_per_node: int | None, *, command: str) -> Iterator[Ranks]:
    """Joins the default process group of a job started by torchrun, or by anything that sets the
    same variables. `command` is an example to start it with."""
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
    if int(environment["WORLD_SIZE"]) < 2:
        raise MeasureError(f"there is one rank, and nothing travels: start more, as in: {line}")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    leave = True
    try:
        yield ranks_of_group(dist.group.WORLD, device, ranks_per_node)
    except (RuntimeError, dist.DistBackendError) as error:
        leave = not cuda  # NCCL would wait for what is in flight, and so for ranks that never come
        lines = str(error).splitlines() or [type(error).__name__]
        cause = " ... ".join(dict.fromkeys((lines[0], lines[-1])))  # NCCL ends with the cause
        raise MeshAttentionError(
            f"rank {environment['RANK']}: a communication failed, most often as one ended: {cause}"
        ) from error
    finally:
        if leave:
            dist.destroy_process_group()


def ranks_of_group(
    group: dist.ProcessGroup | None, device: torch.device, ranks_per_node: int | None = None
) -> Ranks:
    """All ranks of the group call this, and all refuse where they do not fit together. All ranks
    are on one node where nothing says how large a node is."""
    group = process_group(group)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    per_node = ranks_per_node
    if not per_node:
        launched = os.environ.get("LOCAL_WORLD_SIZE", "")
        per_node = min(int(launched) if launched.isdecimal() else 0, size) or size
    ranks = Ranks(group, rank, size, per_node, device)
    own = {
        "versions": f"mesh-attention {__version__}, torch {torch.__version__}, "
        f"Python {sys.version_info.major}.{sys.version_info.minor}",
        "device": device.type,
        "ranks of a node": per_node,
    }
    every: list[dict[str, Any]] = ranks.everyones(own)
    for what in own:
        for other, its in enumerate(every):
            if its[what] != every[0][what]:
                raise MeasureError(
                    f"ranks differ in their {what}: rank 0 has {every[0][what]}, rank {other} has "
                    f"{its[what]}; they would measure different things"
                )
    if per_node < 1 or size % per_node:
        raise MeasureError(
            f"ranks_per_node={per_node}: {size} ranks are no whole nodes of that many; every node "
            "must have as many, rank by rank"
        )
    return ranks
