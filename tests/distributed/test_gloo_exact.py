"""Attention over real processes against the float64 truth, with every byte counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mesh_attention import Mask
from mesh_attention.plan.methods.parts.reduce import Combine
from support.cases import Case, random_case, tiles
from support.gloo_case import Part, attend, context, whole
from support.gloo_check import check
from support.pool import WorkerPool
from support.reference import attention, errors, tolerance

CAUSAL = Mask(causal=True)


@pytest.mark.parametrize(
    "ranks", [1, 2, 3, 6, *(pytest.param(n, marks=pytest.mark.slow) for n in (9, 16))]
)
def test_causal_gqa_with_an_uneven_length_equals_the_truth(pool: WorkerPool, ranks: int) -> None:
    case = Case(ranks, 101, 101, heads=(4, 2), head_dims=(16, 16), batch=2, mask=CAUSAL)
    check(pool, [case, replace(case, dtype=torch.float32, batch=1, options={"chunks": (2, 2)})])


@pytest.mark.parametrize("combine", list(Combine))
@pytest.mark.parametrize("ranks", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 9))])
def test_every_combine_mode_equals_the_truth(
    pool: WorkerPool, ranks: int, combine: Combine
) -> None:
    case = Case(ranks, 67, 67, heads=(8, 1), batch=2, options={"combine": combine})
    causal = replace(case, mask=CAUSAL, options={"combine": combine, "chunks": (3, 2)})
    check(pool, [case, causal])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_every_layout_equals_the_truth(pool: WorkerPool, layout: str) -> None:
    case = Case(4, 55, 55, mask=CAUSAL, options={"layout": layout, "chunks": (2, 2)})
    check(pool, [case, replace(case, mask=Mask(), kv_tokens=31)])


def test_fewer_tokens_than_ranks_equal_the_truth(pool: WorkerPool) -> None:
    case = Case(9, 7, 7, mask=CAUSAL)
    check(pool, [case, Case(9, 1, 1, options={"layout": "striped", "tile": (9, 1)})])


def test_windows_documents_and_prefixes_equal_the_truth(pool: WorkerPool) -> None:
    case = Case(4, 90, 90, mask=Mask(causal=True, window=(11, 0)))
    packed = Mask(causal=True, documents=(0, 13, 40, 40, 90))
    check(pool, [case, replace(case, mask=packed), replace(case, mask=Mask(causal=True, prefix=9))])


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(16, {"tile": (4, 4), "ranks_per_node": 4, "alpha": 2}, marks=pytest.mark.slow),
        pytest.param(
            *(
                16,
                {
                    "tile": (8, 2),
                    "ranks_per_node": 8,
                    "alpha": 4,
                    "combine": Combine.REDUCE_SCATTER,
                },
            ),
            marks=pytest.mark.slow,
        ),
        (8, {"tile": (4, 2), "ranks_per_node": 4, "alpha": 2, "combine": Combine.NODES}),
        (
            8,
            {
                "method": "mesh-usp",
                "ulysses": 4,
                "tile": (1, 2),
                "ranks_per_node": 4,
                "units_per_node": 2,
            },
        ),
        (8, {"method": "mesh-usp", "ulysses": 4, "tile": (2, 1), "even_chunks": True}),
        (
            8,
            {
                "method": "mesh-usp",
                "ulysses": 2,
                "tile": (1, 4),
                "chunks": (2, 2),
                "short_start": True,
            },
        ),
        (9, {"tile": (3, 3), "rotation": False}),
        (6, {"tile": (2, 3), "backward_tile": (3, 2), "gather_out": True}),
    ],
    ids=[
        *("patches", "patches-reduced", "patches-in-nodes", "units-in-nodes", "even-chunks"),
        *("short-start", "no-rotation", "two-tiles"),
    ],
)
def test_mappings_and_tiles_of_every_kind_equal_the_truth(
    pool: WorkerPool, ranks: int, options: dict[str, object]
) -> None:
    """With patches the logical rank is not the place in the group, so members change order."""
    case = Case(ranks, 70, 70, mask=CAUSAL, batch=2, options={"chunks": (2, 2), **options})
    check(pool, [case])


@pytest.mark.parametrize(
    "ranks", [3, 6, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 9, 16))]
)
def test_random_cases_equal_the_truth(pool: WorkerPool, ranks: int) -> None:
    fitting = [tile for n, tile in tiles() if n == ranks]
    cases = [random_case(77 * ranks + i, ranks, tile) for i, tile in enumerate(fitting)]
    check(pool, cases)


def run_twice(rank: int, world_size: int, case: Case) -> bool:
    with context(case) as cp:
        first, second = attend(cp, case), attend(cp, case)
    return all(torch.equal(x, second.tensors[name]) for name, x in first.tensors.items())


def test_two_runs_are_bit_equal(pool: WorkerPool) -> None:
    case = Case(6, 101, 101, mask=CAUSAL, dtype=torch.bfloat16, options={"chunks": (2, 2)})
    assert all(pool.run(run_twice, 6, case))


def run_dtypes(rank: int, world_size: int, case: Case) -> list[Part]:
    """One object meets tensors of other dtypes and batches than it was made for."""
    parts = []
    with context(case) as cp:
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            for batch in (2, 1):
                parts.append(attend(cp, replace(case, dtype=dtype, batch=batch)))
    return parts


def test_one_object_serves_several_dtypes_and_batches(pool: WorkerPool) -> None:
    case = Case(4, 50, 50, mask=CAUSAL, dtype=torch.bfloat16)
    for parts in zip(*pool.run(run_dtypes, 4, case), strict=True):
        out = parts[0].tensors["out"]
        fed = replace(case, dtype=out.dtype, batch=out.shape[0])
        distances = errors(whole(list(parts), fed), attention(*fed.tensors(), fed.mask))
        limit = 0.02 if out.dtype == torch.bfloat16 else tolerance(out.dtype)
        assert max(distances.values()) <= limit, (distances, fed)
