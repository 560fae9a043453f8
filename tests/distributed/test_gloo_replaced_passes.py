"""What comes between a block of `cp.context_parallel` and its backward pass: checkpoints, which
attend again, several batches in flight, parameters that FSDP2 gathers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mesh_attention import ContextParallel, MeshAttentionError
from support.pool import WorkerPool
from support.rotary import (
    batch,
    differs,
    entered,
    loss_of,
    make_model,
    truth,
)

Op = torch.ops.aten
SAVED = (Op.addmm.default, Op.mm.default, Op._scaled_dot_product_flash_attention_for_cpu.default)


def save_some(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(save_some)  # type: ignore[no-untyped-call]


WAYS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": selective},
    "unchecked": {"use_reentrant": False, "determinism_check": "none"},
}


def run_of(way: str) -> Any:
    """Reentrant ones are nested, with an input that needs no gradient in the first pass."""

    def inner(block: Any, x: Any, *others: Any) -> Any:
        return checkpoint(block, x * 1.0, *others, **WAYS[way])

    if way != "reentrant":
        return lambda *x: checkpoint(*x, **WAYS[way])
    return lambda block, *x: checkpoint(inner, block, *x, **WAYS[way])


def checkpointed(rank: int, world_size: int, way: str, wanted: Any) -> float:
    model, (ids, labels) = make_model(), batch()
    with ContextParallel(causal=True) as cp, entered(cp, model, ids, labels) as documents:
        logits = model(ids, run_of(way))
        loss, parameters = loss_of(logits, labels), [*model.parameters()]
        apart = None
        if way == "not reentrant":  # the only kind that may be gone through twice
            apart = torch.autograd.grad(loss, parameters, retain_graph=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for grad, parameter in zip(apart or (), parameters, strict=apart is not None):
            assert torch.equal(grad, parameter.grad)  # type: ignore[arg-type]
        whole = cp.unshard(logits.detach(), 1, documents=documents)
        return differs(model, [whole], wanted)


@pytest.mark.parametrize("way", [*WAYS][:3])
def test_checkpoints_of_every_kind_attend_again_over_all_ranks(pool: WorkerPool, way: str) -> None:
    """Need 22."""
    assert max(pool.run(checkpointed, 2, way, truth((0,)))) < 2e-5


def too_late(rank: int, world_size: int, way: str) -> str:
    model, (ids, labels) = make_model(), batch()
    with ContextParallel(causal=True, seq_len=2 * ids.shape[1]) as cp:
        with torch.no_grad(), cp.context_parallel():
            model(ids, run_of(way))  # no backward pass follows
        try:
            with cp.context_parallel():
                logits = model(ids, run_of(way))
            loss_of(logits, labels).backward()  # type: ignore[no-untyped-call]
        except (CheckpointError, MeshAttentionError) as error:
            with cp.context_parallel():  # nothing is lost
                loss_of(model(ids), labels).backward()  # type: ignore[no-untyped-call]
            return str(error)
    return "nothing"


TOLD = {
    "reentrant": "a checkpoint with use_reentrant=True attends again in its backward pass, which",
    "not reentrant": "have different metadata than during the forward pass",
    "unchecked": "a checkpoint without a determinism_check has computed other tensors",
}


@pytest.mark.parametrize("way", TOLD)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_that_would_attend_to_its_own_tokens_is_told(
    pool: WorkerPool, way: str
) -> None:
    assert all(TOLD[way] in message for message in pool.run(too_late, 2, way))


def pipelined(rank: int, world_size: int, way: str | None, wanted: Any) -> float:
    """Forward A, forward B, backward A, backward B."""
    model = make_model()
    batches = [batch(0), batch(1)]
    run = run_of(way) if way else (lambda block, *x: block(*x))
    with ContextParallel(causal=True) as cp:
        tensors = [x for each in batches for x in each]
        with entered(cp, model, *tensors) as documents:
            outs = [model(ids, run) for ids, _ in batches]
            losses = [loss_of(out, labels) for out, (_, labels) in zip(outs, batches, strict=True)]
            for loss in losses:
                loss.backward()  # type: ignore[no-untyped-call]
        wholes = [cp.unshard(out.detach(), 1, documents=documents) for out in outs]
    return differs(model, wholes, wanted)


@pytest.mark.parametrize("way", [None, "not reentrant", "reentrant"])
def test_several_batches_may_be_in_flight(pool: WorkerPool, way: str | None) -> None:
    assert max(pool.run(pipelined, 2, way, truth((0, 1)))) < 2e-5


def fully_sharded(rank: int, world_size: int, inside: bool, wanted: Any) -> float:
    from torch.distributed.fsdp import fully_shard  # seconds, which the pool has spent already

    model, (ids, labels) = make_model(), batch()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with ContextParallel(mesh, causal=True) as cp:
        with entered(cp, model, ids, labels):
            loss = loss_of(model(ids), labels) * world_size  # gradients are averaged
            if inside:
                loss.backward()  # type: ignore[no-untyped-call]
        if not inside:
            loss.backward()  # type: ignore[no-untyped-call]
    results: list[Any] = [p.grad for p in model.parameters()]
    pairs = zip(results, wanted[1], strict=True)
    return max(float((a.full_tensor() - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("inside", [True, False])
def test_parameters_may_be_sharded_too(pool: WorkerPool, inside: bool) -> None:
    """FSDP2 brings parameters into the tensors that autograd has saved."""
    assert max(pool.run(fully_sharded, 2, inside, truth((0,)))) < 2e-5
