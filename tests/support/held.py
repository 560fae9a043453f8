"""What a process holds of the system, and whether it grew."""

from __future__ import annotations

import gc
import os

import torch.distributed as dist

from mesh_attention.runtime.transport.groups import default_store


def resources() -> dict[str, int]:
    """What this process holds of the system and of the job's store, when no rank is busy."""
    gc.collect()  # what an earlier test left is not ours
    dist.barrier()
    results = {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "keys": default_store().num_keys(),
    }
    dist.barrier()
    return results


def grown(begin: dict[str, int], end: dict[str, int]) -> dict[str, int]:
    """What there is more of. There may be less: gloo closes connections of groups that are gone,
    those of earlier tests too, in threads of its own."""
    return {name: end[name] - begin[name] for name in begin if end[name] > begin[name]}
