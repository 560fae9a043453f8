"""`relayout=True` over real processes: all that a caller sees is in contiguous shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mesh_attention import ContextParallel, Mask, MeshAttentionError
from support.cases import Case
from support.document_case import error, make
from support.gloo_case import Part, attend, context, expected_bytes, whole
from support.pool import WorkerPool
from support.reference import NAMES, attention, errors
from support.sink_reference import attention_with_sinks, distances

CAUSAL, SINKS = Mask(causal=True), torch.tensor([1.0, 3.0, -0.5, 2.0], dtype=torch.float64)
CASES = [  # 45 tokens on 4 ranks: 12 slots outside, 12 inside; 41: 11 and 12
    Case(4, 41, 41, batch=2, mask=CAUSAL, options={"method": "mesh", "relayout": True}),
    Case(4, 41, 41, mask=CAUSAL, options={"method": "usp", "ulysses": 2, "relayout": True}),
    Case(4, 29, 41, mask=CAUSAL, options={"method": "ring", "relayout": True}),
]


def all_cases(rank: int, world_size: int) -> list[Part]:
    results = []
    for case in CASES:
        with context(case) as cp:
            results.append(attend(cp, case))
            q = case.tensors()[0]
            assert torch.equal(cp.shard(q, 1)[:, ~cp.padding()], q.chunk(4, 1)[rank])
            assert torch.equal(cp.unshard(cp.shard(q, 1), 1), q)
    return results


def test_outputs_and_gradients_are_exact_in_contiguous_shards(pool: WorkerPool) -> None:
    by_rank = pool.run(all_cases, 4)
    for at, case in enumerate(CASES):
        parts = [of_rank[at] for of_rank in by_rank]
        for rank, part in enumerate(parts):
            slots = len(part.positions)
            assert part.positions.tolist() == [*range(rank * slots, (rank + 1) * slots)]
        truth = attention(*case.tensors(), case.mask)
        assert max(errors(whole(parts, case), truth).values()) <= 1e-10
        expected = expected_bytes(case)
        assert [part.traffic for part in parts] == [expected[part.rank] for part in parts]


def sinks_and_lse(rank: int, world_size: int) -> tuple[Part, Tensor]:
    """A loss on lse too, which comes in the order of the shards."""
    case = CASES[0]
    with context(case, differentiable_lse=True) as cp:
        q, k, v, grad_out = (cp.shard(x, 1) for x in case.tensors())
        leaves = [x.requires_grad_() for x in (q, k, v, SINKS.clone())]
        out, lse = cp.attention(*leaves[:3], sinks=leaves[3], return_lse=True)
        real = ~cp.padding()
        loss = (out * grad_out).sum() + (lse[..., real] * rising(cp.positions()[real])).sum()
        grads = torch.autograd.grad(loss, leaves)
        result = dict(zip(NAMES, (out.detach(), lse.detach(), *grads[:3]), strict=True))
        return Part(cp.rank, cp.positions(), cp.positions(side="kv"), result, {}), grads[3]


def rising(positions: Tensor) -> Tensor:
    return positions.double() / 41


def test_sinks_and_the_log_sum_exp_have_gradients_in_the_order_of_the_shards(
    pool: WorkerPool,
) -> None:
    case, by_rank = CASES[0], pool.run(sinks_and_lse, 4)
    results = whole([part for part, _ in by_rank], case)
    results["grad_sinks"] = torch.stack([grad for _, grad in by_rank]).sum(0)
    grad_lse = rising(torch.arange(41)).expand(2, 4, 41)
    truth = attention_with_sinks(case.tensors(), SINKS, case.mask, grad_lse=grad_lse)
    assert max(distances(results, truth).values()) <= 1e-10


def batches(rank: int, world_size: int) -> list[float]:
    """Documents of every batch, by what is chosen and by methods that work in zigzag."""
    results = []
    for changes in ({}, {"method": "mesh"}, {"method": "seen", "layout": "zigzag"}):
        with make(relayout=True, **changes) as cp:
            results += [error(cp, [0, 5, 64], 1), error(cp, [0, 1, 1, 2, 40, 63], 2, batch=2)]
            docs = cp.documents([0, 9, 50])
            slots = -(-50 // world_size)
            assert cp.positions(documents=docs).tolist() == [
                *range(rank * slots, (rank + 1) * slots)
            ]
            ids = torch.arange(50)[None]
            batch = cp.shard_batch(input_ids=ids, labels=ids, cu_seqlens=[0, 9, 50])
            own = batch["input_ids"][~batch.padding]
            assert torch.equal(own, torch.arange(50)[rank * slots : (rank + 1) * slots])
    return results


def test_documents_of_every_batch_are_exact_in_contiguous_shards(pool: WorkerPool) -> None:
    for result in pool.run(batches, 3):
        assert max(result) < 1e-5


def by_hand(rank: int, world_size: int) -> float:
    """Shards that nobody's `shard` cut, of an odd length, and no sizes given."""
    case = Case(world_size, 5 * world_size, 5 * world_size, mask=CAUSAL)
    tensors = case.tensors()
    q, k, v, grad = (x.chunk(world_size, 1)[rank].clone() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with ContextParallel(causal=True, relayout=True) as cp:
        out, lse = cp.attention(*leaves, return_lse=True)
        results = (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad))
    truth = attention(*tensors, CAUSAL).named()
    parts = {name: truth[name].chunk(world_size, 2 if name == "lse" else 1)[rank] for name in truth}
    return max(float((x - parts[name]).abs().max()) for name, x in zip(NAMES, results, strict=True))


def test_shards_cut_by_chunk_are_right_without_sizes(pool: WorkerPool) -> None:
    assert max(pool.run(by_hand, 3)) < 1e-10


def mixed(rank: int, world_size: int) -> list[str]:
    def refused(call: Any) -> str:
        try:
            call()
        except MeshAttentionError as error:
            return str(error)
        return "nothing"

    said = [refused(lambda: make(relayout=rank == 1, method="ring"))]
    with make(relayout=True) as outside, make() as plain:
        said.append(refused(lambda: outside.documents([0, 64], also=[plain])))
        docs = outside.documents([0, 64])
        q, k, v = (torch.zeros(1, 22, heads, 8) for heads in (6, 3, 3))
        said.append(refused(lambda: plain.attention(q, k, v, documents=docs)))
        fits = outside.attention(q, k, v, documents=docs)  # nothing is broken by it
        assert isinstance(fits, Tensor)
    return said


def test_shards_of_two_kinds_are_refused_on_all_ranks(pool: WorkerPool) -> None:
    for differ, also, other in pool.run(mixed, 3):
        assert "relayout" in differ
        assert "differ in relayout" in also
        assert "made with relayout=True, and this attention has relayout=False" in other
