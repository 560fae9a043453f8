"""Processes that are forked from a rank share its connections: they refuse to communicate, and what
they hold on to does not keep others from learning that the rank is gone."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Any

import torch

from mesh_attention import Mask, mesh_attention
from support.cases import Case
from support.gloo_case import attend, context
from support.pool import WorkerPool

RANKS = 2
CASE = Case(RANKS, 12, 12, heads=(2, 2), head_dims=(4, 4), mask=Mask(causal=True))
SECONDS = 20.0  # for what takes none


def in_a_child(work: Callable[[], Any]) -> str:
    """What it returned or raised, in words; `hangs` where it did not end."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"returned {work()}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    ready, _, _ = select.select([reads], [], [], SECONDS)
    said = os.read(reads, 10_000).decode() if ready else "hangs"
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(reads)
    return said


def use_in_children(rank: int, world_size: int) -> tuple[list[str], list[str], bool]:
    """(what communicates, what does not, and whether the parents go on as before)"""
    cp = context(CASE)
    before = attend(cp, CASE)
    leaves = [cp.shard(x, 1).requires_grad_() for x in CASE.tensors()[:3]]
    out = cp.attention(*leaves)
    assert isinstance(out, torch.Tensor)
    refused = [
        in_a_child(lambda: cp.attention(*leaves)),
        in_a_child(lambda: torch.autograd.grad(out.sum(), leaves)),
        in_a_child(lambda: cp.unshard(leaves[0].detach(), 1)),
        in_a_child(lambda: mesh_attention(*leaves, causal=True)),
        in_a_child(lambda: context(CASE)),
    ]
    local = [
        in_a_child(cp.close),
        in_a_child(lambda: tuple(cp.shard(CASE.tensors()[0], 1).shape)),
    ]
    after = attend(cp, CASE)
    same = all(torch.equal(x, after.tensors[name]) for name, x in before.tensors.items())
    return refused, local, same


def test_a_forked_process_refuses_to_communicate_and_leaves_its_parent_alone(
    pool: WorkerPool,
) -> None:
    for refused, local, same in pool.run(use_in_children, RANKS):
        for told in refused:
            assert told.startswith("MeshAttentionError: this process was forked from process"), told
        assert local == ["returned None", "returned (1, 6, 2, 4)"]
        assert same
