"""Seconds of a plan's passes on real ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.measure.ranks import Ranks
from mesh_attention.plan.language.plan import Direction, Plan

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
LEAST_RUNS, MOST_RUNS = 5, 30


def plan_seconds(ranks: Ranks, plan: Plan, *, lasting: float) -> dict[Direction, float]:
    """Of both passes, until the last rank is done: the mean of the faster half of as many runs as
    take about `lasting` seconds, after one that is not counted. All ranks give the same plan."""
    problem = plan.problem
    dtype = _DTYPES[problem.element_bytes]
    with ContextParallel(ranks.group, plan=plan) as cp:
        queries, keys = (len(cp.positions(side=side)) for side in ("q", "kv"))
        q, k, v, grad_out = (
            torch.randn(1, n, heads, dim, dtype=dtype, device=ranks.device)
            for n, heads, dim in (
                (queries, problem.num_heads, problem.head_dim),
                (keys, problem.kv_heads, problem.head_dim),
                (keys, problem.kv_heads, problem.v_dim),
                (queries, problem.num_heads, problem.v_dim),
            )
        )
        inputs = [x.requires_grad_() for x in (q, k, v)]
        times: list[tuple[float, float]] = []
        runs = 1 + LEAST_RUNS
        while len(times) < runs:
            out, forward = _timed(ranks, partial(cp.attention, *inputs))
            _, backward = _timed(ranks, partial(torch.autograd.grad, out, inputs, grad_out))
            times.append((forward, backward))
            if len(times) == 2:  # the first makes executors, and buffers of transports
                once = sum(times[-1])
                runs = 1 + max(LEAST_RUNS, min(MOST_RUNS, int(lasting / max(once, 1e-9))))
    forward, backward = (faster_half(one) for one in zip(*times[1:], strict=True))
    return {Direction.FORWARD: forward, Direction.BACKWARD: backward}


def faster_half(times: Sequence[float]) -> float:
    """Their mean: what disturbs a run only ever makes it longer."""
    return statistics.mean(sorted(times)[: (len(times) + 1) // 2])


def _timed(ranks: Ranks, work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and seconds: the longest of all ranks, so the same on all of them."""
    ranks.wait_for_all()
    begin = time.perf_counter()
    found = work()
    if ranks.is_cuda:
        torch.cuda.synchronize(ranks.device)
    return found, ranks.longest(time.perf_counter() - begin)
