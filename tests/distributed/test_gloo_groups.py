"""Sub-groups with arbitrary ranks, several objects at a time, and nothing left after `close`."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mesh_attention import Mask, MeshAttentionError
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.runtime.transport.groups import backend_of, timeout_of
from mesh_attention.runtime.transport.make_group import make_group
from support.cases import Case
from support.gloo_case import Part, attend, context, expected_bytes, whole
from support.pool import WorkerPool
from support.reference import attention, errors, tolerance

CASE = Case(4, 45, 45, mask=Mask(causal=True), batch=2, options={"tile": (2, 2), "chunks": (2, 2)})
ODD = [6, 2, 0, 4]


def num_groups() -> int:
    """All process groups that this process knows of."""
    return len(torch.distributed.distributed_c10d._world.pg_map)


# torch 2.11 sorts the ranks of a group; a mesh keeps them as given everywhere.
KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
KINDS = ["sorted", *(["as given"] if KEEPS_ORDER else []), "mesh"]


def world_of_four(rank: int, world_size: int, case: Case) -> Part:
    with context(case) as cp:
        return attend(cp, case)


def backend_for_each_device(rank: int, world_size: int, case: Case) -> Part:
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    assert dist.get_backend(group) != "gloo", "the test shows nothing"
    assert backend_of(group) == "gloo"
    with context(case, group) as cp:
        return attend(cp, case)


@pytest.mark.parametrize(
    ("config", "gpu", "wanted"),
    [
        ("cuda:nccl", False, "nccl"),
        ("cpu:gloo,cuda:gloo,mps:gloo", True, "gloo"),
        ("cpu:gloo,cuda:nccl", True, "nccl"),
        ("cuda:nccl,cpu:gloo", False, "gloo"),
        ("cpu:gloo,xpu:xccl", True, "gloo"),
    ],
)
def test_the_backend_is_that_of_the_gpus_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, config: str, gpu: bool, wanted: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    monkeypatch.setattr(dist, "get_backend", lambda _: "undefined")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert backend_of(mock.Mock()) == wanted


def test_a_group_with_a_backend_for_each_device_is_like_any_other(pool: WorkerPool) -> None:
    results = pool.run(backend_for_each_device, 4, CASE)
    distances = errors(whole(results, CASE), attention(*CASE.tensors(), CASE.mask))
    assert max(distances.values()) <= tolerance(CASE.dtype)


def group_of_the_caller_after_ours(rank: int, world_size: int) -> list[int]:
    """Of each rank: how many others it meets in a group of the caller's that only its members make,
    while some ranks have made groups of ours."""
    pair, _ = (dist.new_group(members) for members in ([0, 1], [2, 3]))
    small = Case(2, 12, 12)
    met = []
    for _ in range(2):
        if rank < 2:
            cp = context(small, pair)
            attend(cp, small)
        everybody = dist.new_group(list(range(world_size)), use_local_synchronization=True)
        met.append(dist.get_world_size(everybody))
        dist.barrier(everybody)
        if rank < 2:
            cp.close()
    return met


def test_groups_that_the_caller_makes_afterwards_have_their_names(pool: WorkerPool) -> None:
    """Before torch 2.15 a name says how many groups a rank has."""
    assert pool.run(group_of_the_caller_after_ours, 4, seconds=30) == [[4, 4]] * 4


def sub_group(rank: int, world_size: int, case: Case, kind: str) -> tuple[int, Part | None]:
    """The place in the group, and the result of a member."""
    group: dist.ProcessGroup | DeviceMesh
    if kind == "mesh":
        group = DeviceMesh("cpu", ODD)
    else:
        order: dict[str, Any] = {} if kind == "sorted" else {"sort_ranks": False}
        group = dist.new_group(ODD, **order)
    if rank not in ODD:
        return -1, None
    place = dist.get_rank(group.get_group() if isinstance(group, DeviceMesh) else group)
    with context(case, group) as cp:
        whole = case.tensors()[0]
        assert torch.equal(cp.unshard(cp.shard(whole, 1), 1), whole)
        return place, attend(cp, case)


@pytest.mark.parametrize(
    ("kind", "combine"),
    [*zip(KINDS, (Combine.EXCHANGE, Combine.REDUCE_SCATTER) * 2, strict=False)],
)
def test_ranks_6_2_0_4_of_eight_give_the_result_of_a_world_of_four(
    pool: WorkerPool, kind: str, combine: Combine
) -> None:
    """Need 9."""
    case = Case(**{**vars(CASE), "options": {**CASE.options, "combine": combine}})
    expected = pool.run(world_of_four, 4, case)
    results = pool.run(sub_group, 8, case, kind)
    members = dict(result for result in results if result[1] is not None)
    assert set(members) == {0, 1, 2, 3}
    assert [rank for rank, result in enumerate(results) if result[1] is None] == [1, 3, 5, 7]
    for place, part in members.items():
        assert part.rank == place
        assert torch.equal(part.positions, expected[place].positions)
        for name, value in part.tensors.items():
            torch.testing.assert_close(value, expected[place].tensors[name], rtol=0, atol=1e-12)
        assert part.traffic == expected[place].traffic == expected_bytes(case)[place]
    if kind == "as given":
        assert results[6][0] == 0
    distances = errors(whole(list(members.values()), case), attention(*case.tensors(), case.mask))
    assert max(distances.values()) <= tolerance(case.dtype)


def two_at_once(rank: int, world_size: int, rows: Case, columns: Case) -> tuple[Part, Part]:
    """A 2 x 4 mesh of ranks: every rank takes part in its row and in its column, by turns."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    with context(rows, mesh["inner"]) as inner, context(columns, mesh["outer"]) as outer:
        attend(inner, rows)
        second = attend(outer, columns)
        inner.traffic["forward"].reset()
        inner.traffic["backward"].reset()
        return attend(inner, rows), second


