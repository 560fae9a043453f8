"""Attention inside autograd: checkpointing, no_grad, partial gradients, graphs of several layers.

Where two ways must agree they must agree to the last bit, because they run the same programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel, Mask, MeshAttentionError
from support.cases import Case
from support.gloo_case import context, handed_bytes
from support.pool import WorkerPool

CASE = Case(
    4, 45, 45, heads=(4, 2), batch=2, mask=Mask(causal=True), dtype=torch.float32,
    options={"tile": (2, 2), "chunks": (2, 2)},
)  # fmt: skip


def local(cp: ContextParallel, *, grads: tuple[bool, bool, bool] = (True, True, True)) -> Any:
    """q, k, v as leaves, and the gradient of the output."""
    q, k, v, grad_out = (cp.shard(x, 1) for x in CASE.tensors())
    leaves = [x.requires_grad_(needed) for x, needed in zip((q, k, v), grads, strict=True)]
    return leaves, grad_out


def out_of(cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = cp.attention(q, k, v)
    assert isinstance(out, Tensor)
    return out


def both_of(cp: ContextParallel, *leaves: Tensor) -> tuple[Tensor, Tensor]:
    both = cp.attention(*leaves, return_lse=True)
    assert isinstance(both, tuple)
    return both


def gradients(cp: ContextParallel, attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    leaves, grad_out = local(cp)
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))


def all_equal(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def with_checkpoint(rank: int, world_size: int, use_reentrant: bool) -> tuple[bool, int]:
    with context(CASE) as cp:
        plain = gradients(cp, lambda q, k, v: out_of(cp, q, k, v))
        moved = handed_bytes(cp)["forward"]

        def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = checkpoint(out_of, cp, q, k, v, use_reentrant=use_reentrant)
            return out

        leaves, grad_out = local(cp)
        out = recomputed(*leaves)
        torch.autograd.backward(out, grad_out)
        again = (out.detach(), *(leaf.grad for leaf in leaves))
        forwards = {
            kind: sum(sizes) // sum(moved[kind])
            for kind, sizes in handed_bytes(cp)["forward"].items()
        }
        after = gradients(cp, lambda q, k, v: out_of(cp, q, k, v))  # and nothing is refused
        return all_equal(plain, again) and all_equal(plain, after), min(forwards.values())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_gives_bit_identical_gradients(pool: WorkerPool, use_reentrant: bool) -> None:
    for equal, forwards in pool.run(with_checkpoint, 4, use_reentrant):
        assert equal
        assert forwards == 3  # the plain one, the checkpointed one and its recomputation


def without_grad(rank: int, world_size: int) -> dict[str, bool]:
    with context(CASE) as cp:
        leaves, _ = local(cp)
        wanted = out_of(cp, *leaves)
        with torch.no_grad():
            quiet = out_of(cp, *leaves)
        with torch.inference_mode():
            inferred = out_of(cp, *[x.detach().clone() for x in leaves])
        frozen = out_of(cp, *[x.detach() for x in leaves])
        return {
            "no_grad": torch.equal(wanted, quiet) and not quiet.requires_grad,
            "inference": torch.equal(wanted, inferred) and not inferred.requires_grad,
            "frozen": torch.equal(wanted, frozen) and not frozen.requires_grad,
            "backward moved nothing": not handed_bytes(cp).get("backward"),
        }


def test_no_grad_and_inference_give_the_same_output_and_no_graph(pool: WorkerPool) -> None:
    for seen in pool.run(without_grad, 4):
        assert all(seen.values()), seen


def partly(rank: int, world_size: int, grads: tuple[bool, bool, bool]) -> bool:
    with context(CASE) as cp:
        whole = gradients(cp, lambda q, k, v: out_of(cp, q, k, v))[1:]
        leaves, grad_out = local(cp, grads=grads)
        torch.autograd.backward(out_of(cp, *leaves), grad_out)
        return all(
            torch.equal(leaf.grad, wanted) if needed else leaf.grad is None
            for leaf, needed, wanted in zip(leaves, grads, whole, strict=True)
        )


@pytest.mark.parametrize(
    "grads", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_inputs_that_need_no_gradient_get_none_and_leave_the_others_alone(
    pool: WorkerPool, grads: tuple[bool, bool, bool]
) -> None:
    assert all(pool.run(partly, 4, grads))


def backward_elsewhere(rank: int, world_size: int) -> bool:
    """The graph is built in one place and run in another, after other calls of the same object."""

    def build(cp: ContextParallel) -> tuple[list[Tensor], Tensor, Tensor]:
        leaves, grad_out = local(cp)
        with torch.enable_grad():
            return leaves, out_of(cp, *leaves), grad_out

    cp = context(CASE)
    wanted = gradients(cp, lambda q, k, v: out_of(cp, q, k, v))
    first, second = build(cp), build(cp)
    with torch.no_grad():
        out_of(cp, *[torch.randn_like(x) for x in first[0]])
    results = []
    for leaves, out, grad_out in (second, first):
        torch.autograd.backward(out, grad_out)
        results.append(all_equal(wanted, (out.detach(), *(x.grad for x in leaves))))  # type: ignore[arg-type]
    cp.close()
    return all(results)


def test_backward_outside_any_context_and_out_of_turn_is_bit_identical(pool: WorkerPool) -> None:
    assert all(pool.run(backward_elsewhere, 4))


def two_layers(rank: int, world_size: int) -> tuple[bool, bool]:
    """The output of one attention is the query of the next; the same object does both."""
    with context(CASE) as cp:
        leaves, grad_out = local(cp)
        q, k, v = leaves
        middle = out_of(cp, q, k, v)
        out = out_of(cp, middle * 2, k, v)
        joint = torch.autograd.grad(out, leaves, grad_out)

        inner = [middle.detach().mul(2).requires_grad_(), k, v]
        out_grads = torch.autograd.grad(out_of(cp, *inner), inner, grad_out)
        in_grads = torch.autograd.grad(out_of(cp, *leaves), leaves, out_grads[0] * 2)
        apart = (in_grads[0], in_grads[1] + out_grads[1], in_grads[2] + out_grads[2])
        return all(
            torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(joint, apart, strict=True)
        ), bool(joint[0].abs().max() > 0.1)


def test_one_object_serves_several_layers_of_a_graph(pool: WorkerPool) -> None:
    assert pool.run(two_layers, 4) == [(True, True)] * 4


def odd_gradients(rank: int, world_size: int) -> bool:
    """An expanded gradient (from a sum) and non-contiguous inputs."""
    with context(CASE) as cp:
        leaves, grad_out = local(cp)
        plain = torch.autograd.grad(out_of(cp, *leaves), leaves, torch.ones_like(grad_out))
        summed = torch.autograd.grad(out_of(cp, *leaves).sum(), leaves)
        turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
        turned = [x.requires_grad_() for x in turned]
        strided = torch.autograd.grad(out_of(cp, *turned).sum(), turned)
        return all_equal(plain, summed) and all_equal(plain, strided)


def test_expanded_gradients_and_strided_inputs_change_nothing(pool: WorkerPool) -> None:
    assert all(pool.run(odd_gradients, 4))


def second_derivative(rank: int, world_size: int) -> str:
    with context(CASE) as cp:
        leaves, _ = local(cp)
        out = out_of(cp, *leaves)
        try:
            torch.autograd.grad(out.pow(2).sum(), leaves[:1], create_graph=True)
        except MeshAttentionError as error:
            return str(error)
        return ""


def test_a_second_derivative_is_refused_and_not_wrong(pool: WorkerPool) -> None:
    said = pool.run(second_derivative, 4)
    assert all("second derivatives of attention are not supported" in one for one in said)


def saved(rank: int, world_size: int) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def keep(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x

    with context(CASE) as cp:
        leaves, _ = local(cp)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out_of(cp, *leaves)
    return shapes


def test_only_q_k_v_out_and_lse_are_kept_for_backward(pool: WorkerPool) -> None:
    for shapes in pool.run(saved, 4):
        q, kv = (2, 12, 4, 8), (2, 12, 2, 8)
        assert sorted(shapes) == sorted([q, kv, kv, q, (2, 4, 12)])


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
        found = []
        out, lse = both_of(cp, *leaves)
        told = f"{lse.max().item():.3f}"
        weighted = out * (lse.detach() > float(told)).logical_not().any()
        found.append(torch.autograd.grad(weighted, leaves, grad_out))
        out, lse = checkpoint(both_of, cp, *leaves, use_reentrant=True)
        torch.autograd.backward(out, grad_out)
        found.append(tuple(leaf.grad for leaf in leaves))
        out, lse = both_of(cp, *leaves)
        zeros = torch.autograd.grad(lse, leaves, torch.zeros_like(lse))
        found.append(tuple(a + b for a, b in zip(zeros, wanted, strict=True)))
        return [all_equal(wanted, one) for one in found]


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
    for told in pool.run(loss_of_lse, 4, (0, 1, 2, 3), with_out):
        assert "a loss depends on lse: without differentiable_lse=True" in told


def differentiable_lse(rank: int, world_size: int, alone: bool) -> list[float]:
    """A loss on out and on lse squared, whose gradient is -inf in padding rows: errors of the
    gradients against the whole, computed by this rank in float64."""
    with context(CASE, differentiable_lse=True) as cp:
        leaves, grad_out = local(cp)
        out, lse = both_of(cp, *leaves)
        grad_lse = 2.0 * lse.detach()  # -inf times two
        roots = (lse,) if alone else (out, lse)
        given = (grad_lse,) if alone else (grad_out, grad_lse)
        found = torch.autograd.grad(roots, leaves, given)
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
            for a, b in zip(found, expected, strict=True)
        ]


@pytest.mark.parametrize("alone", [False, True])
def test_a_loss_of_lse_is_exact_where_it_was_asked_for(pool: WorkerPool, alone: bool) -> None:
    for errors in pool.run(differentiable_lse, 4, alone):
        assert max(errors) < 2e-4, errors


def test_a_loss_of_lse_on_one_rank_is_an_error_on_all(pool: WorkerPool) -> None:
    told = pool.run(loss_of_lse, 4, (2,), True, group_seconds=3.0)
    assert "a loss depends on lse" in told[2]
    assert "nothing" not in told


def under_autocast(rank: int, world_size: int, kernel: str) -> list[bool]:
    """The forward pass under it, the backward pass, and both."""
    with context(CASE, kernel=kernel) as cp:
        leaves, grad_out = local(cp)

        def with_modes(forward: bool, backward: bool) -> tuple[Tensor, ...]:
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                out = out_of(cp, *leaves)
            with torch.autocast("cpu", torch.bfloat16, enabled=backward):
                return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))

        wanted = with_modes(False, False)
        return [
            all_equal(wanted, with_modes(*modes))
            for modes in ((True, False), (False, True), (True, True))
        ]


def test_autocast_around_a_call_changes_nothing(pool: WorkerPool) -> None:
    assert pool.run(under_autocast, 4, "blockwise") == [[True] * 3] * 4
