"""The rank that keeps the job's key-value store ends, or is stopped: the others say that, not
`Broken pipe`, and do not wait for its answer."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from mesh_attention import ContextParallel, MeshAttentionError
from support.pool import WorkerPool
from support.raised import leave_with_all

RANKS = 3
TIMEOUT_SECONDS = {"ends": 20.0, "stops": 4.0}
LIMIT_SECONDS = {"ends": 25.0, "stops": 19.0}  # their timeouts, 5 s, and 10 of a busy machine


def join_a_job_of_its_own(rank: int, world_size: int, limit: timedelta) -> None:
    """Its store is kept by rank 0, and not by the process of pytest."""
    port: list[Any] = [None]
    listening: int | None = None
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = [server.getsockname()[1]]
            listening = server.detach()  # nobody else can take the port meanwhile
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = TCPStore(
        "127.0.0.1",
        port[0],
        world_size,
        rank == 0,
        limit,
        master_listen_fd=listening,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def lose_the_store(rank: int, world_size: int, how: str, folder: str) -> NoReturn:
    join_a_job_of_its_own(rank, world_size, timedelta(seconds=TIMEOUT_SECONDS[how]))
    cp = ContextParallel(seq_len=24, num_heads=2, head_dim=8, causal=True, dtype=torch.float32)
    x = torch.ones(1, cp.plan.q_layout.slots, 2, 8)
    cp.attention(x, x, x)
    if rank == 0:
        Path(folder, "0").touch()  # the others wait for all to have written
        os.kill(os.getpid(), signal.SIGKILL if how == "ends" else signal.SIGSTOP)
    begun = time.monotonic()
    words = "nothing"
    try:
        cp.attention(x, x, x)
    except MeshAttentionError as error:
        words = str(error)
    leave_with_all(folder, rank, world_size, f"{time.monotonic() - begun} {words}")


@pytest.mark.parametrize("how", TIMEOUT_SECONDS)
def test_a_store_that_is_gone_is_named(pool: WorkerPool, tmp_path: Path, how: str) -> None:
    everyone = tuple(range(RANKS))
    pool.run(lose_the_store, RANKS, how, str(tmp_path), may_end=everyone, may_hang=(0,))
    for rank in everyone[1:]:
        seconds, _, words = (tmp_path / str(rank)).read_text().partition(" ")
        assert "the key-value store of the job does not answer" in words
        assert "rank 0 of the job" in words
        assert ("has probably been stopped" in words) == (how == "stops")
        assert float(seconds) < LIMIT_SECONDS[how]
