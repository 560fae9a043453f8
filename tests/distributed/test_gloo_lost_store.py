"""The rank that keeps the job's key-value store ends, or is stopped: the others say that, not
`Broken pipe`, and do not wait for its answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RANKS = 3
SCRIPT = Path(__file__).parents[1] / "support" / "lost_store.py"


LIMITS_SECONDS = {"ends": 25.0, "stops": 19.0}  # their timeouts, 5 s, and 10 of a busy machine


def test_a_store_that_is_gone_is_named() -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        [sys.executable, str(SCRIPT), str(RANKS)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    told = [line.split(maxsplit=2) for line in job.stdout.splitlines()]
    assert sorted(how for how, *_ in told) == ["ends"] * (RANKS - 1) + ["stops"] * (RANKS - 1), (
        job.stderr
    )
    for how, seconds, words in told:
        assert "the key-value store of the job does not answer" in words, job.stderr
        assert "rank 0 of the job" in words
        assert ("has probably been stopped" in words) == (how == "stops")
        assert float(seconds) < LIMITS_SECONDS[how]
