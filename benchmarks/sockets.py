"""Ranks that are nodes of their own on one machine, over its loopback: NCCL ranks on one GPU.

NCCL refuses two ranks of one node on a GPU, but takes each for a node where all have a
`NCCL_HOSTID` of their own; then they talk through sockets, and one channel each, or kernels that
wait for each other fill the GPU. MPS lets kernels of several processes run at once; where it cannot
be started they take turns, which is slower, and a line says so. Over gloo the same runs on CPUs, to
be tried out without a GPU. Neither root nor a network is needed.
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

from links import Command, Links, NamespaceError, environment
from rank_processes import Heard, RankProcesses

INTERFACE = "lo"
_DAEMON = "nvidia-cuda-mps-control"
_DAEMON_SECONDS, _PROBE_SECONDS = 20.0, 60.0
_PROBE = "import torch; assert float(torch.ones(8, device='cuda').sum()) == 8"


def socket_environment(rank: int, num_ranks: int, backend: str, port: int) -> dict[str, str]:
    """As torchrun sets it on nodes of one rank, and what gloo and NCCL need."""
    own = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_IB_DISABLE": "1",
        "NCCL_MAX_NCHANNELS": "1",
        "NCCL_HOSTID": f"node{rank}",
    }
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    return environment(Links(num_ranks), rank) | own | hidden


class Sockets(RankProcesses):
    """`shares_gpu` says in words how ranks share it, once it is known."""

    def __init__(
        self, num_ranks: int, backend: str, say: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(num_ranks, say)
        self._backend = backend
        self._mps: dict[str, str] = {}  # what its clients have in their environment
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._port = 0
        self.shares_gpu = "on CPUs"

    def run(
        self, command: Sequence[str], *, seconds: float, heard: Heard | None = None
    ) -> list[str]:
        self._port = _free_port()
        return super().run(command, seconds=seconds, heard=heard)

    def _open(self) -> None:
        if self._backend == "nccl":
            self.shares_gpu = self._share_gpu()
        self._say(f"network: {len(self._ranks)} nodes of one rank over {self._backend} and sockets")
        self._say(f"ranks: {self.shares_gpu}")

    def _started(self, rank: int, command: Sequence[str]) -> tuple[Command, dict[str, str]]:
        own = socket_environment(rank, len(self._ranks), self._backend, self._port)
        return tuple(command), own | self._mps

    def _share_gpu(self) -> str:
        if shutil.which(_DAEMON) is None:
            why = f"there is no {_DAEMON}"
        else:
            why = self._start_mps()
            if not why:
                return "kernels of several ranks at once (MPS)"
            self._release()
        if told := _probe({}):
            raise NamespaceError(f"ranks over NCCL need a CUDA GPU: {told}")
        return f"kernels of ranks take turns on the GPU (no MPS: {why})"

    def _start_mps(self) -> str:
        """Why not, or nothing where it runs."""
        self._folder = tempfile.TemporaryDirectory(prefix="mps-")  # short: sockets lie there
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        for name, part in zip(names, ("pipe", "log"), strict=True):
            path = Path(self._folder.name) / part
            path.mkdir()
            self._mps[name] = str(path)
        return _control(("-d",), self._mps) or _probe(self._mps)

    def _release(self) -> None:
        if self._folder is not None:
            if told := _control((), self._mps, said="quit\n"):
                self._say(f"MPS does not end: {told}")
            self._folder.cleanup()
            self._folder = None
        self._mps.clear()


def _control(options: Sequence[str], mps: dict[str, str], said: str = "") -> str:
    """Why the daemon did not do it, or nothing. It keeps what it inherits: no pipes of ours."""
    try:
        done = subprocess.run(
            (_DAEMON, *options),
            input=said,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | mps,
            timeout=_DAEMON_SECONDS,
            text=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_DAEMON}: {type(error).__name__}"
    return f"{_DAEMON} ended with {done.returncode}" if done.returncode else ""


def _probe(mps: dict[str, str]) -> str:
    """Why a process cannot use the GPU, or nothing."""
    try:
        done = subprocess.run(
            (sys.executable, "-c", _PROBE),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | mps,
            timeout=_PROBE_SECONDS,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_PROBE_SECONDS:g} s"
    last = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
    return last[0] if done.returncode else ""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
