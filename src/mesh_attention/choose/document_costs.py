"""How long one layer of a batch takes by each method, without a plan: counted, not simulated.

`documents.py` chooses by it, for a new batch at every step. Work and rows are counted exactly, and
become seconds by the rates of a cluster: transfers as for the shapes of a search
(`shape_seconds.py`), attention as calls of one size. An estimate of `cost/` needs the programs of
every candidate, which takes fifty times as long: too long for every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mesh_attention.choose.ask import usual_machine
from mesh_attention.choose.shape_seconds import Layouts, ShapeSeconds
from mesh_attention.cost.planning import is_scattered, kernels_of_calls
from mesh_attention.machine.seconds import CallSize, kernel_seconds
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.parts.chunks import sizes_for, suggested_cut
from mesh_attention.plan.methods.parts.head_group import ulysses_degrees
from mesh_attention.plan.methods.table import HEADS_FIRST, SEEN_ROWS
from mesh_attention.plan.problem.problem import Problem


@dataclass(frozen=True)
class Cost:
    """What one layer costs: seconds of both passes, the most bytes that a rank receives forward,
    and the most work of a rank over the mean."""

    seconds: float
    received_bytes: float
    unevenness: float


class _Cut(NamedTuple):
    """Into how many slices of heads a method cuts, and chunks of queries and of keys."""

    slices: int = 1
    chunks: tuple[int, int] = (1, 1)

    @property
    def num_calls(self) -> int:
        return self.slices * self.chunks[0] * self.chunks[1]


class LayerCosts:
    """The costs of one layer of a batch, by method and layout."""

    def __init__(self, problem: Problem, num_ranks: int, ranks_per_node: int | None = None) -> None:
        self._problem, self._ranks = problem, num_ranks
        self._cluster = usual_machine(num_ranks, ranks_per_node)
        self._shapes = {d: ShapeSeconds(problem, num_ranks, self._cluster, d) for d in Direction}
        self._heads_first: dict[bool, Cost] = {}

    def heads_first(self, layouts: Layouts) -> Cost:
        """The cost where every rank has all tokens of its heads: the same in most layouts."""
        scattered = is_scattered(layouts)
        if scattered not in self._heads_first:
            self._heads_first[scattered] = self.cost(HEADS_FIRST, (1, 1), layouts)
        return self._heads_first[scattered]

    def cost(
        self,
        method: str,
        tile: tuple[int, int],
        layouts: Layouts,
        *,
        relayout: bool = False,
        even: bool = False,
    ) -> Cost:
        """`tile`: of units of ranks that exchange tokens for heads; all ranks do, or none.
        `relayout`: tensors are contiguous shards, whatever the layout. `even`: as if all ranks had
        the same work, which takes less time to count."""
        forward = self._shapes[Direction.FORWARD]
        degree = self._ranks // (tile[0] * tile[1])
        mean = forward.num_pairs / self._ranks
        pairs = mean if even else forward.busiest_pairs({}, layouts, degree, tile)
        seconds, received_bytes, scattered = 0.0, 0.0, is_scattered(layouts)
        cut = self._cut(method, tile, degree)
        for direction, shapes in self._shapes.items():
            moving = shapes.moving(method, {}, layouts, degree, tile)
            moved = moving.total_seconds
            if not moved:
                cut = _Cut()
            kernel = kernels_of_calls(self._cluster, direction, scattered=scattered)["range"]
            attention = self._attention(direction, kernel, pairs, tile, degree, cut)
            first_part = moved / (cut.slices * max(cut.chunks))  # nothing hides it
            seconds += first_part + max(attention, moved - first_part)
            if relayout:
                seconds += shapes.relayout().total_seconds
            if direction is Direction.FORWARD:
                received_bytes = moving.received_bytes
        return Cost(seconds, received_bytes, pairs / mean if mean else 1.0)

    def _attention(
        self,
        direction: Direction,
        kernel: str,
        pairs: float,
        tile: tuple[int, int],
        degree: int,
        cut: _Cut,
    ) -> float:
        """Seconds of all calls of a rank. `pairs`: as if it had all heads."""
        if not pairs:
            return 0.0
        p = self._problem
        rows, columns = (
            max(1, side * degree * -(-tokens // self._ranks) // count)
            for side, tokens, count in zip(tile, (p.q_tokens, p.keys), cut.chunks, strict=True)
        )
        heads, kv_heads = (-(-h // (degree * cut.slices)) for h in (p.num_heads, p.kv_heads))
        of_a_head = round(pairs * p.num_heads / (heads * cut.num_calls))
        size = CallSize("range", rows, columns, of_a_head, heads, kv_heads)
        flops = p.flops(1, backward=direction is Direction.BACKWARD) * pairs / cut.num_calls
        rates = self._cluster.kernels[kernel].of(direction)
        seconds = kernel_seconds(rates, self._cluster.gpu, size, flops) if rates else None
        assert seconds is not None, kernel
        return seconds * cut.num_calls

    def _cut(self, method: str, tile: tuple[int, int], degree: int) -> _Cut:
        """How a method cuts where there are transfers to hide."""
        p = self._problem
        if degree > 1 and degree not in ulysses_degrees(p):
            return _Cut()
        chunks, heads = suggested_cut(p, self._ranks, tile, degree)
        if heads is not None:
            return _Cut(len(sizes_for(p, degree, (heads[1], heads[1]))))
        return _Cut() if method == SEEN_ROWS else _Cut(chunks=chunks)
