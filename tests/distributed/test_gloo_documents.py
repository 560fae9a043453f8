"""Documents that come with every batch: exact, cheap, and never another rank's in silence."""

from __future__ import annotations

import gc
import threading
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mesh_attention import ContextParallel
from mesh_attention.runtime.session.rank_plan import RankPlan
from support.document_case import DIM, HEADS, error, make, one_by_one, tensors
from support.held import grown, resources
from support.pool import WorkerPool


def many_batches(rank: int, world_size: int, changes: dict[str, Any]) -> list[float]:
    with make(**changes) as cp:
        return [*some_batches(cp), error(cp, [0, 64], 2), error(cp, [0, 97, 130], 4)]


def some_batches(cp: ContextParallel) -> list[float]:
    starts = ([0, 5, 64], [0, 1, 1, 2, 40, 63], [0, 3])
    return [error(cp, cuts, seed, batch=1 + seed % 2) for seed, cuts in enumerate(starts)]


def batches_elsewhere(rank: int, world_size: int, changes: dict[str, Any]) -> list[float]:
    with make(**changes) as cp:
        return some_batches(cp)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(2, {"method": "mesh"}), (3, {"layout": "contiguous"}), (4, {}), (4, {"method": "mesh"})],
    ids=repr,
)
def test_documents_and_lengths_that_change_with_every_batch_are_exact(
    pool: WorkerPool, ranks: int, changes: dict[str, Any]
) -> None:
    for errors in pool.run(many_batches, ranks, changes):
        assert max(errors) < 1e-5


UNITS = {"ulysses": 3, "units_per_node": 2, "ranks_per_node": 2}
PATCHES: list[tuple[int, dict[str, Any]]] = [
    (4, {"method": "mesh", "tile": (2, 2), "alpha": 1, "ranks_per_node": 2}),
    (6, {"method": "usp", **UNITS, "relayout": True}),
]


@pytest.mark.parametrize(("ranks", "changes"), PATCHES, ids=repr)
def test_documents_on_ranks_in_another_order_are_exact(
    pool: WorkerPool, ranks: int, changes: dict[str, Any]
) -> None:
    for errors in pool.run(batches_elsewhere, ranks, changes):
        assert max(errors) < 1e-5


def other_places(rank: int, world_size: int) -> tuple[list[float], list[int]]:
    """Layers that number ranks in other orders, on the shards of one batch and without documents;
    and where those begin."""
    errors, starts = [], [0, 20, 64]
    whole = tensors(starts, 1)
    with make(method="mesh-usp", **UNITS) as spread, make(method="mesh-usp", ulysses=3) as usual:
        for first, second in [(spread, usual), (usual, spread)]:
            docs = first.documents(starts, also=[second])
            for documents, cuts in ((docs, starts), (None, [0, 64])):
                q, k, v, _ = (first.shard(x, 1, documents=documents) for x in whole)
                out = second.attention(q, k, v, documents=documents)
                assert isinstance(out, Tensor)
                wanted = one_by_one(cuts, whole)[0]
                joined = first.unshard(out, 1, documents=documents)
                errors.append(float((joined - wanted).abs().max()))
        return errors, spread.positions()[:2].tolist()


def test_layers_that_number_ranks_in_another_order_share_the_shards_of_a_batch(
    pool: WorkerPool,
) -> None:
    for rank, (errors, positions) in enumerate(pool.run(other_places, 6)):
        assert max(errors) < 1e-5
        assert positions == [6 * rank, 6 * rank + 1]


def windows_too(rank: int, world_size: int) -> tuple[list[float], int]:
    """Layers with and without a window on the same shards, each batch with other documents."""
    with make() as full, make(window_size=(6, 0)) as local:
        errors = []
        for seed, starts in enumerate([[0, 30, 64], [0, 11, 50, 97]]):
            docs = full.documents(starts, also=[local])
            whole = tensors(starts, seed)
            q, k, v, _ = (full.shard(x, 1, documents=docs) for x in whole)
            for cp, window in ((full, None), (local, 6)):
                out = cp.attention(q, k, v, documents=docs)
                assert isinstance(out, Tensor)
                wanted = one_by_one(starts, whole, window)[0]
                results = cp.unshard(out, 1, documents=docs)
                errors.append(float((results - wanted).abs().max()))
        return errors, full._calls.session.handshake._rounds


def test_layers_with_and_without_a_window_share_the_shards_of_a_batch(pool: WorkerPool) -> None:
    for errors, _ in pool.run(windows_too, 4):
        assert max(errors) < 1e-5


def rounds_of_agreement(rank: int, world_size: int) -> list[tuple[int, int]]:
    """And how often this rank worked out its collectives, for others to compare."""
    noted = mock.patch.object(RankPlan, "meetings", autospec=True, side_effect=RankPlan.meetings)
    with make() as cp, noted as meetings:
        results = []
        for seed, starts in enumerate([[0, 9, 64], [0, 33, 64], [0, 70], [0, 2, 3, 40]]):
            error(cp, starts, seed)
            results.append((cp._calls.session.handshake._rounds, meetings.call_count))
        return results


def test_ranks_stop_for_no_agreement_on_later_documents(pool: WorkerPool) -> None:
    for first, *later in pool.run(rounds_of_agreement, 3):
        assert first[1] > 0
        assert later == [first] * 3


