"""Objects that learn their sizes from the tensors of calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mesh_attention import ContextParallel, MeshAttentionError
from support.pool import WorkerPool


def whole(tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(tokens + heads)
    q = torch.randn(2, tokens, heads, dim, generator=chance)
    k, v = (torch.randn(2, tokens, kv_heads, dim, generator=chance) for _ in range(2))
    return q, k, v


def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def told_by(work: object) -> str:
    try:
        work()  # type: ignore[operator]
    except MeshAttentionError as error:
        return str(error)
    return "nothing"


def sizes_of_calls(rank: int, world_size: int) -> tuple[list[float], list[str]]:
    with ContextParallel(causal=True) as cp:
        errors = []
        told = [told_by(lambda: cp.plan), told_by(cp.positions)]
        assert cp.rank == rank
        for tokens, num_heads, kv_heads, dim in ((64, 4, 2, 8), (36, 6, 6, 16), (64, 4, 2, 8)):
            tensors = whole(tokens, num_heads, kv_heads, dim)
            docs = cp.documents([0, tokens])
            shards = [cp.shard(x, 1, documents=docs).requires_grad_() for x in tensors]
            out = cp.attention(*shards, documents=docs)
            assert isinstance(out, Tensor)
            torch.autograd.grad(out.sum(), shards)
            found = cp.unshard(out.detach(), 1, documents=docs)
            errors.append(float((found - truth(*tensors)).abs().max()))
        tensors = whole(64, 4, 2, 8)
        sharing = ContextParallel(seq_len=64, causal=True)  # the length alone
        shards = [sharing.shard(x, 1) for x in tensors]
        for one in (cp, sharing):
            out = one.attention(*shards)
            assert isinstance(out, Tensor)
            found = sharing.unshard(out, 1)
            errors.append(float((found - truth(*tensors)).abs().max()))
            assert one.plan.problem.num_heads == 4
        three = ContextParallel(num_kv_heads=3, causal=True)  # no number of heads is taken for it
        for tensors in whole(64, 6, 3, 8), whole(64, 3, 3, 8):
            q, k, v = (sharing.shard(x, 1) for x in tensors)
            out = three.attention(q, k, v)
            assert isinstance(out, Tensor)
            found = sharing.unshard(out, 1)
            errors.append(float((found - truth(*tensors)).abs().max()))
        told.append(told_by(lambda: three.attention(*shards)))
        heads = ContextParallel(num_heads=8, causal=True)
        told.append(told_by(lambda: heads.attention(*shards)))
        return errors, told


def test_heads_come_from_tensors_and_the_length_from_the_batch(pool: WorkerPool) -> None:
    for errors, told in pool.run(sizes_of_calls, 2):
        assert max(errors) < 1e-5
        assert "no call has said them yet" in told[0]
        assert "documents([0, tokens])" in told[1]
        assert "num_kv_heads=3 was given, but the tensors have 2" in told[2]
        assert "num_heads=8 was given, but the tensors have 4" in told[3]


def without_a_mask(rank: int, world_size: int) -> str:
    return told_by(lambda: ContextParallel())


@pytest.mark.parametrize("ranks", [1, 2])
def test_whether_attention_is_causal_is_always_said(pool: WorkerPool, ranks: int) -> None:
    for told in pool.run(without_a_mask, ranks):
        assert "causal: missing" in told
