"""Mistakes that a rank finds before its backward pass begins: told to all, and nothing is lost."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from mesh_attention import ContextParallel, Mask, MeshAttentionError
from support.cases import Case
from support.gloo_case import context
from support.pool import WorkerPool

RANKS, ODD = 2, 1
TIMEOUT_SECONDS = 6.0
CASE = Case(RANKS, 16, 16, heads=(2, 2), mask=Mask(causal=True), dtype=torch.float32)
WORDS = {
    "second derivative": "second derivatives of attention are not supported",
    "twice": "Trying to backward through the graph a second time",
    "changed": "modified by an inplace operation",
    "lse": "a loss depends on lse",
}


def backward(cp: ContextParallel, mistake: str) -> None:
    q, k, v = (cp.shard(x, 1).requires_grad_() for x in CASE.tensors()[:3])
    changed = q * 1.0
    out, lse = cp.attention(changed, k, v, return_lse=True)
    assert isinstance(out, Tensor)
    if mistake == "changed":
        changed.mul_(2.0)
    if mistake == "twice":
        out.sum().backward()  # type: ignore[no-untyped-call]
    root = lse.sum() if mistake == "lse" else out.sum()
    torch.autograd.grad(root, (q, k, v), create_graph=mistake == "second derivative")


def make_mistake(
    rank: int, world_size: int, mistake: str, by: tuple[int, ...]
) -> tuple[str, float]:
    """What this rank was told, in how many seconds; then all make a right call."""
    cp = context(CASE)
    begun = time.monotonic()
    message = "nothing"
    try:
        if mistake == "twice" and rank not in by:
            backward(cp, "none")  # as the first of the two
        backward(cp, mistake if rank in by else "none")
    except (MeshAttentionError, RuntimeError) as error:
        message = str(error)
    seconds = time.monotonic() - begun
    if len(by) == world_size:
        backward(cp, "none")
        cp.close()
    return message, seconds


@pytest.mark.parametrize("mistake", list(WORDS))
def test_a_mistake_of_all_ranks_leaves_everything_usable(pool: WorkerPool, mistake: str) -> None:
    for message, _ in pool.run(make_mistake, RANKS, mistake, tuple(range(RANKS))):
        assert WORDS[mistake] in message


def test_a_mistake_of_one_rank_is_told_to_all_with_its_cause(pool: WorkerPool) -> None:
    messages = pool.run(
        make_mistake, RANKS, "second derivative", (ODD,), group_seconds=TIMEOUT_SECONDS
    )
    for words, seconds in messages:
        assert WORDS["second derivative"] in words
        assert seconds < 5.0
    assert f"rank {ODD}" in messages[0][0]
