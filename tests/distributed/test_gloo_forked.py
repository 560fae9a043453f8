"""Processes that are forked from a rank share its connections: they refuse to communicate, and what
they hold on to does not keep others from learning that the rank is gone."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch

from mesh_attention import Mask, MeshAttentionError, mesh_attention
from mesh_attention.runtime.execute.executor import Executor
from mesh_attention.runtime.transport.groups import default_store
from support.cases import Case
from support.gloo_case import attend, context
from support.pool import WorkerPool

RANKS = 2
CASE = Case(RANKS, 12, 12, heads=(2, 2), head_dims=(4, 4), mask=Mask(causal=True))
SECONDS = 20.0  # for what takes none
ODD = 1
LONG_SECONDS = 50.0


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
        for message in refused:
            assert message.startswith("MeshAttentionError: this process was forked from process"), (
                message
            )
        assert local == ["returned None", "returned (1, 6, 2, 4)"]
        assert same


def out_of_memory(*_: object) -> NoReturn:
    raise MemoryError("none left")


def children_outlive_a_fault(rank: int, world_size: int, how: str) -> tuple[str, float]:
    """(what is told, after how many seconds), while forked processes hold all connections."""
    case = replace(CASE, ranks=world_size, options={"method": "ring"})
    cp = context(case)
    attend(cp, case)
    child = os.fork()
    if child == 0:
        time.sleep(LONG_SECONDS)
        os._exit(0)
    store = default_store()
    store.set(f"child {rank}", str(child))
    children = [int(store.get(f"child {number}")) for number in range(world_size)]
    if rank == ODD and how == "ends":
        os.kill(os.getpid(), signal.SIGKILL)
    message, begun, run = "nothing", time.monotonic(), Executor.run
    try:
        if rank == ODD:
            Executor.run = out_of_memory  # type: ignore[method-assign, assignment]
        attend(cp, case)
    except (MeshAttentionError, MemoryError) as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        Executor.run = run  # type: ignore[method-assign]
    passed = time.monotonic() - begun
    store.set(f"told {rank}", "")
    if rank == 0:
        store.get("told 2")
        for each in children:
            os.kill(each, signal.SIGKILL)
    return message, passed


@pytest.mark.parametrize("how", ["raises", "ends"])
def test_processes_that_a_rank_forked_do_not_keep_its_fault_from_the_others(
    pool: WorkerPool, how: str
) -> None:
    results = pool.run(
        *(children_outlive_a_fault, 3, how),
        group_seconds=LONG_SECONDS,
        may_end=(ODD,) if how == "ends" else (),
    )
    for rank in (0, 2):
        message, seconds = results[rank]
        cause = "has ended" if how == "ends" else "broke off a call: MemoryError: none left"
        assert message.startswith(f"CommunicationError: rank {ODD} {cause}"), message
        assert seconds < LONG_SECONDS / 2
