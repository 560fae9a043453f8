"""Mistakes that people make when they port a program: each is an error on all ranks, with the way
out, and what is right afterwards still works. Results are held against one process in float64."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.data import DataLoader

from mesh_attention import ContextParallel, mesh_attention
from support.pool import WorkerPool
from support.training import refusal

Told = tuple[list[str], list[float]]  # errors, and how far results are from the truth


def whole(tokens: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, tokens, 4, 8, generator=chance) for _ in range(3)]


def truth(tensors: list[Tensor], starts: list[int], *, causal: bool = True) -> Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in tensors)
    parts = [
        scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=causal)
        for a, b in pairwise(starts)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def apart(
    cp: ContextParallel, out: Any, tensors: list[Tensor], starts: list[int], **how: Any
) -> float:
    whole_out = cp.unshard(out, 1, documents=how.pop("documents", None))
    return float((whole_out - truth(tensors, starts, **how)).abs().max())


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


def shifted_again(rank: int, world_size: int) -> Told:
    generator = torch.Generator().manual_seed(1)
    how: Any = {"reduce": "sum"}
    ids = torch.randint(0, 11, (2, 24), generator=generator)
    with ContextParallel(causal=True) as cp:
        batch: Any = cp.shard_batch(input_ids=ids, labels=ids)
        labels = batch.labels
        logits = torch.randn(*labels.shape, 11, generator=generator).requires_grad_()
        x, y, copied = logits[:, :-1], labels[:, 1:], labels[:, 1:].contiguous()
        messages = [
            refusal(lambda: cp.cross_entropy(x, y, **how)),
            refusal(lambda: cp.cross_entropy(x.contiguous().view(-1, 11), y.flatten(), **how)),
            refusal(lambda: cp.cross_entropy(x.detach(), y, **how)),
            refusal(lambda: cp.linear_cross_entropy(x * 1, torch.eye(11), y, **how)),
            refusal(lambda: cp.cross_entropy(x.detach() * 1, copied, **how)),
            refusal(lambda: cp.linear_cross_entropy(x * 1, torch.eye(11), copied, **how)),
            refusal(lambda: cp.log_probs(x * 1, copied)),
            refusal(lambda: cp.cross_entropy(logits, labels.roll(-1, 1), **how)),
            refusal(lambda: cp.cross_entropy(logits, pad(y, (0, 1), value=-100), **how)),
        ]
        shard = cp.shard(ids, 1, documents=batch.documents)
        messages.append(refusal(lambda: cp.cross_entropy(x.detach(), shard[:, 1:], **how)))
        right = cp.cross_entropy(logits, labels, **how).value
        padded = pad(logits, (0, 0, 0, 1))[:, :-1]
        errors = [cp.cross_entropy(padded, labels, **how).value - right]
        errors.append(cp.cross_entropy(padded.flatten(0, 1), labels.view(-1), **how).value - right)
        for spans in ([(0, 5), (5, 12)], [(0, 1), (1, 12)], [(0, 11), (11, 12)]):
            parts = [(logits[:, a:b], labels[:, a:b]) for a, b in spans]
            parted = [cp.cross_entropy(*part, **how) for part in parts]
            tokens = [part.num_targets for part in parted]
            total = sum(part.value * n for part, n in zip(parted, tokens, strict=True))
            errors.append(total / sum(tokens) - right)
        return messages, [float(error.abs()) for error in errors]


def test_a_shift_of_labels_that_are_shifted_already_is_refused(pool: WorkerPool) -> None:
    for messages, errors in pool.run(shifted_again, 2):
        for words in messages:
            assert "labels of shard_batch are the next tokens already" in words
        assert max(errors) < 1e-5


def never_shifted(rank: int, world_size: int) -> list[str]:
    ids = torch.randint(0, 11, (1, 24), generator=torch.Generator().manual_seed(1))
    how: Any = {"input_ids": ids, "labels": ids, "shift_labels": False}
    with ContextParallel(causal=True) as cp, ContextParallel(causal=False) as both:
        batch: Any = cp.shard_batch(input_ids=ids)
        logits, row = torch.zeros(*batch.input_ids.shape, 11), batch.to("cpu").input_ids[0]
        return [
            refusal(lambda: cp.log_probs(logits, batch.input_ids)),
            refusal(lambda: cp.cross_entropy(logits[0], row, reduce="sum")),
            refusal(lambda: cp.shard_batch(**how)),
            refusal(lambda: cp.log_probs(logits, batch.input_ids.clone())),
            refusal(lambda: cp.shard_batch(**how, check=False)),
            refusal(lambda: both.log_probs(logits, batch.input_ids)),
            refusal(lambda: both.shard_batch(**how)),
        ]


def test_tokens_that_are_their_own_targets_are_refused_under_a_causal_mask(
    pool: WorkerPool,
) -> None:
    for ids, of_loss, labels, *meant in pool.run(never_shifted, 2):
        assert "take batch.labels, which are the next tokens" in ids
        assert "take batch.labels, which are the next tokens" in of_loss
        assert "leave shift_labels out" in labels
        assert meant == ["nothing"] * 4


def targets_cut_otherwise(rank: int, world_size: int) -> list[str]:
    """Targets and masks that do not lie as the tokens of attention."""
    [x, *_], ids = whole(240), torch.arange(240)[None] % 7
    with (
        ContextParallel(causal=True, seq_len=240) as cp,
        ContextParallel(causal=False, seq_len=240) as other,
    ):
        docs = cp.documents([*range(0, 241, 20)])
        q = cp.shard(x, 1).requires_grad_()
        of_docs = cp.shard(x, 1, documents=docs).requires_grad_()
        attend: Any = cp.attention
        out = attend(q, q, q).flatten(2)
        packed = attend(of_docs, of_docs, of_docs, documents=docs).flatten(2)
        right, wrong = cp.shard(ids, 1), other.shard(ids, 1)
        of_right, mask = cp.shard(ids, 1, documents=docs), cp.shard(ids > 3, 1)
        loss = partial(cp.cross_entropy, reduce="sum")
        mean = partial(cp.token_mean, packed[..., 0], reduce="sum", documents=docs)
        return [
            refusal(lambda: loss(out, wrong)),
            refusal(lambda: loss(packed * 2, right)),
            refusal(lambda: mean(mask)),
            refusal(lambda: loss(out, right)),
            refusal(lambda: loss(packed, of_right)),
            refusal(lambda: loss(out, wrong.clone())),
            refusal(lambda: mean(mask.clone())),
        ]


def test_targets_and_masks_that_were_cut_in_another_way_than_their_tokens_are_refused(
    pool: WorkerPool,
) -> None:
    for targets, of_plain, mask, *meant in pool.run(targets_cut_otherwise, 2):
        assert "targets lie in the contiguous layout" in targets
        assert "with the same documents=" in of_plain
        assert "give shard and token_mean the same documents=" in mask
        assert meant == ["nothing"] * 4


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


def other_ignored(rank: int, world_size: int) -> list[str]:
    ids = torch.arange(24)[None] % 7
    with ContextParallel(causal=True) as cp:
        batch: Any = cp.shard_batch(input_ids=ids, labels=ids, ignore_index=0)
        logits, labels = torch.randn(*batch.labels.shape, 7), batch.labels
        how: Any = {"reduce": "sum"}
        messages = [
            refusal(lambda: cp.cross_entropy(logits, labels, **how)),
            refusal(lambda: cp.cross_entropy(logits.flatten(0, 1), labels.view(-1), **how)),
            refusal(lambda: cp.cross_entropy(logits, batch.to("cpu").labels, **how)),
        ]
        said = refusal(lambda: cp.cross_entropy(logits, labels, ignore_index=0, **how))
        labels[labels == 0] = -100  # what is written into them is the caller's
        return [*messages, said, refusal(lambda: cp.cross_entropy(logits, labels, **how))]


def test_a_loss_ignores_what_shard_batch_wrote(pool: WorkerPool) -> None:
    for *messages, same, written in pool.run(other_ignored, 2):
        assert (same, written) == ("nothing", "nothing")
        for words in messages:
            assert "shard_batch filled these labels with 0" in words


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
