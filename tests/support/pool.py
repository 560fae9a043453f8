"""A pool of processes for tests over gloo: started once, used by many tests.

    results = pool.run(function, 4, "some", "arguments")

calls function(rank, 4, "some", "arguments") in four processes, each with a fresh default process
group, and returns the four results. A rank that raises, ends or hangs fails the test and is named.
Pools of several processes of pytest can share the server that forks, and so what it imports.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from support.worker import START_SECONDS, Answer, Fork, Job, Lines, crash_file, locked, send

__all__ = ["Ended", "WorkerError", "WorkerPool"]

JOB_SECONDS = 120.0  # a machine that gives tests a third of its cores takes 60 for some
GRACE_SECONDS = 8.0  # that the others get after one rank has failed


class WorkerError(AssertionError):
    """A rank raised, ended or hung."""


@dataclass(frozen=True)
class Ended:
    """Stands for the result of a rank whose process ended."""

    traces: str = ""  # where all threads of it were, if a signal ended it


class WorkerPool:
    def __init__(
        self,
        environment: dict[str, str] | None = None,
        modules: tuple[str, ...] = (),
        seconds: float = JOB_SECONDS,
        measured: bool = True,
        address_file: Path | None = None,
    ) -> None:
        """`environment` is added to that of the processes; `modules` are imported once, before any
        of them starts; `seconds` are for a job that says nothing else; `measured`: what they run
        counts as covered, where that is measured. Pools with the same `address_file` share a
        server; they must agree on all of these."""
        self._seconds = seconds
        self._folder = tempfile.TemporaryDirectory(prefix="pool")
        self._listener = Listener(str(Path(self._folder.name) / "s"), family="AF_UNIX", backlog=64)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: dict[int, tuple[Connection, int]] = {}
        self._jobs = 0
        self._started: subprocess.Popen[bytes] | None = None  # the server, by the first pool
        file = address_file or Path(self._folder.name, "address")
        with locked(file):
            self._server = _connected(file)
            if self._server is None:
                self._started = _start_server(file, environment or {}, modules, measured)
                self._server = _connected(file)
        if self._server is None:
            raise WorkerError("the server of the pool did not start")

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        seconds: float | None = None,
        group_seconds: float | None = None,
        may_end: tuple[int, ...] = (),
        may_hang: tuple[int, ...] = (),
    ) -> list[Any]:
        """Results by rank; ranks that may end their process or hang, and did, give `Ended`.

        `group_seconds` is the timeout of the default process group.
        """
        seconds = seconds or self._seconds
        self._start(world_size)
        self._jobs += 1
        for rank in range(world_size):
            job = Job(
                self._jobs,
                f"{function.__module__}:{function.__qualname__}",
                rank,
                world_size,
                args,
                group_seconds or seconds,
                tuple(sys.path),
            )
            send(self._workers[rank][0], job)
        answers = self._collect(world_size, time.monotonic() + seconds, may_hang)
        silent = [rank for rank in range(world_size) if rank not in answers]
        for rank in set(silent).intersection(may_hang):
            self._kill(rank)
            answers[rank] = Ended()
            silent.remove(rank)
        errors = {
            rank: a.error if isinstance(a, Answer) else f"its process ended\n{a.traces}"
            for rank, a in answers.items()
            if (a.error if isinstance(a, Answer) else rank not in (*may_end, *may_hang))
        }
        for rank in silent:
            errors[rank] = self._abort(rank)
        for rank, answer in answers.items():
            if isinstance(answer, Answer):
                self._workers[rank][0].send_bytes(b"end")
        if silent or errors:
            hung = f"ranks {silent} did not finish in time" if silent else ""
            messages = [f"rank {rank}: {error}" for rank, error in sorted(errors.items())]
            raise WorkerError("\n".join([f"{function.__qualname__} failed. {hung}", *messages]))
        return [a.result if isinstance(a, Answer) else a for _, a in sorted(answers.items())]

    def _start(self, num_workers: int) -> None:
        missing = [number for number in range(num_workers) if number not in self._workers]
        assert self._server is not None
        for number in missing:
            send(self._server, Fork(str(self._listener.address), number, self._store.port))
        deadline = time.monotonic() + START_SECONDS
        listening: Any = self._listener
        listening._listener._socket.settimeout(1.0)
        while not all(number in self._workers for number in missing):
            if self._server.poll():  # it sends nothing: this is its end
                raise WorkerError("the server of the pool ended")
            if time.monotonic() > deadline:
                raise WorkerError(f"workers {missing} did not start in {START_SECONDS:.0f} s")
            try:
                connection = self._listener.accept()
            except TimeoutError:
                continue
            number, pid = pickle.loads(connection.recv_bytes())
            self._workers[number] = (connection, pid)

    def _collect(
        self, world_size: int, deadline: float, may_hang: tuple[int, ...]
    ) -> dict[int, Answer | Ended]:
        answers: dict[int, Answer | Ended] = {}
        ranks = {self._workers[rank][0]: rank for rank in range(world_size)}
        while set(ranks.values()).difference(may_hang):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for connection in wait(list(ranks), left):
                assert isinstance(connection, Connection)
                rank = ranks.pop(connection)
                try:
                    answer = pickle.loads(connection.recv_bytes())
                    assert answer.number == self._jobs
                    answers[rank] = answer
                    add_coverage(answer.lines)
                    failed = answer.error is not None
                except (EOFError, ConnectionResetError):
                    answers[rank] = Ended(self._traces(rank))
                    self._kill(rank)
                    failed = False  # the others have to notice by themselves
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _abort(self, number: int) -> str:
        """Ends a worker that does not answer; returns where all of its threads were."""
        connection, pid = self._workers[number]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
        wait([connection], 5.0)  # readable at its end
        traces = self._traces(number)
        self._kill(number)
        return f"no answer\n{traces}"

    def _traces(self, number: int) -> str:
        _, pid = self._workers[number]
        file = crash_file(str(self._listener.address), pid)
        return file.read_text() if file.exists() else ""

    def _kill(self, number: int) -> None:
        connection, pid = self._workers.pop(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        connection.close()

    def close(self) -> None:
        for number in list(self._workers):
            self._kill(number)
        assert self._server is not None
        self._server.close()
        if self._started is not None:  # others may go on with it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._started.wait(timeout=1)
        self._listener.close()
        self._folder.cleanup()


def _connected(address_file: Path) -> Connection | None:
    """To the server whose address a file has, if there is one."""
    address = address_file.read_text()
    if not address:
        return None
    try:
        return Client(address, family="AF_UNIX")
    except OSError:  # of a run that was killed
        address_file.write_text("")
        return None


def _start_server(
    address_file: Path, environment: dict[str, str], modules: tuple[str, ...], measured: bool
) -> subprocess.Popen[bytes]:
    """Returns when it listens; what it imports comes after that."""
    inherited = {n: x for n, x in os.environ.items() if measured or n != "SLIPCOVER_ENABLED"}
    tests = Path(__file__).parent.parent
    own = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), *sys.path]),
    }
    script = Path(__file__).with_name("worker.py")
    server = subprocess.Popen(
        [sys.executable, str(script), str(address_file), *modules],
        stdin=subprocess.DEVNULL,
        env=inherited | own | environment,
    )
    while not address_file.read_text() and server.poll() is None:
        time.sleep(0.01)
    return server


def add_coverage(lines: Lines) -> None:
    """What a worker ran counts as run by this process, where that is measured."""
    if lines:
        from slipcover import pytest_plugin

        if pytest_plugin._slipcover_instance is not None:
            for file, seen in lines.items():
                pytest_plugin._slipcover_instance.all_seen[file].update(seen)
