"""The log-sum-exp beside the output: returned, left alone, refused in a loss, or differentiated."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mesh_attention import MeshAttentionError
from support.gloo_case import context
from support.gloo_grads import CASE, all_equal, both_of, local, out_of
from support.pool import WorkerPool


def with_lse(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    with context(CASE) as cp:
        leaves, _ = local(cp)
        out, lse = both_of(cp, *leaves)
        padding = cp.padding()
        return (
            torch.equal(out, out_of(cp, *leaves)),
            lse.requires_grad and lse.shape == (2, 4, 12),  # so that backward can refuse it
            bool((lse[..., padding] == -torch.inf).all() and (out[:, padding] == 0).all()),
        )


def test_return_lse_gives_it_beside_the_same_output(pool: WorkerPool) -> None:
    assert pool.run(with_lse, 4) == [(True, True, True)] * 4


def lse_without_a_loss(rank: int, world_size: int) -> list[bool]:
    """Returned, detached, compared, logged, or filled in with zeros by what is around it."""
    with context(CASE) as cp:
        leaves, grad_out = local(cp)
        wanted = torch.autograd.grad(out_of(cp, *leaves), leaves, grad_out)
        results = []
        out, lse = both_of(cp, *leaves)
        message = f"{lse.max().item():.3f}"
        weighted = out * (lse.detach() > float(message)).logical_not().any()
        results.append(torch.autograd.grad(weighted, leaves, grad_out))
        out, lse = checkpoint(both_of, cp, *leaves, use_reentrant=True)
        torch.autograd.backward(out, grad_out)
        results.append(tuple(leaf.grad for leaf in leaves))
        out, lse = both_of(cp, *leaves)
        zeros = torch.autograd.grad(lse, leaves, torch.zeros_like(lse))
        results.append(tuple(a + b for a, b in zip(zeros, wanted, strict=True)))
        return [all_equal(wanted, result) for result in results]


def test_lse_that_no_loss_depends_on_changes_nothing(pool: WorkerPool) -> None:
    assert pool.run(lse_without_a_loss, 4) == [[True] * 3] * 4


def loss_of_lse(rank: int, world_size: int, by: tuple[int, ...], with_out: bool) -> str:
    cp = context(CASE)
    leaves, _ = local(cp)
    out, lse = both_of(cp, *leaves)
    loss = out.sum()
    if rank in by:
        seen = lse.masked_fill(cp.padding(), 0.0).sum()
        loss = loss + seen if with_out else seen
    try:
        torch.autograd.backward(loss)
    except MeshAttentionError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("with_out", [True, False])
def test_a_loss_of_lse_is_refused_in_backward(pool: WorkerPool, with_out: bool) -> None:
    for message in pool.run(loss_of_lse, 4, (0, 1, 2, 3), with_out):
        assert "a loss depends on lse: without differentiable_lse=True" in message


def differentiable_lse(rank: int, world_size: int, alone: bool) -> list[float]:
    """A loss on out and on lse squared, whose gradient is -inf in padding rows: errors of the
    gradients against the whole, computed by this rank in float64."""
    with context(CASE, differentiable_lse=True) as cp:
        leaves, grad_out = local(cp)
        out, lse = both_of(cp, *leaves)
        grad_lse = 2.0 * lse.detach()  # -inf times two
        roots = (lse,) if alone else (out, lse)
        inputs = (grad_lse,) if alone else (grad_out, grad_lse)
        results = torch.autograd.grad(roots, leaves, inputs)
        whole = [x.double().requires_grad_() for x in CASE.tensors()[:3]]
        q, k, v = (x.repeat_interleave(4 // x.shape[2], 2) for x in whole)
        scores = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        wanted = scores.logsumexp(-1)
        loss = (wanted**2).sum()
        if not alone:
            out64 = torch.einsum("bhst,bthe->bshe", scores.softmax(-1), v)
            loss = loss + (out64 * CASE.tensors()[3].double()).sum()
        expected = torch.autograd.grad(loss, whole, materialize_grads=True)
        real = ~cp.padding()
        return [
            (a[:, real] - cp.shard(b, 1)[:, real]).abs().max().item()
            for a, b in zip(results, expected, strict=True)
        ]


@pytest.mark.parametrize("alone", [False, True])
def test_a_loss_of_lse_is_exact_where_it_was_asked_for(pool: WorkerPool, alone: bool) -> None:
    for errors in pool.run(differentiable_lse, 4, alone):
        assert max(errors) < 2e-4, errors


def test_a_loss_of_lse_on_one_rank_is_an_error_on_all(pool: WorkerPool) -> None:
    messages = pool.run(loss_of_lse, 4, (2,), True, group_seconds=3.0)
    assert "a loss depends on lse" in messages[2]
    assert "nothing" not in messages
