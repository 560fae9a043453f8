"""Two jobs whose rank 0 keeps the key-value store: in one it ends in mid-job, in the other it is
stopped. Run by a test.

What each other rank is told, and after how many seconds, is a line of the output. Ranks are forked:
torch is imported once, and nobody else can take a port between its choice and its use.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from mesh_attention import ContextParallel, MeshAttentionError

SECONDS = {"ends": 20, "stops": 4}


def one_rank(how: str, rank: int, size: int, listening: socket.socket) -> None:
    limit = timedelta(seconds=SECONDS[how])
    port, own = listening.getsockname()[1], listening.detach()
    if rank:
        os.close(own)
    store = TCPStore(
        *("127.0.0.1", port, size, rank == 0, limit),
        master_listen_fd=None if rank else own,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    cp = ContextParallel(seq_len=24, num_heads=2, head_dim=8, causal=True, dtype=torch.float32)
    x = torch.ones(1, cp.plan.q_layout.slots, 2, 8)
    cp.attention(x, x, x)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL if how == "ends" else signal.SIGSTOP)
    begun = time.monotonic()
    try:
        cp.attention(x, x, x)
    except MeshAttentionError as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        passed = time.monotonic() - begun
        os.write(1, f"{how} {passed:.1f} {told}\n".encode())  # at once: ranks share the output


def main(size: int) -> None:
    torch.set_num_threads(1)
    processes = {}
    for how in SECONDS:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            for rank in range(size):
                process = os.fork()
                if process == 0:
                    try:
                        signal.alarm(45)  # no rank outlives the test
                        one_rank(how, rank, size, listening)
                    finally:
                        sys.stderr.flush()
                        os._exit(0)
                processes[how, rank] = process
    stopped = processes.pop(("stops", 0))
    for process in processes.values():
        os.waitpid(process, 0)
    os.kill(stopped, signal.SIGKILL)
    os.waitpid(stopped, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
