"""Tensors that lie otherwise than a call assumes, where they are known or were computed from such:
each is an error on all ranks, and programs that mean it are right, held against float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from mesh_attention import ContextParallel, mesh_attention
from support.pool import WorkerPool
from support.port_case import Told, apart, truth, whole
from support.training import refusal


def of_another_object(rank: int, world_size: int) -> Told:
    tensors, starts, errors = whole(240), [*range(0, 241, 20)], []
    with (
        ContextParallel(seq_len=240, causal=True, layout="contiguous") as cut,
        ContextParallel(seq_len=240, causal=True) as called,
    ):
        q, k, v = (cut.shard(x, 1) for x in tensors)
        docs = called.documents(starts)
        of_docs = [called.shard(x, 1, documents=docs) for x in tensors]
        of_plain = [called.shard(x, 1) for x in tensors]
        own_q, own_k, _ = of_plain
        together = cut.shard(torch.stack(tensors, 2), 1).unbind(2)
        out_of_docs = called.attention(*of_docs, documents=docs)
        messages = [
            refusal(lambda: called.attention(q, k, v)),
            refusal(lambda: called.attention(own_q, own_k, v.clone())),
            refusal(lambda: called.attention(own_q, own_k, v)),
            refusal(lambda: called.attention(*together)),
            refusal(lambda: mesh_attention(q, k, v, causal=True, seq_len=240)),
            refusal(lambda: called.attention(q, k, v)),  # where the call is warm too
            refusal(lambda: apart(cut, called.attention(*of_plain), tensors, [0, 240])),
            refusal(lambda: called.unshard(q, 1)),
            refusal(lambda: called.attention(*of_plain, documents=docs)),
            refusal(lambda: apart(called, out_of_docs, tensors, starts)),
        ]
        errors.append(apart(called, out_of_docs, tensors, starts, documents=docs))
        square = [cut.shard(torch.randn(1, 80, 240, 8), 2) for _ in range(3)]
        messages.append(refusal(lambda: cut.attention(*square)))  # 80 heads, and 80 slots
        errors.append(apart(cut, cut.attention(q, k, v), tensors, [0, 240]))
        for x, right in zip((q, k, v), of_plain, strict=True):
            x.copy_(right)  # what is written into a tensor is not known
        errors.append(apart(called, called.attention(q, k, v), tensors, [0, 240]))
    return messages, errors


def test_shards_of_another_object_are_told_from_ours_wherever_they_are_known(
    pool: WorkerPool,
) -> None:
    for messages, errors in pool.run(of_another_object, 3):
        assert messages.pop(1) == "nothing"  # a copy is another tensor
        assert "q has shape (1, 80, 80, 8) and was cut along another dimension" in messages.pop()
        for words in messages:
            assert "in the contiguous layout" in words
        assert max(errors) < 1e-5


def joined_otherwise(rank: int, world_size: int) -> Told:
    """What is computed from shards lies as they do, also where another object joins it."""
    starts, ids = [0, 3, 9, 13, 20, 26, 40], torch.arange(40)[None]
    with (
        ContextParallel(seq_len=40, causal=True, num_heads=4, head_dim=8) as cp,
        ContextParallel(seq_len=40, causal=True) as other,
        ContextParallel(seq_len=40, causal=True, window_size=(5, 0), method="seen") as seen,
        ContextParallel(seq_len=40, causal=True, layout="contiguous") as named,
    ):
        packed: Any = cp.shard_batch(input_ids=ids, cu_seqlens=starts)
        states: Any = packed.input_ids * 2
        messages = [refusal(lambda: cp.unshard(states, 1))]
        cp.positions()  # which says nothing of what the object itself has cut
        messages.append(refusal(lambda: cp.unshard(states, 1)))
        errors = [float((cp.unshard(states, 1, documents=packed.documents) - ids * 2).abs().max())]
        errors.append(float((named.unshard(states, 1) - ids * 2).abs().max()))  # lies as said
        batch: Any = other.shard_batch(input_ids=ids, labels=ids)
        seen.padding()
        x = other.shard(torch.randn(1, 40, 4, 8), 1) * 1
        for call in (
            lambda: seen.unshard(x.mean(-1), 1),
            lambda: seen.unshard(batch.labels, 1),
            lambda: seen.attention(x, x, x),
        ):
            messages.append(refusal(call))
        return messages, errors


def test_computed_tensors_are_joined_as_the_shards_they_come_from(pool: WorkerPool) -> None:
    for messages, errors in pool.run(joined_otherwise, 2):
        for words in messages:
            assert "zigzag layout" in words
        assert max(errors) == 0


def cut_along_two(rank: int, world_size: int) -> list[float]:
    """Frames over two ranks of four, the tokens of each over the other two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("frames", "tokens"))
    video = torch.randn(1, 12, 16, 2, 4, generator=torch.Generator().manual_seed(1))
    with (
        ContextParallel(mesh["frames"], seq_len=12, causal=True) as frames,
        ContextParallel(mesh["tokens"], seq_len=16, causal=False) as tokens,
    ):
        own = tokens.shard(frames.shard(video, 1), 2)
        back = tokens.unshard(frames.unshard(own, 1), 2), frames.unshard(tokens.unshard(own, 2), 1)
        x = own.flatten(0, 1)
        whole_frames = [frames.shard(video, 1).flatten(0, 1)] * 3
        error = apart(tokens, tokens.attention(x, x, x), whole_frames, [0, 16], causal=False)
        return [error, *(float((x - video).abs().max()) for x in back)]


