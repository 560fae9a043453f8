"""A context outlives plans: a mask that is new with every batch makes a new plan, nothing else."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention import ContextParallel, Mask, mesh_attention, register_kernel, release
from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import Block, unregister
from mesh_attention.kernels.reference import Reference
from mesh_attention.runtime.session import calls
from mesh_attention.runtime.session import session as sessions
from mesh_attention.runtime.session.caches import NUM_CALLS, LruCache
from support.cases import Case
from support.gloo_case import attend, context, count_plans, whole
from support.held import grown, resources
from support.pool import WorkerPool
from support.reference import attention, errors, tolerance

CASE = Case(4, 45, 45, mask=Mask(causal=True), options={"tile": (2, 2)})


def batch(number: int, world_size: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Another length and other documents with every number, alike on all ranks."""
    tokens = world_size * (4 + number % 50)
    cut = 1 + number % (tokens - 1)
    source = torch.Generator().manual_seed(number)
    q, k, v = (torch.randn(1, tokens, 1, 4, generator=source) for _ in range(3))
    return [q, k, v], {"mask": Mask(causal=True, documents=(0, cut, tokens)), "causal": True}


def by_function(number: int, world_size: int) -> None:
    tensors, inputs = batch(number, world_size)
    own = [x.chunk(world_size, 1)[dist.get_rank()].clone().requires_grad_() for x in tensors]
    out = mesh_attention(*own, layout="contiguous", **inputs)
    if number % 4 == 0:
        out.sum().backward()  # type: ignore[union-attr]


def by_object(number: int, world_size: int) -> None:
    """Dropped without being closed."""
    tensors, inputs = batch(number, world_size)
    sizes: dict[str, Any] = {"seq_len": tensors[0].shape[1], "num_heads": 1, "head_dim": 4}
    cp = ContextParallel(**sizes, dtype=torch.float32, **inputs)
    own = [cp.shard(x, 1).requires_grad_() for x in tensors]
    out = cp.attention(*own)
    if number % 4 == 0:
        out.sum().backward()  # type: ignore[union-attr]


def many_kinds(rank: int, world_size: int, way: str, times: int, most: int) -> tuple[Any, ...]:
    use = by_function if way == "function" else by_object
    with (
        mock.patch.multiple(sessions, NUM_PLANS=most, NUM_CALLS=most),
        mock.patch.object(calls, "NUM_CALLS", most),
    ):
        for number in range(8):
            use(number, world_size)
        begin = resources()
        for number in range(8, times):
            use(number % 1000, world_size)
        end = resources()
    assert dist.group.WORLD is not None
    shared = sessions.session_of(dist.group.WORLD)
    kept = (len(shared.plans), len(shared.calls._caches[False]), len(shared.asked))
    gc.collect()
    return begin, end, kept, len(shared.calls._living)


@pytest.mark.parametrize("way", ["function", pytest.param("objects", marks=pytest.mark.slow)])
def test_20_lengths_and_masks_leave_nothing_behind_but_what_is_kept(
    pool: WorkerPool, way: str
) -> None:
    """More than what is kept here, which is less than usual, and what warms up."""
    check_many(pool, way, 20, most=10)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["function", "objects"])
def test_10_000_calls_with_1_000_lengths_and_masks_leave_nothing_behind(
    pool: WorkerPool, way: str
) -> None:
    check_many(pool, way, 10_000, most=sessions.NUM_PLANS, seconds=1800)


def check_many(pool: WorkerPool, way: str, times: int, *, most: int, seconds: float = 60) -> None:
    for begin, end, kept, living in pool.run(many_kinds, 2, way, times, most, seconds=seconds):
        assert grown(begin, end) == {}
        assert kept == (most, most, most if way == "function" else 0)
        assert living == most


def test_64_plans_and_kinds_of_call_are_kept() -> None:
    assert (sessions.NUM_PLANS, NUM_CALLS) == (64, 64)


