"""The rank that keeps the job's key-value store ends: the others say that, not `Broken pipe`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

RANKS = 3
SCRIPT = Path(__file__).parents[1] / "support" / "lost_store.py"


def test_a_store_that_is_gone_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        [sys.executable, str(SCRIPT), str(RANKS), str(port)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    told = job.stdout.splitlines()
    assert len(told) == RANKS - 1, job.stderr
    for line in told:
        assert "the key-value store of the job does not answer" in line, job.stderr
        assert "rank 0 of the job" in line
