"""bfloat16: the error against float64 beside that of the same kernel on one device.

*The measure.* A row is one token and head. Its error is `|found - true| / |true|`, norms over the
row; rows that are zero in truth (dQ of a query that sees one key) are left out. A tensor's error is
the root mean square over its rows, in units of the same on one device. Every row counts alike: over
plain elements the first rows of a causal mask, which average few values and so are the largest,
count for most of the sum, and they are just the rows that few ranks share. More stands beside it:
the median row, because a few rows of dQ nearly cancel, are as wrong on one device as on
sixteen and pull a mean of ratios towards one; and root mean square and largest of plain elements.
Growth is limited by rows, mean and median; twice the error of one device limits all four.

*What to expect.* By exchange a partial is rounded to travel and the sum once at the end, however
many ranks there are: in units of a kernel that only rounds its result sqrt(2), and there it stays.
A kernel that also rounds what each call returns (`cpu_flash`, like every stock flash kernel) adds a
third rounding where a partial that travels was made by several calls. Two ranks have no such tile:
theirs are a row and a column. So its error rises once, from tiles that round twice to tiles that
round three times, by less than sqrt(3/2), and hardly from there on: it may exceed that of two ranks
by 15 % (measured: 13), and that of four ranks, the first to have a tile that is neither row nor
column, by 10 %.

The tables are printed; see them with `pytest -rP`. A reduce-scatter adds in bfloat16 on the way:
its error grows, so it is not what the planner chooses for elements of two bytes, inside a node
or across nodes (tests/methods/test_method_bf16.py).
"""

from __future__ import annotations

from dataclasses import astuple
from functools import cache

import pytest
import torch

from mesh_attention import Mask
from mesh_attention.plan.methods.parts.assignment import factorisations
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.testing import run_local
from support.bf16 import TENSORS, Errors
from support.cases import Case
from support.reference import Attention, attention

MASKS = {"causal": Mask(causal=True), "full": Mask()}
OVER_TWO_RANKS = {"blockwise": 1.1, "cpu_flash": 1.15}
# Products of bfloat16 matrices, which blockwise avoids, take long where no hardware does them.
RANKS = {"blockwise": (2, 4, 16), "cpu_flash": (2, 4, 16)}
TOKENS = {"blockwise": 512, "cpu_flash": 256}


def case(ranks: int, mask: str, kernel: str, combine: Combine, tile: tuple[int, int]) -> Case:
    return Case(
        ranks, TOKENS[kernel], TOKENS[kernel], heads=(4, 2), head_dims=(32, 32), mask=MASKS[mask],
        dtype=torch.bfloat16, options={"combine": combine, "tile": tile, "layout": "zigzag"},
    )  # fmt: skip


@cache
def truth(mask: str, kernel: str) -> Attention:
    return attention(*case(1, mask, kernel, Combine.AUTO, (1, 1)).tensors(), MASKS[mask])


def errors(case: Case, mask: str, kernel: str) -> dict[str, Errors]:
    result, true = run_local(case.plan(), *case.tensors(), kernel=kernel), truth(mask, kernel)
    return {name: Errors.of(getattr(result, name), getattr(true, name)) for name in TENSORS}


@cache
def on_one_device(mask: str, kernel: str) -> dict[str, Errors]:
    return errors(case(1, mask, kernel, Combine.AUTO, (1, 1)), mask, kernel)


@cache
def worst(ranks: int, mask: str, kernel: str, combine: Combine) -> dict[str, Errors]:
    """Over the tiles of so many ranks, in units of one device."""
    alone = on_one_device(mask, kernel)
    by_tile = []
    tiles = list(factorisations(ranks))
    for tile in tiles if kernel == "blockwise" or ranks < 16 else tiles[::2]:
        results = errors(case(ranks, mask, kernel, combine, tile), mask, kernel)
        by_tile.append({name: results[name].over(alone[name]) for name in TENSORS})
    return {name: Errors.worst([each[name] for each in by_tile]) for name in TENSORS}


def show(kernel: str, mask: str, combine: Combine) -> None:
    print(f"\n{kernel}, {mask}, {combine.value}: worst tile's error / error on one device")
    print("rms over rows (median row, rms over elements, largest element)")
    print("ranks" + "".join(f"{name:>25}" for name in TENSORS))
    for ranks in RANKS[kernel]:
        cells = "".join(
            f"{e.rows:7.2f} ({e.median:.2f}, {e.elements:.2f}, {e.largest:.1f})"
            for e in worst(ranks, mask, kernel, combine).values()
        )
        print(f"{ranks:5}{cells}")


@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        pytest.param("blockwise", "causal", marks=pytest.mark.slow),
        pytest.param("blockwise", "full", marks=pytest.mark.slow),
        pytest.param("cpu_flash", "causal", marks=pytest.mark.slow),
        pytest.param("cpu_flash", "full", marks=pytest.mark.slow),
    ],
)
def test_bf16_error_is_at_most_twice_that_of_one_device_and_does_not_grow(
    kernel: str, mask: str
) -> None:
    show(kernel, mask, Combine.EXCHANGE)
    two, four = (worst(ranks, mask, kernel, Combine.EXCHANGE) for ranks in (2, 4))
    for ranks in RANKS[kernel]:
        for name, result in worst(ranks, mask, kernel, Combine.EXCHANGE).items():
            assert max(astuple(result)) <= 2.0, (ranks, name)
            for base, limit in ((two, OVER_TWO_RANKS[kernel]), (four, 1.1)):
                grown = result.over(base[name])
                assert max(grown.rows, grown.median) <= limit, (ranks, name, grown)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", OVER_TWO_RANKS)
def test_the_error_of_a_reduce_scatter_grows(kernel: str, mask: str) -> None:
    show(kernel, mask, Combine.REDUCE_SCATTER)
    two, sixteen = (worst(ranks, mask, kernel, Combine.REDUCE_SCATTER) for ranks in (2, 16))
    assert sixteen["out"].rows > 1.3 * two["out"].rows


def test_exchange_is_what_the_planner_chooses_without_nodes() -> None:
    chosen = case(16, "causal", "blockwise", Combine.AUTO, (4, 4)).plan()
    asked = case(16, "causal", "blockwise", Combine.EXCHANGE, (4, 4)).plan()
    assert chosen == asked