def test_two_objects_on_different_sub_groups_work_at_the_same_time(pool: WorkerPool) -> None:
    rows = CASE
    columns = Case(2, 31, 31, mask=Mask(), heads=(8, 1), dtype=torch.float32)
    results = pool.run(two_at_once, 8, rows, columns)
    for case, which, groups in (
        (rows, 0, [range(4), range(4, 8)]),
        (columns, 1, [(i, i + 4) for i in range(4)]),
    ):
        for group in groups:
            parts = [results[rank][which] for rank in group]
            distances = errors(whole(parts, case), attention(*case.tensors(), case.mask))
            assert max(distances.values()) <= tolerance(case.dtype)
            assert [part.traffic for part in parts] == expected_bytes(case)


def open_and_close(rank: int, world_size: int, case: Case, times: int) -> list[tuple[int, int]]:
    seen = []
    for _ in range(times):
        before = num_groups()
        cp = context(case)
        attend(cp, case)
        during = num_groups()
        cp.close()
        cp.close()
        seen.append((during - before, num_groups() - before))
    return seen


def test_no_group_is_left_after_close_however_often(pool: WorkerPool) -> None:
    for seen in pool.run(open_and_close, 4, CASE, 4):
        # A row and a column of the 2 x 2 tile, forward and backward alike, and all ranks.
        assert seen == [(3, 0)] * 4


def interleaved(rank: int, world_size: int, case: Case) -> list[Part]:
    """Objects on the same ranks, closed in another order than they were made."""
    first, second, third = (context(case) for _ in range(3))
    parts = [attend(second, case), attend(first, case)]
    second.close()
    parts.append(attend(third, case))
    first.close()
    parts.append(attend(third, case))
    third.close()
    return parts


def test_objects_on_the_same_ranks_do_not_disturb_each_other(pool: WorkerPool) -> None:
    for parts in zip(*pool.run(interleaved, 4, CASE), strict=True):
        distances = errors(whole(list(parts), CASE), attention(*CASE.tensors(), CASE.mask))
        assert max(distances.values()) <= tolerance(CASE.dtype)


def use_after_close(rank: int, world_size: int, case: Case) -> list[str]:
    q, k, v, _ = case.tensors()
    cp = context(case)
    shards = [cp.shard(x, 1).requires_grad_() for x in (q, k, v)]
    out = cp.attention(*shards)
    cp.close()
    # What only reads the plan still answers.
    assert torch.equal(cp.shard(q, 1), shards[0])
    assert cp.positions().shape == cp.padding().shape == (shards[0].shape[1],)
    assert cp.volume().keys() == {"forward", "backward"}
    said = []
    uses: list[Callable[[], object]] = [
        lambda: cp.attention(*shards),
        lambda: out.sum().backward(),  # type: ignore[union-attr]
        lambda: cp.unshard(shards[0], 1),
    ]
    for use in uses:
        try:
            use()
        except MeshAttentionError as error:
            said.append(str(error))
    return said


