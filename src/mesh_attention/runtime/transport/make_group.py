"""A process group of some ranks, made by its members alone, under a name of our own.

`torch.distributed.new_group` asks every rank of the job to take part. Its option to ask the members
alone names the group by how many groups a rank happens to have, so members with different histories
wait under different names, and a group made again after `destroy_process_group` finds the addresses
of the old one (pytorch#189073, pytorch#55967). Making the group through the function below it, with
a name that is ours and never used twice, has neither fault. It is private: this file is its only
user, and says what it found if it has changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from mesh_attention.errors import MeshAttentionError

__all__ = ["default_store", "is_registered", "make_group", "timeout_of"]

_WANTED = ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name")


def default_store() -> Store:
    """The key-value store that all ranks of the job share."""
    return c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout that the caller gave this group; the backend's usual one if it does not say."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
        except (AttributeError, RuntimeError):
            continue
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return c10d._get_default_timeout(dist.Backend(dist.get_backend(group)))


def is_registered(group: dist.ProcessGroup) -> bool:
    """False once the group has been destroyed."""
    return group in c10d._world.pg_map


def make_group(
    ranks: Sequence[int], name: str, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Called by exactly these global ranks, with the same name."""
    helper = getattr(c10d, "_new_process_group_helper", None)
    found = tuple(inspect.signature(helper).parameters) if helper else ()
    if helper is None or found[: len(_WANTED)] != _WANTED:
        raise MeshAttentionError(
            f"torch {torch.__version__} is not supported: its process groups are made with "
            f"{found or 'another function'}, expected {_WANTED}; use torch 2.11 to 2.13"
        )
    members = list(ranks)
    group, _ = helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        backend,
        default_store(),
        c10d.GroupName(name) if hasattr(c10d, "GroupName") else name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    made: dist.ProcessGroup = group
    return made
