"""Ranks that are out of step: no result is made from another call's data.

Every kind of call here was agreed on before. Ranks that then differ raise, all of them, before any
data moves, and name the odd one. If they differ in what they call with, the right call works
afterwards; if they are at different points of their programs nothing does, since they would stay
so, and calls of different batches would look alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention import ContextParallel, Mask, MeshAttentionError, mesh_attention
from support.cases import Case
from support.gloo_case import attend, context, whole
from support.pool import WorkerPool
from support.raised import Raised, all_raised, raised_by
from support.reference import attention, errors

RANKS, ODD = 4, 2
CASE = Case(RANKS, 40, 40, mask=Mask(causal=True), dtype=torch.float32, batch=2)
Leaves = list[Tensor]


def leaves(cp: ContextParallel, case: Case = CASE) -> Leaves:
    return [cp.shard(x, 1).requires_grad_() for x in case.tensors()[:3]]


def out_of(cp: ContextParallel, tensors: Leaves, **options: Any) -> Tensor:
    out = cp.attention(*tensors, **options)
    assert isinstance(out, Tensor)
    return out


def mixed_kinds(cp: ContextParallel, change: Callable[[Tensor], Tensor]) -> Callable[[bool], Any]:
    """Two kinds of call that all ranks know."""
    usual = leaves(cp)
    other = [change(x) for x in usual]
    out_of(cp, usual)
    out_of(cp, other)
    return lambda odd: out_of(cp, other if odd else usual)


def half_batch(cp: ContextParallel) -> Callable[[bool], Any]:
    return mixed_kinds(cp, lambda x: x[:1].detach().requires_grad_())


def two_halves(cp: ContextParallel) -> Callable[[bool], Any]:
    """Types of one size: nothing but the numbers would tell them apart."""
    small = Case(RANKS, 8, 8, heads=(1, 1), mask=Mask(causal=True), dtype=torch.bfloat16)
    with context(small) as own:
        arguments = {
            t: [x.to(t) for x in leaves(own, small)] for t in (torch.bfloat16, torch.float16)
        }
        for part in arguments.values():
            out_of(own, part)
    again = context(small)
    return lambda odd: out_of(again, arguments[torch.float16 if odd else torch.bfloat16])


def needs_grad(cp: ContextParallel) -> Callable[[bool], Any]:
    return mixed_kinds(cp, Tensor.detach)


def opposite_order(cp: ContextParallel) -> Callable[[bool], Any]:
    second = context(CASE)
    tensors = leaves(cp)
    out_of(cp, tensors)
    out_of(second, tensors)
    return lambda odd: out_of(second if odd else cp, tensors)


def other_label(cp: ContextParallel) -> Callable[[bool], Any]:
    """A rank has skipped a layer: its next call looks like that of the others."""
    tensors = leaves(cp)
    out_of(cp, tensors, label=0)
    return lambda odd: out_of(cp, tensors, label=2 if odd else 1)


def forward_and_backward(cp: ContextParallel) -> Callable[[bool], Any]:
    tensors = leaves(cp)
    out = out_of(cp, tensors)

    def call(odd: bool) -> Any:
        if not odd:
            return out_of(cp, tensors)
        return torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)

    return call


def backward_of_another_call(cp: ContextParallel) -> Callable[[bool], Any]:
    tensors = leaves(cp)
    outs = [out_of(cp, tensors) for _ in range(2)]
    return lambda odd: torch.autograd.grad(
        outs[odd], tensors, torch.ones_like(outs[odd]), retain_graph=True
    )


def unsharded(cp: ContextParallel, change: Callable[[Tensor], Tensor]) -> Callable[[bool], Any]:
    x = leaves(cp)[0].detach()
    cp.unshard(x, 1)
    cp.unshard(change(x), 1)
    return lambda odd: cp.unshard(change(x) if odd else x, 1)


def unshard_whole_numbers(cp: ContextParallel) -> Callable[[bool], Any]:
    return unsharded(cp, lambda x: x.int())


def unshard_narrow(cp: ContextParallel) -> Callable[[bool], Any]:
    return unsharded(cp, lambda x: x[..., :2])


def unshard_and_attention(cp: ContextParallel) -> Callable[[bool], Any]:
    tensors = leaves(cp)
    out_of(cp, tensors)
    cp.unshard(tensors[0], 1)
    return lambda odd: cp.unshard(tensors[0], 1) if odd else out_of(cp, tensors)


MIXED: dict[str, tuple[Callable[[ContextParallel], Callable[[bool], Any]], str]] = {
    "batch": (half_batch, "batch is 1 there, 2 elsewhere"),
    "dtype": (two_halves, "dtype is 'torch.float16' there, 'torch.bfloat16' elsewhere"),
    "gradients": (needs_grad, "needs_grad is False there, True elsewhere"),
    "objects": (opposite_order, "number of the object is 2 there, 1 elsewhere"),
    "label": (other_label, "label is '2' there, '1' elsewhere"),
    "pass": (forward_and_backward, "pass is 'backward' there, 'forward' elsewhere"),
    "backward": (backward_of_another_call, "number of its forward call is 2 there, 1 elsewhere"),
    "unshard dtype": (unshard_whole_numbers, "dtype is 'torch.int32' there"),
    "unshard width": (unshard_narrow, "shape is [2, 10, 4, 2] there, [2, 10, 4, 8] elsewhere"),
    "unshard": (unshard_and_attention, "pass is 'unshard' there, 'forward' elsewhere"),
}


OF_ORDER = ("objects", "label", "pass", "backward", "unshard")


def mix(rank: int, world_size: int, name: str) -> tuple[Raised, Any]:
    with context(CASE) as cp:
        call = MIXED[name][0](cp)
        raised = raised_by(lambda: call(rank == ODD))
        if name in OF_ORDER:
            return raised, raised_by(lambda: attend(cp, CASE)).error
        return raised, attend(cp, CASE)


@pytest.mark.parametrize("name", MIXED)
def test_ranks_at_different_calls_raise_on_all_and_name_the_odd_one(
    pool: WorkerPool, name: str
) -> None:
    raised, parts = zip(*pool.run(mix, RANKS, name), strict=True)
    if name in OF_ORDER:  # all groups were given up, and none was made
        assert all(failure.groups < 0 for failure in raised)
        raised = tuple(replace(failure, groups=0) for failure in raised)
    all_raised(list(raised))
    for outcome in raised:
        assert outcome.kind == "DisagreementError"
        assert f"rank {ODD} of the group [0, 1, 2, 3] disagrees" in outcome.error
        assert MIXED[name][1] in outcome.error
        assert outcome.seconds < 5
    if name in OF_ORDER:
        for said in parts:
            assert "the ranks of this process group are out of step since an earlier call" in said
            assert MIXED[name][1] in said
            assert "everything on this group is refused" in said
        return
    distances = errors(whole(list(parts), CASE), attention(*CASE.tensors(), CASE.mask))
    assert max(distances.values()) <= 1e-5


def one_batch_ahead(rank: int, world_size: int) -> list[str]:
    """A rank skips one backward pass; every rank catches what it is told and goes on with the next
    batch. What each batch came to."""
    cp, results = context(CASE), []
    for batch in range(4):
        tensors = [x * (batch + 1) for x in leaves(cp)]
        try:
            out = out_of(cp, tensors, label=0)
            if rank != ODD or batch != 1:
                torch.autograd.grad(out, tensors, torch.ones_like(out))
            results.append("made")
        except MeshAttentionError as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def test_ranks_that_are_out_of_step_by_a_batch_never_get_back_in_step_in_silence(
    pool: WorkerPool,
) -> None:
    for rank, (first, *others) in enumerate(pool.run(one_batch_ahead, RANKS)):
        assert first == "made"
        message = others[1:] if rank == ODD else others
        assert message[0].startswith(f"DisagreementError: rank {ODD} of the group")
        assert all("out of step since an earlier call" in each for each in message[1:])


def first_call_skipped(rank: int, world_size: int) -> list[str]:
    """Nothing was agreed on before."""
    cp = context(CASE)
    tensors = leaves(cp)
    calls = [lambda: out_of(cp, tensors), lambda: cp.unshard(tensors[0], 1)]
    if rank == ODD:
        calls = [calls[1], calls[1]]
    return [f"{failure.kind}: {failure.error}" for failure in map(raised_by, calls)]


def test_ranks_whose_first_calls_are_different_ones_are_out_of_step(pool: WorkerPool) -> None:
    for first, second in pool.run(first_call_skipped, RANKS):
        assert first.startswith(f"DisagreementError: rank {ODD} of the group [0, 1, 2, 3]")
        assert "the ranks are at different points of their programs" in first
        assert "out of step since an earlier call" in second


def end_with_the_error(rank: int, world_size: int, folder: str) -> str:
    """The odd rank ends as soon as it is told; the others are told when it has ended."""
    cp = context(CASE)
    tensors = leaves(cp)
    faults = cp._calls.session.guard._faults
    statements = faults.statements

    def slowly(*call: Any) -> Any:
        said = statements(*call)
        while not faults._has_ended(ODD):
            time.sleep(0.01)
        return said

    if rank != ODD:
        faults.statements = slowly  # type: ignore[method-assign,assignment]
    said = raised_by(lambda: out_of(cp, tensors, label=1 + (rank == ODD)))
    if rank == ODD:
        Path(folder, "told").write_text(said.error)
        os._exit(1)
    return f"{said.kind}: {said.error}"


def test_a_difference_is_told_although_the_odd_rank_ends_with_it(
    pool: WorkerPool, tmp_path: Path
) -> None:
    messages = pool.run(end_with_the_error, RANKS, str(tmp_path), may_end=(ODD,))
    del messages[ODD]
    assert len({*messages}) == 1
    assert messages[0].startswith(
        f"DisagreementError: rank {ODD} of the group [0, 1, 2, 3] disagrees"
    )
    assert (tmp_path / "told").read_text() in messages[0]


def out_of_step(rank: int, world_size: int) -> str:
    """A rank skips one of several calls that look alike, and goes on to the backward pass."""
    with context(CASE) as cp:
        tensors = leaves(cp)
        try:
            outs = [out_of(cp, tensors) for _ in range(2 if rank == ODD else 3)]
            torch.autograd.grad(outs[-1], tensors, torch.ones_like(outs[-1]))
        except MeshAttentionError as error:
            return str(error)
    return ""


def test_a_skipped_call_shows_at_the_next_one_that_differs(pool: WorkerPool) -> None:
    for said in pool.run(out_of_step, RANKS):
        assert f"rank {ODD} of the group" in said
        assert "pass is 'backward' there, 'forward' elsewhere" in said


def own_data_on_the_callers_group(rank: int, world_size: int) -> tuple[Any, float]:
    """The caller's messages on its group are in another order on one rank than ours."""
    case = replace(CASE, options={"method": "ring"})
    with context(case) as cp:
        attend(cp, case)
        x, works = torch.full((4,), float(rank)), []
        if rank == ODD:
            works.append(dist.all_reduce(x, async_op=True))
        part = attend(cp, case)
        if rank != ODD:
            works.append(dist.all_reduce(x, async_op=True))
        works[0].wait()
        return part, float(x[0])


