"""Residuals: the rows of other ranks that a forward pass keeps for the backward pass.

Without them the backward pass fetches queries, keys and values again, as they were shared out at
the beginning. Rows that were exchanged for heads take the place of the caller's shards, so they
need no memory where every rank has as many heads of all tokens as it had tokens of all heads. Rows
that were gathered are held besides.

Used by the planner of tiles, by head groups and by their exchanges.
"""

from __future__ import annotations

from enum import StrEnum

from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.problem.problem import Problem

GATHERED = (Kind.Q, Kind.K, Kind.V)


class Keep(StrEnum):
    """The most that is kept; rows that go round in a ring are not."""

    AUTO = "auto"  # what was exchanged, where that needs no memory
    SHARDS = "shards"
    EXCHANGED = "exchanged"
    GATHERED = "gathered"


def kept_kinds(keep: Keep, problem: Problem, degree: int) -> tuple[Kind, ...]:
    """The tensors of which a rank keeps the rows that `degree` ranks exchanged for heads.

    >>> from mesh_attention.plan.problem.mask import Mask
    >>> few = Problem(64, num_heads=8, num_kv_heads=2, head_dim=8, mask=Mask())
    >>> [" ".join(kept_kinds(Keep.AUTO, few, degree)) for degree in (2, 4)]
    ['q lse k v', 'q lse']
    """
    if keep is Keep.SHARDS:
        return ()
    all_kinds = keep is not Keep.AUTO
    queries = (Kind.Q, Kind.LSE) if all_kinds or problem.num_heads % degree == 0 else ()
    keys = (Kind.K, Kind.V) if all_kinds or problem.kv_heads % degree == 0 else ()
    return (*queries, *keys)
