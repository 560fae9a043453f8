"""The processes of pools: a server that imports torch once and forks, and the forked workers.

Run as a script with a file, in which the server writes the address at which it listens, and modules
to import. Pools of several processes may share a server: each connects to it and sends a `Fork` for
every worker that it wants. The server ends when the last of them has closed its connection. It has
a single thread when it forks.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


Lines = dict[str, set[int]]  # of each file
START_SECONDS = 180.0  # of a busy machine


@dataclass(frozen=True)
class Fork:
    """A worker that a pool asks the server for."""

    pool: str  # its address
    number: int
    store_port: int


@dataclass(frozen=True)
class Job:
    """`function` is 'module:name'; it is called as function(rank, world_size, *args)."""

    number: int
    function: str
    rank: int
    world_size: int
    args: tuple[Any, ...]
    timeout_seconds: float
    search_path: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    number: int
    result: Any = None
    error: str | None = None
    lines: Lines = field(default_factory=dict)  # run since the last answer


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Only one process at a time reads or changes the address in a file."""
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def serve(address_file: Path, *modules: str) -> None:
    with tempfile.TemporaryDirectory(prefix="pool") as folder:
        listener = Listener(str(Path(folder) / "s"), family="AF_UNIX", backlog=64)
        address_file.write_text(str(listener.address))
        new_lines = measure_coverage()  # before anything that counts is imported
        _import(modules)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end leave nothing behind
        _fork_for_pools(address_file, listener, new_lines)
        listener.close()  # while its folder is there


def _import(modules: tuple[str, ...]) -> None:
    import pytest  # noqa: F401
    import torch
    import torch._dynamo  # gradients and checkpoints import it, for seconds
    import torch.distributed.device_mesh

    import mesh_attention.api.context_parallel
    import mesh_attention.api.functional
    import mesh_attention.testing  # noqa: F401

    for name in modules:
        import_module(name)
    torch.set_num_threads(1)
    gc.set_threshold(50_000, 20, 20)  # as conftest.py; after every job all is collected
    gc.collect()
    gc.freeze()  # and so the children share what was imported


def _fork_for_pools(address_file: Path, listener: Listener, new_lines: Callable[[], Lines]) -> None:
    accepting: Any = listener
    arriving = accepting._listener._socket
    pools: list[Connection] = []
    while True:
        ready = wait([arriving, *pools], None if pools else START_SECONDS)
        for connection in ready:
            if connection is arriving:
                pools.append(listener.accept())
                continue
            assert isinstance(connection, Connection)
            try:
                request = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                pools.remove(connection)
                connection.close()
                continue
            if os.fork() == 0:
                for inherited in (arriving, *pools):
                    inherited.close()
                _work_for(request, new_lines)
        if not pools:
            with locked(address_file):  # nobody connects meanwhile
                if not wait([arriving], 0):
                    address_file.write_text("")
                    return


def _work_for(request: Fork, new_lines: Callable[[], Lines]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    last_words = crash_file(request.pool, os.getpid()).open("w")
    faulthandler.enable(last_words)
    try:
        work(Client(request.pool, family="AF_UNIX"), request.number, request.store_port, new_lines)
    finally:
        os._exit(0)


def crash_file(address: str, pid: int) -> Path:
    """Where a worker leaves its traces if a signal ends it."""
    return Path(address).with_name(f"crash{pid}")


def measure_coverage() -> Callable[[], Lines]:
    """Lines run since it was last asked; none, unless the tests run under SlipCover.

    It measures the processes of pytest alone, so what these here run is told with their answers.
    """
    if "SLIPCOVER_ENABLED" not in os.environ:
        return dict
    import slipcover

    sources, omit = (os.environ.get(f"SLIPCOVER_{x}", "").split(",") for x in ("SOURCE", "OMIT"))
    measured = slipcover.Slipcover()
    slipcover.ImportManager(measured, slipcover.FileMatcher(sources, omit)).__enter__()
    message: Lines = defaultdict(set)

    def new_lines() -> Lines:
        new = {}
        for file in {*measured.all_seen, *measured.newly_seen}:
            seen = measured.all_seen[file] | measured.newly_seen[file]
            new[file] = seen - message[file]
            message[file] = seen
        return {file: lines for file, lines in new.items() if lines}

    return new_lines


def work(pool: Connection, number: int, store_port: int, new_lines: Callable[[], Lines]) -> None:
    import torch.distributed
    from torch._C._distributed_c10d import TCPStore

    # One connection for all jobs: a new one now and then takes the store five seconds.
    store = TCPStore("127.0.0.1", store_port, is_master=False)
    send(pool, (number, os.getpid()))
    while True:
        try:
            job: Job = pickle.loads(pool.recv_bytes())
        except EOFError:
            return
        sys.path[:] = job.search_path
        try:
            result = _run(job, store)
            answer = pickle.dumps(Answer(job.number, result, lines=new_lines()))
        except BaseException:
            error = traceback.format_exc()
            answer = pickle.dumps(Answer(job.number, error=error, lines=new_lines()))
        pool.send_bytes(answer)
        try:
            pool.recv_bytes()  # nobody leaves the group while another still talks to it
        except EOFError:
            return
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        gc.collect()  # a group that a cycle holds keeps threads, which wake up all the time


def _run(job: Job, store: Store) -> Any:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    os.environ.setdefault("NCCL_HOSTID", f"node{job.rank // ranks_of_a_node()}")
    module, _, name = job.function.partition(":")
    function = getattr(import_module(module), name)
    timeout = timedelta(seconds=job.timeout_seconds)
    store.set_timeout(timeout)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"job{job.number}", store),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,
    )
    return function(job.rank, job.world_size, *job.args)


def ranks_of_a_node() -> int:
    """NCCL takes several ranks of a node on one GPU from 2.30 on, if it is told so; else each rank
    is a node of its own, and they talk through sockets."""
    return 4 if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else 1


def send(connection: Connection, message: Any) -> None:
    """Plainly pickled: the connection's own way would share tensors through file descriptors."""
    connection.send_bytes(pickle.dumps(message))


if __name__ == "__main__":
    # Under its real name, so that messages unpickle on both sides.
    import_module("support.worker").serve(Path(sys.argv[1]), *sys.argv[2:])
