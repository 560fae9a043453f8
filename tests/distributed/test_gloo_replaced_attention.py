"""Models that call PyTorch's own attention, inside `cp.context_parallel(...)`: they have outputs
and gradients of one process, and everything is as it was after the block."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel, ContextParallelAttention, MeshAttentionError
from support.pool import WorkerPool
from support.raised import all_raised, raised_by
from support.rotary import (
    DIM,
    HEADS,
    TOKENS,
    batch,
    differs,
    entered,
    loss_of,
    make_model,
    truth,
)

# A block of code.


def once(
    rank: int, world_size: int, inside: bool, wanted: Any, changes: dict[str, Any]
) -> tuple[float, bool]:
    model, (ids, labels) = make_model(), batch()
    before = [x.clone() for x in (model.cos, model.sin, ids)]
    with ContextParallel(causal=True, **changes) as cp:
        with entered(cp, model, ids, labels, keep=[labels]) as documents:
            assert ids.shape[1] == len(model.cos) == TOKENS // world_size
            logits = model(ids)
            loss = loss_of(logits, labels)
            if inside:
                loss.backward()  # type: ignore[no-untyped-call]
        after = [model.cos, model.sin, ids]
        same = all(map(torch.equal, before, after)) and labels.shape[1] == TOKENS // world_size
        if not inside:
            loss.backward()  # type: ignore[no-untyped-call]
        whole = cp.unshard(logits.detach(), 1, documents=documents)
    return differs(model, [whole], wanted), same


@pytest.mark.parametrize(("ranks", "inside"), [(1, True), (2, True), (2, False), (4, False)])
def test_a_model_that_calls_pytorchs_attention_has_results_of_one_process(
    pool: WorkerPool, ranks: int, inside: bool
) -> None:
    """Backward comes in the block or after it, when its buffers are whole again."""
    changes = {} if ranks != 2 else {"seq_len": TOKENS}
    for error, same in pool.run(once, ranks, inside, truth((0,)), changes):
        assert same
        assert error < 2e-5


def alternating(rank: int, world_size: int) -> tuple[float, float, bool]:
    """Blocks inside blocks, of layers that differ, and one again after an exception."""
    chance = torch.Generator().manual_seed(1)
    whole = torch.randn(3, 1, HEADS, TOKENS, DIM, generator=chance).unbind()
    far = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    wanted = [
        scaled_dot_product_attention(
            whole[0], whole[1], whole[2], attn_mask=(far >= 0) & (far <= most)
        )
        for most in (TOKENS, 3)
    ]
    with (
        ContextParallel(causal=True) as full,
        ContextParallel(causal=True, window_size=(3, 0)) as near,
    ):
        q, k, v = (x.clone() for x in whole)
        try:
            with full.context_parallel(buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
                raise KeyError
        except KeyError:
            restored = all(map(torch.equal, (q, k, v), whole))
        with full.context_parallel(buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]) as docs:
            first = scaled_dot_product_attention(q, k, v, is_causal=True)
            with near.context_parallel(documents=docs):
                inner = scaled_dot_product_attention(q, k, v, is_causal=True)
            last = scaled_dot_product_attention(q, k, v, is_causal=True)
        assert torch.equal(first, last)
        results = [full.unshard(x, 2, documents=docs) for x in (first, inner)]
        plain = scaled_dot_product_attention(
            whole[0], whole[1], whole[2], is_causal=True
        )  # on this rank again
    errors = [float((a - b).abs().max()) for a, b in zip(results, wanted, strict=True)]
    return errors[0], errors[1], restored and torch.allclose(plain, wanted[0], atol=1e-6)


def test_blocks_may_be_nested_and_entered_again(pool: WorkerPool) -> None:
    for full, near, restored in pool.run(alternating, 2):
        assert restored
        assert max(full, near) < 1e-5


def with_documents(rank: int, world_size: int) -> float:
    chance = torch.Generator().manual_seed(2)
    whole = torch.randn(3, 1, HEADS, TOKENS, DIM, generator=chance).unbind()
    place = torch.arange(TOKENS)
    sees = (place[:, None] >= place) & ((place[:, None] < 5) == (place < 5))
    wanted = scaled_dot_product_attention(whole[0], whole[1], whole[2], attn_mask=sees)
    q, k, v = buffers = [x.clone() for x in whole]
    with ContextParallel(causal=True) as cp:
        docs = cp.documents([0, 5, TOKENS])
        arguments: Any = {"buffers": buffers, "buffer_seq_dims": [2, 2, -2], "documents": docs}
        with cp.context_parallel(**arguments) as same:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        assert same is docs
        return float((cp.unshard(out, 2, documents=docs) - wanted).abs().max())


def test_a_batch_may_have_documents(pool: WorkerPool) -> None:
    assert max(pool.run(with_documents, 2)) < 1e-5


def as_leaves(rank: int, world_size: int) -> tuple[float, bool]:
    """Buffers of which gradients are asked inside, as in examples of PyTorch's."""
    chance = torch.Generator().manual_seed(2)
    whole = torch.randn(3, 1, HEADS, TOKENS, DIM, generator=chance).unbind()
    leaves = [x.clone().requires_grad_() for x in whole]
    out = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
    wanted = torch.autograd.grad(out.square().sum(), leaves)
    q, k, v = buffers = [x.clone() for x in whole]
    with ContextParallel(causal=True) as cp:
        with cp.context_parallel(buffers=buffers, buffer_seq_dims=[2, 2, 2]) as docs:
            for x in buffers:
                x.requires_grad_()
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
            out.backward(2 * out.detach(), inputs=[q, k])  # type: ignore[no-untyped-call]
            torch.autograd.backward(
                [scaled_dot_product_attention(q.detach(), k.detach(), v, is_causal=True)],
                [2 * out.detach()],
            )
            results = [x.grad for x in buffers if x.grad is not None]
        pairs = zip(results, wanted, strict=True)
        errors = [(a - cp.shard(b, 2, documents=docs)).abs().max() for a, b in pairs]
    return float(max(errors)), all(map(torch.equal, buffers, whole))


