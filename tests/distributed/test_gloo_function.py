"""`mesh_attention(q, k, v, ...)`: the truth again, with plans kept until `release` lets go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention import ContextParallel, Mask, release
from mesh_attention import mesh_attention as attend
from mesh_attention.runtime.execute.executor import Executor
from mesh_attention.runtime.session import session as sessions
from support.cases import Case
from support.gloo_case import Part, context, count_plans, whole
from support.pool import WorkerPool
from support.reference import attention, errors

CASE = Case(4, 48, 48, heads=(4, 2), batch=2, mask=Mask(causal=True))


def num_groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_map)


def shards(cp: ContextParallel, case: Case) -> list[Tensor]:
    q, k, v, _ = case.tensors()
    return [
        cp.shard(x, 1, side="q" if name == "q" else "kv").requires_grad_()
        for name, x in (("q", q), ("k", k), ("v", v))
    ]


def kept(rank: int, world_size: int) -> dict[str, Any]:
    made = count_plans()
    with context(CASE) as cp:
        inputs = shards(cp, CASE)
        wanted = cp.attention(*inputs)
    before = num_groups()
    made.clear()
    outputs, plans = [], []
    for _ in range(3):
        out = attend(*inputs, causal=True, method="mesh")
        assert isinstance(out, Tensor)
        torch.autograd.backward(out.sum())
        outputs.append(torch.equal(out, wanted))  # type: ignore[arg-type]
        plans.append(len(made))
    attend(*[x[:1] for x in inputs], causal=True, method="mesh")
    plans.append(len(made))
    attend(*inputs, causal=False, layout="zigzag", method="mesh")
    plans.append(len(made))
    during = num_groups() - before
    release()
    left = num_groups() - before
    attend(*inputs, causal=True, method="mesh")
    plans.append(len(made))
    release()
    release()
    return {"equal": outputs, "plans": plans, "during": during, "left": left}


def test_the_second_call_of_a_kind_plans_nothing_and_release_lets_go(pool: WorkerPool) -> None:
    for seen in pool.run(kept, 4):
        assert seen["equal"] == [True] * 3
        # The first call; then none, nor for another batch; another mask; again after release.
        assert seen["plans"] == [1, 1, 1, 1, 2, 3]
        assert seen["during"] > 0
        assert seen["left"] == 0


def held_by_autograd(rank: int, world_size: int) -> tuple[int, int]:
    """Executors before and after `release`, while a result can still be differentiated."""
    inputs = [torch.randn(1, 4, 2, 4, requires_grad=True) for _ in range(3)]
    gc.collect()
    # Tests before this one may have left some in the process.
    before = [thing for thing in gc.get_objects() if isinstance(thing, Executor)]
    out = attend(*inputs, causal=True, seq_len=8)
    results = [thing for thing in gc.get_objects() if isinstance(thing, Executor)]
    made = [weakref.ref(result) for result in results if not any(result is old for old in before)]
    del before, results
    release()
    gc.collect()
    left = sum(maker() is not None for maker in made)
    del out
    return len(made), left


def test_release_lets_go_of_executors_of_calls_that_only_autograd_holds(pool: WorkerPool) -> None:
    assert pool.run(held_by_autograd, 2) == [(2, 0)] * 2


def with_options(rank: int, world_size: int, case: Case, arguments: dict[str, Any]) -> Part:
    changes = {"layout": arguments.get("layout")}
    with context(case, **changes) as cp:
        inputs = shards(cp, case)
        grad_out = cp.shard(case.tensors()[3], 1)
        result = attend(*inputs, return_lse=True, **arguments)
        assert isinstance(result, tuple)
        out, lse = result
        grads = torch.autograd.grad(out, inputs, grad_out)
        names = ("out", "lse", "grad_q", "grad_k", "grad_v")
        tensors = dict(zip(names, (out.detach(), lse, *grads), strict=True))
        release()
        return Part(cp.rank, cp.positions(), cp.positions(side="kv"), tensors, {})


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        (CASE, {"causal": True}),
        (Case(4, 45, 45, mask=Mask(causal=True)), {"causal": True, "seq_len": 45}),
        (Case(4, 40, 24), {"causal": False}),
        (Case(4, 38, 24), {"causal": False, "seq_len": 38}),
        (
            Case(4, 38, 21, mask=Mask(causal=True)),
            {"causal": True, "seq_len": 38, "kv_seq_len": 21},
        ),
        (
            Case(4, 48, 48, mask=Mask(causal=True, window=(7, 0))),
            {"causal": True, "window_size": (7, 0)},
        ),
        (
            Case(4, 48, 48, mask=Mask(window=(None, 4))),
            {"causal": False, "window_size": (-1, 4), "layout": "striped"},
        ),
        (
            Case(4, 48, 48, mask=Mask(causal=True, documents=(0, 9, 48))),
            {"mask": Mask(causal=True, documents=(0, 9, 48)), "chunks": "2x2"},
        ),
    ],
)
def test_the_function_equals_the_truth(
    pool: WorkerPool, case: Case, arguments: dict[str, Any]
) -> None:
    parts = pool.run(with_options, 4, case, arguments)
    distances = errors(whole(parts, case), attention(*case.tensors(), case.mask))
    assert max(distances.values()) <= 1e-10, distances


def destroyed(rank: int, world_size: int) -> tuple[int, int]:
    """Contexts kept before and after a group is gone."""
    group = dist.new_group()
    inputs = [torch.randn(1, 4, 2, 4) for _ in range(3)]
    attend(*inputs, causal=True, seq_len=8, group=group)
    before = len(sessions._SESSIONS)
    dist.destroy_process_group(group)
    del group
    attend(*inputs, causal=True, seq_len=8)
    after = len(sessions._SESSIONS)
    release()
    return before, after


def test_what_is_kept_for_a_group_goes_with_the_group(pool: WorkerPool) -> None:
    assert pool.run(destroyed, 2) == [(1, 1)] * 2