def test_tensors_cut_along_two_dimensions_over_two_groups_are_right(pool: WorkerPool) -> None:
    for errors in pool.run(cut_along_two, 4):
        assert max(errors) < 1e-5


def of_other_documents(rank: int, world_size: int) -> Told:
    """A model with full layers and layers of a window, each of which makes documents itself."""
    tensors, starts = whole(240), [0, 120, 180, 240]
    with (
        ContextParallel(causal=True, layout="zigzag") as full,
        ContextParallel(causal=True, window_size=(9, 0), layout="contiguous") as local,
        ContextParallel(causal=True, window_size=(9, 0)) as chosen,
        ContextParallel(causal=True, seq_len=240) as sized,
    ):
        of_full, of_local = full.documents(starts), local.documents(starts)
        shards = [full.shard(x, 1, documents=of_full) * 1 for x in tensors]  # as projections are
        messages = [refusal(lambda: local.attention(*shards, documents=of_local))]
        right = full.attention(*shards, documents=of_full)
        errors = [apart(full, right, tensors, starts, documents=of_full)]
        plain = [sized.shard(x, 1) * 1 for x in tensors]
        others = chosen.documents([0, 100, 240])
        for _ in range(2):
            messages.append(refusal(lambda: chosen.attention(*plain, documents=others)))
            chosen.padding(documents=others)  # which says nothing of how tensors lie
        chosen.positions(documents=others)  # by which tensors may have been cut
        messages.append(refusal(lambda: chosen.attention(*plain, documents=others)))
        return messages, errors


def test_documents_that_each_object_makes_for_itself_are_refused_where_layouts_differ(
    pool: WorkerPool,
) -> None:
    for messages, errors in pool.run(of_other_documents, 2):
        assert messages.pop() == "nothing"
        for words in messages:
            assert "made once a batch with also=" in words
        assert max(errors) < 1e-5


def meant_otherwise(rank: int, world_size: int) -> list[float]:
    """What other objects cut, or what was cut long ago, is no mistake of these tensors."""
    tensors, errors = whole(40), []
    by_hand = [x.chunk(world_size, 1)[rank] for x in tensors]
    starts = [0, 3, 9, 13, 20, 26, 40]
    with (
        ContextParallel(causal=True, num_heads=4, head_dim=8) as packed,
        ContextParallel(seq_len=40, causal=True) as sized,
    ):
        docs = packed.documents(starts)
        shards = [packed.shard(x, 1, documents=docs) for x in tensors]
        for number in range(65):  # and the bounds of the first are forgotten
            rest = [x for x in range(1, 8) if number >> x - 1 & 1]
            packed.positions(documents=packed.documents([0, *rest, 40]))
        sized.positions()
        out: Any = packed.attention(*shards, documents=docs)
        errors.append(apart(packed, out, tensors, starts, documents=docs))
        for names in ({"relayout": True}, {"layout": "contiguous"}):
            with ContextParallel(causal=True, **names) as named:
                for bounds in (starts, [0, 40]):
                    out = named.attention(*by_hand, documents=named.documents(bounds))
                    right = truth(tensors, bounds).chunk(world_size, 1)[rank]
                    errors.append(float((out - right).abs().max()))
            with ContextParallel(causal=True, **names) as named:  # 39 tokens have as many slots
                for seq_len in (39, 40):
                    ContextParallel(seq_len=seq_len, causal=True).shard(tensors[0][:, :seq_len], 1)
                    out = named.attention(*by_hand)
                    right = truth(tensors, [0, 40]).chunk(world_size, 1)[rank]
                    errors.append(float((out - right).abs().max()))
    return errors


def test_tensors_are_right_where_documents_were_asked_for_or_the_layout_is_named(
    pool: WorkerPool,
) -> None:
    for errors in pool.run(meant_otherwise, 2):
        assert max(errors) < 1e-5


def in_any_order(rank: int, world_size: int) -> list[float]:
    """Without a mask the order of tokens means nothing: shards of any object are right."""
    tensors, errors = whole(48), []
    with (
        ContextParallel(seq_len=48, causal=True) as cut,
        ContextParallel(seq_len=48, causal=False, layout="contiguous") as full,
        ContextParallel(causal=False, layout="contiguous") as unsized,
    ):
        shards = [cut.shard(x, 1) for x in tensors]
        docs = unsized.documents([0, 48])
        for out in (
            full.attention(*shards),
            full.attention(*(x * 1 for x in shards)),
            unsized.attention(*(x * 1 for x in shards), documents=docs),
        ):
            errors.append(apart(cut, out, tensors, [0, 48], causal=False))
    return errors


def test_shards_of_another_object_are_right_where_no_mask_orders_tokens(pool: WorkerPool) -> None:
    for errors in pool.run(in_any_order, 2):
        assert max(errors) < 1e-5
