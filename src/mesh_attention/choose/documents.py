"""Which method for which layer of a batch of documents, and in which layout: by predicted time.

The layers of a batch share its tensors, so they share a layout; the method is each layer's own.
Each of the three layouts suits one kind of mask:

    contiguous   windows need a halo of their neighbours' keys
    zigzag       long causal documents are even in themselves
    listed       documents shorter than a shard stay whole, and work is even (`balance.py`)

In each of them a layer has heads first (`ulysses`, up to a rank for each head), only what is seen
(`seen`), and, where few documents leave little hidden, a `mesh`. Whatever is chosen runs on the
caller's own group, or on the groups of one tile, which no batch changes. `pack.py` asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_attention.choose.document_costs import Cost, LayerCosts
from mesh_attention.machine.rates import Rates, usual_rates
from mesh_attention.plan.methods.parts.assignment import best_tile
from mesh_attention.plan.methods.parts.needed_rows import has_few_ranges
from mesh_attention.plan.methods.question import Question, ask
from mesh_attention.plan.methods.table import HEADS_FIRST
from mesh_attention.plan.methods.table import SEEN_ROWS as SEEN
from mesh_attention.plan.methods.table import TILES as MESH
from mesh_attention.plan.problem.balance import balanced_stretches
from mesh_attention.plan.problem.layout import Layout, LayoutKind, Stretches
from mesh_attention.plan.problem.problem import Problem

Starts = tuple[int, ...]  # of documents: 0, ..., number of tokens
Shards = tuple[LayoutKind, Stretches | None]

# A plan with heads first is the same for every mask: others must be so much faster to be worth a
# plan for each batch.
WORTH_A_PLAN = 1.05
_LAYOUTS = {kind: str(kind) for kind in LayoutKind} | {LayoutKind.LISTED: "balanced"}


@dataclass(frozen=True)
class Strategy:
    """How a layer is done in the layout of its batch. `tile`: of a mesh."""

    method: str
    tile: tuple[int, int] | None = None

    def ask(self, problem: Problem, num_ranks: int, **layout: Any) -> Question:
        if self.tile is not None:
            layout["tile"] = self.tile
        return ask(problem, num_ranks, method=self.method, **layout)


@dataclass(frozen=True)
class BatchChoice:
    """A strategy for each layer, in one layout for all. `reason`: what was chosen and why, in a
    line."""

    layout: LayoutKind
    stretches: Stretches | None
    strategies: tuple[Strategy, ...]
    reason: str


def choose_strategies(
    layers: Sequence[Problem],
    num_ranks: int,
    documents: Starts,
    kv_documents: Starts,
    *,
    shards: Shards | None = None,
    relayout: bool = False,
    rates: Rates | None = None,
) -> BatchChoice:
    """`shards`: where the tensors are cut already. `relayout`: the tensors are contiguous shards,
    and any other layout costs an exchange. A mesh has the same tile for every batch: the one that
    moves the fewest bytes by the sizes of the first layer."""
    tile = best_tile(num_ranks, layers[0])
    asked = [layer.with_documents(documents, kv_documents) for layer in layers]
    costs = {problem: LayerCosts(problem, num_ranks, rates or usual_rates()) for problem in asked}
    several = _shards(layers, num_ranks, documents, kv_documents) if shards is None else [shards]
    boards = []
    for kind, stretches in several:
        q = kv = Layout(kind, documents[-1], num_ranks, stretches=stretches)
        if documents[-1] != kv_documents[-1]:
            kv = Layout(kind, kv_documents[-1], num_ranks, stretches=stretches)
        may_mesh = kind is LayoutKind.ZIGZAG or shards is not None
        boards.append(_LayoutBoard(q, kv, asked, costs, tile if may_mesh else None, relayout))
    best = min(boards, key=lambda board: board.score)
    strategies = tuple(map(best.strategy, asked))
    return BatchChoice(
        best.layout.kind, best.layout.stretches, strategies, _reason(best, boards, asked)
    )


def _shards(
    layers: Sequence[Problem], num_ranks: int, documents: Starts, kv_documents: Starts
) -> list[Shards]:
    shards: list[Shards] = [(LayoutKind.CONTIGUOUS, None), (LayoutKind.ZIGZAG, None)]
    if kv_documents == documents and num_ranks > 1:
        masks, weights = [layer.mask for layer in layers], [layer.flops(1) for layer in layers]
        listed = balanced_stretches(documents, num_ranks, masks, weights)
        shards.append((LayoutKind.LISTED, listed))
    return shards


class _LayoutBoard:
    """What each method takes in one layout, for each layer."""

    def __init__(
        self,
        layout: Layout,
        kv_layout: Layout,
        asked: Sequence[Problem],
        costs: Mapping[Problem, LayerCosts],
        tile: tuple[int, int] | None,
        relayout: bool,
    ) -> None:
        self.layout = layout
        self._moves = relayout and layout.kind is not LayoutKind.CONTIGUOUS
        fits = not self._moves or (has_few_ranges(layout) and has_few_ranges(kv_layout))
        self._asked, self._tile = asked, tile
        can_see = has_few_ranges(kv_layout)
        self._costs: dict[Problem, dict[str, Cost]] = {}
        for problem, cost in costs.items():
            by_method = self._costs[problem] = {}
            if layout.num_ranks <= problem.num_heads:
                by_method[HEADS_FIRST] = cost.heads_first()
            around = cost.relayout() if self._moves else 0.0
            if can_see and fits:
                by_method[SEEN] = cost.seen(layout, kv_layout).longer_by(around)
            if tile is not None and layout.num_ranks > 1 and fits:
                # The pairs of its tiles are worth counting only where it could be the best.
                rest = min((_score(*item) for item in by_method.items()), default=math.inf)
                if WORTH_A_PLAN * (cost.mesh_at_best(tile) + around) < rest:
                    by_method[MESH] = cost.mesh(layout, kv_layout, tile).longer_by(around)

    def best_method(self, problem: Problem) -> str:
        costs = self._costs[problem]
        return min(costs, key=lambda method: _score(method, costs[method]))

    def cost(self, problem: Problem) -> Cost:
        return self._costs[problem][self.best_method(problem)]

    def strategy(self, problem: Problem) -> Strategy:
        method = self.best_method(problem)
        return Strategy(method, self._tile if method == MESH else None)

    @property
    def score(self) -> float:
        if not all(self._costs.values()):
            return math.inf
        return sum(_score(self.best_method(p), self.cost(p)) for p in self._asked)

    def words(self, method: str) -> str:
        """Where heads come first the layout makes no difference."""
        if method == HEADS_FIRST:
            return method
        tile = f" {self._tile[0]}x{self._tile[1]}" if method == MESH and self._tile else ""
        kind = _LAYOUTS[self.layout.kind]
        where = f"in {kind} order inside contiguous" if self._moves else f"on {kind}"
        return f"{method}{tile} {where} shards"

    def all_alike(self) -> Iterator[tuple[str, float]]:
        """Seconds of all layers if all were done by one method, for those that can."""
        for method in (HEADS_FIRST, SEEN, MESH):
            costs = [self._costs[problem].get(method) for problem in self._asked]
            if all(costs):
                yield self.words(method), sum(cost.seconds for cost in costs if cost)


def _score(method: str, cost: Cost) -> float:
    return cost.seconds * (1.0 if method == HEADS_FIRST else WORTH_A_PLAN)


def _reason(best: _LayoutBoard, boards: Sequence[_LayoutBoard], asked: Sequence[Problem]) -> str:
    """Such as: ulysses: 3.1 ms modelled for 2 layers, forward and backward (others: mesh 4.2 ms);
    work max/mean 1.00, a rank receives up to 12.0 MiB."""
    chosen = list(dict.fromkeys(best.words(best.best_method(problem)) for problem in asked))
    costs = [best.cost(problem) for problem in asked]
    total = sum(cost.seconds for cost in costs)
    seconds = {words: value for board in boards for words, value in board.all_alike()}
    others = [f"{words} {s * 1e3:.3g} ms" for words, s in seconds.items() if chosen != [words]]
    layers = "a layer" if len(asked) == 1 else f"{len(asked)} layers"
    against = f" (others: {', '.join(others)})" if others else ""
    received = max(cost.received_bytes for cost in costs) / 2**20
    return (
        f"{' and '.join(chosen)}: {total * 1e3:.3g} ms modelled for {layers}, "
        f"forward and backward{against}; "
        f"work max/mean {max(cost.unevenness for cost in costs):.3f}, a rank receives up to "
        f"{received:.3g} MiB a layer forward"
    )
