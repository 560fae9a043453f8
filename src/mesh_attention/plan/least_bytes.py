"""The least that a rank can receive, whatever the plan: a bound to hold volumes against.

A rank's share of the work is a set of (head, query, key) triples. No shape of it touches fewer rows
than a box does: some heads, `x` query rows and `y` key rows of each, with at least its share of the
visible pairs in `x * y`. What touches a row that another rank owns travels: queries come and
partial outputs go, keys and values come, and backward their gradients go. In the mean over ranks as
much is received as sent.
"""

from __future__ import annotations

import math

from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.runs import Run, visible_pairs


def least_received_bytes(problem: Problem, num_ranks: int, direction: Direction) -> float:
    """In the mean over ranks, without statistics.

    >>> tokens = Problem(q_tokens=4096, num_heads=64, head_dim=128)
    >>> unit = 4096 / 64 * 64 * 128 * 2
    >>> least_received_bytes(tokens, 64, Direction.FORWARD) / unit == 4 * (1 - 1 / 64)
    True
    """
    everything = [Run(0, problem.q_tokens)], [Run(0, problem.keys)]
    pairs = float(visible_pairs(*everything, problem.rows)[0, 0])
    if num_ranks == 1 or not pairs:
        return 0.0
    backward = direction is Direction.BACKWARD
    head, v_head = problem.head_dim, problem.v_dim
    query = (2 * head + v_head if backward else head + v_head) * problem.element_bytes
    key = (2 if backward else 1) * (head + v_head) * problem.element_bytes
    own_q, own_k = problem.q_tokens / num_ranks, problem.keys / num_ranks
    best = math.inf
    for heads in range(1, problem.num_heads + 1):
        kv_heads = max(1.0, heads / problem.heads_per_kv_head)
        area = pairs * problem.num_heads / (num_ranks * heads)
        if area > problem.q_tokens * problem.keys:
            continue  # so few heads have too few pairs
        per_x, per_y = heads * query, kv_heads * key
        x = math.sqrt(area * per_y / per_x)
        x = min(max(x, area / problem.keys), problem.q_tokens)
        received = max(x - own_q, 0.0) * per_x + max(area / x - own_k, 0.0) * per_y
        best = min(best, received)
    return best