def test_after_close_communication_is_refused_and_the_rest_still_answers(pool: WorkerPool) -> None:
    for said in pool.run(use_after_close, 4, CASE):
        assert len(said) == 3
        assert all("closed; make a new one" in answer for answer in said)


def close_after_destroy(rank: int, world_size: int, case: Case) -> None:
    cp = context(case)
    attend(cp, case)
    dist.destroy_process_group()
    cp.close()


def test_close_is_safe_after_the_caller_destroyed_all_groups(pool: WorkerPool) -> None:
    pool.run(close_after_destroy, 4, CASE)


def groups_timeouts(rank: int, world_size: int, case: Case) -> list[timedelta]:
    parent = dist.new_group(timeout=timedelta(seconds=23))
    with context(case, parent) as cp:
        attend(cp, case)
        return [timeout_of(group) for group in cp._calls.session.groups._made.values()]


def test_groups_inherit_the_timeout_of_the_callers_group(pool: WorkerPool) -> None:
    for timeouts in pool.run(groups_timeouts, 4, CASE):
        assert timeouts == [timedelta(seconds=23)] * 3


def after_the_group_was_destroyed(rank: int, world_size: int) -> str:
    case = Case(world_size, 16, 16, mask=Mask(causal=True), dtype=torch.float32)
    group = dist.new_group()
    cp = context(case, group)
    attend(cp, case)
    dist.destroy_process_group(group)
    try:
        attend(cp, case)
    except MeshAttentionError as error:
        return str(error)
    return "nothing"


def test_a_destroyed_process_group_is_named(pool: WorkerPool) -> None:
    for message in pool.run(after_the_group_was_destroyed, 2):
        assert "the process group of this call was destroyed" in message


def on_a_bound_job(rank: int, world_size: int, case: Case) -> tuple[Part | None, list[object]]:
    """What groups of ours are split off, as PyTorch is told."""
    default = c10d._get_default_group()
    group = dist.new_group([0, 1])
    default.bound_device_id = torch.device("cpu", 0)
    helper, seen = c10d._new_process_group_helper, list[object]()

    @functools.wraps(helper)
    def noting(*inputs: Any, **named: Any) -> Any:
        seen.append(default.bound_device_id)
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        return helper(*inputs, **named)

    part = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_new_process_group_helper", noting)
        patch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # the caller's own
        patch.delenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", raising=False)
        before = dict(os.environ)
        if rank < 2:
            with context(case, group) as cp:
                part = attend(cp, case)
        assert dict(os.environ) == before
    assert default.bound_device_id == torch.device("cpu", 0)
    return part, seen


def test_no_group_is_split_off_a_job_that_is_bound_to_a_device(pool: WorkerPool) -> None:
    case = Case(2, 31, 31, mask=Mask(causal=True))
    results = pool.run(on_a_bound_job, 3, case)
    for part, seen in results[:2]:
        assert part is not None
        assert seen
        assert set(seen) == {None}
    assert results[2] == (None, [])


def late_at_a_group(rank: int, world_size: int, case: Case) -> list[str]:
    """The last rank comes to the group when the others have given up:
    they wait for a second there, and not for that timeout, which all else has."""

    def late(ranks: Any, name: str, backend: str, limit: timedelta, store: Any) -> Any:
        if limit == timedelta(seconds=30):
            limit = timedelta(seconds=1)
            time.sleep(2.0 if rank == world_size - 1 else 0.0)
        return make_group(ranks, name, backend, limit, store)

    messages = []
    with mock.patch("mesh_attention.runtime.transport.groups.make_group", late):
        cp = context(case, timeout=timedelta(seconds=30))
        for _ in range(2):
            try:
                attend(cp, case)
                messages.append("nothing")
            except MeshAttentionError as error:
                messages.append(str(error))
    return messages


def test_a_rank_that_is_late_at_a_group_is_told_to_all(pool: WorkerPool) -> None:
    """Those who came say no word of PyTorch's own alone, and the late one not that the store has
    been stopped."""
    case = Case(3, 24, 24, mask=Mask(), options={"method": "ring"})
    for first, second in pool.run(late_at_a_group, 3, case):
        assert first.startswith("ranks [0, 1, 2] were to make a process group")
        assert "did not all come within the timeout of 30 s" in first
        assert "were to make a process group" in second  # the cause of all that follows