def test_buffers_may_become_leaves_in_the_block(pool: WorkerPool) -> None:
    for error, restored in pool.run(as_leaves, 2):
        assert restored
        assert error < 1e-5


def half_precision(rank: int, world_size: int) -> torch.dtype:
    with ContextParallel(causal=True, seq_len=8) as cp:
        q = torch.randn(1, 2, 4, 8)
        with cp.context_parallel(), torch.autocast("cpu", dtype=torch.bfloat16):
            return scaled_dot_product_attention(q, q, q.bfloat16(), is_causal=True).dtype


def test_autocast_casts_as_for_pytorchs_attention(pool: WorkerPool) -> None:
    assert pool.run(half_precision, 2) == [torch.bfloat16] * 2


def changed(rank: int, world_size: int) -> str:
    model, (ids, _) = make_model(), batch()
    with ContextParallel(causal=True) as cp, entered(cp, model, ids):
        out = model(ids)
        ids.zero_()
        try:
            out.sum().backward()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_a_buffer_that_is_changed_before_backward_is_refused_as_ever(pool: WorkerPool) -> None:
    for message in pool.run(changed, 1):
        assert "modified by an inplace operation" in message


# What is refused.


def spread(x: Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def calls(mistake: str, q: Tensor) -> Any:
    good = {"is_causal": True}
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "attn_mask": ((q, q, q), {"attn_mask": torch.ones(6, 6, dtype=torch.bool)}),
        "dropout_p": ((q, q, q, None, 0.1, True), {}),
        "is_causal": ((q, q, q), {}),
        "shape": ((q[0], q[0], q[0]), good),
        "heads": ((q, q[:, :1], q[:, :1]), good),
        "scale": ((q, q, q), good | {"scale": float("nan")}),
        "dtensor": ((spread(q), q, q), good),
    }
    if mistake == "module":
        return nn.MultiheadAttention(8, 2, batch_first=True)(q[0], q[0], q[0])
    args, kwargs = arguments[mistake]
    return scaled_dot_product_attention(*args, **kwargs)


