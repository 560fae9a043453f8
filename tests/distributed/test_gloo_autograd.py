"""Attention inside autograd: checkpointing, no_grad, partial gradients, graphs of several layers.

Where two ways must agree they must agree to the last bit, because they run the same programs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel, MeshAttentionError
from support.gloo_case import context, handed_bytes
from support.gloo_grads import CASE, all_equal, local, out_of
from support.pool import WorkerPool


def gradients(cp: ContextParallel, attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    leaves, grad_out = local(cp)
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))


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
    """Need 22."""
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
    """Need 22."""
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
    assert all("second derivatives of attention are not supported" in answer for answer in said)


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


def under_autocast(rank: int, world_size: int, kernel: str) -> list[bool]:
    """The forward pass under it, the backward pass, and both: as if q, k and v had been cast to its
    dtype before, and with any but float32 tensors as if it were not there."""
    with context(CASE, kernel=kernel) as cp:
        leaves, grad_out = local(cp)

        def with_modes(forward: bool, backward: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
            cast = [x.to(dtype) for x in leaves]
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                out = out_of(cp, *cast)
            with torch.autocast("cpu", torch.bfloat16, enabled=backward):
                grads = torch.autograd.grad(out, leaves, grad_out.to(out.dtype))
                return (out.detach(), *grads)

        full, half = torch.float32, torch.bfloat16
        exact, wanted = with_modes(False, False, full), with_modes(False, False, half)
        return [
            all_equal(exact, with_modes(False, True, full)),
            all_equal(wanted, with_modes(True, False, full)),
            all_equal(wanted, with_modes(True, True, full)),
            all_equal(wanted, with_modes(True, True, half)),
            exact[0].dtype is full and wanted[0].dtype is half,
        ]


def test_autocast_casts_q_k_and_v_and_reaches_nothing_inside(pool: WorkerPool) -> None:
    assert pool.run(under_autocast, 4, "blockwise") == [[True] * 5] * 4
