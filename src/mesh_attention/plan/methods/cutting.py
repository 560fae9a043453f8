"""How finely to cut a plan when nobody says: by its size alone, without a model of the machine."""

from __future__ import annotations

from mesh_attention.plan.methods.head_slices import HeadsAtOnce, usual_heads
from mesh_attention.plan.problem import Problem

__all__ = ["suggested_cut"]

_ROWS_PER_CHUNK = 4096  # fewer rows a side and kernels lose speed; more and less can overlap
_ROWS_AND_HEADS = 128 * 132 * 2  # two rounds of 128 queries for every multiprocessor of an H100


def suggested_cut(
    problem: Problem, num_ranks: int, tile: tuple[int, int], degree: int
) -> tuple[tuple[int, int], HeadsAtOnce | None]:
    """Slices of heads that fill a GPU, where there are several heads. Otherwise up to 4x4 chunks,
    as long as every chunk keeps enough rows for a kernel."""
    q_rows, kv_rows = (
        side * degree * tokens // num_ranks
        for side, tokens in zip(tile, (problem.q_tokens, problem.keys), strict=True)
    )
    if num_ranks == degree:
        return (1, 1), None  # nothing is gathered
    heads = usual_heads(problem, degree)
    if heads is None:
        kq, kkv = (min(4, max(1, rows // _ROWS_PER_CHUNK)) for rows in (q_rows, kv_rows))
        return (kq, kkv), None
    least = -(-_ROWS_AND_HEADS // (max(1, q_rows) * problem.heads_per_kv_head))
    most = max(heads[1], least)
    if 2 * most > problem.kv_heads // degree:
        return (1, 1), None
    return (1, 1), (max(1, most // 4), most)
