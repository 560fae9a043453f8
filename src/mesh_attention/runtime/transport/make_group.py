"""Making one process group, by its members alone, and ending its connections.

`torch.distributed.new_group` asks every rank of the job to take part. Its option to ask the members
alone names the group by how many groups a rank happens to have, so members with different histories
wait under different names, and a group made again after `destroy_process_group` finds the addresses
of the old one (pytorch#189073, pytorch#55967). Making the group through the function below it, with
a name that is ours and never used twice, has neither fault. It is private: this file is its only
user, and says what it found if it has changed.

A rank that breaks off a call drops its groups, and the others learn it from closed connections. But
forked processes, as the workers of a `DataLoader`, hold copies, and a connection is closed only
with its last copy. Shutting it down ends it for all who hold it. gloo has no call for that, so
`groups.py` compares the sockets of the process before and after it makes a group.
"""

from __future__ import annotations

import inspect
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.transport.job_store import ANSWER_SECONDS, LostStoreError, in_time
from mesh_attention.version import TESTED_TORCH

_LISTEN_SECONDS = 1.0
_DESCRIPTORS = Path("/proc/self/fd")
# After an error NCCL's watchdog leaves the process alone, and sleeps four times this long (a minute
# by default), in which the group cannot be closed.
_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}
_WANTED = ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name")


class _OnOurOwn:
    """Around the making of groups. PyTorch ends the process when it finds an error of NCCL, or a
    timeout: ours leave that to us, who tell the cause. And if the default group is bound to a
    device (`init_process_group(device_id=...)`), PyTorch splits its communicator for later groups,
    and waits for every rank of the job: ours get one of their own. Both are of the process, so the
    last thread that makes a group puts them back."""

    def __init__(self) -> None:
        self._lock, self._num_inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._default = c10d._get_default_group()
                environment = {name: os.environ.get(name) for name in _WATCHDOG}
                self._before = environment, self._default.bound_device_id
                os.environ.update(_WATCHDOG)
                self._default.bound_device_id = None
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                environment, self._default.bound_device_id = self._before
                for name, value in environment.items():
                    del os.environ[name]
                    if value is not None:
                        os.environ[name] = value
                del self._default


ON_OUR_OWN = _OnOurOwn()


def with_all(
    make: Callable[[], dist.ProcessGroup], ranks: Sequence[int], limit: timedelta
) -> dist.ProcessGroup:
    seconds = limit.total_seconds()
    try:
        return in_time(make, seconds + ANSWER_SECONDS)
    except (RuntimeError, LostStoreError) as error:
        # Those who came miss a key of the store; a late one finds that they have given up: nobody
        # answers, or their sockets are closed. All else, a wrong interface say, is another matter.
        absent = isinstance(error, dist.DistStoreError | dist.DistNetworkError | LostStoreError)
        if not absent and "connectFullMesh" not in str(error):
            raise
        raise MeshAttentionError(
            f"ranks {list(ranks)} were to make a process group, and did not all come within the "
            f"timeout of {seconds:g} s: one of them is late, has ended or gave up before the "
            f"others. What this rank saw: {str(error).splitlines()[0]}"
        ) from error


def make_group(
    ranks: Sequence[int],
    name: str,
    backend: str,
    timeout: timedelta,
    store: Store,
    options: Any = None,
) -> dist.ProcessGroup:
    """Called by exactly these global ranks, with the same name."""
    helper = getattr(c10d, "_new_process_group_helper", None)
    parameters = tuple(inspect.signature(helper).parameters) if helper else ()
    if helper is None or parameters[: len(_WANTED)] != _WANTED:
        raise MeshAttentionError(
            f"torch {torch.__version__} is not supported: its process groups are made with "
            f"{parameters or 'another function'}, expected {_WANTED}; use {TESTED_TORCH}"
        )
    _leave_names_alone()
    members = list(ranks)
    group, _ = helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        backend,
        store,
        group_name(name),
        backend_options=options,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    made: dist.ProcessGroup = group
    return made


OUR_NAMES = "mesh_attention/"  # begin so


class _NamesOfGroups(dict[Any, Any]):
    """PyTorch's table of names, whose length leaves out ours."""

    def __len__(self) -> int:
        return sum(not str(name).startswith(OUR_NAMES) for name in self.values())


def _leave_names_alone() -> None:
    """Before torch 2.15 `new_group(use_local_synchronization=True)` names a group by how many a
    rank has: where ranks have made other numbers of ours, the next of the caller's would wait for
    ever."""
    naming = getattr(c10d, "_hash_ranks_to_str", None)
    names = getattr(c10d, "_pg_names", None)
    if naming is None or "pg_names" not in naming.__code__.co_names:
        return
    if isinstance(names, dict) and not isinstance(names, _NamesOfGroups):
        c10d._pg_names = _NamesOfGroups(names)


def group_name(name: str) -> Any:
    """As functions of torch take it: later ones have a type for names."""
    return c10d.GroupName(name) if hasattr(c10d, "GroupName") else name


@dataclass(frozen=True)
class OpenSocket:
    """By its number, which may be used again, and what the system calls it, which is not."""

    descriptor: int
    inode: int

    def copy(self) -> socket.socket | None:
        """None if it is closed."""
        try:
            descriptor = os.dup(self.descriptor)
        except OSError:
            return None
        if os.fstat(descriptor).st_ino != self.inode:
            os.close(descriptor)
            return None
        return socket.socket(fileno=descriptor)


def shut_down(connections: Iterable[OpenSocket]) -> None:
    """At once for those who wait at the other end. We take what they send for a while longer: a
    send of gloo's that fails as it begins is waited for in vain."""
    copies = [copy for copy in (connection.copy() for connection in connections) if copy]

    def end(how: int) -> None:
        for copy in copies:
            with suppress(OSError):  # the other end was faster
                copy.shutdown(how)

    def end_later() -> None:
        sleep(_LISTEN_SECONDS)
        end(socket.SHUT_RDWR)
        for copy in copies:
            copy.close()

    end(socket.SHUT_WR)
    if copies:
        threading.Thread(target=end_later, name="mesh_attention shut down", daemon=True).start()


def open_sockets() -> frozenset[OpenSocket]:
    """All of this process; none where the system does not say."""
    sockets = set()
    with suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    sockets.add(OpenSocket(int(name), status.st_ino))
    return frozenset(sockets)


def connections_since(before: frozenset[OpenSocket], wanted: int) -> tuple[OpenSocket, ...]:
    """The connections of a group that was made meanwhile and has `wanted` of them. If another
    thread made connections too: only those that the group accepted, which are surely its own."""
    listening = set()
    ends = {}
    for open_socket in open_sockets() - before:
        copy = open_socket.copy()
        if copy is None:
            continue
        with copy, suppress(OSError):
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(copy.getsockname())
            else:
                copy.getpeername()  # raises unless it is connected
                ends[open_socket] = copy.getsockname()
    if len(listening) == 1 and len(ends) == wanted:
        return (*ends,)
    return tuple(open_socket for open_socket, end in ends.items() if {end} == listening)
