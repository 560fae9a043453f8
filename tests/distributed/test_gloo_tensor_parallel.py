"""Tensor parallelism beside context parallelism: each rank has its own heads of its own tokens.

On a mesh of 2 x 2 ranks a model whose projections PyTorch has cut has the loss and all gradients of
one process. DTensors are taken where they are sharded over heads, and refused by name elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mesh_attention import ContextParallel, mesh_attention
from support.pool import WorkerPool
from support.raised import all_raised, raised_by
from support.training import refusal

HEADS, KV_HEADS, DIM, WORDS, TOKENS = 4, 2, 8, 14, 24
WIDTH = HEADS * DIM
STARTS = [0, 5, 6, TOKENS]
MESH = [[2, 0], [3, 1]]  # tp by cp


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * DIM) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, attention: Any) -> Tensor:
        x = self.words(ids)
        heads = (linear(self.norm(x)) for linear in (self.q, self.k, self.v))
        q, k, v = (y.unflatten(-1, (y.shape[-1] // DIM, DIM)) for y in heads)
        logits: Tensor = self.head(x + self.out(attention(q, k, v).flatten(2)))
        return logits


def make_layer() -> Layer:
    torch.manual_seed(1)
    return Layer()


def batch() -> Tensor:
    return torch.randint(0, WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def truth(rank: int, world_size: int) -> tuple[float, list[Tensor]]:
    layer, ids = make_layer(), batch()
    document = torch.bucketize(torch.arange(TOKENS), torch.tensor(STARTS[1:]), right=True)
    sees = torch.ones(TOKENS, TOKENS).tril().bool() & (document[:, None] == document)

    def attention(*heads: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in heads)
        out = scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
        return out.transpose(1, 2)

    targets = ids.roll(-1, 1)
    targets[0, [s - 1 for s in STARTS[1:]]] = -100
    loss = cross_entropy(layer(ids, attention).flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), [p.grad for p in layer.parameters() if p.grad is not None]


def spread_over_heads(layer: Layer, mesh: DeviceMesh, use_local_output: bool) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    cut = ColwiseParallel(use_local_output=use_local_output)
    parallelize_module(
        layer, mesh, {"q": cut, "k": cut, "v": cut, "out": RowwiseParallel(), "head": whole_head()}
    )


def whole_head() -> Any:
    """Its logits are a DTensor that is replicated."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    return ColwiseParallel(output_layouts=Replicate(), use_local_output=False)


