"""How little can travel: a lower bound on what a rank moves, whatever the method.

A rank's work is a set of (query, key, head) triples. For one KV head, the rows of queries that it
touches (A, over the query heads of that KV head) and of keys (b) span at most A b triples; whatever
of those rows it does not hold must reach it, and results of query rows that it does not hold must
leave it. Work of a rank's own rows is free. `docs/theory.md` has the proof in words and a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.runs import Run, visible_pairs


@dataclass(frozen=True, slots=True)
class _Side:
    """What a row of one head is in elements, and of how many rows a rank holds its share."""

    row: int
    all_rows: float
    own_rows: float


def least_bytes(problem: Problem, num_ranks: int, direction: Direction) -> float:
    """Bytes that a rank receives at least, in the mean of all ranks, each of which has an equal
    share of the tokens and of the work. Statistics (LSE, delta) are left out."""
    queries, keys = _sides(problem, num_ranks, direction)
    size = problem.element_bytes
    own = queries.own_rows * keys.own_rows
    everything = [Run(0, tokens, tokens) for tokens in (problem.q_tokens, problem.keys)]
    pairs = int(visible_pairs(everything[:1], everything[1:], problem.rows)[0, 0])
    most = float(pairs * problem.heads_per_kv_head)  # of one KV head
    share = most * problem.kv_heads / num_ranks
    beyond_own = share - problem.kv_heads * own
    if beyond_own <= 0:
        return 0.0
    if queries.row * queries.own_rows > keys.row * keys.all_rows:
        # A few ranks with many query heads on a KV head: all keys come before it is worth to move
        # a query, the price is convex in the work, and work is cheapest where heads share it.
        return problem.kv_heads * _price(queries, keys, share / problem.kv_heads) * size
    # Otherwise it is concave: work is cheapest in few heads.
    heads = beyond_own / (most - own)
    if heads >= 1:
        return heads * _price(queries, keys, most) * size
    return _price(queries, keys, own + beyond_own) * size


def unit_bytes(problem: Problem, num_ranks: int) -> float:
    """One unit is one Q partition."""
    tokens = problem.q_tokens / num_ranks
    return tokens * problem.num_heads * problem.head_dim * problem.element_bytes


def _sides(problem: Problem, num_ranks: int, direction: Direction) -> tuple[_Side, _Side]:
    qk, v, group = problem.head_dim, problem.v_dim, problem.heads_per_kv_head
    # Forward Q comes and O leaves, K and V come. Backward Q and dO come and dQ leaves, K and V come
    # and dK and dV leave.
    forward = direction is Direction.FORWARD
    of_query, of_key = (qk + v, qk + v) if forward else (2 * qk + v, 2 * (qk + v))
    q_rows, k_rows = group * problem.q_tokens, problem.keys
    return (
        _Side(of_query, q_rows, q_rows / num_ranks),
        _Side(of_key, k_rows, k_rows / num_ranks),
    )


def _price(queries: _Side, keys: _Side, work: float) -> float:
    """Elements that must move for so much work in one head: of all A b = work the cheapest."""
    fewest = max(keys.own_rows, work / queries.all_rows)
    most = min(keys.all_rows, work / queries.own_rows)
    rows = min(max(sqrt(work * queries.row / keys.row), fewest), most)
    return queries.row * (work / rows - queries.own_rows) + keys.row * (rows - keys.own_rows)
