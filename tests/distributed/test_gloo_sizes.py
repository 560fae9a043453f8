"""Objects that learn their sizes from the tensors of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mesh_attention import ContextParallel, Mask, MeshAttentionError, mesh_attention
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
        messages = [told_by(lambda: cp.plan), told_by(cp.positions)]
        assert cp.rank == rank
        for tokens, num_heads, kv_heads, dim in ((64, 4, 2, 8), (36, 6, 6, 16), (64, 4, 2, 8)):
            tensors = whole(tokens, num_heads, kv_heads, dim)
            docs = cp.documents([0, tokens])
            shards = [cp.shard(x, 1, documents=docs).requires_grad_() for x in tensors]
            out = cp.attention(*shards, documents=docs)
            assert isinstance(out, Tensor)
            torch.autograd.grad(out.sum(), shards)
            results = cp.unshard(out.detach(), 1, documents=docs)
            errors.append(float((results - truth(*tensors)).abs().max()))
        tensors = whole(64, 4, 2, 8)
        sharing = ContextParallel(seq_len=64, causal=True)  # the length alone
        shards = [sharing.shard(x, 1) for x in tensors]
        for context in (cp, sharing):
            out = context.attention(*shards)
            assert isinstance(out, Tensor)
            results = sharing.unshard(out, 1)
            errors.append(float((results - truth(*tensors)).abs().max()))
            assert context.plan.problem.num_heads == 4
        three = ContextParallel(num_kv_heads=3, causal=True)  # no number of heads is taken for it
        for tensors in whole(64, 6, 3, 8), whole(64, 3, 3, 8):
            q, k, v = (sharing.shard(x, 1) for x in tensors)
            out = three.attention(q, k, v)
            assert isinstance(out, Tensor)
            results = sharing.unshard(out, 1)
            errors.append(float((results - truth(*tensors)).abs().max()))
        messages.append(told_by(lambda: three.attention(*shards)))
        heads = ContextParallel(num_heads=8, causal=True)
        messages.append(told_by(lambda: heads.attention(*shards)))
        return errors, messages


def test_heads_come_from_tensors_and_the_length_from_the_batch(pool: WorkerPool) -> None:
    for errors, messages in pool.run(sizes_of_calls, 2):
        assert max(errors) < 1e-5
        assert "no call has said them yet" in messages[0]
        assert "documents([0, tokens])" in messages[1]
        assert "num_kv_heads=3 was given, but the tensors have 2" in messages[2]
        assert "num_heads=8 was given, but the tensors have 4" in messages[3]


def lengths_of_masks(rank: int, world_size: int) -> tuple[list[Any], list[str]]:
    """Documents say the length; slices say where they end, and what is advised is enough."""
    documents, tree = Mask(causal=True, documents=(0, 5, 21)), Mask.tree([None, 0], [5, 15])
    ids = torch.arange(21)[None]
    q, k, v = whole(21, 4, 2, 8)
    with ContextParallel(mask=documents) as cp:
        results: list[Any] = [cp.shard_batch(input_ids=ids).documents]
        shards = [cp.shard(x, 1) for x in (q, k, v)]
        wanted = torch.cat(
            [truth(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in ((0, 5), (5, 21))], 1
        )
        for out in cp.attention(*shards), mesh_attention(*shards, mask=documents):
            assert isinstance(out, Tensor)
            results.append(float((cp.unshard(out, 1) - wanted).abs().max()) < 1e-5)
        both = ContextParallel(mask=Mask(documents=(0, 5), kv_documents=(0, 9)))
        results.append([len(both.positions(side=side)) for side in ("q", "kv")])
        long = ContextParallel(mask=Mask.tree([None], [1 << 21]))  # longer than any usual length
        apart = ContextParallel(mask=Mask(slices=(((0, 4), (0, 9), "full"),)))
        short = ContextParallel(mask=tree)
        messages = [told_by(context.positions) for context in (long, apart, short)]
        messages.append(told_by(lambda: short.shard_batch(input_ids=ids[:, :20])))
        messages.append(told_by(lambda: short.documents([0, 20])))
        messages.append(told_by(lambda: ContextParallel(mask=documents, seq_len=20)))
        advised = ContextParallel(mask=tree, seq_len=20)
        results.append(advised.shard_batch(input_ids=ids[:, :20]).input_ids is not None)
        out = advised.attention(*(advised.shard(x[:, :20], 1) for x in (q, k, v)))
        assert isinstance(out, Tensor)
        results.append(out.shape[1])
    return results, messages


def test_a_mask_says_the_length_or_what_to_give(pool: WorkerPool) -> None:
    for result, messages in pool.run(lengths_of_masks, 2):
        assert result == [None, True, True, [4, 6], True, 10]
        assert "give seq_len=2097152 there" in messages[0]
        assert "seq_len=9 there" in messages[1]
        assert "(seq_len=4, kv_seq_len=9 if" in messages[1]
        assert "give seq_len=20 there" in messages[2]
        assert messages[3] == messages[2]
        assert "the slices and the seq_len of each batch" in messages[4]
        assert "documents end at 21 but there are 20 tokens" in messages[5]
        assert not any("1048576" in message or "documents([" in message for message in messages)


def choices(rank: int, world_size: int) -> list[Any]:
    """Before any call, after a call with documents, and after one without."""
    with ContextParallel(causal=True, relayout=True) as cp:
        results: list[Any] = [cp.choice]
        docs = cp.documents([0, 7, 20])
        x = cp.shard(whole(20, 1, 1, 8)[0], 1, documents=docs)
        cp.attention(x, x, x, documents=docs)
        results += [repr(docs), cp.choice, cp.plan.method, cp.plan.problem.mask.documents]
        results.append(cp.volume()["forward"].ranks[0].total.sent_bytes > 0)
        cp.verify()
        x = cp.shard(whole(20, 4, 4, 8)[0], 1, documents=cp.documents([0, 20]))
        cp.attention(x, x, x)
        return [*results, cp.choice]


def test_the_choice_is_told_of_the_latest_call_with_documents_too(pool: WorkerPool) -> None:
    for before, chosen, message, method, documents, sends, after in pool.run(choices, 2):
        assert before.startswith("nothing yet, for no call has said the sizes: auto: chosen for")
        assert "seen on contiguous shards" in chosen
        assert "others: ulysses" in chosen
        # The call has one head, which two ranks cannot share: in both parts.
        assert message.startswith("seen (tile 1x2"), message
        assert "for the documents of the latest call, seen on contiguous shards: " in message
        assert "ulysses" not in message
        assert (method, documents, sends) == ("seen", (0, 7, 20), True)
        assert "for the sizes of each call" in after


def without_a_mask(rank: int, world_size: int) -> str:
    return told_by(lambda: ContextParallel())


@pytest.mark.parametrize("ranks", [1, 2])
def test_whether_attention_is_causal_is_always_said(pool: WorkerPool, ranks: int) -> None:
    for message in pool.run(without_a_mask, ranks):
        assert "causal: missing" in message
