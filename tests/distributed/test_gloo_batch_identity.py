"""Which batch a call is made on: a rank that is at another is named, whatever else is alike, and
loaders that are ahead and checkpoints that attend again are left alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel, ContextParallelAttention, MeshAttentionError
from mesh_attention.train.sharded_batch import ShardedBatch
from support.pool import WorkerPool

RANKS, ODD = 3, 1
TOKENS = 24
Outcome = list[str]


def make() -> ContextParallel:
    return ContextParallel(
        seq_len=TOKENS, num_heads=2, head_dim=4, causal=True, dtype=torch.float32
    )


def ids_of(step: int) -> Tensor:
    return torch.randint(50, (1, TOKENS), generator=torch.Generator().manual_seed(step))


def vectors_of(ids: Tensor) -> Tensor:
    """(1, tokens, 2, 4), from a table that all ranks have."""
    return torch.randn(50, 2, 4, generator=torch.Generator().manual_seed(99))[ids]


def attended(cp: ContextParallel, batch: ShardedBatch, **inputs: Any) -> Tensor:
    assert batch.input_ids is not None
    x = vectors_of(batch.input_ids).requires_grad_()
    out = cp.attention(x, x, x, documents=batch.documents, **inputs)
    assert isinstance(out, Tensor)
    return out


def true_error(cp: ContextParallel, out: Tensor, step: int, documents: Any = None) -> float:
    x = vectors_of(ids_of(step)).double().transpose(1, 2)
    true = scaled_dot_product_attention(x, x, x, is_causal=True)
    return float((out - cp.shard(true.transpose(1, 2).float(), 1, documents=documents)).abs().max())


def outcome(step: Callable[..., Any], *args: Any, **inputs: Any) -> str:
    try:
        step(*args, **inputs)
    except MeshAttentionError as error:
        return str(error)
    return ""


# Faults: what each of three steps comes to, in words.


def micro_batches_in_opposite_order(rank: int, cp: ContextParallel) -> Outcome:
    """On the same documents."""
    documents = cp.documents([0, TOKENS])
    batches = [cp.shard_batch(input_ids=ids_of(i), documents=documents) for i in (0, 1)]
    order = (1, 0) if rank == ODD else (0, 1)
    return [outcome(attended, cp, batches[i], label=0) for i in order]


def skipped_step(rank: int, cp: ContextParallel) -> Outcome:
    """Forward and backward, after the batch was cut; its numbers cannot be compared."""
    messages = []
    for step in range(3):
        x = cp.shard(vectors_of(ids_of(step)), 1).requires_grad_()
        if rank == ODD and step == 1:
            continue

        def train(x: Tensor = x) -> None:
            for layer in range(2):
                x = cp.attention(x, x, x, label=layer)  # type: ignore[assignment]
            x.sum().backward()  # type: ignore[no-untyped-call]

        messages.append(outcome(train))
    return messages


def skipped_block(rank: int, cp: ContextParallel) -> Outcome:
    """In which PyTorch's own attention is replaced."""
    messages = []
    for step in range(3):
        x = vectors_of(ids_of(step)).transpose(1, 2).contiguous()
        with cp.context_parallel(buffers=[x], buffer_seq_dims=[2]):
            if rank == ODD and step == 1:
                continue
            messages.append(outcome(scaled_dot_product_attention, x, x, x, is_causal=True))
    return messages


