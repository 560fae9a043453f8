"""Inside `cp.context_parallel` ranks compare the module that calls PyTorch's attention: two layers
that change places are told, and layers of wrapped, checkpointed and compiled models are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel, MeshAttentionError
from mesh_attention.request.attend import attend
from support.pool import WorkerPool
from support.rotary import TOKENS, Rotary, batch, entered, make_model
from support.transformer_block import Compiled, difference, gradients

REPLACED = "mesh_attention.train.replaced_attention"
RANKS, ODD = 3, 1
Labels = list[str | None]
LAYERS: Labels = ["Rotary.blocks.0", "Rotary.blocks.1"]


def other_order(model: Rotary) -> Callable[..., Tensor]:
    first, second = model.blocks
    return lambda block, *x: (second if block is first else first)(*x)


def without_the_first(model: Rotary) -> Callable[..., Tensor]:
    return lambda block, *x: x[0] if block is model.blocks[0] else block(*x)


MISTAKES = {"swapped": other_order, "left out": without_the_first}


def at_another_layer(rank: int, world_size: int, mistake: str) -> str:
    model, (ids, _) = make_model(), batch()
    run = [MISTAKES[mistake](model)] if rank == ODD else []
    with ContextParallel(causal=True) as cp, entered(cp, model, ids):
        try:
            model(ids, *run)
        except MeshAttentionError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_rank_at_another_layer_is_named(pool: WorkerPool, mistake: str) -> None:
    for error in pool.run(at_another_layer, RANKS, mistake):
        assert f"rank {ODD} of the group [0, 1, 2] disagrees" in error
        assert "label is \"'Rotary.blocks.1'\" there, \"'Rotary.blocks.0'\" elsewhere" in error


def labels_of(action: Callable[[], Any]) -> Labels:
    """Of the calls that it makes."""
    labels = Labels()

    def noted(calls: Any, call: Any, fault: Any = None) -> Any:
        labels.append(call.label)
        return attend(calls, call, fault)

    with mock.patch(f"{REPLACED}.attend", noted):
        action()
    return labels


class Caller(nn.Module):
    """Its attention is in a method, and one of its parts is in a list, where PyTorch has no name
    for it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.hidden = [part]

    def attend(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x, is_causal=True)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        if kind == "hidden":
            return self.hidden[0](x, "method")  # type: ignore[no-any-return]
        if kind == "checkpointed":
            out: Any = checkpoint(self.attend, x, use_reentrant=False)
            return out  # type: ignore[no-any-return]
        return self.attend(x)


def names(rank: int, world_size: int) -> dict[str, Labels]:
    from torch.distributed.fsdp import fully_shard  # seconds, which the pool has spent already

    results = {}
    ids, _ = batch()
    with ContextParallel(causal=True) as cp:
        for reentrant in (False, True):
            model = make_model()

            def forward_and_backward(model: Rotary = model, reentrant: bool = reentrant) -> None:
                out = model(ids, lambda *x: checkpoint(*x, use_reentrant=reentrant))
                out.sum().backward()

            with entered(cp, model, ids):
                results[f"checkpoint {reentrant}"] = labels_of(forward_and_backward)
        model = make_model()
        mesh = init_device_mesh("cpu", (world_size,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        with entered(cp, model, ids):
            results["FSDP2"] = labels_of(lambda: model(ids).sum().backward())
        wrapped = DistributedDataParallel(model := make_model())
        with entered(cp, model, ids):
            results["DDP"] = labels_of(lambda: wrapped(ids).sum().backward())

        x = torch.ones(1, 2, TOKENS, 4, requires_grad=True)
        caller = Caller(Caller(nn.Identity()))
        whole = nn.Sequential(Caller(nn.Identity()))  # of which a rank has run a part before
        with cp.context_parallel(documents=cp.documents([0, world_size * TOKENS])):
            for kind in ("method", "hidden", "checkpointed"):
                results[kind] = labels_of(lambda: caller(x, kind).sum().backward())  # noqa: B023
            results["no module"] = labels_of(lambda: caller.attend(x))
            results["a part"] = labels_of(lambda: whole[0](x, "method"))
            whole.forward = lambda x: whole[0](x, "method")  # type: ignore[method-assign]
            results["the whole"] = labels_of(lambda: whole(x))
    return results


def test_a_call_has_the_name_of_its_module_and_so_has_what_a_checkpoint_runs_again(
    pool: WorkerPool,
) -> None:
    for result in pool.run(names, 2):
        for way in ("checkpoint False", "checkpoint True"):
            assert result.pop(way) == [*LAYERS, *reversed(LAYERS)]
        assert result == {
            "FSDP2": ["FSDPRotary.blocks.0", "FSDPRotary.blocks.1"],
            "DDP": [f"DistributedDataParallel.module.blocks.{i}" for i in range(2)],
            "method": ["Caller"],
            "hidden": ["Caller: Caller"],
            "checkpointed": [None, None],
            "no module": [None],
            "a part": ["Caller"],
            "the whole": ["Sequential.0"],
        }


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)
        return x + scaled_dot_product_attention(q, x, q, is_causal=True)


def compiled(rank: int, world_size: int) -> tuple[float, int]:
    torch.manual_seed(rank)
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(1, 2, TOKENS, 4, requires_grad=True)
    counter = Compiled(lambda layer, x: layer(x))
    leaves = [x, *model.parameters()]
    never = mock.patch(f"{REPLACED}.running_module", side_effect=AssertionError)
    with (
        ContextParallel(causal=True) as cp,
        cp.context_parallel(documents=cp.documents([0, world_size * TOKENS])),
    ):
        wanted = gradients(lambda: model(x), leaves)
        with never:
            result = gradients(lambda: counter(model[1], counter(model[0], x)), leaves)
    return difference(wanted, result), counter.graphs


def test_layers_of_compiled_code_have_no_names_and_share_a_graph(
    compiling_pool: WorkerPool,
) -> None:
    for error, graphs in compiling_pool.run(compiled, 2, seconds=300.0):
        assert error < 1e-5
        assert graphs == 1
