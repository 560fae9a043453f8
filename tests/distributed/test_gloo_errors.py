"""Mistakes in a call are raised by all ranks, name the odd one, and come before any data moves.

Each mistake is made by one rank, or by all; every rank must raise within ten seconds, and nothing
may have been handed to the transport. Afterwards the right call must work on the same object.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from mesh_attention import ContextParallel, Mask
from mesh_attention.plan.language.program import Attend, CallKind
from mesh_attention.runtime.agreement import handshake
from support.cases import Case
from support.gloo_case import Part, attend, context, whole
from support.pool import WorkerPool
from support.raised import Raised, all_raised, leave_with_all, raised_by
from support.reference import attention, errors

RANKS = 4
CASE = Case(RANKS, 40, 40, mask=Mask(causal=True), dtype=torch.float32, batch=2)

Inputs = list[Tensor]


def shards(cp: ContextParallel, case: Case) -> Inputs:
    q, k, v, _ = case.tensors()
    return [cp.shard(x, 1).requires_grad_() for x in (q, k, v)]


def larger_batch(inputs: Inputs) -> Inputs:
    return [torch.cat([x, x]) for x in inputs]


def other_dtype(inputs: Inputs) -> Inputs:
    return [x.double() for x in inputs]


def shorter(inputs: Inputs) -> Inputs:
    return [x[:, 1:] for x in inputs]


def other_heads(inputs: Inputs) -> Inputs:
    return [inputs[0][:, :, :2], *inputs[1:]]


def mixed_dtypes(inputs: Inputs) -> Inputs:
    return [inputs[0], inputs[1].double(), inputs[2]]


def no_batch(inputs: Inputs) -> Inputs:
    return [x[0] for x in inputs]


def whole_numbers(inputs: Inputs) -> Inputs:
    return [x.detach().long() for x in inputs]


def without_grad(inputs: Inputs) -> Inputs:
    return [x.detach() for x in inputs]


def strided_nested(inputs: Inputs) -> Inputs:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch recommends the other layout
        return [torch.nested.nested_tensor([*x.detach()]) for x in inputs]


def fake(inputs: Inputs) -> Inputs:
    mode = FakeTensorMode()
    return [mode.from_tensor(x.detach()) for x in inputs]


def spread(inputs: Inputs) -> Inputs:
    mesh = DeviceMesh("cpu", [torch.distributed.get_rank()], _init_backend=False)
    return [DTensor.from_local(x.detach(), mesh, [Replicate()], run_check=False) for x in inputs]


def without_data(inputs: Inputs) -> Inputs:
    return [x.detach().to("meta") for x in inputs]


def sparse(inputs: Inputs) -> Inputs:
    return [x.detach().to_sparse() for x in inputs]


def nobody(inputs: Inputs) -> Inputs:
    return [x[:0] for x in inputs]


def call_wrongly(
    rank: int, world_size: int, names: list[str], by: list[int]
) -> list[tuple[Raised, Part]]:
    """What each mistake raises on an object of its own, and what that computes afterwards."""
    results = []
    for name in names:
        with context(CASE) as cp:
            inputs = shards(cp, CASE)
            wrong = MISTAKES[name][0](inputs) if rank in by else inputs
            raised = raised_by(partial(cp.attention, *wrong), cp)
            results.append((raised, attend(cp, CASE)))
    return results


MISTAKES = {
    "batch": (larger_batch, "batch is 4 there, 2 elsewhere"),
    "dtype": (other_dtype, "dtype is 'torch.float64' there, 'torch.float32' elsewhere"),
    "length": (shorter, "q has shape (2, 9, 4, 8), expected (2, 10, 4, 8)"),
    "heads": (other_heads, "q has shape (2, 10, 2, 8), expected (2, 10, 4, 8)"),
    "mix": (mixed_dtypes, "k is torch.float64 on cpu but q is torch.float32 on cpu"),
    "ndim": (no_batch, "q has shape (10, 4, 8)"),
    "integers": (whole_numbers, "torch.int64 is not a floating-point type"),
    "grad": (without_grad, "needs_grad is False there, True elsewhere"),
    "nested": (strided_nested, "q is a nested tensor; give a dense one"),
    "fake": (fake, "q is a FakeTensor; of what traces, torch.compile is supported"),
    "dtensor": (spread, "q is a DTensor; give the plain torch.Tensor that this rank holds"),
    "meta": (without_data, "q is on the meta device; it must have data"),
    "sparse": (sparse, "q is a torch.sparse_coo tensor; it must be a dense torch.Tensor"),
    "nobody": (nobody, "q has shape (0, 10, 4, 8): a batch of 0 is not supported"),
}


def test_wrong_tensors_on_one_rank_raise_on_all_and_name_it(pool: WorkerPool) -> None:
    odd = 2
    truth = attention(*CASE.tensors(), CASE.mask)
    by_mistake = zip(*pool.run(call_wrongly, RANKS, [*MISTAKES], [odd]), strict=True)
    for (name, (_, reason)), results in zip(MISTAKES.items(), by_mistake, strict=True):
        raised, parts = zip(*results, strict=True)
        all_raised(list(raised))
        for rank, refusal in enumerate(raised):
            assert reason in refusal.error, name
            if rank != odd or refusal.kind == "DisagreementError":
                assert f"rank {odd}" in refusal.error, name
        # The mistake has done no harm: the same object then computes the truth.
        assert max(errors(whole(list(parts), CASE), truth).values()) <= 1e-5, name


def test_the_same_wrong_tensors_on_all_ranks_raise_on_all(pool: WorkerPool) -> None:
    names = ["length", "mix"]
    by_mistake = zip(*pool.run(call_wrongly, RANKS, names, [*range(RANKS)]), strict=True)
    for name, results in zip(names, by_mistake, strict=True):
        all_raised([raised for raised, _ in results])
        assert all(MISTAKES[name][1] in raised.error for raised, _ in results)


def transformed(rank: int, world_size: int, odd: int) -> list[Raised]:
    return [transform(rank, how, odd) for how in TRANSFORMS]


def transform(rank: int, how: str, odd: int) -> Raised:
    with context(CASE) as cp:
        q, k, v = (x.detach() for x in shards(cp, CASE))

        def call() -> Any:
            if rank != odd:
                return cp.attention(q, k, v)
            if how == "vmap":
                return torch.vmap(lambda x: cp.attention(x, k, v))(q[None])
            if how == "grad":
                return torch.func.grad(lambda x: cp.attention(x, k, v).sum())(q)  # type: ignore[union-attr]
            if how == "mode":
                with FakeTensorMode(allow_non_fake_inputs=True):
                    return cp.attention(q, k, v)
            with forward_ad.dual_level():
                return cp.attention(forward_ad.make_dual(q, q), k, v)  # type: ignore[no-untyped-call]

        return raised_by(call, cp)


TRANSFORMS = {
    "vmap": "transforms of torch.func (vmap, grad, jvp, ...) around attention",
    "grad": "transforms of torch.func (vmap, grad, jvp, ...) around attention",
    "dual": "q is a dual tensor; forward-mode derivatives are not supported",
    "mode": "a FakeTensorMode is active; of what traces",
}


def test_transforms_around_a_call_on_one_rank_are_refused_on_all(pool: WorkerPool) -> None:
    by_transform = zip(*pool.run(transformed, RANKS, 1), strict=True)
    for (how, reason), raised in zip(TRANSFORMS.items(), by_transform, strict=True):
        all_raised(list(raised))
        assert all(reason in refusal.error for refusal in raised), how


def negated(rank: int, world_size: int) -> list[bool]:
    """Views whose memory holds the opposite: their numbers travel, not their memory."""
    with context(CASE) as cp:
        q, k, v = shards(cp, CASE)
        views = [torch._neg_view(-x.detach()).requires_grad_() for x in (q, k, v)]
        plain, result = cp.attention(q, k, v), cp.attention(*views)
        assert isinstance(plain, Tensor)
        assert isinstance(result, Tensor)
        grads = torch.autograd.grad(plain, (q, k, v), plain.detach())
        same = torch.autograd.grad(result, views, torch._neg_view(-plain.detach()))
        whole = cp.unshard(views[0], 1)
        return [
            all(x.is_neg() for x in views),
            torch.equal(plain, result),
            all(torch.equal(a, b) for a, b in zip(grads, same, strict=True)),
            torch.equal(whole, cp.unshard(q, 1)),
        ]


def test_negated_views_are_read_as_what_they_mean(pool: WorkerPool) -> None:
    assert pool.run(negated, RANKS) == [[True] * 4] * RANKS


def test_two_odd_ranks_are_both_named(pool: WorkerPool) -> None:
    raised = pool.run(call_wrongly_once, 5, without_grad, [1, 3])
    all_raised(raised)
    assert all("ranks [1, 3] of the group [0, 1, 2, 3, 4] disagree" in h.error for h in raised), (
        raised
    )


def call_wrongly_once(
    rank: int, world_size: int, mistake: Callable[[Inputs], Inputs], by: list[int]
) -> Raised:
    case = replace(CASE, ranks=world_size)
    with context(case) as cp:
        inputs = shards(cp, case)
        arguments = mistake(inputs) if rank in by else inputs
        torch.distributed.barrier()  # a rank that comes much later than others is told, not heard
        with mock.patch.object(handshake, "_GRACE_SECONDS", 8.0):  # on a busy machine
            return raised_by(lambda: cp.attention(*arguments), cp)


def forced_kernel(rank: int, world_size: int, kernel: str) -> tuple[Raised, list[CallKind]]:
    """With these tiles only the first rank meets the ragged edge of the window."""
    options = {"layout": "contiguous", "tile": (4, 1), "kernel": kernel}
    case = replace(CASE, mask=Mask(causal=True, window=(30, 0)), options=options)
    with context(case) as cp:
        inputs = shards(cp, case)
        program = cp.plan.forward.programs[cp.rank]
        kinds = [c.kind for op in program.operations if isinstance(op, Attend) for c in op.calls]
        return raised_by(lambda: cp.attention(*inputs), cp), kinds


def test_a_kernel_that_cannot_do_the_work_of_one_rank_is_refused_on_all(pool: WorkerPool) -> None:
    raised, kinds = zip(*pool.run(forced_kernel, RANKS, "cpu_flash"), strict=True)
    assert [CallKind.RANGE in own for own in kinds] == [True, False, False, False]
    all_raised(list(raised))
    assert all("kernel 'cpu_flash' cannot do" in failure.error for failure in raised)


def shard_wrongly(rank: int, world_size: int) -> list[Raised]:
    with context(CASE) as cp:
        q = CASE.tensors()[0]
        once = cp.shard(q, 1)
        return [
            raised_by(lambda: cp.shard(once, 1), cp),
            raised_by(lambda: cp.shard(q[:, :-1], 1), cp),
            raised_by(lambda: cp.shard(q, 4), cp),
            raised_by(lambda: cp.unshard(q, 1), cp),
            raised_by(lambda: cp.shard(q, 1, side="keys"), cp),  # type: ignore[arg-type]
        ]


def test_sharding_twice_is_detected(pool: WorkerPool) -> None:
    for raised in pool.run(shard_wrongly, RANKS):
        all_raised(raised)
        assert "looks sharded already" in raised[0].error
        assert "all 40 tokens along dim 1, but it has 39" in raised[1].error
        assert "dim=4 is outside a tensor of 4 dimensions" in raised[2].error
        assert "wants 10 slots along dim 1, but it has 40" in raised[3].error
        assert "must be 'q' or 'kv'" in raised[4].error


def call_wrongly_when_warm(
    rank: int, world_size: int, mistake: Callable[[Inputs], Inputs], by: int, folder: str
) -> None:
    """One row of tiles: the first thing every rank waits for is a gather with all the others."""
    case = replace(CASE, options={"tile": (1, RANKS)})
    cp = context(case)
    inputs = shards(cp, case)
    cp.attention(*inputs)
    arguments = mistake(inputs) if rank == by else inputs
    with mock.patch.object(handshake, "_GRACE_SECONDS", 8.0):  # on a busy machine
        raised = raised_by(lambda: cp.attention(*arguments))
    # Where an error has broken it off, the next call is refused, right as it is.
    after = raised_by(lambda: cp.attention(*inputs))
    leave_with_all(folder, rank, world_size, f"{raised.seconds} {raised.error}\n{after.error}")


@pytest.mark.parametrize(("name", "odd"), [("batch", 3), ("length", 0)])
def test_a_mistake_after_calls_that_were_agreed_on_is_told_while_waiting_for_a_collective(
    pool: WorkerPool, name: str, odd: int, tmp_path: Path
) -> None:
    mistake, reason = MISTAKES[name]
    everyone = tuple(range(RANKS))
    pool.run(call_wrongly_when_warm, RANKS, mistake, odd, str(tmp_path), may_end=everyone)
    for rank in everyone:
        first, after = (tmp_path / str(rank)).read_text().split("\n")
        seconds, _, error = first.partition(" ")
        assert reason in error
        assert float(seconds) < 10
        broken_off = "was broken off, and transfers may be in flight" in after
        assert broken_off == (name == "length"), (
            after
        )  # else ranks have compared, and nothing moved