def wholes_in_opposite_order(rank: int, cp: ContextParallel) -> Outcome:
    documents = cp.documents([0, TOKENS])
    batches = [cp.shard_batch(input_ids=ids_of(i), documents=documents) for i in (0, 1)]
    order = (1, 0) if rank == ODD else (0, 1)
    x = torch.zeros(1, TOKENS // RANKS)
    return [outcome(cp.unshard, x, 1, documents=batches[i].documents) for i in order]


def batch_that_a_rank_never_cut(rank: int, cp: ContextParallel) -> Outcome:
    messages = []
    for step in range(3):
        if rank == ODD and step == 1:
            continue
        ids = cp.shard(ids_of(step), 1)
        x = vectors_of(ids)
        messages.append(outcome(cp.attention, x, x, x))
        if messages[-1]:
            break
    return messages


def swapped_losses(rank: int, cp: ContextParallel) -> Outcome:
    batches = [cp.shard_batch(input_ids=ids_of(i), labels=ids_of(i), check=False) for i in range(2)]
    logits = torch.zeros(*batches[0].position_ids.shape, 50)
    order = (1, 0) if rank == ODD else (0, 1)
    return [
        outcome(cp.cross_entropy, logits, batches[i].to("cpu").labels, reduce="sum") for i in order
    ]


def labels_of_losses(rank: int, cp: ContextParallel) -> Outcome:
    batch = cp.shard_batch(input_ids=ids_of(0), labels=ids_of(0))
    logits = torch.zeros(*batch.position_ids.shape, 50)
    names = ("second", "first") if rank == ODD else ("first", "second")
    return [outcome(cp.cross_entropy, logits, batch.labels, reduce="sum", label=n) for n in names]


def labels_of_unshard(rank: int, cp: ContextParallel) -> Outcome:
    x = cp.shard(vectors_of(ids_of(0)), 1)
    return [outcome(cp.unshard, x, 1, label="keys" if rank == ODD else "values")]


def swapped_modules(rank: int, cp: ContextParallel) -> Outcome:
    """The second is a copy, as layers of a model are made."""
    first = ContextParallelAttention(cp)
    layers = [first, copy.deepcopy(first)]
    x = cp.shard(vectors_of(ids_of(0)), 1)
    return [outcome(layers[i ^ (rank == ODD)], x, x, x) for i in (0, 1)]


FAULTS: dict[str, tuple[Callable[[int, ContextParallel], Outcome], int, str]] = {
    # What is done, the step that is told, and how.
    "micro-batches": (micro_batches_in_opposite_order, 0, "number of the batch is 3 there, 2 else"),
    "skipped step": (skipped_step, 1, "number of the batch is 3 there, 2 elsewhere"),
    "skipped block": (skipped_block, 1, "number of the batch is 3 there, 2 elsewhere"),
    "wholes": (wholes_in_opposite_order, 0, "number of the batch is 3 there, 2 elsewhere"),
    "never cut": (batch_that_a_rank_never_cut, 1, "the whole batch is "),
    "losses": (swapped_losses, 0, "number of the batch is 2 there, 1 elsewhere"),
    "loss labels": (labels_of_losses, 0, "label is \"'second'\" there, \"'first'\" elsewhere"),
    "modules": (swapped_modules, 0, "label is \"'module 1'\" there, \"'module 0'\" elsewhere"),
    "unshard": (labels_of_unshard, 0, "label is \"'keys'\" there, \"'values'\" elsewhere"),
}


def go_wrong(rank: int, world_size: int, name: str) -> tuple[Outcome, str]:
    cp = make()
    message = FAULTS[name][0](rank, cp)
    x = cp.shard(vectors_of(ids_of(9)), 1)
    return message, outcome(cp.attention, x, x, x)


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_at_another_batch_is_named(pool: WorkerPool, name: str) -> None:
    _, step, words = FAULTS[name]
    for messages, later in pool.run(go_wrong, RANKS, name):
        assert not any(messages[:step])
        assert f"rank {ODD} of the group [0, 1, 2] disagrees" in messages[step]
        assert words in messages[step]
        if name != "never cut":  # else the ranks are at the same call, as far as anybody can tell
            assert "the ranks are at different points of their programs" in messages[step]
            assert "everything on this group is refused" in later


def loader_ahead(rank: int, cp: ContextParallel) -> float:
    """In its own thread, by another number of batches on each rank, all on the same documents."""
    documents, batches = cp.documents([0, TOKENS]), list[ShardedBatch]()

    def load(steps: range) -> None:
        for step in steps:
            batches.append(cp.shard_batch(input_ids=ids_of(step), documents=documents))

    results = []
    for step in range(3):
        ahead = range(len(batches), 3 if rank == ODD else step + 1)
        thread = threading.Thread(target=load, args=(ahead,))
        thread.start()
        thread.join()
        out = attended(cp, batches[step])
        results.append(true_error(cp, out, step, documents))
    return max(results)


def prefetched(rank: int, cp: ContextParallel) -> float:
    results = []
    for step, (ids, documents) in enumerate(
        cp.prefetch(map(ids_of, range(3)), lambda _: [0, TOKENS])
    ):
        batch = cp.shard_batch(input_ids=ids, documents=documents)
        results.append(true_error(cp, attended(cp, batch), step, documents))
    return max(results)


def recomputed_after_the_next_batch(rank: int, cp: ContextParallel) -> float:
    """Forward of a batch, forward of the next, then both backward passes, which attend again."""
    outs = []
    for step in range(2):
        batch = cp.shard_batch(input_ids=ids_of(step))
        outs.append(checkpoint(attended, cp, batch, use_reentrant=False))
    results = [true_error(cp, out, step) for step, out in enumerate(outs)]
    for out in outs:
        out.sum().backward()
    return max(results)


def after_a_difference(rank: int, cp: ContextParallel) -> float:
    """Of what a batch holds alone: all go on with the next."""
    for step in (0, 1):
        x = vectors_of(cp.shard(ids_of(step + (5 if step == 0 and rank == ODD else 0)), 1))
        message = outcome(cp.attention, x, x, x)
        assert bool(message) == (step == 0), message
        assert not message or "the whole batch is" in message
    out = cp.attention(x, x, x)
    assert isinstance(out, Tensor)
    return true_error(cp, out, 1)


def after_a_refused_batch(rank: int, cp: ContextParallel) -> float:
    """By one rank, for a mistake of its own: all go on with the next."""
    check: Any = "yes" if rank == ODD else None
    message = outcome(cp.shard_batch, input_ids=ids_of(0), check=check)
    assert bool(message) == (rank == ODD), message
    return true_error(cp, attended(cp, cp.shard_batch(input_ids=ids_of(1))), 1)


def in_modules(rank: int, cp: ContextParallel) -> float:
    layers = [ContextParallelAttention(cp) for _ in range(2)]
    x = vectors_of(cp.shard(ids_of(0), 1))
    return max(true_error(cp, layer(x, x, x), 0) for layer in layers)


RIGHT = (
    *(loader_ahead, prefetched, recomputed_after_the_next_batch, after_a_difference),
    *(after_a_refused_batch, in_modules),
)


def go_right(rank: int, world_size: int) -> dict[str, float]:
    results = {}
    for way in RIGHT:
        with make() as cp:
            results[way.__name__] = way(rank, cp)
    return results


def test_loaders_checkpoints_and_other_batches_after_an_error_are_right(pool: WorkerPool) -> None:
    for result in pool.run(go_right, RANKS):
        assert max(result.values()) < 1e-5, result
