"""Runs of a plan on all ranks: its seconds, or a refusal on which all ranks agree.

A setting is refused where the planner or the kernels refuse it, or where memory ends, on every rank
by itself. Any other error (a rank that ended, a lost store, a broken context, or an error that only
some ranks see) says nothing about the setting, and is raised. `tune.py` and benchmarks use this.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch.distributed.distributed_c10d import PrefixStore

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.errors import MeshAttentionError, PlanError
from mesh_attention.kernels.registry import KernelRefusedError
from mesh_attention.measure.ranks import Ranks
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.runtime.transport.groups import default_store
from mesh_attention.runtime.transport.job_store import asking_the_store

PATIENCE_SECONDS = 30.0  # for others to refuse the same
LEAST_RUNS, MOST_RUNS = 5, 30
_MOST_CHARACTERS = 240
_PAUSE_SECONDS = 0.01
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Refusal:
    """Why all ranks refuse a setting."""

    reason: str


def reason_of(error: BaseException) -> str | None:
    """The refusal in one line; None where the error may be about something else."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {text}"
    return text if isinstance(error, PlanError | KernelRefusedError) else None


class Attempts:
    """All ranks make the same attempts. They agree by the store: a rank that is out of memory
    cannot know at which collective the others are."""

    def __init__(self, ranks: Ranks, *, patience: float = PATIENCE_SECONDS) -> None:
        name: str = ranks.of_first(lambda: uuid4().hex)
        self._store = PrefixStore(f"mesh_attention/attempts/{name}", default_store())
        self._ranks = ranks
        self._patience = patience
        self._made = 0

    def make(self, work: Callable[[], Result]) -> Result | Refusal:
        self._made += 1
        try:
            return work()
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            kind = type(error).__name__
        # Not while the error is held, and with it the memory of what has failed.
        return Refusal(self._agreed(kind, reason))

    def _agreed(self, kind: str, reason: str) -> str:
        """The reason of the first rank, where all ranks have refused for a reason of this kind."""
        keys = [f"{self._made}/{rank}" for rank in range(self._ranks.size)]
        with asking_the_store():
            self._store.set(keys[self._ranks.rank], f"{kind}\n{reason}")
            end = time.monotonic() + self._patience
            while not (complete := self._store.check(keys)) and time.monotonic() < end:
                time.sleep(_PAUSE_SECONDS)
            answers = [self._store.get(key).decode() for key in keys] if complete else []
        if len({answer.split("\n")[0] for answer in answers}) != 1:
            raise MeshAttentionError(
                f"rank {self._ranks.rank} could not run a setting, and not all ranks say the same: "
                f"{reason}"
            )
        return answers[0].partition("\n")[2]


def plan_seconds(ranks: Ranks, plan: Plan, *, lasting: float) -> dict[Direction, float]:
    """Seconds of both passes until the last rank is done: the mean of the faster half of as many
    runs as take about `lasting` seconds, after one that is not counted. All ranks give the same
    plan."""
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
    forward, backward = (_faster_half(column) for column in zip(*times[1:], strict=True))
    return {Direction.FORWARD: forward, Direction.BACKWARD: backward}


def _faster_half(times: Sequence[float]) -> float:
    """The mean of the faster half: a disturbance only ever makes a run longer."""
    return statistics.mean(sorted(times)[: (len(times) + 1) // 2])


def _timed(ranks: Ranks, work: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the longest seconds of all ranks, which are the same on all of them."""
    ranks.wait_for_all()
    begin = time.perf_counter()
    result = work()
    if ranks.is_cuda:
        torch.cuda.synchronize(ranks.device)
    return result, ranks.longest(time.perf_counter() - begin)
