"""CUDA's multi-process service for processes that share one GPU: their kernels run at once.

Without it processes take turns of milliseconds, and a kernel that waits for another rank's spends
its turn waiting. Processes that are to use the service get `environment`; others do without. Ranks
of benchmarks (`sockets.py`) and of GPU tests use it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DAEMON = "nvidia-cuda-mps-control"
_DAEMON_SECONDS, _PROBE_SECONDS = 20.0, 60.0
_PROBE = "import torch; assert float(torch.ones(8, device='cuda').sum()) == 8"


class MpsDaemon:
    """`why_not` is empty while it runs."""

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
        """The reason why it failed, or nothing. A daemon keeps what it inherits: no pipes of ours,
        but what is said to it."""
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