def rows_apart(rank: int, world_size: int) -> list[Any]:
    """Each row of a batch has documents of its own."""
    with make() as cp:
        starts = [[0, 10, 40], [0, 25, 30, 40]]
        docs = cp.documents(starts)
        packed = [0, 10, 40, 65, 70, 80]
        whole = tensors(packed, 1)
        rows = [x.reshape(2, 40, *x.shape[2:]) for x in whole]
        q, k, v, _ = (cp.shard(x, 1, documents=docs) for x in rows)
        out = cp.attention(q, k, v, documents=docs)
        assert isinstance(out, Tensor)
        wanted = one_by_one(packed, whole)[0].reshape(2, 40, HEADS, DIM)
        results = cp.unshard(out, 1, documents=docs)
        restart = cp.positions(documents=docs, restart=True)
        real = ~cp.padding(documents=docs)
        at = cp.positions(documents=docs)
        by_hand = torch.cat([torch.arange(b - a) for a, b in pairwise(packed)])
        return [
            tuple(results.shape),
            float((results - wanted).abs().max()) < 1e-5,
            torch.equal(restart[real], by_hand[at[real]]),
            bool((restart[~real] == 0).all()),
        ]


def test_rows_with_documents_of_their_own_are_one_pack(pool: WorkerPool) -> None:
    assert pool.run(rows_apart, 3) == [[(2, 40, HEADS, DIM), True, True, True]] * 3


def passes_and_reasons(cp: ContextParallel) -> tuple[set[str], set[str]]:
    """What is said of the latest calls: of which passes, and why not through shared memory."""
    passes = [{name.split()[0] for name in each} for each in (cp.kernels(), cp.transports())]
    assert passes[0] == passes[1]
    return passes[0], {reason for _, reason in cp.transports().values()}


def told_of_batches(rank: int, world_size: int, sizes: dict[str, Any]) -> list[Any]:
    """After a batch with documents, after it was let go, and after one call more without any."""
    with make(method="mesh", **sizes) as cp:
        results = [cp.kernels(), error(cp, [0, 9, 64], 1) < 1e-5]
        gc.collect()
        results.append(passes_and_reasons(cp))
        plain = cp.documents([0, 64])
        q, k, v = (cp.shard(x, 1, documents=plain) for x in tensors([0, 64], 1)[:3])
        cp.attention(q, k, v)
        results.append(passes_and_reasons(cp))
    return [*results, cp.kernels()]


@pytest.mark.parametrize(
    "sizes", [{}, dict.fromkeys(("seq_len", "num_heads", "num_kv_heads"))], ids=["all", "none"]
)
def test_the_latest_call_of_each_pass_is_told_of_with_documents_or_without(
    pool: WorkerPool, sizes: dict[str, Any]
) -> None:
    both = {"forward", "backward"}
    for before, exact, batch, (passes, why), after in pool.run(told_of_batches, 2, sizes):
        assert before == after == {}  # before the first call, and on a closed object
        assert exact
        assert batch[0] == passes == both
        assert all("the call has documents" in reason for reason in batch[1])
        assert any("on the cpu" in reason for reason in why)  # of the call without documents


def prefetched(rank: int, world_size: int) -> tuple[list[float], list[int], bool]:
    batches = [[0, 7, 64], [0, 40, 64], [0, 64], [0, 1, 90]]
    errors, ready = list[float](), list[int]()
    with make() as cp:
        for seed, (starts, docs) in enumerate(
            cp.prefetch(batches, lambda starts: torch.tensor(starts))
        ):
            kept = [source.calls for source in docs.plans._sources.values()]
            ready.append(sum(len(calls.values()) for calls in kept if calls is not None))
            whole = tensors(starts, seed)
            q, k, v, grad = (cp.shard(x, 1, documents=docs) for x in whole)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = cp.attention(*leaves, documents=docs)
            results = [out, *torch.autograd.grad(out, leaves, grad)]
            wanted = one_by_one(starts, whole)
            errors += [
                float((a - cp.shard(b, 1, documents=docs)).detach().abs().max())  # type: ignore[operator]
                for a, b in zip(results, wanted, strict=True)
            ]
    alive = any("prefetch" in thread.name for thread in threading.enumerate())
    return errors, ready, alive


def test_prefetch_makes_the_next_batch_ready_and_leaves_no_thread(pool: WorkerPool) -> None:
    for errors, ready, alive in pool.run(prefetched, 3):
        assert max(errors) < 1e-5
        assert ready[0] == 0  # what it will be used for is not known yet
        assert all(ready[2:])  # the second may have been taken before the first was used
        assert not alive


def held(rank: int, world_size: int, times: int) -> tuple[dict[str, int], dict[str, int], int]:
    with make() as cp:
        for number in range(4):
            error(cp, [0, 5 + number, 70 + number], number)
        begin = resources()
        for number in range(4, times):
            error(cp, [0, 5 + number % 60, 70 + number % 97], number)
        end = resources()
        return begin, end, len(cp._calls.session.calls._living)


def check_held(pool: WorkerPool, times: int, seconds: float) -> None:
    for begin, end, living in pool.run(held, 2, times, seconds=seconds):
        assert grown(begin, end) == {}
        assert living <= 8  # bases of plans that serve any mask


@pytest.mark.slow  # 30 lengths and masks leave nothing behind in every run
def test_40_different_masks_leave_nothing_behind(pool: WorkerPool) -> None:
    check_held(pool, 40, 60)


@pytest.mark.slow
def test_1_000_different_masks_leave_nothing_behind(pool: WorkerPool) -> None:
    check_held(pool, 1000, 600)
