"""Kernel calls of the tasks of a plan, each worked out once."""

from __future__ import annotations

from mesh_attention.plan.layout import Layout, Spans
from mesh_attention.plan.lower import Queries, RowList, lower
from mesh_attention.plan.mask import RowRanges
from mesh_attention.plan.program import Call

__all__ = ["Lowerings"]


class Lowerings:
    """Kernel calls of every task, each worked out once: both passes often ask for the same."""

    def __init__(self, q_layout: Layout, kv_layout: Layout, rows: RowRanges) -> None:
        self._q_layout = q_layout
        self._kv_layout = kv_layout
        self._rows = rows
        self._queries: dict[Spans, Queries] = {}
        self._keys: dict[Spans, RowList] = {}
        # By identity first: methods ask for the same spans again and again, and long ones are slow
        # to hash. The spans are held, so their ids stay theirs.
        self._queries_of: dict[int, tuple[Spans, Queries]] = {}
        self._keys_of: dict[int, tuple[Spans, RowList]] = {}
        self._calls: dict[tuple[int, int], tuple[Call, ...]] = {}
        self._equal: dict[tuple[Call, ...], tuple[Call, ...]] = {}

    def queries(self, spans: Spans) -> Queries:
        known = self._queries_of.get(id(spans))
        if known is None:
            if spans not in self._queries:
                self._queries[spans] = Queries.of(RowList.of(self._q_layout, spans), self._rows)
            known = self._queries_of[id(spans)] = (spans, self._queries[spans])
        return known[1]

    def keys(self, spans: Spans) -> RowList:
        known = self._keys_of.get(id(spans))
        if known is None:
            if spans not in self._keys:
                self._keys[spans] = RowList.of(self._kv_layout, spans)
            known = self._keys_of[id(spans)] = (spans, self._keys[spans])
        return known[1]

    def calls(self, q: Queries, k: RowList) -> tuple[Call, ...]:
        """Equal calls are the same object, so that tasks can be told apart by its id."""
        key = (id(q), id(k))  # both live as long as this object
        found = self._calls.get(key)
        if found is None:
            calls = lower(q, k)
            found = self._calls[key] = self._equal.setdefault(calls, calls)
        return found
