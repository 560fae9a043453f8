"""Settings worth trying: shapes, the most promising first, and a short list of cuts of each.

A box exchanges tokens for heads among `degree` ranks, and on the units that this makes a tile a x b
gathers (or rotates) a parts of the queries and b of the keys. The bytes of a box are known without
a plan, so two numbers are too: `moving_seconds`, and `least_seconds`, below which no cut of it can
be. Both are bounds: links carry nothing but this at their best rate, attention runs at the best
rate of any kernel, and every rank has the mean of the work.

A cut is a number of slices of heads and of chunks of rows. Cuts are listed in the order in which
they help: over the questions of `benchmarks/default_against_best.py` the first is within 3 % of the
best cut in the mean, the first three within 1 %. `search.py` tries both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesh_attention.cost.planning import PLACES, num_pairs
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.language.computed_pairs import pairs_of_tiles
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.needed_rows import usual_layout
from mesh_attention.plan.methods.parts.keep import Keep, kept_kinds
from mesh_attention.plan.methods.parts.needed_rows import needed_keys, needed_queries
from mesh_attention.plan.methods.table import METHODS, Method
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.problem import Problem


@dataclass(frozen=True)
class Shape:
    """A method and the options that are not about cuts. `held`: KV heads that a rank has."""

    name: str  # of the method
    options: dict[str, Any]
    degree: int
    tile: tuple[int, int]
    held: int
    least_seconds: float
    moving_seconds: float

    @property
    def box(self) -> str:
        """Shapes with the same programs in other words have the same."""
        method = METHODS[self.name]
        if not (method.is_plain_box or method.by_stretches):
            return setting_key(self.name, self.options)
        names = ("tile", "ulysses")
        rest = sorted((k, v) for k, v in self.options.items() if k not in names)
        rotates = method.rotates and self.tile != (1, 1)
        return f"{method.by_stretches} {self.degree} {self.tile} {rotates} {rest}"

    @property
    def moves_tokens(self) -> bool:
        """Whether partitions lie on other ranks than by default."""
        return any(self.options.get(name) is not None for name in PLACES)

    @property
    def promise(self) -> tuple[float, float]:
        """The bound first; of equal bounds the one that leaves less to hide."""
        return self.least_seconds + self.moving_seconds, self.moving_seconds


def setting_key(method: str, options: Mapping[str, Any]) -> str:
    return f"{method} {sorted(options.items(), key=str)}"


def default_layout(problem: Problem) -> LayoutKind:
    return LayoutKind.CONTIGUOUS if problem.mask.is_full else LayoutKind.ZIGZAG


def shows_little(problem: Problem) -> bool:
    """Whether the mask hides more than the future: then rows that nobody sees need not travel."""
    mask = problem.mask
    return mask.window is not None or mask.documents is not None or mask.slices is not None


def busiest_ranks(plan: Plan, method: str, setting: Mapping[str, Any], per_node: int) -> set[int]:
    """The ranks that may end last under a mask that shows little: the rank whose tile shows most,
    and, if single rows travel, the rank that exchanges most of them with other nodes."""
    layouts, rows = (plan.q_layout, plan.kv_layout), plan.problem.rows
    degree, tile = degree_and_tile(method, setting, plan.num_ranks)
    ranks = {plan.num_ranks // 2}
    if all(layout.kind in (LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG) for layout in layouts):
        pairs = pairs_of_tiles(*layouts, rows, tile, degree)
        ranks = {degree * int(pairs.argmax())}  # units follow each other along rows of the grid
    if METHODS[method].by_stretches:
        finders = (needed_keys, needed_queries)
        keys, queries = (find(*layouts, rows, tile[0]) for find in finders)
        tokens = keys.tokens_between() + queries.tokens_between()
        node = np.arange(plan.num_ranks) // per_node
        far = np.where(node[:, None] == node, 0, tokens)
        ranks.add(int(np.maximum(far.sum(0), far.sum(1)).argmax()))
    return ranks


def degree_and_tile(
    method: str, setting: Mapping[str, Any], num_ranks: int
) -> tuple[int, tuple[int, int]]:
    degree = METHODS[method].degree(setting, num_ranks)
    return degree, setting.get("tile") or (1, max(1, num_ranks // degree))


def shapes_of(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster,
    direction: Direction,
    methods: Sequence[str],
    options: Mapping[str, Any],
    layout: LayoutKind | None,
) -> list[Shape]:
    """Of all these methods, the most promising first. `options` are the caller's; `layout` becomes
    one where it is not the method's own."""
    bounds = _Bounds(problem, num_ranks, cluster, direction)
    shapes: dict[str, Shape] = {}
    for name in methods:
        method, said = METHODS[name], dict(options)
        by_rows = method.by_stretches
        own_layout = usual_layout(problem.mask) if by_rows else default_layout(problem)
        if layout is not None and layout is not own_layout:
            said["layout"] = layout.value
        for candidate in (*method.candidates(problem, num_ranks, cluster.node.ranks), {}):
            setting = candidate | said
            key = setting_key(name, setting)
            agrees = all(options.get(option) in (None, x) for option, x in candidate.items())
            if agrees and key not in shapes:
                shapes[key] = bounds.shape(name, setting)
    return sorted(shapes.values(), key=lambda shape: (shape.promise, len(shape.options)))