def refused(rank: int, world_size: int, mistake: str) -> Any:
    with ContextParallel(causal=True) as cp, cp.context_parallel():
        q = torch.ones(1, 2, 6, 8)
        wrong = raised_by(
            lambda: (
                calls(mistake, q)
                if rank == 1
                else scaled_dot_product_attention(q, q, q, is_causal=True)
            ),
            cp,
        )
        scaled_dot_product_attention(q, q, q, is_causal=True)
        return wrong


REFUSED = {
    "attn_mask": "attn_mask is not supported; give the mask to ContextParallel",
    "dropout_p": "dropout_p=0.1: dropout of attention weights is not supported",
    "is_causal": "is_causal=False, but the mask of this ContextParallel is causal",
    "shape": "query has shape (2, 6, 8); expected (batch, heads, local_seq, head_dim)",
    "heads": "query has 2 heads and key 1: give enable_gqa=True",
    "scale": "scale=nan",
    "dtensor": "query is a DTensor; give the plain torch.Tensor that this rank holds",
    "module": "torch.nn.MultiheadAttention and layers with it are not replaced",
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_not_attention_over_ranks_is_refused_on_all(pool: WorkerPool, mistake: str) -> None:
    raised = pool.run(refused, 2, mistake)
    all_raised(raised)
    assert all(REFUSED[mistake] in failure.error for failure in raised)


def wrong_buffers(rank: int, world_size: int) -> list[str]:
    messages = []
    x = torch.zeros(2, 8)
    cases: list[Any] = [
        ([x], [], ()),
        ([x], [1], [x.clone()]),
        ([x, x], [1, 1], ()),
        ([x, x.clone().requires_grad_()], [1, 1], ()),
        ([x, torch.zeros(9)], [1, 0], ()),
        ([torch.zeros(9)], [0], ()),
        ([x], [2], ()),
    ]
    with ContextParallel(causal=True) as cp:
        for buffers, dims, keep in cases:
            try:
                with cp.context_parallel(
                    buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=keep
                ):
                    messages.append("nothing")
            except MeshAttentionError as error:
                messages.append(str(error))
        assert x.shape == (2, 8)
    return messages


def test_wrong_buffers_are_refused_and_left_alone(pool: WorkerPool) -> None:
    for messages in pool.run(wrong_buffers, 2):
        for line, wanted in zip(
            messages,
            [
                "1 buffers and 0 buffer_seq_dims",
                "not among the buffers",
                "buffers[1] is given twice",
                "buffers[1] requires a gradient",
                "buffers[1]: shard wants all 8 tokens along dim 0, but it has 9",
                "9 tokens do not divide evenly",
                "buffer_seq_dims[0]=2 is outside a tensor of 2 dimensions",
            ],
            strict=True,
        ):
            assert wanted in line


# The module.


def by_module(rank: int, world_size: int) -> bool:
    with ContextParallel(causal=True) as cp:
        module = ContextParallelAttention(cp)
        layer = copy.deepcopy(nn.ModuleDict({"attention": module}).eval())
        assert not layer.state_dict()
        assert not layer["attention"].training
        with pytest.raises(MeshAttentionError, match="cannot be pickled; save the state_dict"):
            pickle.dumps(module)
        docs = cp.documents([0, 3, 12])
        q = cp.shard(torch.randn(1, 12, 2, 8), 1, documents=docs)
        wanted = cp.attention(q, q, q, documents=docs)
        assert isinstance(wanted, Tensor)
        return torch.equal(layer["attention"](q, q, q, documents=docs), wanted)


def test_the_module_is_attention_and_its_copies_share_the_object(pool: WorkerPool) -> None:
    assert all(pool.run(by_module, 2))