def warm(rank: int, world_size: int) -> tuple[int, int]:
    """Plans made and agreements held by the second call of a kind."""
    with context(CASE) as cp:
        attend(cp, CASE)
        shared = cp._calls.session
        rounds, plans, made = shared.handshake._rounds, len(shared.plans), count_plans()
        attend(cp, CASE)
        return shared.handshake._rounds - rounds, len(shared.plans) - plans + len(made)


def test_a_warm_call_plans_nothing_and_agrees_on_nothing(pool: WorkerPool) -> None:
    assert pool.run(warm, 4) == [(0, 0)] * 4


def two_objects(rank: int, world_size: int) -> dict[str, Any]:
    first, second = context(CASE), context(CASE)
    with context(replace(CASE, q_tokens=61, kv_tokens=61)) as third:
        attend(first, CASE)
        before, rounds = resources(), first._calls.session.handshake._rounds
        attend(second, CASE)
        warm = first._calls.session.handshake._rounds == rounds
        attend(third, replace(CASE, q_tokens=61, kv_tokens=61))
        during = resources()
        moved = [cp.traffic["forward"].total for cp in (first, second)]
        first.close()
        second.close()
        part = attend(third, replace(CASE, q_tokens=61, kv_tokens=61))
        seen = {
            "shared": first._calls.session is second._calls.session is third._calls.session,
            "warm": warm,
            "grown": grown(before, during),
            "groups": len(third._calls.session.groups),
            "counted apart": moved[0] == moved[1] and moved[0].sent_bytes > 0,
            "part": part,
        }
    seen["left"] = len(third._calls.session.groups)
    return seen


def test_objects_on_one_group_share_its_process_groups_and_kinds_of_call(pool: WorkerPool) -> None:
    results = pool.run(two_objects, 4)
    for seen in results:
        assert seen["shared"]
        assert seen["warm"]
        assert seen["grown"] == {}
        assert seen["groups"] == 3  # a row, a column, and all ranks
        assert seen["counted apart"]
        assert seen["left"] == 0
    longer = replace(CASE, q_tokens=61, kv_tokens=61)
    truth = attention(*longer.tensors(), longer.mask)
    distances = errors(whole([seen["part"] for seen in results], longer), truth)
    assert max(distances.values()) <= tolerance(CASE.dtype)


