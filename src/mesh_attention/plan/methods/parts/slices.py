"""Slices of the heads that follow each other through gather, attention and reduction.

Attention of a slice hides the gather of the next one and the reduction of the one before, so only
the first gather and the last reduction stay open. Those should be small and the rest large, since
every slice costs a few transfers: sizes grow from the first slice on, no faster than attention
usually outlasts the gather of as many heads, and fall again towards the last.
"""

from __future__ import annotations

from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.problem import Problem

HeadSlices = tuple[int, int]  # most KV heads of the first and last slice, and of any
_GROWTH = 1.6
_ROWS_PER_CHUNK = 4096  # fewer rows a side and kernels lose speed; more and less can overlap
_ROWS_AND_HEADS = 128 * 132 * 2  # two rounds of 128 queries for every multiprocessor of an H100


def slice_sizes(num_heads: int, first: int, most: int) -> tuple[int, ...]:
    """Near the largest they are of even size, and so may be smaller than asked for.

    >>> slice_sizes(64, 2, 16), slice_sizes(64, 16, 16)
    ((2, 3, 5, 8, 10, 9, 9, 8, 5, 3, 2), (16, 16, 16, 16))
    """
    rising: list[int] = []
    size, middle = first, num_heads
    while size < most and (middle == 2 * size or middle >= 3 * size):
        rising.append(size)
        middle -= 2 * size
        size = max(size + 1, round(size * _GROWTH))
    count = -(-middle // min(size, most))
    level = [middle // count + (at < middle % count) for at in range(count)] if count else []
    return (*rising, *level, *reversed(rising))


def usual_heads(problem: Problem, degree: int = 1) -> HeadSlices | None:
    """About eight slices of those that a rank holds, and small ones at both ends."""
    held = max(1, problem.kv_heads // degree)
    if held == 1:
        return None
    most = max(1, held // 8)
    return max(1, most // 4), most


def sizes_for(
    problem: Problem, degree: int, heads: HeadSlices | None, name: str = "head_slices"
) -> tuple[int, ...]:
    """Sizes of the slices of the KV heads that one of `degree` ranks of a unit holds."""
    held = max(1, problem.kv_heads // degree)
    if heads is None:
        return (held,)
    first, most = heads
    if not 1 <= first <= most <= held:
        where = f"{held} KV heads" + (f" that a rank holds with ulysses={degree}" * (degree > 1))
        raise PlanError(
            f"{name}={first}x{most}: give the KV heads of the first slice and of the "
            f"largest, 1 <= first <= largest <= {where}"
        )
    return slice_sizes(held, first, most)


def suggested_cut(
    problem: Problem, num_ranks: int, tile: tuple[int, int], degree: int
) -> tuple[tuple[int, int], HeadSlices | None]:
    """Slices of heads that fill a GPU, where there are several heads. Otherwise up to 4x4 chunks,
    2x2 of what is exchanged, as long as every chunk keeps enough rows for a kernel."""
    q_rows, kv_rows = (
        side * degree * tokens // num_ranks
        for side, tokens in zip(tile, (problem.q_tokens, problem.keys), strict=True)
    )
    if num_ranks == 1:
        return (1, 1), None  # nothing travels
    heads = usual_heads(problem, degree)
    if heads is None:
        kq, kkv = (min(4, max(1, rows // _ROWS_PER_CHUNK)) for rows in (q_rows, kv_rows))
        # Halves of all members' rows are those of a zigzag, which stay whole.
        return (kq, kkv) if degree == 1 else (min(2, kq), min(2, kkv)), None
    least = -(-_ROWS_AND_HEADS // (max(1, q_rows) * problem.heads_per_kv_head))
    most = max(heads[1], least)
    if 2 * most > problem.kv_heads // degree:
        return (1, 1), None
    return (1, 1), (max(1, most // 4), most)


def suggested_ring_cut(
    problem: Problem, num_ranks: int, degree: int, ranks_per_node: int | None
) -> tuple[tuple[int, int], HeadSlices | None]:
    """What rotates is hidden as it is. What is exchanged is worth smaller calls and messages where
    it leaves the node, or where it is all that travels; the keys of a ring stay whole."""
    units = num_ranks // degree
    if units > 1 and degree <= (ranks_per_node or 8):
        return (1, 1), None
    (kq, kkv), heads = suggested_cut(problem, num_ranks, (1, units), degree)
    return (kq, kkv if units == 1 else 1), heads
