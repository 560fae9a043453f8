"""Chooses a layout for a batch of documents, and a method for each layer, by predicted time.

The layers of a batch share its tensors, so they share a layout; each layer has its own method.
Each of the three layouts suits one kind of mask:

    contiguous   windows, which need only the nearest keys of their neighbours
    zigzag       long causal documents, each of which is even by itself
    listed       documents shorter than a shard stay whole, and work is even (`balance.py`)

The methods are `ulysses` (tokens are exchanged for heads, of which each rank needs some), `seen`
(only rows that the mask shows travel) and `mesh` (all rows of a tile travel, which suits few long
documents). They run on the caller's own group, or on the groups of a single tile shape, so no batch
makes new groups. `pack.py` calls `choose_strategies`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mesh_attention.choose.document_costs import Cost, LayerCosts
from mesh_attention.plan.methods.parts.assignment import best_tile
from mesh_attention.plan.methods.parts.needed_rows import has_few_ranges
from mesh_attention.plan.methods.question import Question, ask
from mesh_attention.plan.methods.table import HEADS_FIRST, SEEN_ROWS, TILES
from mesh_attention.plan.problem.balance import balanced_stretches
from mesh_attention.plan.problem.layout import Layout, LayoutKind, Stretches
from mesh_attention.plan.problem.problem import Problem

Starts = tuple[int, ...]  # where each document starts, and last the number of tokens
Shards = tuple[LayoutKind, Stretches | None]  # how tensors are cut; stretches if listed

# `ulysses` has the same plan for all masks. Any other method needs a plan for each batch, so it is
# chosen only if it is faster by this factor.
WORTH_A_PLAN = 1.05


@dataclass(frozen=True)
class Strategy:
    """The method of a layer in the layout of its batch, with the tile if it is a mesh."""

    method: str
    tile: tuple[int, int] | None = None

    def ask(self, problem: Problem, num_ranks: int, **layout: Any) -> Question:
        if self.tile is not None:
            layout["tile"] = self.tile
        return ask(problem, num_ranks, method=self.method, **layout)


@dataclass(frozen=True)
class BatchChoice:
    """One layout, and a strategy for each layer. `reason` says the choice and why, in a line."""

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
    ranks_per_node: int | None = None,
) -> BatchChoice:
    """The best layout and methods for the layers of a batch. `shards`: how the tensors are cut, if
    they are already; no other layout is tried. `relayout`: the tensors are contiguous shards, and
    any other layout costs an exchange. A mesh has the same tile for every batch, which moves the
    fewest bytes for the sizes of the first layer."""
    tile = best_tile(num_ranks, layers[0])
    problems = [layer.with_documents(documents, kv_documents) for layer in layers]
    costs = {p: LayerCosts(p, num_ranks, ranks_per_node) for p in problems}
    layouts = []
    candidates = [shards] if shards else _candidates(layers, num_ranks, documents, kv_documents)
    for kind, stretches in candidates:
        q = kv = Layout(kind, documents[-1], num_ranks, stretches=stretches)
        if documents[-1] != kv_documents[-1]:
            kv = Layout(kind, kv_documents[-1], num_ranks, stretches=stretches)
        may_mesh = kind is LayoutKind.ZIGZAG or shards is not None
        layouts.append(_LayoutCosts(q, kv, problems, costs, tile if may_mesh else None, relayout))
    best = min(layouts, key=lambda layout: layout.score)
    strategies = tuple(map(best.strategy, problems))
    reason = _reason(best, layouts, problems)
    return BatchChoice(best.layout.kind, best.layout.stretches, strategies, reason)


def _candidates(
    layers: Sequence[Problem], num_ranks: int, documents: Starts, kv_documents: Starts
) -> list[Shards]:
    shards: list[Shards] = [(LayoutKind.CONTIGUOUS, None)]
    if num_ranks == 1:
        return shards
    shards.append((LayoutKind.ZIGZAG, None))
    if kv_documents == documents:
        masks, weights = [layer.mask for layer in layers], [layer.flops(1) for layer in layers]
        exact = documents[-1] % num_ranks == 0  # then there is no padding
        listed = balanced_stretches(documents, num_ranks, masks, weights, exact=exact)
        shards.append((LayoutKind.LISTED, listed))
    return shards


class _LayoutCosts:
    """The cost of each layer by each method, in one layout."""

    def __init__(
        self,
        layout: Layout,
        kv_layout: Layout,
        problems: Sequence[Problem],
        costs: Mapping[Problem, LayerCosts],
        tile: tuple[int, int] | None,
        relayout: bool,
    ) -> None:
        self.layout = layout
        self._has_relayout = relayout and layout.kind is not LayoutKind.CONTIGUOUS
        # Each range of rows is a message of its own: layouts of many ranges cannot be exchanged.
        few_kv_ranges = has_few_ranges(kv_layout)
        can_relayout = not self._has_relayout or (has_few_ranges(layout) and few_kv_ranges)
        self._problems, self._tile = problems, tile
        self._costs: dict[Problem, dict[str, Cost]] = {}
        layouts = layout, kv_layout
        for problem, cost in costs.items():
            by_method = self._costs[problem] = {}
            if layout.num_ranks <= problem.num_heads:
                by_method[HEADS_FIRST] = cost.heads_first(layouts)
            how = partial(cost.cost, relayout=self._has_relayout)
            if few_kv_ranges and can_relayout:
                by_method[SEEN_ROWS] = how(SEEN_ROWS, (1, layout.num_ranks), layouts)
            if tile is not None and layout.num_ranks > 1 and can_relayout:
                # Counting the pairs of its tiles takes time: not where a mesh cannot be the best.
                best_score = min((_score(*item) for item in by_method.items()), default=math.inf)
                if _score(TILES, how(TILES, tile, layouts, even=True)) < best_score:
                    by_method[TILES] = how(TILES, tile, layouts)

    def best_method(self, problem: Problem) -> str:
        costs = self._costs[problem]
        return min(costs, key=lambda method: _score(method, costs[method]))

    def cost(self, problem: Problem) -> Cost:
        return self._costs[problem][self.best_method(problem)]

    def strategy(self, problem: Problem) -> Strategy:
        method = self.best_method(problem)
        return Strategy(method, self._tile if method == TILES else None)

    @property
    def score(self) -> float:
        """The sum of the layers' scores; infinite if no method can do one of the layers."""
        if not all(self._costs.values()):
            return math.inf
        return sum(_score(self.best_method(p), self.cost(p)) for p in self._problems)

    def describe(self, method: str) -> str:
        if method == HEADS_FIRST:  # the layout makes no difference to it
            return method
        tile = f" {self._tile[0]}x{self._tile[1]}" if method == TILES and self._tile else ""
        kind = "balanced" if self.layout.kind is LayoutKind.LISTED else self.layout.kind.value
        where = f"in {kind} order inside contiguous" if self._has_relayout else f"on {kind}"
        return f"{method}{tile} {where} shards"

    def by_one_method(self) -> Iterator[tuple[str, float]]:
        """Seconds of all layers by one method, for each method that can do all of them."""
        for method in (HEADS_FIRST, SEEN_ROWS, TILES):
            costs = [self._costs[problem].get(method) for problem in self._problems]
            if all(costs):
                yield self.describe(method), sum(cost.seconds for cost in costs if cost)