def held_backward(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    """(gradients as if called at once, their kind of call was let go, and goes with the graph)"""
    case = replace(CASE, ranks=world_size, options={})
    with context(case) as cp:
        at_once = attend(cp, case)
        tensors = case.tensors()
        leaves = [cp.shard(x, 1).requires_grad_() for x in tensors[:3]]
        out = cp.attention(*leaves)
        assert isinstance(out, Tensor)
        shared = cp._calls.session
        (kind,) = shared.calls._caches[False].values()
        (call,) = kind.calls.values()
        held = weakref.ref(call)
        del call, kind
        for number in range(70):
            by_function(number, world_size)
        kept = [
            call for kind in shared.calls._caches[False].values() for call in kind.calls.values()
        ]
        gone = held() not in kept
        del kept
        grads = torch.autograd.grad(out, leaves, cp.shard(tensors[3], 1))
        names = ("grad_q", "grad_k", "grad_v")
        same = all(torch.equal(g, at_once.tensors[n]) for g, n in zip(grads, names, strict=True))
        alive = held() is not None
        del out, grads
        gc.collect()
        release()
        return same, gone and alive, held() is None


@pytest.mark.slow
def test_a_backward_pass_runs_after_70_other_kinds_of_call(pool: WorkerPool) -> None:
    assert pool.run(held_backward, 2) == [(True, True, True)] * 2


def dropped(rank: int, world_size: int) -> list[dict[str, int]]:
    results = []
    for _ in range(6):
        attend(context(CASE), CASE)
        results.append(resources())
    return results


def test_objects_that_are_dropped_without_close_hold_one_context(pool: WorkerPool) -> None:
    for results in pool.run(dropped, 4):
        assert results[0]["groups"] == 4
        assert results[1:] == [results[1]] * 5
        assert {**results[0], "keys": 0} == {**results[1], "keys": 0}


def closed_on_one_rank(rank: int, world_size: int) -> str:
    cp = context(CASE)
    attend(cp, CASE)
    if rank == 1:
        cp.close()
    try:
        context(CASE)
    except ValueError as error:
        return str(error)
    return ""


def test_a_context_that_one_rank_has_released_is_named(pool: WorkerPool) -> None:
    for said in pool.run(closed_on_one_rank, 4):
        assert "rank 1 of the group [0, 1, 2, 3] disagrees" in said
        assert "number of releases of this group is 1 there, 0 elsewhere" in said


def test_the_latest_are_kept_in_the_order_of_their_use() -> None:
    latest: LruCache[int, str] = LruCache(2)
    made = []
    for key in (1, 2, 1, 3, 1, 2):
        if latest.find(key) is None:
            made.append(latest.keep(key, str(key)))
    assert made == ["1", "2", "3", "2"]
    assert [*latest] == [1, 2]
    assert latest.find(3) is None


class Slow(Reference):
    name = "slow"
    seconds = 0.0

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        seconds, self.seconds = self.seconds, 0.0
        time.sleep(seconds)
        return super().forward(block)


def other_timeouts(rank: int, world_size: int) -> tuple[list[int], list[str]]:
    """Process groups of objects with different timeouts, and what they say: rank 0 is late in one
    call of each, after which an object with the timeout of the group gives up."""
    kernel = Slow()
    register_kernel(kernel)
    case = Case(world_size, 32, 32, mask=Mask(causal=True), options={"method": "ring"})
    group = dist.new_group(timeout=timedelta(seconds=2))
    patient = context(case, group, kernel="slow", timeout=timedelta.max)
    hasty = context(case, group, kernel="slow")
    num_groups, said = [], []
    for cp, seconds in ((patient, 0.0), (hasty, 0.0), (patient, 2.5), (hasty, 3.0)):
        kernel.seconds = 0.0 if rank else seconds
        try:
            attend(cp, case)
            said.append("nothing")
            num_groups.append(len(cp._calls.session.groups))
        except MeshAttentionError as error:
            said.append(str(error))
    unregister("slow")
    return num_groups, said


def test_calls_wait_as_long_as_their_timeout_says_on_one_process_group(pool: WorkerPool) -> None:
    for num_groups, said in pool.run(other_timeouts, 3):
        assert num_groups == [1, 1, 1]
        assert said[:3] == ["nothing"] * 3
        assert "KV-" in said[3]  # the transfer


def called_crosswise(rank: int, world_size: int) -> tuple[str, float]:
    """By objects with different timeouts."""
    case = Case(world_size, 32, 32, mask=Mask(causal=True), options={"method": "ring"})
    objects = [context(case, timeout=timedelta(seconds=seconds)) for seconds in (40, 50)]
    for cp in objects:
        attend(cp, case)
    begun = time.monotonic()
    with pytest.raises(MeshAttentionError) as raised:
        attend(objects[rank == 0], case)
    return str(raised.value), time.monotonic() - begun


def test_objects_with_different_timeouts_called_crosswise_are_told_at_once(
    pool: WorkerPool,
) -> None:
    for said, seconds in pool.run(called_crosswise, 3):
        assert "rank 0 of the group [0, 1, 2] disagrees: number of the object is 2 there" in said
        assert seconds < 5


class Counting(Reference):
    """A kernel that is registered again and again under one name."""

    name = "counting"

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().forward(block)


def register_again(rank: int, world_size: int) -> list[bool]:
    results = []
    with context(CASE):
        for _ in range(2):
            kernel = Counting()
            register_kernel(kernel)
            with context(CASE, kernel="counting") as cp:
                attend(cp, CASE)
            unregister("counting")
            results.append(kernel.calls > 0)
    return results


def test_objects_made_after_a_kernel_was_registered_anew_use_the_new_one(pool: WorkerPool) -> None:
    assert pool.run(register_again, 4) == [[True, True]] * 4
