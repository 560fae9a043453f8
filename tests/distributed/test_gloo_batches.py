"""What a rank gets of a batch, and what is refused of batches and losses.

Tests name the needs of users that they show, by their numbers: every argument used or refused (6),
labels shifted before the cut (8), batches sharded twice or different (12), evaluation (20).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from mesh_attention import ContextParallel, Mask, MeshAttentionError
from mesh_attention.train.means import TokenMean
from support.pool import WorkerPool
from support.tiny_gpt import HEAD_DIM, HEADS, VOCABULARY, WholeCase, make_model
from support.training import (
    ALL,
    FEW,
    PACKED,
    PLAIN,
    POSITIONS,
    RIGHT,
    ROWS,
    logits_of,
    make,
    refusal,
    sharded,
    truth,
)


def put_together(rank: int, world_size: int, case: WholeCase) -> list[Any]:
    with make() as cp:
        weights = torch.rand(*case.input_ids.shape, 3, generator=torch.Generator().manual_seed(0))
        batch = sharded(cp, case, weights=weights)
        assert batch.labels is not None
        docs = batch.documents
        slots = cp.padding(documents=docs)
        names = ("input_ids", "position_ids", "labels", "padding", "weights")
        whole = [cp.unshard(batch[name], 1, documents=docs) for name in names]
        rows = case.input_ids.shape
        return [
            *(x.reshape(*rows, *x.shape[2:]) for x in whole),
            bool((batch.labels[:, slots] == -100).all()),
            bool(batch.padding[:, slots].all()),
            torch.equal(whole[-1], weights) and batch.weights is batch["weights"],
            cp.unshard(logits_of(cp, make_model(), batch), 1, documents=docs),
        ]


@pytest.mark.parametrize("case", ALL, ids=lambda case: next(iter(case.arguments), "plain"))
def test_every_token_keeps_its_position_target_and_padding_and_logits_come_back_in_order(
    pool: WorkerPool, case: WholeCase
) -> None:
    """Needs 8 and 20."""
    for ids, positions, labels, padding, _, ignored, masked, others, logits in pool.run(
        put_together, 3, case
    ):
        assert torch.equal(ids, case.input_ids)
        assert torch.equal(positions, case.positions)
        assert torch.equal(labels, case.targets)
        assert torch.equal(padding, ~case.real)
        assert ignored
        assert masked
        assert others
        with torch.no_grad():
            wanted = make_model()(case.input_ids, case.positions, case.attention)
        assert (logits - wanted)[case.real].abs().max() < 1e-5


def kept(rank: int, world_size: int, cases: list[WholeCase]) -> list[list[tuple[int, ...]]]:
    """(token, position, target) of this rank's slots, for each layout and case."""
    results = []
    for layout in ("contiguous", "zigzag", "striped"):
        with ContextParallel(causal=True, layout=layout) as cp:
            for case in cases:
                batch = sharded(cp, case)
                real = ~cp.padding(documents=batch.documents)
                columns = [batch[name][:, real] for name in ("input_ids", "position_ids", "labels")]
                results.append([(*x,) for x in torch.stack(columns, -1).flatten(0, -2).tolist()])
    return results


def test_labels_are_shifted_before_the_cut_in_every_layout(pool: WorkerPool) -> None:
    """Need 8, with documents: the same triples of token, position and target as in one process."""
    cases = [PACKED, ROWS, RIGHT]
    parts = pool.run(kept, 2, cases)
    for number, case in enumerate(cases * 3):
        columns = [case.input_ids, case.positions, case.targets]
        wanted = [(*x,) for x in torch.stack(columns, -1).flatten(0, 1).tolist()]
        results = [triple for of_rank in parts for triple in of_rank[number]]
        assert sorted(results) == sorted(wanted)


def evaluated(rank: int, world_size: int) -> list[float]:
    model = make_model()
    with make() as cp, torch.no_grad():
        batches = [sharded(cp, case) for case in (*ALL, FEW)]
        means = [
            cp.cross_entropy(logits_of(cp, model, batch), batch.labels, reduce="sum")
            for batch in batches
        ]
        return [mean.value.item() for mean in means]


def test_evaluation_has_the_loss_of_one_process_on_any_number_of_ranks(pool: WorkerPool) -> None:
    """Need 20."""
    model = make_model()
    with torch.no_grad():
        wanted = [
            cross_entropy(
                model(case.input_ids, case.positions, case.attention).flatten(0, 1),
                case.targets.flatten(),
            ).item()
            for case in (*ALL, FEW)
        ]
    for ranks in (1, 2, 4):
        for result in pool.run(evaluated, ranks):
            assert result == pytest.approx(wanted, rel=1e-5)


