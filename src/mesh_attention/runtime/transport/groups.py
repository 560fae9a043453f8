"""Process groups for the groups of plans: as few as they need, made once, released by `close`.

The caller's group carries none of our data, so nothing is mixed up with what the caller sends, and
ours can be broken off alone. One group of the same ranks carries point-to-point, all-to-all and
collectives over all of them, and compares calls. Only members make a group, in the plan's order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.runtime.transport.job_store import JobStore, PatientStore
from mesh_attention.runtime.transport.make_group import (
    ON_OUR_OWN,
    OUR_NAMES,
    OpenSocket,
    connections_since,
    make_group,
    open_sockets,
    shut_down,
    with_all,
)

_ABORT_SECONDS = 2.0
_LONGEST_TIMEOUT = timedelta(days=3650)  # clocks of gloo and of threads overflow at some centuries


class Groups:
    """The process groups that a session makes beside the caller's group, which is `parent`.
    `ranks[i]` is the global rank of device i of the caller's group."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        self.parent = parent
        self.backend = backend_of(parent)
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(parent))
        self.global_rank_of_self = dist.get_rank()
        self.releases = 0
        # Asked for in every call, and slow to find where a backend is missing.
        self._timeout_of_parent = timeout_of(parent)
        self._aborting: dict[dist.ProcessGroup, threading.Thread] = {}
        self._connections: list[OpenSocket] = []  # of groups over gloo
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._stores: dict[tuple[int, ...], PatientStore] = {}  # of those over gloo
        # Each rank counts its own contexts on this group: the n-th here meets the n-th there. Two
        # groups of the same ranks have two numbers, but for those that were split off: PyTorch
        # gives them names that may differ between ranks.
        base = f"{OUR_NAMES}{'-'.join(map(str, self.ranks))}"
        number = str(c10d._world.pg_names.get(parent, ""))
        base += f"/{number}" if number.isdigit() else ""
        self.asked_timeout: timedelta | None = None  # by the latest call; None: that of the parent
        self.limit = self.timeout(None)  # which is this
        store = JobStore(base, default_store(), self.limit.total_seconds())
        ordinal = store.add(f"contexts/{self.global_rank_of_self}", 1)
        self.lasting_name = f"{base}/{ordinal}"

    @property
    def name(self) -> str:
        """Never the same again once the groups have been released."""
        return f"{self.lasting_name}/{self.releases}"

    def timeout(self, timeout: timedelta | None) -> timedelta:
        return min(timeout or self._timeout_of_parent, _LONGEST_TIMEOUT)

    def set_timeout(self, timeout: timedelta | None) -> timedelta:
        """Of collectives over gloo from now on; messages, and NCCL, are told when they are waited
        for. A group for each timeout would let ranks at different calls wait in different groups.
        Returns how long ranks will wait."""
        self.asked_timeout, limit = timeout, self.timeout(timeout)
        if limit != self.limit:
            self.limit = limit
            if self.backend == dist.Backend.GLOO:
                for backend in chain.from_iterable(map(backends_of, self._there())):
                    backend._set_default_timeout(limit)
        return limit

    def global_rank(self, plan: Plan, rank: int) -> int:
        return self.ranks[plan.devices[rank]]

    def global_ranks(self, plan: Plan, pass_: Pass, rank: int) -> dict[str, list[int]]:
        """Members of every group of a pass that this logical rank belongs to."""
        return {
            name: [self.global_rank(plan, member) for member in members]
            for name, members in pass_.groups.items()
            if rank in members
        }

    def of(self, members: Sequence[int]) -> dist.ProcessGroup:
        """The process group of these global ranks, of which this one must be a member. Made if it
        is not there: then all members call this, in the same order."""
        ranks, limit = tuple(sorted(members)), self.limit
        if ranks not in self._made:
            name = f"{self.name}/{'-'.join(map(str, ranks))}"
            backend = self.backend
            with ON_OUR_OWN:
                if backend == dist.Backend.GLOO:  # asks the store, in words of its own
                    store = self._stores[ranks] = PatientStore(default_store(), limit)
                    make = partial(make_group, ranks, name, backend, limit, store)
                    before = open_sockets()
                    self._made[ranks] = with_all(make, ranks, limit)
                    self._connections += connections_since(before, len(ranks) - 1)
                else:
                    options = nccl_options(limit) if backend == dist.Backend.NCCL else None
                    how = (backend, limit, default_store(), options)
                    self._made[ranks] = make_group(ranks, name, *how)
        return self._made[ranks]

    def check_device(self, device: torch.device) -> None:
        """Raises if tensors on this device cannot travel on groups like the caller's."""
        if self.backend == dist.Backend.NCCL and device.type != "cuda" and len(self.ranks) > 1:
            raise MeshAttentionError(
                f"the tensors are on the {device.type}, and the process group is over nccl: move "
                "them to a CUDA device, or pass a group over gloo"
            )

    def everybody(self) -> dist.ProcessGroup:
        """Of all ranks of the caller's group."""
        return self.of(self.ranks)

    def has(self, members: Sequence[int]) -> bool:
        """Whether the process group of these global ranks is made."""
        return tuple(sorted(members)) in self._made

    def __len__(self) -> int:
        return len(self._made)

    def close(self, *, abort: bool = False) -> None:
        """`abort`: break off what is in flight; otherwise the last transfers would be waited for,
        and with them ranks that never come."""
        if abort:
            self.abort()
        for group in self._there():
            aborting = self._aborting.get(group)
            if aborting is not None:
                aborting.join(_ABORT_SECONDS)
            if aborting is None or not aborting.is_alive():
                dist.destroy_process_group(group)
            # Those that do not end are left to the end of the process.
        self._made.clear()
        self._stores.clear()
        self._aborting.clear()
        self._connections.clear()
        self.releases += 1

    def abort(self) -> None:
        """Break off what is in flight, without waiting: what one group has on a stream may wait
        for what another has there, or for a graph that holds its communicator."""
        shut_down(self._connections)
        self._connections.clear()
        for group in self._there():
            if hasattr(group, "abort") and group not in self._aborting:
                name = "mesh_attention abort"
                thread = threading.Thread(target=group.abort, name=name, daemon=True)
                self._aborting[group] = thread
                thread.start()

    def _there(self) -> list[dist.ProcessGroup]:
        """Not those that the caller has destroyed already, with all groups."""
        return [group for group in self._made.values() if is_registered(group)]


