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

__all__ = ["default_store", "make_group"]

_WANTED = ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name")


def default_store() -> Store:
    """The key-value store that all ranks of the job share."""
    return c10d._get_default_store()


def make_group(
    ranks: Sequence[int], name: str, backend: str, timeout: timedelta | None
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
    options = {"timeout": timeout} if timeout is not None else {"timeout": _default(backend)}
    group, _ = helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        backend,
        default_store(),
        c10d.GroupName(name) if hasattr(c10d, "GroupName") else name,
        **options,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    made: dist.ProcessGroup = group
    return made


def _default(backend: str) -> timedelta:
    return c10d._get_default_timeout(dist.Backend(backend))
