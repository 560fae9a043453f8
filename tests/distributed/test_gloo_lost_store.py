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
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(RANKS), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(RANKS)
    ]
    said = [one.communicate(timeout=60) for one in ranks]
    for out, error in said[1:]:
        assert "the key-value store of the job does not answer" in out, error
        assert "rank 0 of the job" in out
