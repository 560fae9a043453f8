"""Targets of other tokens than the logits: shifted twice or never, cut otherwise, or ignored
otherwise than `shard_batch` wrote them. Each is an error with the way out; right losses are right.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from mesh_attention import ContextParallel
from support.pool import WorkerPool
from support.port_case import Told, whole
from support.training import refusal


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