def _score(method: str, cost: Cost) -> float:
    """The seconds by which methods are compared."""
    return cost.seconds * (1.0 if method == HEADS_FIRST else WORTH_A_PLAN)


def _reason(
    best: _LayoutCosts, layouts: Sequence[_LayoutCosts], problems: Sequence[Problem]
) -> str:
    """A line such as: ulysses: 3.1 ms modelled for 2 layers, forward and backward (others: mesh 4.2
    ms); work max/mean 1.000, a rank receives up to 12 MiB a layer forward."""
    chosen = list(dict.fromkeys(best.describe(best.best_method(p)) for p in problems))
    costs = [best.cost(problem) for problem in problems]
    total = sum(cost.seconds for cost in costs)
    seconds = {name: value for layout in layouts for name, value in layout.by_one_method()}
    others = [f"{name} {s * 1e3:.3g} ms" for name, s in seconds.items() if chosen != [name]]
    layers = "a layer" if len(problems) == 1 else f"{len(problems)} layers"
    against = f" (others: {', '.join(others)})" if others else ""
    received = max(cost.received_bytes for cost in costs) / 2**20
    return (
        f"{' and '.join(chosen)}: {total * 1e3:.3g} ms modelled for {layers}, "
        f"forward and backward{against}; "
        f"work max/mean {max(cost.unevenness for cost in costs):.3f}, a rank receives up to "
        f"{received:.3g} MiB a layer forward"
    )