def in_parallel(rank: int, world_size: int, way: str) -> tuple[float, list[Tensor]]:
    mesh = DeviceMesh("cpu", MESH, mesh_dim_names=("tp", "cp"))
    layer = make_layer()
    spread_over_heads(layer, mesh["tp"], way == "plain")
    with ContextParallel(mesh["cp"], causal=True) as cp:
        part = cp.shard_batch(input_ids=batch(), labels=batch(), cu_seqlens=STARTS)

        def attention(*heads: Tensor) -> Tensor:
            assert all(isinstance(x, DTensor) == (way != "plain") for x in heads)
            if way == "replaced":
                q, k, v = (x.transpose(1, 2) for x in heads)
                with cp.context_parallel(documents=part.documents):
                    out: Any = scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True
                    )
                out = out.transpose(1, 2)
            else:
                q, k, v = heads
                out = cp.attention(q, k, v, documents=part.documents)
            assert out.shape == heads[0].shape
            return out  # type: ignore[no-any-return]

        run: Any = layer
        if way == "compiled":
            run = torch.compile(layer, fullgraph=True, backend="aot_eager")
        logits = run(part.input_ids, attention)
        assert isinstance(logits, DTensor)
        mean = cp.cross_entropy(logits, part.labels, reduce="sum")
        mean.loss.backward()  # type: ignore[no-untyped-call]
    grads: list[Any] = [p.grad for p in layer.parameters()]
    for grad in grads:
        own = grad.to_local() if isinstance(grad, DTensor) else grad
        dist.all_reduce(own, group=mesh["cp"].get_group())
    return mean.value.item(), [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


@pytest.mark.parametrize(
    "way",
    # Compiling takes four processes four seconds each.
    ["plain", "dtensor", "replaced", pytest.param("compiled", marks=pytest.mark.slow)],
)
def test_each_rank_has_its_own_heads_and_all_gradients_are_those_of_one_process(
    pool: WorkerPool, way: str
) -> None:
    """Projections give plain tensors, as PyTorch has them unless told otherwise, or DTensors, which
    go to attention as they are, also in compiled code, or to PyTorch's own in a block."""
    [(loss, wanted)] = pool.run(truth, 1)
    for value, grads in pool.run(in_parallel, 4, way):
        assert value == pytest.approx(loss, rel=1e-5)
        for a, b in zip(grads, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-8


# What a DTensor becomes.


def as_dtensors(rank: int, world_size: int) -> dict[str, bool]:
    mesh = DeviceMesh("cpu", MESH, mesh_dim_names=("tp", "cp"))
    chance = torch.Generator().manual_seed(rank % 2)
    heads = [torch.randn(1, TOKENS, n, DIM, generator=chance) for n in (2, 1, 1)]

    def spread(x: Tensor, *placements: Any) -> DTensor:
        return DTensor.from_local(x, mesh["tp"], placements, run_check=False)

    with ContextParallel(mesh["cp"], causal=True) as cp:
        docs = cp.documents(STARTS)
        own = [cp.shard(x, 1, documents=docs) for x in heads]
        cut: Any = [cp.shard(spread(x, Shard(2)), 1, documents=docs) for x in heads]
        sinks = torch.tensor([0.3, -1.0])
        wanted: Any = cp.attention(*own, sinks=sinks, documents=docs, return_lse=True)
        inputs = spread(sinks, Shard(0))
        both: Any = cp.attention(*cut, sinks=inputs, documents=docs, return_lse=True)
        out, lse = both
        once = mesh_attention(*cut, causal=True, group=mesh["cp"], seq_len=TOKENS)
        joined: Any = cp.unshard(out, 1, documents=docs)
        late = [AsyncCollectiveTensor(x) for x in own]  # as collectives give them without gradients
        copied: Any = cp.shard(spread(heads[0], Replicate()), 1, documents=docs)
        return {
            "shards": all(map(torch.equal, [x.to_local() for x in cut], own)),
            "shape": cut[0].shape == (1, TOKENS // 2, HEADS, DIM),
            "out": torch.equal(out.to_local(), wanted[0]),
            "lse": torch.equal(lse.to_local(), wanted[1]),
            "heads of lse": lse.shape == (1, HEADS, TOKENS // 2),
            "function": isinstance(once, DTensor) and once.placements == (Shard(2),),
            "joined": torch.equal(joined.to_local(), cp.unshard(wanted[0], 1, documents=docs)),
            "spread alike": joined.placements == (Shard(2),) == out.placements,
            "copies": torch.equal(copied.to_local(), own[0]),
            "in flight": torch.equal(
                cp.attention(*late, sinks=sinks, documents=docs),  # type: ignore[arg-type]
                wanted[0],
            ),
            "still copies": copied.placements == (Replicate(),),
        }


def test_what_becomes_of_a_dtensor_is_one_that_is_spread_alike(pool: WorkerPool) -> None:
    for results in pool.run(as_dtensors, 4):
        assert [name for name, right in results.items() if not right] == []


def refused(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, str]]:
    """By one rank in attention, `unshard` and the loss; by each where nothing is sent."""
    mesh = DeviceMesh("cpu", MESH, mesh_dim_names=("tp", "cp"))
    x, ids = torch.ones(1, 12, 2, DIM), torch.ones(1, 12, dtype=torch.int64)

    def spread(x: Tensor, placement: Any, over: Any = None) -> DTensor:
        return DTensor.from_local(x, over or mesh["tp"], [placement], run_check=False)

    uneven: Any = {"shape": torch.Size((1, 12, 3, DIM)), "stride": (288, 24, 8, 1)}
    odd = DTensor.from_local(x, mesh["tp"], [Shard(2)], run_check=False, **uneven)
    arguments: dict[str, list[Any]] = {
        "replicated": [spread(x, Replicate())] * 3,
        "partial": [spread(x, Partial())] * 3,
        "tokens": [spread(x, Shard(1))] * 3,
        "the group's mesh": [spread(x, Shard(2), mesh["cp"])] * 3,
        "mixed": [spread(x, Shard(2)), x, x],
        "few KV heads": [spread(x, Shard(2)), spread(x, Replicate()), spread(x, Replicate())],
        "uneven": [odd] * 3,
    }
    with ContextParallel(mesh["cp"], causal=True) as cp:
        docs = cp.documents([0, 24])
        logits = torch.ones(1, 12, 5)
        raised: dict[str, Any] = {}
        is_odd = rank in (1, 2)  # one in each group
        for name, tensors in arguments.items():
            own = tensors if is_odd else [x] * 3
            raised[name] = raised_by(partial(cp.attention, *own), cp)
        part = spread(x, Shard(1)) if is_odd else x
        raised["unshard"] = raised_by(lambda: cp.unshard(part, 1, documents=docs), cp)
        words = spread(logits, Shard(2)) if is_odd else logits
        raised["loss"] = raised_by(lambda: cp.cross_entropy(words, ids, reduce="sum"), cp)
        messages = {
            "shard": refusal(lambda: cp.shard(spread(x, Shard(1)), 1, documents=docs)),
            "batch": refusal(lambda: cp.shard_batch(input_ids=spread(ids, Replicate()))),
        }
        cp.attention(x, x, x)
        return raised, messages


def test_dtensors_that_say_something_else_are_refused_on_all_ranks(pool: WorkerPool) -> None:
    """Need 6."""
    results = pool.run(refused, 4)
    odd = {"mixed": "k is a plain tensor", "few KV heads": "k is a DTensor; give the plain"}
    odd |= {"unshard": "x is a DTensor; give x.full_tensor()", "loss": "logits is a DTensor"}
    for name in results[0][0]:
        raised = [result[name] for result, _ in results]
        all_raised(raised)
        assert all(
            odd.get(name, "q is a DTensor; give the plain") in failure.error for failure in raised
        )
    for _, messages in results:
        assert "x is a DTensor; give x.full_tensor()" in messages["shard"]
        assert "input_ids is a DTensor; give the plain" in messages["batch"]