def test_what_the_caller_sends_on_its_group_is_never_mixed_up_with_ours(pool: WorkerPool) -> None:
    parts, sums = zip(*pool.run(own_data_on_the_callers_group, RANKS), strict=True)
    assert sums == (6.0,) * RANKS
    distances = errors(whole(list(parts), CASE), attention(*CASE.tensors(), CASE.mask))
    assert max(distances.values()) <= 1e-5


def function_wrongly(rank: int, world_size: int, mistake: str) -> Raised:
    """The function, warm, with something else on one rank."""
    q, k, v = (x.detach() for x in leaves(context(CASE)))
    arguments: dict[str, Any] = {"causal": True, "timeout": None}
    mesh_attention(q, k, v, **arguments)
    first: Any = q
    if rank == ODD:
        arguments |= {"softmax_scale": 0.5} if mistake == "scale" else {}
        arguments |= {"mask": Mask(causal=True, window=(3, 0))} if mistake == "mask" else {}
        first = {"None": None, "3-D": q[0]}.get(mistake, q)
    return raised_by(lambda: mesh_attention(first, k, v, **arguments))


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        ("scale", "softmax_scale is 0.5 there, None elsewhere"),
        ("mask", f"rank {ODD} of the group [0, 1, 2, 3] disagrees: plan is"),
        ("None", "q is NoneType; it must be a torch.Tensor"),
        ("3-D", "q has 3 dimensions; expected (batch, local_seq, heads, head_dim)"),
    ],
)
def test_a_mistake_in_a_warm_function_is_told_to_all_and_soon(
    pool: WorkerPool, mistake: str, reason: str
) -> None:
    raised = pool.run(function_wrongly, RANKS, mistake)
    for rank, failure in enumerate(raised):
        assert reason in failure.error
        assert failure.seconds < 10
        assert f"rank {ODD}" in failure.error or rank == ODD


def close_alone(rank: int, world_size: int) -> Raised:
    cp = context(CASE)
    tensors = leaves(cp)
    out_of(cp, tensors)
    if rank == ODD:
        cp.close()
    return raised_by(lambda: out_of(cp, tensors))


def test_an_object_that_one_rank_has_closed_is_named_by_the_others(pool: WorkerPool) -> None:
    for rank, raised in enumerate(pool.run(close_alone, RANKS)):
        assert ("is closed" if rank == ODD else f"rank {ODD} closed the last user") in raised.error
        assert raised.seconds < 5
