"""Mistakes with documents of a batch: told by name, to all, and in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from mesh_attention import ContextParallel, MeshAttentionError
from support.document_case import error, make, one_by_one, tensors
from support.pool import WorkerPool


def other_documents(rank: int, world_size: int, warm: bool) -> tuple[str, str]:
    with make() as cp:
        if warm:
            error(cp, [0, 20, 64], 0)
        try:
            error(cp, [0, 30, 64] if rank == 1 else [0, 31, 64], 1)
        except MeshAttentionError as refusal:
            message = str(refusal)
        else:
            message = "nothing"
        try:
            return message, str(error(cp, [0, 12, 64], 2))
        except MeshAttentionError as refusal:
            return message, str(refusal)


@pytest.mark.parametrize("warm", [False, True])
def test_a_rank_with_other_documents_is_named_and_nothing_is_broken(
    pool: WorkerPool, warm: bool
) -> None:
    for message, later in pool.run(other_documents, 4, warm):
        assert "rank 1" in message
        assert "2 documents" in message
        assert float(later) < 1e-5


def wrong_tensors(rank: int, world_size: int) -> tuple[str, float]:
    """All ranks hand in tensors of another batch."""
    with make() as cp:
        error(cp, [0, 20, 64], 0)
        docs = cp.documents([0, 20, 90])
        q, k, v, _ = (cp.shard(x, 1) for x in tensors([0, 64], 0))
        try:
            cp.attention(q, k, v, documents=docs)
            message = "nothing"
        except MeshAttentionError as refusal:
            message = str(refusal)
        return message, error(cp, [0, 20, 90], 0)


def test_tensors_of_another_batch_are_refused_by_all_and_the_object_lives(
    pool: WorkerPool,
) -> None:
    for message, later in pool.run(wrong_tensors, 3):
        assert "q has shape" in message
        assert later < 1e-5


LATE_SECONDS = 5  # ranks of a busy machine took more than 2 to make a process group


def late_rank(rank: int, world_size: int) -> tuple[str, float]:
    """The object has a timeout of its own, much shorter than the group's."""
    cp = make(timeout=timedelta(seconds=LATE_SECONDS))
    error(cp, [0, 20, 64], 0)
    begin = monotonic()
    if rank == world_size - 1:
        dist.distributed_c10d._get_default_store().get("told")  # until the others are
        return "", 0.0
    try:
        error(cp, [0, 21, 64], 1)
        message = "nothing"
    except MeshAttentionError as refusal:
        message = str(refusal)
    took = monotonic() - begin
    dist.distributed_c10d._get_default_store().set("told", "yes")
    return message, took


def test_a_rank_that_does_not_come_is_told_after_the_timeout_of_the_object(
    pool: WorkerPool,
) -> None:
    *others, _ = pool.run(late_rank, 3)
    for message, took in others:
        assert "rank 2" in message
        assert took < LATE_SECONDS + 5


def outliving(rank: int, world_size: int) -> list[float]:
    """Documents that were made before the last object was closed."""
    cp = make()
    starts = [0, 20, 64]
    docs = cp.documents(starts)
    results = []
    for _ in range(2):
        whole = tensors(starts, 1)
        q, k, v, _ = (cp.shard(x, 1, documents=docs) for x in whole)
        out = cp.attention(q, k, v, documents=docs)
        assert isinstance(out, Tensor)
        right = cp.shard(one_by_one(starts, whole)[0], 1, documents=docs)
        results.append(float((out - right).abs().max()))
        cp.close()
        cp = make()
    cp.close()
    return results


def test_documents_outlive_the_object_that_made_them(pool: WorkerPool) -> None:
    for errors in pool.run(outliving, 2):
        assert max(errors) < 1e-5


def left_early(rank: int, world_size: int) -> bool:
    """The loader waits for data when the loop is left."""
    held = threading.Event()

    def loader() -> Iterator[list[int]]:
        yield [0, 7, 64]
        yield [0, 8, 64]
        held.wait(60)

    with make() as cp:
        for number, _ in enumerate(cp.prefetch(loader(), lambda starts: starts)):
            if number == 1:
                break
    waited = held.is_set()
    held.set()
    return waited


def test_leaving_a_prefetch_loop_does_not_wait_for_the_loader(pool: WorkerPool) -> None:
    assert pool.run(left_early, 2) == [False, False]


def slow_loader(rank: int, world_size: int) -> list[float]:
    """On one rank the second batch is made after the first was used, elsewhere before."""
    used = threading.Event()
    batches = [[0, 30, 61], [0, 9, 64], [0, 40, 64]]

    def loader() -> Iterator[list[int]]:
        for number, starts in enumerate(batches):
            if rank == 0 and number == 1:
                used.wait(60)
            yield starts

    results = []
    with ContextParallel(causal=True) as cp:
        for starts, docs in cp.prefetch(loader(), lambda starts: starts):
            whole = tensors(starts, 1)
            q, k, v, _ = (cp.shard(x, 1, documents=docs) for x in whole)
            out = cp.attention(q, k, v, documents=docs)
            used.set()
            right = cp.shard(one_by_one(starts, whole)[0], 1, documents=docs)
            results.append(float((out - right).abs().max()))  # type: ignore[operator]
    return results


def test_batches_are_laid_out_alike_however_fast_the_loaders_are(pool: WorkerPool) -> None:
    for errors in pool.run(slow_loader, 2):
        assert max(errors) < 1e-5


def mistakes(rank: int, world_size: int) -> list[str]:
    with make() as cp, make(layout="zigzag") as zigzag, make(layout="contiguous") as contiguous:
        pack = cp.packer()([0, 9, 64])
        closed = make()
        closed.close()
        tried: list[Any] = [
            lambda: cp.documents(pack, kv_cu_seqlens=[0, 4, 8]),
            lambda: cp.documents(pack, also=[zigzag]),
            lambda: zigzag.documents([0, 64], also=[contiguous]),
            lambda: cp.documents([0, 64], also=[None]),  # type: ignore[list-item]
            lambda: cp.prefetch([[0, 64]], "cu_seqlens"),  # type: ignore[arg-type]
            lambda: cp.documents([0, 9, 5, 64]),
            lambda: cp.documents([3, 9]),
            closed.packer,
        ]
        return [told_by(each) for each in tried]


def told_by(work: Any) -> str:
    try:
        work()
    except MeshAttentionError as refusal:
        return str(refusal)
    return "nothing"


def test_what_documents_cannot_use_is_refused_by_name(pool: WorkerPool) -> None:
    parts = [
        "give 'kv_cu_seqlens' and 'also' to the packer instead",
        "give 'kv_cu_seqlens' and 'also' to the packer instead",
        "want different layouts: zigzag, contiguous",
        "a list of ContextParallel objects on the same group",
        "a function that takes them from a batch",
        "number 2 is 5, after 9",
        "the first is 3",
        "closed",
    ]
    for messages in pool.run(mistakes, 2):
        assert len(messages) == len(parts)
        for text, part in zip(messages, parts, strict=True):
            assert part in text