class _Bounds:
    """What is the same for all shapes of a question."""

    def __init__(
        self, problem: Problem, num_ranks: int, cluster: Cluster, direction: Direction
    ) -> None:
        self._problem, self._ranks, self._cluster = problem, num_ranks, cluster
        self._backward = direction is Direction.BACKWARD
        pairs = num_pairs(problem)
        kernels = cluster.passes(direction).values()
        best = max(rate.tflops for kernel in kernels for rate in kernel.rates.values())
        flops = problem.flops(pairs, backward=self._backward)
        self._attention = flops / num_ranks / (best * 1e12)
        # The part of all that a mask without a window and documents would show: about as much of
        # the rows travels where only those do that are seen.
        whole = problem.q_tokens * problem.keys / (2 if problem.mask.causal else 1)
        self._seen = min(1.0, pairs / whole)
        # Rows that a mask hides from everybody may stay at home.
        self._all_travels = not shows_little(problem)

    def shape(self, name: str, setting: dict[str, Any]) -> Shape:
        method, n = METHODS[name], self._ranks
        degree, tile = degree_and_tile(name, setting, n)
        held = max(1, self._problem.kv_heads // degree)
        moving = 0.0
        if n > 1:
            moving = self._exchange(degree, setting) + self._tile(
                degree, tile, setting, rotates=method.rotates
            )
        if method.by_stretches:
            moving *= self._seen
        bound = 0.0
        if self._all_travels and n > 1:
            # A ring of rings has most of its hops inside nodes.
            bound = moving if method.is_plain_box else self._inner_ring(degree, tile, method)
        return Shape(name, setting, degree, tile, held, max(self._attention, bound), moving)

    def _inner_ring(self, degree: int, tile: tuple[int, int], method: Method) -> float:
        if not method.rotates:
            return 0.0
        _, _, kv = self._sides(degree)
        rate = self._cluster.node.peer.gb_per_second * 1e9
        return (tile[1] - 1) * degree * kv / rate

    def _sides(self, degree: int) -> tuple[float, float, float]:
        """Bytes of Q, of O and of K with V in a partition: the heads that a rank holds."""
        p, n = self._problem, self._ranks
        slots, kv_slots = -(-p.q_tokens // n), -(-p.keys // n)
        heads = -(-p.num_heads // degree)
        kv_heads = max(1, -(-heads // p.heads_per_kv_head))
        q, out = slots * heads * p.head_dim, slots * heads * p.v_dim
        kv = kv_slots * kv_heads * (p.head_dim + p.v_dim)
        return q * p.element_bytes, out * p.element_bytes, kv * p.element_bytes

    def _exchange(self, degree: int, setting: Mapping[str, Any]) -> float:
        """Tokens for heads, and back."""
        if degree == 1:
            return 0.0
        q, out, kv = self._sides(degree)
        each = q + out + kv
        if self._backward:
            kept = kept_kinds(Keep(setting.get("keep") or Keep.AUTO), self._problem, degree)
            each += (Kind.Q not in kept) * q + (Kind.K not in kept) * kv
        node = self._cluster.node
        units = setting.get("units_per_node")
        here = node.ranks // units if units else min(degree, node.ranks)
        far, near = max(0, degree - here) * each, (here - 1) * each
        network = self._cluster.network.many_peers
        return max(
            near / (node.all_to_all_gb_per_second * 1e9), far / (network.gb_per_second * 1e9)
        )

    def _tile(
        self, degree: int, tile: tuple[int, int], setting: Mapping[str, Any], *, rotates: bool
    ) -> float:
        """Queries and keys of other units, and partial results back."""
        (a, b), node, network = tile, self._cluster.node, self._cluster.network
        q, out, kv = self._sides(degree)
        again = self._backward and setting.get("keep") != Keep.GATHERED
        grads = 2 if again or (self._backward and rotates) else 1
        q_side, kv_side = degree * (grads * q + out), degree * grads * kv
        if rotates:
            link = network.peer if self._ranks > node.ranks else node.peer
            return (b - 1) * kv_side / (link.gb_per_second * 1e9)
        units = setting.get("units_per_node") or max(1, node.ranks // degree)
        near_a, near_b = min(a, units), min(b, max(1, units // a))
        near = (near_a - 1) * q_side + (near_b - 1) * kv_side
        far = (a - 1) * q_side + (b - 1) * kv_side - near
        rate = network.collective.gb_per_second * network.nics / node.ranks
        return max(near / (node.collective.gb_per_second * 1e9), far / (rate * 1e9))


_CUT_OPTIONS = ("chunks", "head_slices")
_Parts = tuple[tuple[int, int], int, int]  # chunks, slices of heads, and largest over first slice


def _parts(text: str) -> tuple[_Parts, ...]:
    """Of words CHUNKS/SLICES:LARGEST, where /1:1 and :1 are left out.

    >>> _parts("2x2 1x2/4 1x1/8:4")
    (((2, 2), 1, 1), ((1, 2), 4, 1), ((1, 1), 8, 4))
    """
    parts = []
    for word in text.split():
        chunks, _, rest = word.partition("/")
        slices, _, largest = rest.partition(":")
        kq, kkv = map(int, chunks.split("x"))
        parts.append(((kq, kkv), int(slices or 1), int(largest or 1)))
    return tuple(parts)


_GATHERED = {
    Direction.FORWARD: _parts(
        "2x2/2 1x2/2:4 1x1/8:4 2x2 1x1 2x1/4:4 2x2/2:2 1x1/2 2x1/2 1x2/4:4 1x2/4 2x1/2:4"
    ),
    Direction.BACKWARD: _parts(
        "2x2/2 2x1/2:4 1x2/4 2x1/2 1x1/8:4 2x4/2 2x1/4:4 1x2/2:4 1x1/2 2x2/2:2 1x1"
    ),
}
_EXCHANGED = _parts("1x1/2 2x4/2 1x1/4 1x1/4:4 1x1/2:2 1x2/2 2x2/2 1x1 1x1/8")
_ONE_HEAD = _parts("2x2 2x4 4x1 1x2 1x1 4x2 2x1 1x4")
_QUERIES_ALONE = _parts("2x1 1x1 4x1")
_WHOLE_ROWS = _parts("1x1/2 1x1 1x1/4:4 1x1/4 1x1/2:4 1x1/8:4")

# Seconds of attention. Of less, cuts cost more in launches and latency than they hide: few parts
# are tried first, or none at all.
SHORT, TINY = 1e-3, 1e-4


def _num_parts(parts: _Parts) -> int:
    (kq, kkv), slices, _ = parts
    return kq * kkv * slices


def cuts_of(shape: Shape, direction: Direction, *, sparse: bool) -> Iterator[dict[str, Any]]:
    """Options of each cut. If the caller's options say a cut, there is no other. `sparse`: the mask
    shows little, so that chunks of keys are of unlike work."""
    known, said = METHODS[shape.name].options(), shape.options
    free = [name for name in _CUT_OPTIONS if name in known]
    if not free or any(name.removeprefix("backward_") in _CUT_OPTIONS for name in said):
        yield {}
        return
    rotates = METHODS[shape.name].rotates and shape.tile != (1, 1)
    if "chunks" not in free:
        parts = _WHOLE_ROWS
    elif shape.held == 1:
        parts = _ONE_HEAD
        if rotates or sparse:
            parts = tuple(dict.fromkeys((*_QUERIES_ALONE, *(() if rotates else _ONE_HEAD))))
    else:
        gathers = shape.tile != (1, 1) and not rotates
        parts = _GATHERED[direction] if gathers else _EXCHANGED
    if shape.least_seconds < SHORT:
        parts = tuple(sorted(parts, key=_num_parts))
    if shape.least_seconds < TINY:
        parts = (((1, 1), 1, 1),)
    # Forward the whole of one head is exchanged before there is something to compute.
    starts_short = direction is Direction.FORWARD and parts is _ONE_HEAD and shape.degree > 1
    starts_short = starts_short and "short_start" in known and "short_start" not in said
    seen = []
    for chunks, slices, first in parts:
        cut: dict[str, Any] = {"chunks": chunks} if "chunks" in free else {}
        if slices > 1:
            most = shape.held // slices
            if most < 1:
                continue
            cut["head_slices"] = (max(1, most // first), most)
        if starts_short and chunks[1] > 1:
            cut["short_start"] = True
        if cut not in seen:
            seen.append(cut)
            yield cut


def variants_of(
    setting: Mapping[str, Any], shape: Shape, *, even: bool
) -> Iterator[dict[str, Any]]:
    """The same setting with a short first chunk of keys, and with chunks of even work (`even`:
    where the mask gives ranks chunks of unlike work)."""
    known = METHODS[shape.name].options()
    kq, kkv = setting.get("chunks") or (1, 1)
    if shape.degree == 1:  # both are about what is exchanged for heads
        return
    if "short_start" in known and "short_start" not in setting and kkv > 1:
        yield {**setting, "short_start": True}
    if "even_chunks" in known and even and "even_chunks" not in setting and kq * kkv > 1:
        yield {**setting, "even_chunks": True}
