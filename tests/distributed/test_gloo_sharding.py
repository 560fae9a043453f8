"""Cutting and joining over real processes: bit exact, positions true, loss as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mesh_attention import Mask, MeshAttentionError
from support.cases import Case
from support.gloo_case import context
from support.pool import WorkerPool

LAYOUTS = ("contiguous", "zigzag", "striped")
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


def round_trip(rank: int, world_size: int, tokens: int, layout: str) -> list[str]:
    """The dtypes and dims that did not come back as they went."""
    wrong = []
    options = {"layout": layout}
    case = Case(world_size, tokens, tokens + 3, mask=Mask(), options=options)
    source = torch.Generator().manual_seed(3)
    with context(case) as cp:
        for side, length in (("q", tokens), ("kv", tokens + 3)):
            for number, dtype in enumerate(DTYPES):
                # Every dtype with two dims, every dim with four dtypes.
                for dim in range(-1 + number % 2, 3, 2):
                    shape = [2, 3, 4]
                    shape[dim] = length
                    x = torch.randint(0, 2**15, shape, generator=source).to(dtype)
                    local = cp.shard(x, dim, side=side)  # type: ignore[arg-type]
                    padding = cp.padding(side=side)  # type: ignore[arg-type]
                    again = cp.unshard(local, dim, side=side)  # type: ignore[arg-type]
                    same = torch.equal(again, x) and again.dtype == dtype
                    if not same or local.movedim(dim, 0)[padding].any():
                        wrong.append(f"{side} {dtype} dim {dim}")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "tokens", "layout"),
    [(1, 7, "zigzag"), *((4, 37, layout) for layout in LAYOUTS), (6, 5, "striped")],
)
def test_shard_and_unshard_give_back_every_bit(
    pool: WorkerPool, ranks: int, tokens: int, layout: str
) -> None:
    """Need 12."""
    assert pool.run(round_trip, ranks, tokens, layout) == [[]] * ranks


def refused_then_used(rank: int, world_size: int, dtype: torch.dtype) -> tuple[str, bool]:
    with context(Case(world_size, 10, 10, mask=Mask(causal=True))) as cp:
        x = cp.shard(torch.arange(10, dtype=torch.float32), 0)
        try:
            cp.unshard(x.to(dtype), 0)
        except MeshAttentionError as error:
            message = str(error)
        return message, torch.equal(cp.unshard(x, 0), torch.arange(10, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn, torch.uint32])
def test_a_dtype_that_gloo_does_not_gather_is_refused_and_the_group_lives_on(
    pool: WorkerPool, dtype: torch.dtype
) -> None:
    for message, works in pool.run(refused_then_used, 2, dtype):
        assert f"gloo does not gather {dtype}; convert it" in message
        assert works


def mapped_round_trip(rank: int, world_size: int) -> tuple[bool, int]:
    options = {"tile": (4, 2), "ranks_per_node": 4, "alpha": 2}
    case = Case(world_size, 50, 50, mask=Mask(causal=True), options=options)
    with context(case) as cp:
        x = torch.arange(50)
        return torch.equal(cp.unshard(cp.shard(x, 0), 0), x), cp.rank


def test_a_mapping_onto_nodes_shards_by_logical_ranks(pool: WorkerPool) -> None:
    results = pool.run(mapped_round_trip, 8)
    assert all(same for same, _ in results)
    ranks = [rank for _, rank in results]
    assert sorted(ranks) == list(range(8))
    assert ranks != list(range(8))


def rotate(x_BSHD: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding."""
    half = x_BSHD.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[:, None, None] * frequency
    a, b = x_BSHD[..., :half], x_BSHD[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def rope(rank: int, world_size: int, layout: str) -> tuple[bool, bool]:
    case = Case(world_size, 41, 41, mask=Mask(causal=True), options={"layout": layout})
    with context(case) as cp:
        q = case.tensors()[0]
        whole = rotate(q, torch.arange(41))
        local = rotate(cp.shard(q, 1), cp.positions())
        real = ~cp.padding()
        same = torch.equal(local[:, real], cp.shard(whole, 1)[:, real])
        return same, torch.equal(cp.unshard(local, 1), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_on_shards_equals_rope_on_the_whole(pool: WorkerPool, layout: str) -> None:
    """Need 11."""
    assert pool.run(rope, 4, layout) == [(True, True)] * 4


def triples(rank: int, world_size: int, layout: str) -> list[tuple[int, int, int]]:
    """(token, position, target) of this rank's real slots; labels are shifted before the cut."""
    case = Case(world_size, 23, 23, mask=Mask(causal=True), options={"layout": layout})
    tokens = torch.randint(0, 9, (23,), generator=torch.Generator().manual_seed(1))
    targets = torch.cat([tokens[1:], torch.tensor([-100])])
    with context(case) as cp:
        real = ~cp.padding()
        columns = (cp.shard(tokens, 0), cp.positions(), cp.shard(targets, 0))
        return list(zip(*(column[real].tolist() for column in columns), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_positions_and_targets_stay_together(pool: WorkerPool, layout: str) -> None:
    """Need 8, without documents."""
    tokens = torch.randint(0, 9, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = list(zip(tokens, range(23), [*tokens[1:], -100], strict=True))
    results = [triple for part in pool.run(triples, 4, layout) for triple in part]
    assert sorted(results, key=lambda triple: triple[1]) == expected


def unshard_gradient(rank: int, world_size: int) -> list[str]:
    """Each rank has a loss of its own; then all ranks are told, and go on."""
    case = Case(world_size, 19, 19, mask=Mask(causal=True))
    with context(case) as cp:
        x = cp.shard(torch.randn(19, generator=torch.Generator().manual_seed(0)), 0)
        x.requires_grad_()
        weight = torch.arange(1.0, 20.0)

        def gradient(**how: Any) -> Tensor:
            loss = (cp.unshard(x, 0, **how) * weight * (rank + 1)).sum()
            [grad] = torch.autograd.grad(loss, x)
            return grad

        parts = cp.shard(weight, 0)
        total = world_size * (world_size + 1) / 2
        for grad, factor in {"own": rank + 1, "sum": total, "mean": total / world_size}.items():
            assert torch.equal(gradient(grad=grad), parts * factor), grad
        messages = []
        for how in ({}, {"grad": "average"}, {"grad": "own" if rank else "sum"}):
            with pytest.raises(MeshAttentionError) as error:
                gradient(**how)
            messages.append(str(error.value))
        assert torch.equal(gradient(grad="sum"), parts * total)
        return messages


def test_a_loss_on_unshard_says_whose_gradients_are_meant(pool: WorkerPool) -> None:
    for silent, unknown, other in pool.run(unshard_gradient, 4):
        assert all(f"grad='{grad}'" in silent for grad in ("sum", "mean", "own"))
        assert "grad='average': must be one of sum, mean, own" in unknown
        assert "grad is 'sum'" in other