def by_the_object(rank: int, world_size: int) -> list[bool]:
    """An object whose mask has documents says all: batches bring none."""
    sizes = {"seq_len": 37, "num_heads": HEADS, "head_dim": HEAD_DIM, "dtype": torch.float32}
    with ContextParallel(mask=Mask(causal=True, documents=(0, 9, 10, 37)), **sizes) as cp:  # type: ignore[arg-type]
        batch = sharded(cp, replace(PACKED, arguments={}))
        whole = [cp.unshard(batch[name], 1) for name in ("labels", "position_ids")]
        logits = cp.unshard(logits_of(cp, make_model(), batch), 1)
        with torch.no_grad():
            wanted = make_model()(PACKED.input_ids, PACKED.positions, PACKED.attention)
        messages = [refusal(lambda case=case: sharded(cp, case)) for case in (PLAIN, POSITIONS)]
        return [
            batch.documents is None,
            torch.equal(whole[0], PACKED.targets),
            torch.equal(whole[1], PACKED.positions),
            (logits - wanted).abs().max().item() < 1e-5,
            all("has documents already" in message for message in messages),
        ]


def test_an_object_for_one_mask_shards_batches_by_it(pool: WorkerPool) -> None:
    assert pool.run(by_the_object, 2) == [[True] * 5] * 2


# What is refused.


def refused(rank: int, world_size: int) -> dict[str, str]:
    with make() as cp:
        batch = sharded(cp, PACKED)
        ids, labels = PLAIN.input_ids, PLAIN.labels
        logits = torch.zeros(2, 19, VOCABULARY)
        loss: Any = cp.cross_entropy
        return {
            "the batch": refusal(lambda: cp.shard_batch(**batch)),
            "moved": refusal(lambda: cp.shard_batch(**batch.to("cpu"))),
            "for models": refusal(lambda: cp.shard_batch(**batch.model_inputs())),
            "a tensor": refusal(lambda: cp.shard_batch(input_ids=batch.input_ids)),
            "length": refusal(lambda: cp.shard_batch(input_ids=ids[:, :10], cu_seqlens=[0, 19])),
            "next tokens": refusal(
                lambda: cp.shard_batch(input_ids=ids[:, :-1], labels=ids[:, 1:])
            ),
            "4-D": refusal(
                lambda: cp.shard_batch(input_ids=ids, attention_mask=torch.ones(2, 1, 19, 19))
            ),
            "shift_labels": refusal(lambda: cp.shard_batch(input_ids=ids, shift_labels=labels)),  # type: ignore[arg-type]
            "1-D": refusal(lambda: cp.shard_batch(input_ids=ids[0])),
            "others": refusal(lambda: cp.shard_batch(input_ids=ids, x=torch.ones(19))),
            "other starts": refusal(
                lambda: sharded(cp, PACKED, cu_seqlens=[0, 9, 37], documents=batch.documents)
            ),
            "the same": refusal(lambda: sharded(cp, PACKED, documents=batch.documents)),
            "documents": refusal(lambda: sharded(cp, PLAIN, documents=batch.documents)),
            "reduce": refusal(lambda: loss(logits, labels, reduce="mean")),
            "shapes": refusal(lambda: loss(logits[:, :5], labels, reduce="sum")),
            "no labels": refusal(lambda: loss(logits, None, reduce="sum")),
            "ignore_index": refusal(lambda: loss(logits, labels - 1, reduce="sum")),
        }


def test_a_batch_that_was_sharded_and_whatever_does_not_fit_is_refused_by_name(
    pool: WorkerPool,
) -> None:
    """Needs 6 and 12."""
    for messages in pool.run(refused, 2):
        for name in ("the batch", "moved", "for models", "a tensor"):
            assert "give the whole batch, which is cut once" in messages[name]
        assert "only once" in messages["length"]
        assert "shift_labels=False" in messages["next tokens"]
        assert "attention_mask has shape (2, 1, 19, 19)" in messages["4-D"]
        assert "shift_labels is True or False" in messages["shift_labels"]
        assert "input_ids is (19,)" in messages["1-D"]
        assert "x has shape (19,)" in messages["others"]
        assert "not those of the batch" in messages["other starts"]
        assert messages["the same"] == "nothing"
        assert "37 tokens in a row, and the batch has 19" in messages["documents"]
        assert "'mean': must be one of ddp, fsdp, sum" in messages["reduce"]
        assert "(batch, local tokens, vocabulary)" in messages["shapes"]
        assert "targets is None" in messages["no labels"]
        assert "targets hold -" in messages["ignore_index"]
        assert "nor ignore_index (-100): give" in messages["ignore_index"]


def other_batch(rank: int, world_size: int, name: str, warm: bool) -> list[Any]:
    model = make_model()
    with make() as cp:
        if warm:
            logits_of(cp, model, sharded(cp, PLAIN))
        arguments = {"input_ids": PACKED.input_ids, "labels": PACKED.labels, **PACKED.arguments}
        if rank == 1:
            arguments[name] = arguments[name].clone()
            arguments[name][0, 5] += 1
        messages = [refusal(lambda: logits_of(cp, model, cp.shard_batch(**arguments)))]
        again = sharded(cp, PACKED)
        mean: TokenMean = cp.cross_entropy(logits_of(cp, model, again), again.labels, reduce="sum")
        return [*messages, mean.value.item()]


