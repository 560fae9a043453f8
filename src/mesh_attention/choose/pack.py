"""A batch of documents as planning sees it: its boundaries, a layout, and a method for each layer.

A `Packer` turns the boundaries of documents into a `Pack`. It imports no torch and asks no other
rank, so a collate function in another process can call it; equal batches have equal packs on every
rank. `ContextParallel` plans each layer of the batch by `Pack.question`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from mesh_attention.choose.documents import Starts, Strategy, choose_strategies
from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.question import Question
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.problem.layout import Layout, LayoutKind, Stretches
from mesh_attention.plan.problem.problem import Problem


@dataclass(frozen=True)
class Layer:
    """Sizes and mask of an attention as a model has it, without documents. `question`: the method
    and options that the caller names; None: they are chosen for each batch."""

    problem: Problem
    question: Question | None = None
    layout: LayoutKind | None = None  # if the caller wants that one
    ranks_per_node: int | None = None  # if the caller says it
    relayout: bool = False  # its tensors are contiguous shards, whatever the layout


@dataclass(frozen=True)
class Pack:
    """A batch of documents, shared out. Its layers work in its layout, and its tensors have that
    layout too, unless `relayout`: then they are contiguous shards."""

    documents: Starts
    kv_documents: Starts
    num_ranks: int
    layout_kind: LayoutKind
    stretches: Stretches | None
    strategies: tuple[tuple[Layer, Strategy], ...]  # of layers whose strategy was chosen
    reason: str  # what was chosen and why, in a line
    num_rows: int = 1  # of the batch, that are one pack here, one after the other
    relayout: bool = False

    @property
    def shards(self) -> tuple[Layout, Layout]:
        """How queries and keys lie on the ranks."""
        if not self.relayout:
            return self.layout, self.kv_layout
        tokens = self.documents[-1], self.kv_documents[-1]
        q, kv = (Layout(LayoutKind.CONTIGUOUS, count, self.num_ranks) for count in tokens)
        return q, kv

    @cached_property
    def layout(self) -> Layout:
        return self._layout(self.documents[-1])

    @cached_property
    def kv_layout(self) -> Layout:
        if self.kv_documents == self.documents:
            return self.layout
        return self._layout(self.kv_documents[-1])

    def _layout(self, tokens: int) -> Layout:
        return Layout(self.layout_kind, tokens, self.num_ranks, stretches=self.stretches)

    @cached_property
    def words(self) -> str:
        """What ranks compare: a digest, and enough for people to see a difference."""
        compared = repr(replace(self, strategies=(), reason=""))
        digest = blake2b(compared.encode(), digest_size=16).hexdigest()
        return f"{digest} ({len(self.documents) - 1} documents of {self.documents[-1]} tokens)"

    def in_chunks(self, tokens: int) -> Pack:
        """The same tokens on the same ranks, where documents end after `tokens` each."""
        if self.kv_documents != self.documents:
            raise PlanError("documents whose keys differ from queries have no chunks")
        starts = [start for a, b in pairwise(self.documents) for start in range(a, b, tokens)]
        chunks = (*starts, self.documents[-1])
        return replace(self, documents=chunks, kv_documents=chunks, strategies=())

    def question(self, layer: Layer) -> Question:
        """The question to plan for a layer: one that the layout was chosen for, or any other that
        takes it."""
        if layer.relayout != self.relayout:
            raise PlanError(
                f"the documents were made with relayout={self.relayout}, and this attention has "
                f"relayout={layer.relayout}: all objects of a batch share its layout; set the "
                "same in both"
            )
        problem = layer.problem.with_documents(self.documents, self.kv_documents)
        if layer.question is not None:
            return layer.question.for_batch(problem, self.layout_kind, self.stretches)
        strategy, _ = self._strategy(layer)
        return strategy.ask(
            problem,
            self.num_ranks,
            layout=self.layout_kind,
            stretches=self.stretches,
            one_call=True,
            relayout=self.relayout,
        )

    def reason_for(self, layer: Layer) -> str:
        """Why a layer is done as `question` says, in a line; also a layer of other sizes than those
        that the layout was chosen for."""
        if layer.question is not None:
            return f"as given: {layer.question.method}"
        return self._strategy(layer)[1]

    def _strategy(self, layer: Layer) -> tuple[Strategy, str]:
        known = dict(self.strategies).get(layer)
        if known is not None:
            return known, self.reason
        choice = choose_strategies(
            [layer.problem],
            self.num_ranks,
            self.documents,
            self.kv_documents,
            shards=(self.layout_kind, self.stretches),
            relayout=self.relayout,
            ranks_per_node=layer.ranks_per_node,
        )
        return choice.strategies[0], choice.reason


@dataclass(frozen=True)
class Packer:
    """Chooses for batches of documents on so many ranks; all `layers` are called with the tensors
    of a batch, so they share its layout."""

    layers: tuple[Layer, ...]
    num_ranks: int

    @property
    def relayout(self) -> bool:
        return any(layer.relayout for layer in self.layers)

    def __call__(self, cu_seqlens: Any, kv_cu_seqlens: Any = None) -> Pack:
        """From cumulative starts (0, ..., tokens), or a list of them for each row of a batch."""
        documents, num_rows = document_starts("cu_seqlens", cu_seqlens)
        kv_documents = documents
        if kv_cu_seqlens is not None:
            kv_documents, kv_rows = document_starts("kv_cu_seqlens", kv_cu_seqlens)
            if kv_rows != num_rows or len(kv_documents) != len(documents):
                raise PlanError(
                    "cu_seqlens and kv_cu_seqlens must have the same number of documents in as "
                    "many rows"
                )
        free = [layer for layer in self.layers if layer.question is None]
        strategies: tuple[tuple[Layer, Strategy], ...] = ()
        if free:
            wanted = next((layer.layout for layer in self.layers if layer.layout), None)
            nodes = (layer.ranks_per_node for layer in self.layers if layer.ranks_per_node)
            if wanted is None and len(documents) == len(kv_documents) == 2 and not self.relayout:
                wanted = _usual_layout(self.layers)  # one sequence is cut as `shard` cuts it
            choice = choose_strategies(
                [layer.problem for layer in free],
                self.num_ranks,
                documents,
                kv_documents,
                shards=None if wanted is None else (wanted, None),
                relayout=self.relayout,
                ranks_per_node=next(nodes, None),
            )
            strategies = tuple(zip(free, choice.strategies, strict=True))
            layout, stretches, reason = choice.layout, choice.stretches, choice.reason
        else:
            layout, stretches = _layout_of_questions(self.layers)
            names = [layer.question.method for layer in self.layers if layer.question]
            reason = f"as given: {', '.join(dict.fromkeys(names))}"
        return Pack(
            documents,
            kv_documents,
            self.num_ranks,
            layout,
            stretches,
            strategies,
            reason,
            num_rows=num_rows,
            relayout=self.relayout,
        )


def _layout_of_questions(layers: Sequence[Layer]) -> tuple[LayoutKind, Stretches | None]:
    """The layout of the first layer that says one; otherwise the one that suits most methods."""
    for layer in layers:
        setting = layer.question.setting if layer.question else None
        if setting is not None and setting.layout is not None:
            return setting.layout, setting.stretches
    return _usual_layout(layers), None


def _usual_layout(layers: Sequence[Layer]) -> LayoutKind:
    full = all(layer.problem.mask.is_full for layer in layers)
    return LayoutKind.CONTIGUOUS if full else LayoutKind.ZIGZAG


def document_starts(name: str, starts: Any) -> tuple[Starts, int]:
    """Cumulative starts as people write them, and of how many rows of a batch they are: of lists,
    one for each row, one pack is made."""
    starts = _on_host(name, starts)
    if not _is_list(starts) or not starts:
        raise PlanError(f"{name}={starts!r}: give cumulative starts (0, ..., number of tokens)")
    rows = [_on_host(name, row) for row in starts]
    if not _is_list(rows[0]):
        rows = [rows]
    packed, tokens = [0], None
    for at, row in enumerate(rows):
        if not _is_list(row):
            raise PlanError(f"{name}, row {at}: {row!r} is not a list of cumulative starts")
        numbers = [number(name, start, least=0) for start in row]
        where = f"{name}, row {at}" if len(rows) > 1 else name
        fault = _fault(numbers)
        if fault:
            raise PlanError(f"{where}: give cumulative starts (0, ..., number of tokens); {fault}")
        if tokens not in (None, numbers[-1]):
            raise PlanError(f"{where} ends at {numbers[-1]}, and the rows before at {tokens}")
        tokens = numbers[-1]
        packed += [at * tokens + start for start in numbers[1:]]
    if packed[-1] == 0:
        raise PlanError(f"{name}: there is no token in the batch")
    return tuple(packed), len(rows)


def _fault(starts: list[int]) -> str:
    if len(starts) < 2:
        return f"found {starts}, which says no end"
    if starts[0] != 0:
        return f"the first is {starts[0]}"
    for at, (a, b) in enumerate(pairwise(starts)):
        if b < a:
            return f"number {at + 1} is {b}, after {a}"
    return ""


def _on_host(name: str, values: Any) -> Any:
    """The numbers of a tensor or an array."""
    if getattr(getattr(values, "device", None), "type", "cpu") != "cpu":
        raise PlanError(
            f"{name} is on {values.device}: plans are made on the host, which would have to wait "
            "for the device; keep a copy on the CPU"
        )
    try:
        return values.tolist() if hasattr(values, "tolist") else values
    except RuntimeError:  # of tensors that hold no list, sparse ones say
        raise PlanError(f"{name}={values!r}: give numbers, as a list or a dense tensor") from None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
