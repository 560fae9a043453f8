"""Attention sinks over real processes; and what flash-attn has and this has not, refused by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel, Mask, MeshAttentionError, mesh_attention
from support.cases import Case
from support.gloo_case import Part, context, whole
from support.gloo_grads import CASE, local, out_of
from support.pool import WorkerPool
from support.reference import NAMES
from support.sink_reference import attention_with_sinks, distances

SINKS = torch.tensor([1.0, 3.0, -0.5, 2.0], dtype=torch.float64)
CASES = [
    Case(4, 45, 45, heads=(4, 2), batch=2, mask=Mask(causal=True), options={"method": method})
    for method in ("mesh", "ring", "ulysses", "allgather-kv")
]


def both(cp: ContextParallel, leaves: list[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    out, lse = cp.attention(*leaves[:3], sinks=leaves[3], return_lse=True)
    return (out, lse, *torch.autograd.grad(out, leaves, grad_out))


def with_sinks(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Part, Tensor]]:
    """The first call of each object, and a second one, which must be the same bit for bit."""
    results = []
    for case in cases:
        with context(case) as cp:
            q, k, v, grad_out = (cp.shard(x, 1) for x in case.tensors())
            leaves = [x.requires_grad_() for x in (q, k, v, SINKS.to(case.dtype).clone())]

            first, second = (both(cp, leaves, grad_out) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            tensors = {n: x.detach() for n, x in zip(NAMES, first, strict=False)}
            part = Part(cp.rank, cp.positions(), cp.positions(side="kv"), tensors, {})
            results.append((part, first[-1]))
    return results


def test_the_whole_is_exact_and_gradients_of_sinks_add_up_over_ranks(pool: WorkerPool) -> None:
    by_rank = pool.run(with_sinks, 4, CASES)
    for number, case in enumerate(CASES):
        parts = [of_rank[number][0] for of_rank in by_rank]
        grads = torch.stack([of_rank[number][1] for of_rank in by_rank])
        results = whole(parts, case) | {"grad_sinks": grads.sum(0)}
        errors = distances(results, attention_with_sinks(case.tensors(), SINKS, case.mask))
        assert max(errors.values()) <= 1e-10, (errors, case)
        assert not torch.allclose(grads[0], grads[1])  # of this rank's own rows


def mixed_calls(rank: int, world_size: int) -> list[bool]:
    """With and without sinks on one object, on a second one, by the function, and where a loss is
    on lse, whose padding rows must not count."""
    with context(CASE, differentiable_lse=True) as cp, context(CASE) as other:
        leaves, _ = local(cp)
        before = out_of(cp, *leaves)
        sinks = SINKS.float().requires_grad_()
        out, lse = cp.attention(*leaves, sinks=sinks, return_lse=True)
        again = other.attention(*leaves, sinks=sinks.detach())
        assert isinstance(again, Tensor)
        by_function = mesh_attention(*leaves, causal=True, seq_len=45, sinks=sinks, tile=(2, 2))
        assert isinstance(by_function, Tensor)
        (only,) = torch.autograd.grad(by_function.sum(), sinks)  # whose gradient is expanded
        rowsums = out.double().sum(-1).transpose(1, 2)
        weights = torch.exp(sinks[:, None] - lse).double()
        (alone,) = torch.autograd.grad(lse.sum(), sinks)
        wanted = torch.exp(sinks[:, None] - lse)[..., ~cp.padding()].sum((0, 2))
        return [
            torch.equal(before, out_of(cp, *leaves)),
            not torch.allclose(before, out),
            torch.equal(out, again),
            torch.allclose(out, by_function, atol=1e-5),
            torch.allclose(only.double(), -(weights * rowsums).sum((0, 2))),  # which cancel
            torch.allclose(alone, wanted, atol=1e-5),
            bool((lse[..., cp.padding()] == sinks[None, :, None]).all()),
        ]


def test_calls_with_and_without_sinks_do_not_mix(pool: WorkerPool) -> None:
    assert pool.run(mixed_calls, 4) == [[True] * 7] * 4


def refused(rank: int, world_size: int, odd: dict[str, Any], scale: float | None) -> str:
    """Rank 1 alone passes what is odd."""
    try:
        with context(CASE, softmax_scale=scale) as cp:
            leaves, _ = local(cp)
            out_of(cp, *leaves)
            cp.attention(*leaves, **(odd if rank == 1 else {}))
    except MeshAttentionError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1: dropout of attention weights is not supported; drop"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes: a bias by distance"),
        ({"sinks": torch.ones(2)}, "sinks is (2,)"),
    ],
    ids=["dropout", "alibi", "shape of sinks"],
)
def test_what_is_wrong_on_one_rank_is_told_to_all(
    pool: WorkerPool, odd: dict[str, Any], message: str
) -> None:
    for result in pool.run(refused, 4, odd, None):
        assert message in result


def test_a_rank_without_sinks_is_told_from_the_others(pool: WorkerPool) -> None:
    for result in pool.run(refused, 4, {"sinks": torch.ones(4)}, None):
        assert "sinks" in result


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_of_zero_or_below_is_refused(pool: WorkerPool, scale: float) -> None:
    for result in pool.run(refused, 4, {}, scale):
        assert f"softmax_scale={scale}: must be finite and above 0" in result


def nothing_of_flash_attn(rank: int, world_size: int) -> list[str]:
    messages = []
    with context(CASE, dropout_p=0.0) as cp:
        leaves, _ = local(cp)
        cp.attention(*leaves, dropout_p=0.0, alibi_slopes=None)
        for tensors in ({"dropout_p": 0.5}, {"alibi_slopes": torch.ones(4)}):
            try:
                mesh_attention(*leaves, causal=True, **tensors)
            except MeshAttentionError as error:
                messages.append(str(error))
    return messages


def test_the_function_refuses_them_too_and_takes_nothing_for_nothing(pool: WorkerPool) -> None:
    for dropout, alibi in pool.run(nothing_of_flash_attn, 4):
        assert "dropout_p=0.5" in dropout
        assert "alibi_slopes" in alibi


def checkpointed(rank: int, world_size: int) -> bool:
    with context(CASE) as cp:
        leaves, grad_out = local(cp)
        sinks = SINKS.float().requires_grad_()

        def run(*tensor: Tensor) -> Any:
            return cp.attention(*tensor[:3], sinks=tensor[3])

        wanted = torch.autograd.grad(run(*leaves, sinks), (*leaves, sinks), grad_out)
        out = checkpoint(run, *leaves, sinks, use_reentrant=False)
        results = torch.autograd.grad(out, (*leaves, sinks), grad_out)
        return all(torch.equal(a, b) for a, b in zip(wanted, results, strict=True))


def test_a_checkpoint_computes_them_again(pool: WorkerPool) -> None:
    assert pool.run(checkpointed, 4) == [True] * 4


def with_documents(rank: int, world_size: int) -> list[tuple[list[float], Tensor]]:
    """Errors of out, dq, dk and dv for batches of other documents and lengths, and this rank's part
    of the gradient of sinks."""
    results = []
    with context(CASE, tile=None, chunks=None) as cp:
        for starts in DOCUMENTS:
            case = batch_of(starts)
            docs, whole = cp.documents(list(starts)), case.tensors()
            q, k, v, grad_out = (cp.shard(x, 1, documents=docs) for x in whole)
            leaves = [x.requires_grad_() for x in (q, k, v, SINKS.float())]
            out = cp.attention(*leaves[:3], sinks=leaves[3], documents=docs)
            assert isinstance(out, Tensor)
            grads = torch.autograd.grad(out, leaves, grad_out)
            truth = attention_with_sinks(whole, SINKS, case.mask)
            errors = [
                (a - cp.shard(truth[name], 1, documents=docs)).abs().max().item()
                for name, a in zip(("out", *NAMES[2:]), (out, *grads), strict=False)
            ]
            results.append((errors, grads[-1]))
    return results


DOCUMENTS = ((0, 5, 45), (0, 1, 30, 61))


def batch_of(starts: tuple[int, ...]) -> Case:
    mask = Mask(causal=True, documents=starts)
    return Case(4, starts[-1], starts[-1], heads=(4, 2), mask=mask, dtype=torch.float32)


def test_documents_of_a_batch_have_sinks_too(pool: WorkerPool) -> None:
    by_rank = pool.run(with_documents, 4)
    for number, starts in enumerate(DOCUMENTS):
        case = batch_of(starts)
        assert all(max(of_rank[number][0]) < 1e-5 for of_rank in by_rank), by_rank
        total = torch.stack([of_rank[number][1] for of_rank in by_rank]).sum(0)
        truth = attention_with_sinks(case.tensors(), SINKS, case.mask)["grad_sinks"]
        torch.testing.assert_close(total.double(), truth, atol=1e-4, rtol=1e-4)
