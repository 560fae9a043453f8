"""Shared memory between ranks of one GPU: where it is used, that it grows, and what is told."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mesh_attention import Mask
from mesh_attention.plan.methods.parts.reduce import Combine
from support.cases import Case
from support.gloo_case import Part, attend, context, whole
from support.gpu_case import LIMIT, SECONDS, check, relative_errors, warm_call
from support.pool import WorkerPool
from support.raised import Raised, all_raised, raised_by
from support.reference import attention

pytestmark = pytest.mark.gpu

CASE = Case(
    4,
    512,
    512,
    heads=(8, 2),
    head_dims=(64, 64),
    mask=Mask(causal=True),
    dtype=torch.bfloat16,
    options={"tile": (2, 2), "chunks": (2, 2)},
)


@pytest.mark.parametrize("combine", list(Combine))
def test_every_combine_mode_over_shared_memory_equals_the_truth(
    gpu_pool: WorkerPool, combine: Combine
) -> None:
    check(gpu_pool, [replace(CASE, options={"combine": combine, "chunks": (3, 2)})], "symmetric")


def grow(rank: int, world_size: int, case: Case) -> list[Part]:
    """Calls that need more and more memory, and then less, through one object."""
    parts = []
    with context(case, transport="symmetric") as cp:
        for dtype in (torch.bfloat16, torch.float32):
            for batch in (1, 3, 2):
                parts.append(attend(cp, replace(case, dtype=dtype, batch=batch), "cuda"))
    return parts


def test_shared_memory_grows_with_the_calls(gpu_pool: WorkerPool) -> None:
    for parts in zip(*gpu_pool.run(grow, 4, CASE, seconds=SECONDS), strict=True):
        out = parts[0].tensors["out"]
        fed = replace(CASE, dtype=out.dtype, batch=out.shape[0])
        result = relative_errors(whole(list(parts), fed), attention(*fed.tensors(), fed.mask))
        assert max(result.values()) <= LIMIT[out.dtype], (result, fed)


def twice(rank: int, world_size: int, case: Case) -> bool:
    torch.use_deterministic_algorithms(True)
    try:
        with context(case, transport="symmetric") as cp:
            first, second = attend(cp, case, "cuda"), attend(cp, case, "cuda")
    finally:
        torch.use_deterministic_algorithms(False)
    return all(torch.equal(x, second.tensors[name]) for name, x in first.tensors.items())


def test_two_runs_over_shared_memory_are_bit_equal(gpu_pool: WorkerPool) -> None:
    for combine in (Combine.EXCHANGE, Combine.REDUCE_SCATTER):
        case = replace(CASE, options={**CASE.options, "combine": combine})
        assert all(gpu_pool.run(twice, 4, case, seconds=SECONDS))


def test_groups_that_leave_the_node_go_over_the_network(gpu_pool: WorkerPool) -> None:
    case = replace(CASE, options={**CASE.options, "ranks_per_node": 2})
    for (ran,) in check(gpu_pool, [case], "auto"):
        chosen = {name for name, _ in ran.transports.values()}
        assert chosen == {"symmetric", "distributed"}, ran.transports
        reasons = [why for name, why in ran.transports.values() if name == "distributed"]
        assert all("is on another node than ranks" in why for why in reasons), reasons


def test_a_ring_is_cut_at_the_edge_of_the_node(gpu_pool: WorkerPool) -> None:
    options = {"method": "ring", "ranks_per_node": 2}
    check(gpu_pool, [replace(CASE, options=options)], "auto")


def sub_group(rank: int, world_size: int, case: Case) -> Part | None:
    """A group of some ranks, whose histories then differ from those of the others."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    with context(case, group, transport="symmetric") as cp:
        return attend(cp, case, "cuda")


def test_ranks_with_different_histories_can_share_memory(gpu_pool: WorkerPool) -> None:
    pair = replace(CASE, ranks=2, options={})
    parts = [p for p in gpu_pool.run(sub_group, 4, pair, seconds=SECONDS) if p is not None]
    result = relative_errors(whole(parts, pair), attention(*pair.tensors(), pair.mask))
    assert max(result.values()) <= LIMIT[pair.dtype]
    check(gpu_pool, [CASE], "symmetric")


def not_allowed(
    rank: int, world_size: int, case: Case
) -> tuple[Raised, dict[str, tuple[str, str]]]:
    """PyTorch reads this variable when ranks show each other their memory."""
    allowed = os.environ.pop("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    try:
        forced = context(case, transport="symmetric")
        raised = raised_by(lambda: attend(forced, case, "cuda"), forced)
        forced.close()
        with context(case) as cp:
            attend(cp, case, "cuda")
            return raised, cp.transports()
    finally:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = allowed


def test_what_is_impossible_is_refused_or_done_otherwise_with_a_reason(
    gpu_pool: WorkerPool,
) -> None:
    results = gpu_pool.run(not_allowed, 2, replace(CASE, ranks=2, options={}), seconds=SECONDS)
    all_raised([raised for raised, _ in results])
    for raised, transports in results:
        assert "transport='symmetric' is not possible" in raised.error
        assert "overlapping devices" in raised.error
        for name, reason in transports.values():
            assert name == "distributed"
            assert "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1" in reason


def across_nodes(rank: int, world_size: int, case: Case) -> Raised:
    with context(case, transport="symmetric") as cp:
        return raised_by(lambda: attend(cp, case, "cuda"), cp)


def test_a_plan_that_leaves_the_node_cannot_be_forced_into_it(gpu_pool: WorkerPool) -> None:
    case = replace(CASE, options={**CASE.options, "ranks_per_node": 2})
    raised = gpu_pool.run(across_nodes, 4, case, seconds=SECONDS)
    all_raised(raised)
    assert all("on another node" in failure.error for failure in raised)


def test_a_warm_call_over_shared_memory_never_stops_the_host(gpu_pool: WorkerPool) -> None:
    options = {"transport": "symmetric"}
    counts = gpu_pool.run(
        warm_call, 2, replace(CASE, ranks=2, options={}), options, seconds=SECONDS
    )
    assert all(counts)
