"""Threads of one process: two on one group are refused, two on a group each do not hold up each
other, and what autograd and loaders do in threads of their own stays as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention import ContextParallel, MeshAttentionError
from support.pool import WorkerPool

RANKS = 4
CALLS = 8


def make(group: dist.ProcessGroup | None = None, **changes: Any) -> ContextParallel:
    return ContextParallel(
        group, seq_len=32, num_heads=2, head_dim=4, causal=True, dtype=torch.float32, **changes
    )


def whole(seed: int) -> Tensor:
    return torch.randn(3, 1, 32, 2, 4, generator=torch.Generator().manual_seed(seed))


def error_of(cp: ContextParallel, seed: int) -> float:
    """Of one attention, against one process."""
    q, k, v = (cp.shard(x, 1) for x in whole(seed))
    out = cp.attention(q, k, v)
    assert isinstance(out, Tensor)
    q, k, v = (x.double().transpose(1, 2) for x in whole(seed))
    true = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return float((out - cp.shard(true.transpose(1, 2).float(), 1)).abs().max())


def in_threads(*works: Callable[[], list[Any]]) -> list[list[Any]]:
    """What each of them gives, begun at the same time."""
    results: list[list[Any]] = [[] for _ in works]
    ready = threading.Barrier(len(works))

    def run(number: int) -> None:
        ready.wait()
        results[number] = works[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def on_one_group(rank: int, world_size: int) -> tuple[list[Any], str]:
    cp = make()
    error_of(cp, 0)

    def calls(thread: int) -> list[Any]:
        came: list[Any] = []
        for number in range(CALLS):
            try:
                came.append(error_of(cp, 10 * thread + number))
            except MeshAttentionError as error:
                came.append(str(error))
        return came

    came = sum(in_threads(lambda: calls(1), lambda: calls(2)), [])
    try:
        error_of(cp, 0)
    except MeshAttentionError as error:
        return came, str(error)
    return came, ""


def test_two_threads_on_one_group_are_refused_on_all_ranks(pool: WorkerPool) -> None:
    for came, later in pool.run(on_one_group, RANKS, group_seconds=20):
        print(came, later)


def on_two_groups(rank: int, world_size: int) -> list[float]:
    groups = [dist.new_group() for _ in range(2)]
    objects: list[ContextParallel] = []

    def calls(number: int) -> list[Any]:
        cp = make(groups[number])
        objects.append(cp)
        return [error_of(cp, 100 * number + seed) for seed in range(3)]

    found = sum(in_threads(lambda: calls(0), lambda: calls(1)), [])
    return found


def test_first_calls_of_two_threads_on_a_group_each_do_not_wait_for_each_other(
    pool: WorkerPool,
) -> None:
    for found in pool.run(on_two_groups, RANKS, group_seconds=15):
        assert len(found) == 6
        assert max(found) < 1e-5