@pytest.mark.parametrize(("name", "warm"), [("input_ids", False), ("labels", True)])
def test_a_rank_with_another_batch_is_named_and_nothing_is_broken(
    pool: WorkerPool, name: str, warm: bool
) -> None:
    """Need 12."""
    [[(wanted, _)]] = pool.run(truth, 1, [[PACKED]])
    for message, later in pool.run(other_batch, 3, name, warm):
        assert message.startswith("rank 1 of the group")
        assert name in message
        assert abs(later - wanted) < 1e-5


def other_loss(rank: int, world_size: int, mistake: str) -> str:
    with make() as cp:
        batch = sharded(cp, PLAIN)
        logits = torch.zeros(*batch.position_ids.shape, VOCABULARY)
        cp.cross_entropy(logits, batch.labels, reduce="sum")
        if rank == 1 and mistake == "shape":
            return refusal(lambda: cp.cross_entropy(logits[:, 1:], batch.labels, reduce="sum"))
        reduce: Any = "ddp" if rank == 1 else "sum"
        return refusal(lambda: cp.cross_entropy(logits, batch.labels, reduce=reduce))


@pytest.mark.parametrize("mistake", ["shape", "reduce"])
def test_a_rank_whose_loss_is_another_is_named(pool: WorkerPool, mistake: str) -> None:
    own = "(batch, local tokens, vocabulary)" if mistake == "shape" else "cross_entropy is 'ddp'"
    for message in pool.run(other_loss, 3, mistake):
        assert own in message
        assert "rank 1" in message or mistake == "shape"


def no_target(rank: int, world_size: int) -> list[float]:
    results = []
    with make() as cp:
        batch = sharded(cp, PLAIN, labels=torch.full_like(PLAIN.labels, -100))
        logits = torch.zeros(*batch.position_ids.shape, VOCABULARY, requires_grad=True)
        assert batch.num_targets is not None
        for total in (None, 0, batch.num_targets, batch.num_targets + 7):
            mean = cp.cross_entropy(logits, batch.labels, reduce="ddp", num_targets=total)
            mean.loss.backward()  # type: ignore[no-untyped-call]
            assert logits.grad is not None
            results += [mean.loss.item(), mean.value.item(), logits.grad.abs().max().item()]
    return results


def test_a_batch_without_any_target_has_a_loss_of_zero(pool: WorkerPool) -> None:
    assert pool.run(no_target, 2) == [[0.0] * 12] * 2


def smoothed(rank: int, world_size: int, dtype: torch.dtype) -> float:
    logits = torch.randn(2, 19, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(dtype)
    with make() as cp:
        batch = sharded(cp, PLAIN)
        own = cp.shard(logits, 1, documents=batch.documents)
        mean = cp.cross_entropy(own, batch.labels, reduce="sum", label_smoothing=0.1)
        true = cross_entropy(
            logits.double().flatten(0, 1), PLAIN.targets.flatten(), label_smoothing=0.1
        )
        return abs(mean.value.item() - true.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_lose_nothing_and_labels_are_smoothed_as_torch_does(
    pool: WorkerPool, dtype: torch.dtype
) -> None:
    assert max(pool.run(smoothed, 2, dtype)) < 1e-6


def sharded_and_copied(rank: int, world_size: int) -> str:
    """Nothing about the tensors says that they are shards."""
    with make() as cp:
        ids = sharded(cp, PACKED)["input_ids"].clone()
        return refusal(lambda: logits_of(cp, make_model(), cp.shard_batch(input_ids=ids)))


def test_shards_that_were_copied_are_found_since_ranks_differ(pool: WorkerPool) -> None:
    """Need 12."""
    for message in pool.run(sharded_and_copied, 2):
        assert "disagrees: the whole batch is" in message
        assert "all ranks of the group must load the same batch" in message


def other_contents(rank: int, world_size: int) -> list[str]:
    """The same documents with another batch: what differs between ranks is found anew."""
    messages = []
    with ContextParallel(None, causal=True, num_heads=2, head_dim=4, seq_len=16) as cp:
        documents = cp.documents([0, 6, 16])
        for odd in (0, 0, rank):
            ids = torch.arange(16)[None] + odd
            batch = cp.shard_batch(input_ids=ids, documents=documents, check=True)
            q = torch.zeros(1, batch.position_ids.shape[1], 2, 4)
            try:
                cp.attention(q, q, q, documents=batch.documents)
                messages.append("")
            except MeshAttentionError as error:
                messages.append(str(error))
    return messages


def test_documents_that_are_used_again_compare_the_contents_of_each_batch(pool: WorkerPool) -> None:
    for first, second, third in pool.run(other_contents, 2):
        assert first == second == ""
        assert "the whole batch" in third
