"""A rank that ends or hangs: the others end with an error that says so, inside the group's timeout.

Where it happens matters: in the middle of a pass the transport notices, before it the agreement.
"""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

import pytest
import torch

from mesh_attention import ContextParallel, Mask, MeshAttentionError
from mesh_attention.plan.language.program import Communication
from mesh_attention.runtime.device import Marks
from mesh_attention.runtime.transport.distributed import DistributedTransport
from mesh_attention.runtime.transport.interface import Handle, Start, View
from support.cases import Case
from support.gloo_case import context
from support.pool import Ended, WorkerPool

CASE = Case(4, 64, 64, mask=Mask(causal=True), options={"tile": (2, 2), "chunks": (2, 2)})
VICTIM = 2
TIMEOUT_SECONDS = 6.0  # longer than a busy machine takes to bring all ranks to a call
LIMIT_SECONDS = 30.0  # for a machine that is busy with other things


def end() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang() -> NoReturn:
    time.sleep(3600)
    raise AssertionError


def stop_at(number: int, how: str) -> None:
    """Let this process stop when it starts its `number`-th communication."""
    prepare = DistributedTransport.prepare
    begun = 0

    def stopping(self: DistributedTransport, op: Communication, view: View) -> Start:
        start = prepare(self, op, view)

        def stop_or_start(after: Marks) -> Handle:
            nonlocal begun
            begun += 1
            if begun == number:
                end() if how == "ends" else hang()
            return start(after)

        return stop_or_start

    DistributedTransport.prepare = stopping  # type: ignore[method-assign]


def train(cp: ContextParallel) -> None:
    q, k, v, grad_out = CASE.tensors()
    shards = [cp.shard(x, 1).requires_grad_() for x in (q, k, v)]
    out = cp.attention(*shards)
    assert isinstance(out, torch.Tensor)
    torch.autograd.grad(out, shards, cp.shard(grad_out, 1))


def lose_one(rank: int, world_size: int, how: str, when: str) -> tuple[str, str, float]:
    """(kind of error, its words, seconds until it came)"""
    cp = context(CASE)
    if rank == VICTIM:
        if when == "before the call":
            end() if how == "ends" else hang()
        communications = [
            op for op in cp.plan.forward.programs[VICTIM].operations if hasattr(op, "group")
        ]
        stop_at(2 if when == "forward" else len(communications) + 2, how)
    started = time.monotonic()
    try:
        train(cp)
    except MeshAttentionError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


@pytest.mark.parametrize(
    ("how", "when"),
    [("ends", "before the call"), ("ends", "forward"), ("ends", "backward"), ("hangs", "forward")],
)
def test_a_rank_that_stops_ends_the_others_with_an_error(
    pool: WorkerPool, how: str, when: str
) -> None:
    results = pool.run(
        lose_one, 4, how, when, group_seconds=TIMEOUT_SECONDS, may_end=(VICTIM,), may_hang=(VICTIM,)
    )
    assert isinstance(results[VICTIM], Ended)
    for rank, result in enumerate(results):
        if rank == VICTIM:
            continue
        kind, words, seconds = result
        assert seconds < LIMIT_SECONDS
        expected = "DisagreementError" if when == "before the call" else "CommunicationError"
        assert kind == expected, words
        # The first error of every rank names the one that is gone, not a live pair.
        if how == "ends":
            assert words.startswith(f"rank {VICTIM} has ended")
        else:
            assert words.startswith(f"rank {VICTIM} has ended, or does not answer")
