"""A rank that misses a first call, because it raised before it, say: the others wait once, and then
the group is refused on all ranks at once, also for the rank that knows nothing of it yet."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mesh_attention import ContextParallel
from support.pool import WorkerPool
from support.raised import Raised, raised_by

RANKS, ODD = 3, 1


def missed(rank: int, world_size: int, asks: bool) -> list[Raised]:
    group = dist.new_group(timeout=timedelta(seconds=2))
    cp = ContextParallel(group, causal=True)
    values = torch.ones(1, 4)

    def call() -> object:
        return cp.token_mean(values, values > 0, reduce="sum")

    raised = [] if rank == ODD else [raised_by(call)]
    dist.barrier()
    calls = [cp.check] if asks else [call]
    return raised + [raised_by(each) for each in (*calls, call, cp.check)]


@pytest.mark.parametrize("asks", [False, True])
def test_a_first_call_that_one_rank_missed_is_waited_for_once(pool: WorkerPool, asks: bool) -> None:
    results = pool.run(missed, RANKS, asks)
    message = "ranks [1] did not reach the same call (token_mean) within 2 s"
    for raised in results:
        assert all(message in failure.error for failure in raised), raised
        assert all("refused" in failure.error for failure in raised)
        assert all(failure.seconds < 1 for failure in raised[-3:]), raised
        assert "make new process groups" in raised[-1].error


def wrong_alone(rank: int, world_size: int) -> tuple[str, float, float]:
    """Nothing is sent by `log_probs` of a whole weight; the others are in the next call."""
    cp = ContextParallel(dist.new_group(timeout=timedelta(seconds=20)), causal=True)
    hidden, weight, tokens = torch.ones(1, 4, 2), torch.ones(3, 2), torch.ones(1, 4).long()

    def step(temperature: float = 1.0) -> float:
        values, _ = cp.log_probs(
            hidden, tokens, weight=weight, reduce="fsdp", temperature=temperature
        )
        return cp.token_mean(values, tokens >= 0, reduce="fsdp").value.exp().item()

    raised = raised_by(lambda: step(0.0 if rank == ODD else 1.0))
    return raised.error, raised.seconds, step()


def test_an_error_of_one_rank_in_log_probs_is_told_to_all(pool: WorkerPool) -> None:
    for error, seconds, value in pool.run(wrong_alone, RANKS):
        assert "temperature=0.0: must be finite" in error
        assert seconds < 5
        assert abs(value - 1 / 3) < 1e-6