def default_store() -> Store:
    """The key-value store that all ranks of the job share."""
    return c10d._get_default_store()


def backend_of(group: dist.ProcessGroup) -> str:
    """By name. A group may have a backend for each kind of device, as `init_process_group()` makes
    it where no backend is asked for: then that of CUDA, where there is a device, and nothing goes
    through the memory of the host."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    of_device = {device: backend for device, _, backend in pairs}
    if len({*of_device.values()}) == 1:
        return next(iter(of_device.values()))
    on_gpus = "cuda" in of_device and torch.cuda.is_available()
    return of_device.get("cuda" if on_gpus else "cpu", str(dist.get_backend(group)))


def backends_of(group: dist.ProcessGroup) -> Iterator[Any]:
    for device in ("cpu", "cuda"):
        with suppress(AttributeError, RuntimeError):
            yield group._get_backend(torch.device(device))


def nccl_options(timeout: timedelta) -> Any:
    """Transfers are more urgent than attention: with a stream of high priority they begin beside
    kernels that let them, as the simulator has it, and not behind all that is queued."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout that the caller gave this group; the backend's usual one if it does not say."""
    for backend in backends_of(group):
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return c10d._get_default_timeout(dist.Backend(dist.get_backend(group)))


def is_registered(group: dist.ProcessGroup) -> bool:
    """False once the group has been destroyed."""
    return group in c10d._world.pg_map
