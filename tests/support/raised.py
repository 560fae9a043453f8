"""What a rank raises after a mistake, and what must hold for every rank that does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from mesh_attention import ContextParallel, MeshAttentionError
from support.gloo_case import handed_bytes

__all__ = ["Raised", "all_raised", "leave_with_all", "raised_by"]

LIMIT_SECONDS = 10.0


@dataclass(frozen=True)
class Raised:
    """What one rank raised, how long it took, and what had moved by then."""

    error: str
    kind: str
    seconds: float
    moved: int
    groups: int


def raised_by(action: Callable[[], object], cp: ContextParallel | None = None) -> Raised:
    groups = torch.distributed.distributed_c10d._world.pg_map
    before = len(groups)
    started = time.monotonic()
    error, kind = "", ""
    try:
        action()
    except MeshAttentionError as caught:
        error, kind = str(caught), type(caught).__name__
    seconds = time.monotonic() - started
    handed = handed_bytes(cp) if cp is not None else {}
    moved = sum(sum(sizes) for kinds in handed.values() for sizes in kinds.values())
    return Raised(error, kind, seconds, moved, len(groups) - before)


def leave_with_all(folder: str, rank: int, world_size: int, message: str) -> NoReturn:
    """Write what a rank was told to a file of its own, and end the process when all ranks have: an
    end that is seen by a rank that still waits would be told instead."""
    part = Path(folder, f"{rank}.part")
    part.write_text(message)
    part.rename(Path(folder, str(rank)))
    while not all(Path(folder, str(other)).exists() for other in range(world_size)):
        time.sleep(0.01)
    os._exit(0)


def all_raised(raised: list[Raised]) -> None:
    for rank, failure in enumerate(raised):
        assert failure.error, f"rank {rank} raised nothing"
        assert failure.seconds < LIMIT_SECONDS
        assert failure.moved == 0
        assert failure.groups == 0
