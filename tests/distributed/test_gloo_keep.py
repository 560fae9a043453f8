"""Rows that stay for the backward pass: the same numbers in every use of autograd, and what a layer
holds between its passes is what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel, Mask
from mesh_attention.plan.methods.parts.setting import Keep
from mesh_attention.plan.read.count import kept_bytes
from support.cases import Case
from support.gloo_case import Part, attend, context, expected_bytes, whole
from support.pool import WorkerPool
from support.reference import attention, errors
from support.sample import sample
from support.sink_reference import attention_with_sinks, distances

CAUSAL, SINKS = Mask(causal=True), torch.tensor([1.0, 3.0, -0.5, 2.0], dtype=torch.float64)
WINDOW = Mask(causal=True, window=(9, 0))
KEEPS = [keep.value for keep in Keep]
CASES = [  # cut by heads and by rows, with KV heads on two ranks, unevenly, and in other layouts
    Case(4, 45, 45, heads=(8, 8), batch=2, mask=CAUSAL, options={"method": "ulysses"}),
    Case(4, 64, 64, heads=(8, 2), mask=CAUSAL, options={"method": "ulysses", "chunks": (2, 2)}),
    Case(4, 37, 51, heads=(6, 3), options={"method": "ulysses"}),
    Case(
        4, 64, 64, heads=(8, 4), batch=2, mask=CAUSAL,
        options={"method": "mesh-usp", "ulysses": 2, "tile": (2, 1), "head_slices": (1, 1)},
    ),
    Case(4, 61, 61, heads=(4, 2), mask=CAUSAL, options={"method": "usp", "ulysses": 2}),
    Case(4, 61, 61, heads=(4, 2), mask=CAUSAL, options={"tile": (2, 2), "relayout": True}),
    Case(4, 60, 60, heads=(4, 4), mask=WINDOW, options={"method": "seen"}),
]  # fmt: skip


def alike(each: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(each, other, strict=True))


def gradients(out: Tensor, leaves: list[Tensor], grad: Tensor, **how: bool) -> tuple[Tensor, ...]:
    return (out.detach(), *torch.autograd.grad(out, leaves, grad, **how))


def one_output(cp: ContextParallel, *leaves: Tensor) -> Tensor:
    out = cp.attention(*leaves)
    assert isinstance(out, Tensor)
    return out


def in_another_order(x: Tensor) -> Tensor:
    """Equal values with other strides, as a hook may hand them back."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x


class Held:
    """What autograd holds, as a hook sees it."""

    num_bytes = 0

    def pack(self, x: Tensor) -> Tensor:
        self.num_bytes += x.nbytes if x.is_floating_point() else 0
        return x.clone()


def in_every_use(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Part, int]]:
    """The results of each case, and the bytes that autograd holds between its passes."""
    results = []
    for case in cases:
        with context(case) as cp:
            part = attend(cp, case)
            q, k, v, _ = case.tensors()
            shards = cp.shard(q, 1), cp.shard(k, 1, side="kv"), cp.shard(v, 1, side="kv")
            leaves = [shard.requires_grad_() for shard in shards]
            grad = cp.shard(case.tensors()[3], 1)
            plain = gradients(one_output(cp, *leaves), leaves, grad)
            held = Held()
            with saved_tensors_hooks(held.pack, in_another_order):
                out = one_output(cp, *leaves)
            assert alike(gradients(out, leaves, grad), plain)
            # Several forward passes before their backward passes, the first of them twice.
            first, second = one_output(cp, *leaves), one_output(cp, *leaves)
            assert alike(gradients(first, leaves, grad, retain_graph=True), plain)
            assert alike(gradients(second, leaves, grad), plain)
            assert alike(gradients(first, leaves, grad), plain)
            for reentrant in (False, True):
                again = checkpoint(one_output, cp, *leaves, use_reentrant=reentrant)
                again.backward(grad)
                assert alike(tuple(leaf.grad for leaf in leaves), plain[1:])  # type: ignore[misc]
                for leaf in leaves:
                    leaf.grad = None
            with torch.inference_mode():
                assert torch.equal(one_output(cp, *leaves), plain[0])
            results.append((part, held.num_bytes))
    return results


@pytest.mark.parametrize(
    "keep",
    sample(("gathered", "exchanged", "shards", "auto"), 4),
)
def test_every_use_of_autograd_has_the_same_numbers_and_holds_what_is_counted(
    pool: WorkerPool, keep: str
) -> None:
    cases = [replace(case, options=case.options | {"keep": keep}) for case in CASES]
    by_rank = pool.run(in_every_use, 4, cases)
    for number, case in enumerate(cases):
        parts, held = zip(*(of_rank[number] for of_rank in by_rank), strict=True)
        truth = attention(*case.tensors(), case.mask)
        assert max(errors(whole(list(parts), case), truth).values()) <= 1e-10, case
        expected = expected_bytes(case)
        assert [part.traffic for part in parts] == [expected[part.rank] for part in parts], case
        counted = kept_bytes(case.plan())
        assert max(held) == case.batch * counted.held_bytes, case
        if keep == Keep.AUTO:
            assert counted.extra_bytes <= 0, case


def with_sinks(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Part, Tensor]]:
    results = []
    for case in cases:
        with context(case) as cp:
            q, k, v, grad_out = (cp.shard(x, 1) for x in case.tensors())
            leaves = [x.requires_grad_() for x in (q, k, v, SINKS.clone())]
            out = cp.attention(*leaves[:3], sinks=leaves[3])
            assert isinstance(out, Tensor)
            grads = torch.autograd.grad(out, leaves, grad_out)
            named = dict(zip(("grad_q", "grad_k", "grad_v"), grads[:3], strict=True))
            named["out"] = out.detach()
            named["lse"] = torch.zeros(case.batch, case.heads[0], out.shape[1]).double()
            part = Part(cp.rank, cp.positions(), cp.positions(side="kv"), named, {})
            results.append((part, grads[3]))
    return results


def test_sinks_reach_the_lse_that_is_kept(pool: WorkerPool) -> None:
    cases = [
        Case(
            4, 45, 45, heads=(4, 2), mask=CAUSAL,
            options={"method": "ulysses", "keep": "exchanged"},
        ),
        Case(
            4, 64, 64, heads=(4, 4), mask=CAUSAL,
            options={"method": "mesh-usp", "ulysses": 2, "tile": (1, 2), "keep": "gathered"},
        ),
    ]  # fmt: skip
    by_rank = pool.run(with_sinks, 4, cases)
    for number, case in enumerate(cases):
        results = whole([of_rank[number][0] for of_rank in by_rank], case)
        results["grad_sinks"] = torch.stack([of_rank[number][1] for of_rank in by_rank]).sum(0)
        wrong = distances(results, attention_with_sinks(case.tensors(), SINKS, case.mask))
        assert max(error for name, error in wrong.items() if name != "lse") <= 1e-10, (wrong, case)
