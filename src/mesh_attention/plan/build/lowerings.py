"""Kernel calls of the tasks of a plan, each worked out once."""

from __future__ import annotations

from functools import cache

from mesh_attention.plan.layout import Layout
from mesh_attention.plan.lower import Queries, RowList, lower
from mesh_attention.plan.mask import RowRanges
from mesh_attention.plan.program import Call


class Lowerings:
    """Both passes, and many ranks, often ask for the same."""

    def __init__(self, q_layout: Layout, kv_layout: Layout, rows: RowRanges) -> None:
        self.queries = cache(lambda spans: Queries.of(RowList.of(q_layout, spans), rows))
        self.keys = cache(lambda spans: RowList.of(kv_layout, spans))
        self._calls: dict[tuple[Queries, RowList], tuple[Call, ...]] = {}
        self._equal: dict[tuple[Call, ...], tuple[Call, ...]] = {}

    def calls(self, q: Queries, k: RowList) -> tuple[Call, ...]:
        found = self._calls.get((q, k))
        if found is None:
            calls = lower(q, k)
            found = self._calls[q, k] = self._equal.setdefault(calls, calls)
        return found
