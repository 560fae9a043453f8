"""The pool itself: a distributed test that cannot work must fail and say which rank it was."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from support.pool import Ended, WorkerError, WorkerPool


def add_up(rank: int, world_size: int, start: int) -> int:
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return int(total.item())


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def raise_on_one(rank: int, world_size: int) -> None:
    if rank == 2:
        raise KeyError("broken on purpose")


def end_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def crash_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.abort()


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_results_come_back_by_rank(pool: WorkerPool, world_size: int) -> None:
    expected = sum(5 + rank for rank in range(world_size))
    assert pool.run(add_up, world_size, 5) == [expected] * world_size


def test_a_rank_that_hangs_fails_the_test_and_is_named(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"ranks \[1\] did not finish"):
        pool.run(hang_on_one, 3, seconds=2.0)
    assert pool.run(add_up, 3, 0) == [3, 3, 3]


def test_a_rank_that_raises_fails_the_test_with_its_trace(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"rank 2: Traceback[\s\S]*broken on purpose"):
        pool.run(raise_on_one, 3)
    assert pool.run(add_up, 3, 0) == [3, 3, 3]


def test_a_rank_that_ends_fails_the_test_unless_it_may(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="rank 1: its process ended"):
        pool.run(end_on_one, 2)
    first, second, third = pool.run(end_on_one, 3, may_end=(1,))
    assert (first, third) == (0, 2)
    assert isinstance(second, Ended)
    assert pool.run(add_up, 2, 0) == [1, 1]


def test_a_rank_that_a_signal_ends_says_where_it_was(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"process ended\nFatal[\s\S]*in crash_on_one"):
        pool.run(crash_on_one, 2)
    assert pool.run(add_up, 2, 0) == [1, 1]
