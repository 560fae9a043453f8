"""Which method for which layer of a batch of documents, and in which layout: by predicted time.

The layers of a batch share its tensors, so they share a layout; the method is each layer's own. The
layouts are the three in which one of the ways to answer a mask is at its best:

    contiguous   windows need a halo of their neighbours' keys
    zigzag       long causal documents are even in themselves
    listed       documents shorter than a shard stay whole, and work is even (`balance.py`)

and in each a layer has heads first (`ulysses`, up to a rank for each head), only what is seen
(`seen`), and, where few documents leave little hidden, a `mesh`. Whatever is chosen runs on the
caller's own group, or on the groups of one tile, which no batch changes.
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

Starts = tuple[int, ...]

# A plan with heads first is the same for every mask: others must be so much faster to be worth a
# plan for each batch.
WORTH_A_PLAN = 1.05
_WORDS = {HEADS_FIRST: "heads first", SEEN: "only what is seen", MESH: "a mesh"}
_LAYOUTS = {kind: str(kind) for kind in LayoutKind} | {LayoutKind.LISTED: "balanced"}


@dataclass(frozen=True)
class Way:
    """A method with its options, as `ask` takes them, but for the layout."""

    name: str  # of the method
    options: tuple[tuple[str, Any], ...] = ()

    def ask(self, problem: Problem, num_ranks: int, **layout: Any) -> Question:
        return ask(problem, num_ranks, method=self.name, **dict(self.options), **layout)


@dataclass(frozen=True)
class Chosen:
    """For each layer a way, in one layout for all.

    reason    what was chosen and why, in a line
    seconds   predicted for all layers, forward and backward, had all been done in one way: by words
              for the method and the layout
    """

    layout: LayoutKind
    stretches: Stretches | None
    ways: tuple[Way, ...]
    reason: str
    seconds: tuple[tuple[str, float], ...] = ()


def choose_ways(
    layers: Sequence[Problem],
    num_ranks: int,
    documents: Starts,
    kv_documents: Starts,
    *,
    layout: tuple[LayoutKind, Stretches | None] | None = None,
    tile: tuple[int, int] | None = None,
    relayout: bool = False,
    rates: Rates | None = None,
) -> Chosen:
    """`layout`: where the tensors are cut already. `tile`: of the mesh, the same for every batch;
    left out, the one that moves the fewest bytes by the sizes of the first layer. `relayout`: the
    tensors are contiguous shards, and any other layout costs an exchange."""
    tile = tile or best_tile(num_ranks, layers[0])
    asked = [one.with_documents(documents, kv_documents) for one in layers]
    costs = {problem: LayerCosts(problem, num_ranks, rates or usual_rates()) for problem in asked}
    shards = _shards(layers, num_ranks, documents, kv_documents) if layout is None else [layout]
    boards = []
    for kind, stretches in shards:
        q = kv = Layout(kind, documents[-1], num_ranks, stretches=stretches)
        if documents[-1] != kv_documents[-1]:
            kv = Layout(kind, kv_documents[-1], num_ranks, stretches=stretches)
        may_mesh = kind is LayoutKind.ZIGZAG or layout is not None
        boards.append(_Board(q, kv, asked, costs, tile if may_mesh else None, relayout))
    best = min(boards, key=lambda board: board.score)
    seconds = {words: value for board in boards for words, value in board.all_alike()}
    return Chosen(
        *(best.layout.kind, best.layout.stretches, tuple(map(best.way, asked))),
        reason=_reason(best, asked, seconds),
        seconds=tuple(seconds.items()),
    )


def _shards(
    layers: Sequence[Problem], num_ranks: int, documents: Starts, kv_documents: Starts
) -> list[tuple[LayoutKind, Stretches | None]]:
    found: list[tuple[LayoutKind, Stretches | None]] = [
        (LayoutKind.CONTIGUOUS, None),
        (LayoutKind.ZIGZAG, None),
    ]
    if kv_documents == documents and num_ranks > 1:
        masks, weights = [one.mask for one in layers], [one.flops(1) for one in layers]
        listed = balanced_stretches(documents, num_ranks, masks, weights)
        found.append((LayoutKind.LISTED, listed))
    return found


class _Board:
    """What each way takes in one layout, for each layer."""

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
        self._found: dict[Problem, dict[str, Cost]] = {}
        for problem, cost in costs.items():
            found = self._found[problem] = {}
            if layout.num_ranks <= problem.num_heads:
                found[HEADS_FIRST] = cost.heads_first()
            around = cost.relayout() if self._moves else 0.0
            if can_see and fits:
                found[SEEN] = cost.seen(layout, kv_layout).longer_by(around)
            if tile is not None and layout.num_ranks > 1 and fits:
                # The pairs of its tiles are worth counting only where it could be the best.
                rest = min((_score(*one) for one in found.items()), default=math.inf)
                if WORTH_A_PLAN * (cost.mesh_at_best(tile) + around) < rest:
                    found[MESH] = cost.mesh(layout, kv_layout, tile).longer_by(around)

    def best_method(self, problem: Problem) -> str:
        found = self._found[problem]
        return min(found, key=lambda method: _score(method, found[method]))

    def cost(self, problem: Problem) -> Cost:
        return self._found[problem][self.best_method(problem)]

    def way(self, problem: Problem) -> Way:
        method = self.best_method(problem)
        return Way(method, (("tile", self._tile),) if method == MESH else ())

    @property
    def score(self) -> float:
        if not all(self._found.values()):
            return math.inf
        return sum(_score(self.best_method(one), self.cost(one)) for one in self._asked)

    def words(self, method: str) -> str:
        """Where heads come first the layout makes no difference."""
        if method == HEADS_FIRST:
            return _WORDS[method]
        tile = f" {self._tile[0]}x{self._tile[1]}" if method == MESH and self._tile else ""
        kind = _LAYOUTS[self.layout.kind]
        where = f"in {kind} order inside contiguous" if self._moves else f"on {kind}"
        return f"{_WORDS[method]}{tile} {where} shards"

    def all_alike(self) -> Iterator[tuple[str, float]]:
        """Seconds of all layers if all were done by one method, for those that can."""
        for method in _WORDS:
            found = [self._found[one].get(method) for one in self._asked]
            if all(found):
                yield self.words(method), sum(cost.seconds for cost in found if cost)


def _score(method: str, cost: Cost) -> float:
    return cost.seconds * (1.0 if method == HEADS_FIRST else WORTH_A_PLAN)


def _reason(best: _Board, asked: Sequence[Problem], seconds: Mapping[str, float]) -> str:
    """Such as: heads first, 3.1 ms forward and backward of 2 layers (mesh ... 4.2 ms); work
    max/mean 1.00, a rank receives up to 12.0 MiB."""
    chosen = list(dict.fromkeys(best.words(best.best_method(one)) for one in asked))
    costs = [best.cost(one) for one in asked]
    total = sum(cost.seconds for cost in costs)
    others = [f"{words} {s * 1e3:.3g} ms" for words, s in seconds.items() if chosen != [words]]
    layers = "a layer" if len(asked) == 1 else f"{len(asked)} layers"
    against = f" (otherwise {', '.join(others)})" if others else ""
    received = max(cost.received_bytes for cost in costs) / 2**20
    return (
        f"{' and '.join(chosen)}: {total * 1e3:.3g} ms forward and backward of {layers}{against}; "
        f"work max/mean {max(cost.unevenness for cost in costs):.3f}, a rank receives up to "
        f"{received:.3g} MiB a layer forward"
    )
