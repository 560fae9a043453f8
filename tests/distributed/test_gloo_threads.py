"""Threads of one process: two on one group are refused, two on a group each do not hold up each
other, and what autograd and loaders do in threads of their own stays as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel, MeshAttentionError
from support.pool import WorkerPool

RANKS = 4


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


def on_one_group(rank: int, world_size: int) -> list[str]:
    """On the first rank a call begins while another thread waits in one for the other ranks."""
    cp, store = make(), dist.distributed_c10d._get_default_store()
    q, k, v = (cp.shard(x, 1) for x in whole(1))
    right = cp.attention(q, k, v)
    assert isinstance(right, Tensor)
    messages = []

    def call() -> None:
        try:
            messages.append("right" if right.equal(cp.attention(q, k, v)) else "wrong")  # type: ignore[arg-type]
        except MeshAttentionError as error:
            messages.append(str(error))

    if rank == 0:
        first = threading.Thread(target=call)
        first.start()
        while cp._calls.session.guard.place < 2:
            time.sleep(0.001)
        call()  # while the other is inside
        store.set("crossed", "yes")
        first.join()
    else:
        store.wait(["crossed"])
        call()
    call()
    return messages


def test_two_threads_on_one_group_are_refused_on_all_ranks(pool: WorkerPool) -> None:
    refused, *others = pool.run(on_one_group, RANKS)
    cause = "rank 0: a call in thread 'MainThread' began while another thread was in one"
    assert refused[0].startswith(cause)
    assert all(cause in message for message in refused[1:])
    assert "everything on this group is refused" in refused[2]
    for first, second in others:  # all ranks were in the first, so it may have come to its end
        assert cause in first or first == "right"
        assert cause in second


def passes_in_other_threads(rank: int, world_size: int) -> list[float]:
    """A backward pass, which attends again, in a thread of its own, as autograd has them."""
    with make() as cp:
        x = [cp.shard(x, 1).requires_grad_() for x in whole(3)]
        grads = []
        for elsewhere in (False, True):
            out: Any = checkpoint(cp.attention, *x, use_reentrant=False)

            def backward(out: Tensor = out) -> list[Any]:
                return [*torch.autograd.grad(out.square().sum(), x)]

            grads.append(in_threads(backward)[0] if elsewhere else backward())
        return [float((a - b).abs().max()) for a, b in zip(*grads, strict=True)]


def test_a_pass_may_run_in_another_thread_than_the_one_before(pool: WorkerPool) -> None:
    for differences in pool.run(passes_in_other_threads, 2):
        assert max(differences) == 0


def on_two_groups(rank: int, world_size: int) -> list[float]:
    groups = [dist.new_group() for _ in range(2)]

    def calls(number: int) -> list[Any]:
        with make(groups[number]) as cp:
            return [error_of(cp, 100 * number + seed) for seed in range(2)]

    first, second = in_threads(lambda: calls(0), lambda: calls(1))
    return first + second


def test_first_calls_of_two_threads_on_a_group_each_do_not_wait_for_each_other(
    pool: WorkerPool,
) -> None:
    for result in pool.run(on_two_groups, RANKS):
        assert len(result) == 4
        assert max(result) < 1e-5
