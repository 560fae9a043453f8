"""Which rank has the most to do, and how much: counted from mask, tile and nodes, without programs.

Ranks differ in the pairs that their tiles show, and in the rows that they exchange with other
nodes. Bounds of shapes go by the most of either; an estimate looks at the ranks that have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.language.computed_pairs import pairs_of_many_tiles, pairs_of_tiles
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.methods.parts.assignment import best_tile
from mesh_attention.plan.methods.parts.needed_rows import needed_keys, needed_queries
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.row_ranges import RowRanges

Floats = NDArray[np.float64]
COUNTED = (LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG)  # layouts whose tiles are counted quickly
MOST_COUNTED = 1024  # ranks: counting for more takes longer than an estimate
_MOST_IN_ORDER = 512  # likewise by partitions, as where a method has an order of ranks of its own


def shows_little(problem: Problem) -> bool:
    """Whether the mask hides more than the future: then rows that nobody sees need not travel."""
    mask = problem.mask
    return mask.window is not None or mask.documents is not None or mask.slices is not None


def is_counted(layout: Layout) -> bool:
    """Whether the work of its tiles is counted quickly."""
    return layout.kind in COUNTED and (layout.order is None or layout.num_ranks <= _MOST_IN_ORDER)


def busiest_ranks(
    plan: Plan, method: str, setting: Mapping[str, Any], per_node: int, *, usual: int | None = None
) -> set[int]:
    """The ranks that may end last: an estimate looks at each of them. `usual` is the rank to look
    at where all have the same work; None: the one in the middle."""
    layouts, problem, num_ranks = (plan.q_layout, plan.kv_layout), plan.problem, plan.num_ranks
    degree, tile = degree_and_tile(method, setting, problem, num_ranks)
    # The middle has the mean of the work where a causal mask is not balanced.
    ranks = {num_ranks // 2 if usual is None else usual}
    if shows_little(problem) and all(is_counted(layout) for layout in layouts):
        ranks = {degree * busiest_unit(*layouts, problem.rows, tile, degree)[0]}
    far = _far_rows(plan, method, degree, tile, per_node)
    if far.max() > max(far[rank] for rank in ranks):
        ranks.add(int(far.argmax()))
    if problem.num_heads % degree or problem.q_tokens < 2 * num_ranks:
        ranks.add(0)  # a large share of heads; or others have no token
    return ranks


def corner_ranks(plan: Plan, method: str, setting: Mapping[str, Any]) -> list[int]:
    """The ranks in the corners of the grid of units. Chunks of a zigzag show most in the first row
    or column and least in the last, so between transfers these wait for each other in turn."""
    degree, (a, b) = degree_and_tile(method, setting, plan.problem, plan.num_ranks)
    return sorted({degree * unit for unit in (0, a - 1, a * (b - 1), a * b - 1)})


def _far_rows(plan: Plan, method: str, degree: int, tile: tuple[int, int], per_node: int) -> Floats:
    """How many rows, times their heads, each rank exchanges with other nodes. Ranks differ where
    single rows travel, and where rows of the grid do not begin where nodes do."""
    problem = plan.problem
    weights = problem.num_heads, problem.kv_heads
    if METHODS[method].by_stretches:
        layouts = plan.q_layout, plan.kv_layout
        queries, keys = needed_tokens(*layouts, problem.rows, tile[0], per_node)[1]
        far: Floats = np.max(weights[0] * queries + weights[1] * keys, axis=0)
        return far
    return _far_of_grid(plan.devices, weights, degree, tile, per_node)


@lru_cache(maxsize=64)  # all cuts ask for the same
def _far_of_grid(
    devices: tuple[int, ...],
    weights: tuple[int, int],
    degree: int,
    tile: tuple[int, int],
    per_node: int,
) -> Floats:
    num_ranks, node = len(devices), np.array(devices) // per_node
    unit, member = np.divmod(np.arange(num_ranks), degree)
    groups = unit // tile[0], unit % tile[0]  # rows and columns of the grid
    far = np.zeros(num_ranks)  # of each rank
    for weight, size, group in zip(weights, tile, groups, strict=True):
        ids = (group * degree + member) * num_ranks + node
        _, at, count = np.unique(ids, return_inverse=True, return_counts=True)
        far += weight * (size - count[at])
    return far


@lru_cache(maxsize=64)  # both passes, all cuts and the bounds ask for the same
def needed_tokens(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, a: int, per_node: int
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """How many tokens each rank sends and receives one by one, where tiles have `a` rows: arrays
    (sent or received, rank) of queries and keys inside its node, and of those of other nodes."""
    nears, fars, num_ranks = [], [], q_layout.num_ranks
    for find in (needed_queries, needed_keys):
        if a == 1 and find is needed_queries:  # every rank has the queries of its row
            nears.append(np.zeros((2, num_ranks)))
            fars.append(nears[0])
            continue
        users, owners, tokens = find(q_layout, kv_layout, rows, a).tokens_between()
        is_near = users // per_node == owners // per_node
        for some, sums in ((is_near & (users != owners), nears), (~is_near, fars)):
            ends = (owners[some], users[some])
            sums.append(np.stack([np.bincount(x, tokens[some], num_ranks) for x in ends]))
    return (nears[0], nears[1]), (fars[0], fars[1])


@lru_cache(maxsize=256)  # both passes, all cuts and the bounds ask for the same
def busiest_unit(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, tile: tuple[int, int], degree: int
) -> tuple[int, int]:
    """The unit whose tile shows the most pairs, and how many. Units are numbered along the rows of
    the grid."""
    count = pairs_of_many_tiles if q_layout.num_ranks <= _MOST_IN_ORDER else pairs_of_tiles
    pairs = count(q_layout, kv_layout, rows, tile, degree)
    return int(pairs.argmax()), int(pairs.max())


def degree_and_tile(
    method: str, setting: Mapping[str, Any], problem: Problem, num_ranks: int
) -> tuple[int, tuple[int, int]]:
    """How many ranks exchange tokens for heads, and the tile on the units that they make."""
    degree, tile = METHODS[method].degree(setting, num_ranks), setting.get("tile")
    units = max(1, num_ranks // degree)
    if tile is None:
        chosen = METHODS[method].is_plain_box and "tile" in METHODS[method].options()
        tile = best_tile(units, problem) if chosen else (1, units)
    return degree, tile
