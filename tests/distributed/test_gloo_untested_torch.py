"""A torch that nobody has tested is no error: it is said once, where somebody looks."""

from __future__ import annotations

import warnings
from unittest import mock

import torch
import torch.distributed as dist

from mesh_attention import ContextParallel
from mesh_attention.runtime.session import session as sessions
from mesh_attention.version import NEWEST_TORCH, OLDEST_TORCH
from support.pool import WorkerPool


def warned(rank: int, world_size: int, versions: list[str]) -> list[list[str]]:
    """What each version says while objects are made on two groups."""
    said = []
    for version in versions:
        sessions._warn_if_untested.cache_clear()
        with (
            mock.patch.object(torch, "__version__", version),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for _ in range(2):
                group = dist.new_group(range(world_size))
                ContextParallel(group, causal=True).close()
                dist.destroy_process_group(group)
        said.append([str(w.message) for w in caught if "is tested with" in str(w.message)])
    sessions._warn_if_untested.cache_clear()
    return said


def test_a_torch_that_is_not_tested_warns_once_in_a_process(pool: WorkerPool) -> None:
    oldest, newest = ("{}.{}".format(*version) for version in (OLDEST_TORCH, NEWEST_TORCH))
    tested = [f"{oldest}.0+cpu", f"{newest}.3a0+git1a2b", torch.__version__]
    newer = [f"{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}.0.dev20270101+cu140", "3.0.0"]
    for said in pool.run(warned, 1, [*tested, *newer]):
        assert said[: len(tested)] == [[]] * len(tested)
        for version, [warning] in zip(newer, said[len(tested) :], strict=True):
            assert f"torch {oldest} to {newest}" in warning
            assert f"this is torch {version}" in warning
