"""The choice of a transport over real processes: one decision for all, and a reason to read."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mesh_attention import Mask
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.transport import shared_memory
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.shared_memory import SharedMemory
from support.cases import Case
from support.gloo_case import attend, context
from support.pool import WorkerPool
from support.raised import Raised, all_raised, raised_by

CASE = Case(4, 40, 40, mask=Mask(causal=True), options={"tile": (2, 2)})


def choices(rank: int, world_size: int, transport: str) -> dict[str, tuple[str, str]]:
    with context(CASE, transport=transport) as cp:
        assert cp.transports() == {}  # nothing has been called yet
        attend(cp, CASE)
        return cp.transports()


@pytest.mark.parametrize(
    ("transport", "why"),
    [("auto", "on the cpu"), ("distributed", "transport='distributed' was asked for")],
)
def test_every_group_says_which_transport_it_has_and_why(
    pool: WorkerPool, transport: str, why: str
) -> None:
    for results in pool.run(choices, 4, transport):
        assert any(name.startswith("forward ") for name in results)
        assert any(name.startswith("backward ") for name in results)
        assert all(name == "distributed" and why in reason for name, reason in results.values())


def wanted(rank: int, world_size: int, by_rank: list[Any]) -> Raised:
    def call() -> None:
        with context(CASE, transport=by_rank[rank]) as cp:
            attend(cp, CASE)

    return raised_by(call)


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        (["symmetric"] * 4, "transport='symmetric' is not possible: the tensors are on the cpu"),
        (["auto", "auto", "distributed", "auto"], "transport is 'distributed' there, 'auto'"),
        (["auto", "pigeon", "auto", "auto"], "transport='pigeon' is unknown; known: auto"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(
    pool: WorkerPool, by_rank: list[Any], message: str
) -> None:
    raised = pool.run(wanted, 4, by_rank)
    all_raised(raised)
    assert all(message in failure.error for failure in raised), raised


def test_one_rank_needs_no_transport(pool: WorkerPool) -> None:
    assert pool.run(alone, 1) == [{}]


def alone(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    changed = replace(CASE, ranks=1, options={})
    with context(changed, transport="symmetric") as cp:
        attend(cp, changed)
        return cp.transports()


class Plain:
    """Stands in for a block of symmetric memory; `fails` says where something goes wrong."""

    fails: tuple[int, str] = (-1, "")
    me = -1

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._step("allocate")
        self.own = torch.empty(num_bytes, dtype=torch.uint8)
        self.released = False

    def connect(self, *inputs: Any) -> None:
        self._step("connect")

    def connected(self) -> None: ...

    def release(self) -> None:
        self.released = True

    def _step(self, name: str) -> None:
        if self.fails == (self.me, name):
            raise RuntimeError(f"cannot {name}\nand more lines")


def share(rank: int, world_size: int, fails: tuple[int, str]) -> tuple[str, bool, list[int]]:
    """What is wrong, whether all share, and the size of the block after calls of several sizes."""
    Plain.fails, Plain.me = fails, rank
    group = torch.distributed.group.WORLD
    assert group is not None
    node, limit = range(world_size), timedelta(seconds=20)
    memory = SharedMemory(Groups(group), node, limit, Workspace())
    torch.distributed.barrier()
    cpu = torch.device("cpu")
    sizes = []
    unable = "no good" if fails == (rank, "begin") else None
    with patch.multiple(shared_memory, SymmetricBlock=Plain, obstacle=lambda device: unable):
        for workspace, staging in ((100, 10), (50, 30), (1000, 1), (900, 30)):
            if memory.meet(cpu):
                memory.grow(workspace, staging, cpu)
                sizes.append(0 if memory.block is None else memory.block.own.numel())
    return memory.reason, memory.covers(range(world_size)), sizes


@pytest.mark.parametrize("step", ["begin", "allocate", "connect"])
def test_a_failure_of_one_rank_is_told_to_all(pool: WorkerPool, step: str) -> None:
    results = pool.run(share, 3, (1, step))
    reasons = {reason for reason, _, _ in results}
    assert len(reasons) == 1
    assert reasons.pop().startswith("rank 1: ")
    assert not any(covered for _, covered, _ in results)


def test_a_block_grows_to_the_largest_call_and_never_shrinks(pool: WorkerPool) -> None:
    for reason, covered, sizes in pool.run(share, 3, (-1, "")):
        assert reason == ""
        assert covered
        # Workspaces in steps of 256 bytes, then the most that was ever staged.
        assert sizes == [256 + 10, 256 + 30, 1024 + 30, 1024 + 30]


def left_to_gloo(rank: int, world_size: int) -> int:
    """How many collectives torch.distributed was asked for, in groups of two."""
    case = replace(CASE, options={"tile": (2, 2), "combine": "reduce-scatter"})
    where = "mesh_attention.runtime.transport.distributed"
    with (
        patch(f"{where}.reduce_scatter") as reduced,
        patch(f"{where}.all_gather") as gathered,
        context(case) as cp,
    ):
        attend(cp, case)
        for kind in ("AllGather", "ReduceScatter"):
            assert cp.traffic["forward"].by_operation[kind].sent_bytes > 0
        return reduced.call_count + gathered.call_count


def test_gloo_is_not_asked_to_reduce_nor_to_gather_between_two_ranks(pool: WorkerPool) -> None:
    """Its reduce-scatter is an all-reduce, which moves all twice; in a gather of two the directions
    of a link take turns."""
    assert pool.run(left_to_gloo, 4) == [0] * 4
