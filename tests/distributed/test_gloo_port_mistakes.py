"""Mistakes that people make when they port a program: each is an error on all ranks, with the way
out, and what is right afterwards still works. Results are held against one process in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mesh_attention import ContextParallel, mesh_attention
from support.pool import WorkerPool
from support.port_case import Told, apart, whole
from support.training import refusal


def heads_before_tokens(rank: int, world_size: int) -> Told:
    messages = []
    with ContextParallel(causal=True) as cp, ContextParallel(seq_len=64, causal=True) as known:
        chance = torch.Generator().manual_seed(rank)
        grouped = [torch.randn(1, heads, 20, 8, generator=chance) for heads in (6, 2, 2)]
        long = [torch.randn(1, 4, 300, 8, generator=chance)] * 3
        for tensors in grouped, long:
            messages.append(refusal(lambda: cp.attention(*tensors)))  # noqa: B023
            messages.append(refusal(lambda: mesh_attention(*tensors, causal=True)))  # noqa: B023
        shards = [known.shard(x, 1) for x in whole(64)]
        messages.append(refusal(lambda: cp.attention(*(x.transpose(1, 2) for x in shards))))
        right = apart(known, cp.attention(*shards), whole(64), [0, 64])
        with ContextParallel(causal=False, num_heads=20) as meant:  # few queries of many heads
            messages.append(refusal(lambda: meant.attention(*grouped)))
        return messages, [right]


def test_heads_where_tokens_are_meant_are_refused_unless_their_number_is_said(
    pool: WorkerPool,
) -> None:
    for messages, errors in pool.run(heads_before_tokens, 2):
        assert messages.pop() == "nothing"
        for words in messages:
            assert "looks like (batch, heads, local_seq, head_dim)" in words
            assert "x.transpose(1, 2)" in words
        assert max(errors) < 1e-5


def never_cut(rank: int, world_size: int) -> Told:
    tensors = whole(48)
    with ContextParallel(causal=True) as cp, ContextParallel(seq_len=96, causal=True) as meant:
        messages = [
            refusal(lambda: cp.attention(*tensors)),
            refusal(lambda: mesh_attention(*tensors, causal=True)),
            refusal(lambda: cp.attention(*(torch.ones(1, 6, 4, 8),) * 3)),  # they say nothing
            refusal(lambda: meant.attention(*tensors)),
        ]
        docs = cp.documents([0, 48])
        shards = [cp.shard(x, 1, documents=docs) for x in tensors]
        messages.append(refusal(lambda: cp.attention(*tensors)))
        out = cp.attention(*shards, documents=docs)
        return messages, [apart(cp, out, tensors, [0, 48], documents=docs)]


def test_tensors_that_were_never_cut_are_refused(pool: WorkerPool) -> None:
    for messages, errors in pool.run(never_cut, 2):
        for words in messages[:2]:
            assert "ranks [0, 1] hold the same keys" in words
            assert "shard_batch" in words
        assert messages[2:4] == ["nothing", "nothing"]
        assert "cut from 48 tokens, so that a rank has fewer" in messages[4]
        assert max(errors) < 1e-5


def without_documents(rank: int, world_size: int) -> Told:
    tensors, starts, errors = whole(48), [0, 20, 48], []
    with ContextParallel(causal=True) as cp, ContextParallel(seq_len=48, causal=True) as sized:
        docs = cp.documents(starts)
        shards = [cp.shard(x, 1, documents=docs) for x in tensors]
        messages = [
            refusal(lambda: cp.attention(*shards)),
            refusal(lambda: sized.attention(*shards)),
            refusal(lambda: mesh_attention(*shards, causal=True)),
        ]
        out = cp.attention(*shards, documents=docs)
        errors.append(apart(cp, out, tensors, starts, documents=docs))
        plain = [sized.shard(x, 1) for x in tensors]  # both kinds in one program
        [cp.shard(x, 1, documents=docs) for x in tensors]
        errors.append(apart(sized, sized.attention(*plain), tensors, [0, 48]))
    with ContextParallel(causal=True) as cp:
        single, batch = cp.documents([0, 32]), cp.documents([0, 12, 32])
        ids, own = torch.arange(32)[None], [torch.randn(1, 16, 2, 8) + rank] * 3
        for _ in range(2):  # once more after the failure, when a call is kept
            cp.shard(ids, 1, documents=single)
            cp.attention(*own)
            cp.attention(*own)
            cp.shard(ids, 1, documents=batch)
            messages.append(refusal(lambda: cp.attention(*own)))
    with ContextParallel(causal=False) as cp:  # whose padding is seen
        slots = cp.shard_batch(input_ids=torch.arange(91)[None]).position_ids.shape[1]
        own = [torch.randn(1, slots, 4, 8)] * 3
        return [*messages, refusal(lambda: cp.attention(*own))], errors


def test_documents_that_were_cut_by_and_then_forgotten_are_asked_for(pool: WorkerPool) -> None:
    for messages, errors in pool.run(without_documents, 2):
        for words in messages:
            assert "attention(..., documents=...)" in words
        assert max(errors) < 1e-5


def padded(rank: int, world_size: int) -> Told:
    tensors, errors = whole(24), []
    with ContextParallel(causal=False) as cp, ContextParallel(seq_len=24, causal=False) as sized:
        shards = [sized.shard(x, 1) for x in tensors]
        messages = [
            refusal(lambda: cp.attention(*shards)),
            refusal(lambda: mesh_attention(*shards, causal=False)),
        ]
        for out in mesh_attention(*shards, causal=False, seq_len=24), sized.attention(*shards):
            errors.append(apart(sized, out, tensors, [0, 24], causal=False))
    with ContextParallel(causal=True) as cp, ContextParallel(seq_len=24, causal=True) as sized:
        out = cp.attention(*(sized.shard(x, 1) for x in tensors))  # padding is seen by none
        errors.append(apart(sized, out, tensors, [0, 24]))
    return messages, errors


def test_padding_is_not_taken_for_tokens(pool: WorkerPool) -> None:
    for messages, errors in pool.run(padded, 5):
        for words, to in zip(messages, (" to ContextParallel(...)", ""), strict=True):
            assert "with 1 of padding" in words
            assert words.endswith(f"if these are other tensors, give seq_len=25 alone{to}"), words
        assert max(errors) < 1e-5


def other_positions(rank: int, world_size: int) -> dict[str, str]:
    """Of documents that zigzag of each could be cut for, in every way that people do."""
    starts, pieces = [0, 24, 48], 2 * world_size
    cut = [torch.arange(a, b).chunk(pieces) for a, b in pairwise(starts)]
    of_each = torch.cat([x for part in cut for x in (part[rank], part[pieces - 1 - rank])])
    with ContextParallel(causal=True, layout="zigzag") as cp:
        docs = cp.documents(starts)
        right, counted = (cp.positions(documents=docs, restart=x) for x in (False, True))
        slots = len(right)
        uneven = cp.documents([0, 47])
        padding = cp.positions(documents=uneven).masked_fill(cp.padding(documents=uneven), 7)

        def check(x: Any, documents: Any = docs) -> str:
            return refusal(lambda: cp.check_positions(x, documents=documents))

        messages = {
            "right": check(right) + check(counted.expand(3, -1)) + check(padding, uneven),
            "contiguous": check(torch.arange(48)[rank * slots :][:slots]),
            "striped": check(torch.arange(48)[rank::world_size][None]),
            "zigzag of each document": check(of_each),
            "of no layout": check(right.flip(0)),
            "slot of this rank": check(torch.arange(48)),
            "on one": check(right if rank == 0 else torch.arange(slots)),
            "give a tensor": check([0, 1]),
        }
        batch = cp.shard_batch(
            input_ids=torch.arange(48)[None], cu_seqlens=starts, position_ids=torch.arange(48) * 3
        )
        messages["own"] = check(batch.position_ids, batch.documents)
        return messages


def test_positions_of_another_layout_are_told_to_all_with_its_name(pool: WorkerPool) -> None:
    for messages in pool.run(other_positions, 2):
        assert messages.pop("right") == "nothing" * 3
        assert messages.pop("own") == "nothing"
        assert "position_ids are contiguous" in messages.pop("on one")
        for name, words in messages.items():
            assert name in words


def with_added_tokens(rank: int, world_size: int) -> Told:
    ids = torch.arange(40)[None]
    with ContextParallel(causal=False) as cp, ContextParallel(causal=False) as other:
        added, pooled = (torch.randn(1, slots, 4, 8) + rank for slots in (21, 10))
        errors = [refusal(lambda: cp.attention(added, added, added))]  # it has cut nothing
        cp.shard_batch(input_ids=ids)
        messages = [
            refusal(lambda: cp.attention(*[added.float()[:, :, :2]] * 3)),
            refusal(lambda: cp.attention(pooled, added, added)),
        ]
        errors.append(refusal(lambda: cp.attention(pooled, pooled, pooled)))
        with ContextParallel(causal=False, layout="contiguous") as named:
            named.shard_batch(input_ids=ids)
            errors.append(refusal(lambda: named.attention(added, added, added)))
        other.shard_batch(input_ids=torch.arange(42)[None])
        errors.append(refusal(lambda: cp.attention(pooled, added, added)))
        return messages, [float(words != "nothing") for words in errors]


def test_tokens_that_each_rank_adds_to_its_shards_are_refused(pool: WorkerPool) -> None:
    for messages, errors in pool.run(with_added_tokens, 2):
        for words in messages:
            assert "cut to 20 slots of a rank, and this call has 21" in words
        assert max(errors) == 0


def of_a_loader(rank: int, world_size: int) -> str:
    with ContextParallel(causal=True) as cp:
        rows: Any = [torch.arange(40)]

        def collate(rows: list[Tensor]) -> dict[str, Any]:
            return dict(cp.shard_batch(input_ids=torch.stack(rows)))

        loader = DataLoader(rows, num_workers=1, timeout=20, collate_fn=collate)
        return refusal(lambda: list(loader))


def test_a_batch_cut_in_a_process_of_a_loader_is_refused_with_the_way_out(pool: WorkerPool) -> None:
    for words in pool.run(of_a_loader, 2):
        assert "let the loader call packer = cp.packer()" in words
