"""Ranks that are nodes of their own on one machine, over its loopback: NCCL ranks on one GPU.

NCCL refuses two ranks of one node on a GPU, but takes each for a node where all have a
`NCCL_HOSTID` of their own; then they talk through sockets, and one channel each, or kernels that
wait for each other fill the GPU. MPS lets kernels of several processes run at once; where it cannot
be started they take turns of milliseconds, and a kernel that waits for another rank wastes its
turn: a line says so. Over gloo the same runs on CPUs, to be tried out without a GPU. Neither root
nor a network is needed. GPU tests share their GPU by `MpsDaemon` too.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rank_processes import Command, Heard, LaunchError, RankProcesses, torchrun_environment

INTERFACE = "lo"
DAEMON = "nvidia-cuda-mps-control"
_DAEMON_SECONDS, _PROBE_SECONDS = 20.0, 60.0
_PROBE = "import torch; assert float(torch.ones(8, device='cuda').sum()) == 8"


def socket_environment(rank: int, num_ranks: int, backend: str, port: int) -> dict[str, str]:
    """What torchrun sets on nodes of one rank, and what gloo and NCCL need."""
    usual = torchrun_environment(
        rank, num_ranks, ranks_per_node=1, address="127.0.0.1", port=port, interface=INTERFACE
    )
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    one_channel = {"NCCL_IB_DISABLE": "1", "NCCL_MAX_NCHANNELS": "1"}
    node = {"NCCL_SOCKET_IFNAME": INTERFACE, "NCCL_HOSTID": f"node{rank}"}
    return usual | hidden | one_channel | node


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Sockets(RankProcesses):
    """`shares_gpu` says in words how ranks share it, once it is known."""

    def __init__(
        self, num_ranks: int, backend: str, say: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(num_ranks, say)
        self._backend = backend
        self._mps: MpsDaemon | None = None
        self._port = 0
        self.shares_gpu = "on CPUs"

    def run(
        self, command: Sequence[str], *, seconds: float, heard: Heard | None = None
    ) -> list[str]:
        self._port = free_port()
        return super().run(command, seconds=seconds, heard=heard)

    def _open(self) -> None:
        if self._backend == "nccl":
            self.shares_gpu = self._share_gpu()
        self._say(f"network: {len(self._ranks)} nodes of one rank over {self._backend} and sockets")
        self._say(f"ranks: {self.shares_gpu}")

    def _started(self, rank: int, command: Sequence[str]) -> tuple[Command, dict[str, str]]:
        environment = socket_environment(rank, len(self._ranks), self._backend, self._port)
        return tuple(command), environment | (self._mps.environment if self._mps else {})

    def _share_gpu(self) -> str:
        self._mps = MpsDaemon()
        if not self._mps.why_not:
            return "kernels of several ranks at once (MPS)"
        if reason := probe_gpu({}):
            raise LaunchError(f"ranks over NCCL need a CUDA GPU: {reason}")
        return f"kernels of ranks take turns on the GPU (no MPS: {self._mps.why_not})"

    def _release(self) -> None:
        if self._mps is not None:
            if reason := self._mps.close():
                self._say(f"MPS does not end: {reason}")
            self._mps = None


class MpsDaemon:
    """CUDA's multi-process service. `why_not` is empty while it runs; processes that are to use it
    get `environment`."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}  # of its clients
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.why_not = f"there is no {DAEMON}" if shutil.which(DAEMON) is None else self._start()
        if self.why_not:
            self.close()

    def _start(self) -> str:
        self._folder = tempfile.TemporaryDirectory(prefix="mps-")  # short: sockets lie there
        for name in ("pipe", "log"):
            path = Path(self._folder.name) / name
            path.mkdir()
            self.environment[f"CUDA_MPS_{name.upper()}_DIRECTORY"] = str(path)
        return self._control("-d") or probe_gpu(self.environment)

    def close(self) -> str:
        """The reason why it did not end, or nothing."""
        reason = ""
        if self._folder is not None:
            reason = self._control(said="quit\n")
            self._folder.cleanup()
            self._folder = None
        self.environment.clear()
        return reason

    def _control(self, *options: str, said: str = "") -> str:
        """The reason why it failed, or nothing. It gets no pipe, as daemons keep what they get."""
        try:
            done = subprocess.run(
                (DAEMON, *options),
                input=said,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | self.environment,
                timeout=_DAEMON_SECONDS,
                text=True,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{DAEMON}: {type(error).__name__}"
        return f"{DAEMON} ended with {done.returncode}" if done.returncode else ""


def probe_gpu(environment: dict[str, str]) -> str:
    """The reason why a process cannot use the GPU, or nothing."""
    try:
        done = subprocess.run(
            (sys.executable, "-c", _PROBE),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | environment,
            timeout=_PROBE_SECONDS,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_PROBE_SECONDS:g} s"
    last = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
    return last[0] if done.returncode else ""
