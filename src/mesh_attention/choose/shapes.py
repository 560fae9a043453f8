"""Settings worth trying: shapes, the most promising first, and a short list of cuts of each.

A box exchanges tokens for heads among `degree` ranks, and on the units that this makes a tile a x b
gathers (or rotates) a parts of the queries and b of the keys. Bytes, messages and work of a box are
known without a plan, so two numbers are too: `moving_seconds`, and `least_seconds`, below which no
cut of it can be. The second is a bound: links carry nothing but this at their best rate, and the
rank with the most work does it at the best rate of any kernel.

A cut is a number of slices of heads and of chunks of rows. Cuts are listed in the order in which
they help: over the questions of `benchmarks/default_against_best.py` the first is within 3 % of the
best cut in the mean, the first three within 1 %. `search.py` tries both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh_attention.cost.planning import PLACES, num_pairs
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.language.computed_pairs import pairs_of_tiles
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.needed_rows import usual_layout
from mesh_attention.plan.methods.parts.assignment import best_tile
from mesh_attention.plan.methods.parts.keep import Keep, kept_kinds
from mesh_attention.plan.methods.parts.needed_rows import needed_keys, needed_queries
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.methods.table import METHODS, Method
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.row_ranges import RowRanges

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """A method and the options that are not about cuts. `held`: KV heads that a rank has.
    `moving_seconds`: of its transfers one by one, with the latency of each if nothing is cut."""

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
        """About as long as it takes in four parts: the longer of attention and transfers hides all
        but a quarter of the shorter. Of equals the one that leaves less to hide."""
        shorter, longer = sorted((self.least_seconds, self.moving_seconds))
        return longer + shorter / 4, self.moving_seconds


def setting_key(method: str, options: Mapping[str, Any]) -> str:
    return f"{method} {sorted(options.items(), key=str)}"


def default_layout(problem: Problem) -> LayoutKind:
    return LayoutKind.CONTIGUOUS if problem.mask.is_full else LayoutKind.ZIGZAG


def shows_little(problem: Problem) -> bool:
    """Whether the mask hides more than the future: then rows that nobody sees need not travel."""
    mask = problem.mask
    return mask.window is not None or mask.documents is not None or mask.slices is not None


def busiest_ranks(plan: Plan, method: str, setting: Mapping[str, Any], per_node: int) -> set[int]:
    """The ranks that may end last, of which an estimate looks at all."""
    layouts, problem, num_ranks = (plan.q_layout, plan.kv_layout), plan.problem, plan.num_ranks
    degree, tile = degree_and_tile(method, setting, problem, num_ranks)
    ranks = {num_ranks // 2}  # where a causal mask leaves the mean of the work
    if shows_little(problem) and all(layout.kind in _COUNTED for layout in layouts):
        ranks = {degree * _busiest_unit(*layouts, problem.rows, tile, degree)[0]}
    far = _far_rows(plan, method, degree, tile, per_node)
    if far.max() > max(far[rank] for rank in ranks):
        ranks.add(int(far.argmax()))
    if problem.num_heads % degree or problem.q_tokens < 2 * num_ranks:
        ranks.add(0)  # a large share of heads; or others have no token
    return ranks


def _far_rows(plan: Plan, method: str, degree: int, tile: tuple[int, int], per_node: int) -> Floats:
    """Rows x heads that each rank exchanges with other nodes: they differ where single rows travel,
    and where rows of the grid do not begin where nodes do."""
    problem, node = plan.problem, np.array(plan.devices) // per_node
    weights = problem.num_heads, problem.kv_heads
    if METHODS[method].by_stretches:
        layouts = plan.q_layout, plan.kv_layout
        queries, keys = _needed_tokens(*layouts, problem.rows, tile[0], per_node)[1]
        return np.max(weights[0] * queries + weights[1] * keys, axis=0)
    unit, member = np.divmod(np.arange(plan.num_ranks), degree)
    groups = unit // tile[0], unit % tile[0]  # rows and columns of the grid
    far = np.zeros(plan.num_ranks)
    for weight, size, group in zip(weights, tile, groups, strict=True):
        ids = (group * degree + member) * plan.num_ranks + node
        _, at, count = np.unique(ids, return_inverse=True, return_counts=True)
        far += weight * (size - count[at])
    return far


@lru_cache(maxsize=64)  # both passes, all cuts and the bounds ask for the same
def _needed_tokens(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, a: int, per_node: int
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Tokens of each rank of a tile a x b that travel one by one, as arrays (sent or received,
    rank): queries and keys inside its node, and queries and keys from other nodes."""
    node = np.arange(q_layout.num_ranks) // per_node
    is_near = node[:, None] == node
    sides = []
    for find in (needed_queries, needed_keys):
        tokens = find(q_layout, kv_layout, rows, a).tokens_between().astype(float)
        np.fill_diagonal(tokens, 0.0)
        near, far = np.where(is_near, tokens, 0.0), np.where(is_near, 0.0, tokens)
        sides.append([np.stack([x.sum(0), x.sum(1)]) for x in (near, far)])
    (near_q, far_q), (near_k, far_k) = sides
    return (near_q, near_k), (far_q, far_k)


_COUNTED = (LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG)  # layouts whose tiles are counted quickly


@lru_cache(maxsize=256)  # both passes, all cuts and the bounds ask for the same
def _busiest_unit(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, tile: tuple[int, int], degree: int
) -> tuple[int, int]:
    """The unit whose tile shows most, and how many pairs; units follow each other along rows of
    the grid."""
    pairs = pairs_of_tiles(q_layout, kv_layout, rows, tile, degree)
    return int(pairs.argmax()), int(pairs.max())


def degree_and_tile(
    method: str, setting: Mapping[str, Any], problem: Problem, num_ranks: int
) -> tuple[int, tuple[int, int]]:
    degree, tile = METHODS[method].degree(setting, num_ranks), setting.get("tile")
    units = max(1, num_ranks // degree)
    if tile is None:
        chosen = METHODS[method].is_plain_box and "tile" in METHODS[method].options()
        tile = best_tile(units, problem) if chosen else (1, units)
    return degree, tile


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
        candidates = [
            candidate
            for candidate in method.candidates(problem, num_ranks, cluster.node.ranks)
            if all(options.get(option) in (None, x) for option, x in candidate.items())
        ]
        for candidate in candidates or [{}]:
            setting = candidate | said
            shapes[setting_key(name, setting)] = bounds.shape(name, setting, layout or own_layout)
    return sorted(shapes.values(), key=lambda shape: (shape.promise, len(shape.options)))


class _Bounds:
    """What is the same for all shapes of a question."""

    def __init__(
        self, problem: Problem, num_ranks: int, cluster: Cluster, direction: Direction
    ) -> None:
        self._problem, self._ranks, self._cluster = problem, num_ranks, cluster
        self._backward = direction is Direction.BACKWARD
        self._pairs = num_pairs(problem)
        kernels = cluster.passes(direction).values()
        best = max(rate.tflops for kernel in kernels for rate in kernel.rates.values())
        self._flops_per_second = best * 1e12
        # Rows that a mask hides from everybody may stay at home.
        self._all_travels = not shows_little(problem)

    def shape(self, name: str, setting: dict[str, Any], layout: LayoutKind) -> Shape:
        method, n = METHODS[name], self._ranks
        degree, tile = degree_and_tile(name, setting, self._problem, n)
        held = max(1, self._problem.kv_heads // degree)
        moving = bound = 0.0
        if n > 1:
            exchange, latency = self._exchange(degree, setting)
            if method.by_stretches and not self._all_travels:
                gather, more = self._needed(tile, setting, layout)
            else:
                gather, more = self._tile(degree, tile, setting, method)
            bound, moving = exchange + gather, exchange + gather + latency + more
        if not (self._all_travels or method.by_stretches):
            bound = 0.0
        elif not (method.is_plain_box or method.by_stretches) and n > 1:
            # A ring of rings has most of its hops inside nodes.
            bound = self._inner_ring(degree, tile, method)
        attention = self._attention(degree, tile, setting, layout)
        return Shape(name, setting, degree, tile, held, max(attention, bound), moving)

    def _attention(
        self, degree: int, tile: tuple[int, int], setting: Mapping[str, Any], layout: LayoutKind
    ) -> float:
        """Of the rank with the most work: the largest share of heads of the tile that shows most.
        Tiles of a zigzag show equally much unless the mask shows little."""
        problem, pairs = self._problem, self._pairs * degree / self._ranks
        kind, layouts = self._layouts(setting, layout)
        balanced = problem.mask.is_full or (kind is LayoutKind.ZIGZAG and self._all_travels)
        if kind in _COUNTED and not balanced:
            pairs = max(pairs, _busiest_unit(*layouts, problem.rows, tile, degree)[1])
        share = -(-problem.num_heads // degree) / problem.num_heads
        flops = problem.flops(1, backward=self._backward) * pairs * share
        return flops / self._flops_per_second

    def _layouts(
        self, setting: Mapping[str, Any], layout: LayoutKind
    ) -> tuple[LayoutKind, list[Layout]]:
        kind, problem = LayoutKind(setting.get("layout") or layout), self._problem
        counted = kind if kind in _COUNTED else LayoutKind.CONTIGUOUS
        return kind, [Layout(counted, x, self._ranks) for x in (problem.q_tokens, problem.keys)]

    def _needed(
        self, tile: tuple[int, int], setting: Mapping[str, Any], layout: LayoutKind
    ) -> tuple[float, float]:
        """Rows that travel one by one, and partial results back: seconds of the bytes, and of the
        messages."""
        (a, b), sizes, slots = tile, self._sides(1), self._slots()
        q, out, kv = (size / rows for size, rows in zip(sizes, slots, strict=True))
        grads = 2 if self._backward and setting.get("keep") != Keep.GATHERED else 1
        _, layouts = self._layouts(setting, layout)
        tokens = _needed_tokens(*layouts, self._problem.rows, a, self._cluster.node.ranks)
        near, far = (float(np.max((grads * q + out) * x + grads * kv * y)) for x, y in tokens)
        peers = a + b - 2 if far else 0
        return self._to_all(near, peers, far / max(1, peers), times=1 + (a > 1 or self._backward))

    def _inner_ring(self, degree: int, tile: tuple[int, int], method: Method) -> float:
        if not method.rotates:
            return 0.0
        _, _, kv = self._sides(degree)
        rate = self._cluster.node.peer.gb_per_second * 1e9
        return (tile[1] - 1) * degree * kv / rate

    def _sides(self, degree: int) -> tuple[float, float, float]:
        """Bytes of Q, of O and of K with V in a partition: the heads that a rank holds."""
        p = self._problem
        slots, _, kv_slots = self._slots()
        heads = -(-p.num_heads // degree)
        kv_heads = max(1, -(-heads // p.heads_per_kv_head))
        q, out = slots * heads * p.head_dim, slots * heads * p.v_dim
        kv = kv_slots * kv_heads * (p.head_dim + p.v_dim)
        return q * p.element_bytes, out * p.element_bytes, kv * p.element_bytes

    def _slots(self) -> tuple[int, int, int]:
        """Rows of Q, of O and of K in a partition."""
        slots = -(-self._problem.q_tokens // self._ranks)
        return slots, slots, -(-self._problem.keys // self._ranks)

    def _exchange(self, degree: int, setting: Mapping[str, Any]) -> tuple[float, float]:
        """Tokens for heads, and back: seconds of the bytes, and of the messages."""
        if degree == 1:
            return 0.0, 0.0
        q, out, kv = self._sides(degree)
        each = q + out + kv
        if self._backward:
            kept = kept_kinds(Keep(setting.get("keep") or Keep.AUTO), self._problem, degree)
            each += (Kind.Q not in kept) * q + (Kind.K not in kept) * kv
        node = self._cluster.node
        units = setting.get("units_per_node")
        here = node.ranks // units if units else min(degree, node.ranks)
        return self._to_all((here - 1) * each, max(0, degree - here), each, times=2)

    def _to_all(
        self, near_bytes: float, far_peers: int, far_bytes: float, *, times: int
    ) -> tuple[float, float]:
        """So many all-to-alls together: seconds of the bytes, those of each far peer, and of the
        messages."""
        node, network = self._cluster.node, self._cluster.network
        many = network.many_peers
        near = near_bytes / (node.all_to_all_gb_per_second * 1e9)
        far = far_peers * far_bytes / (many.gb_per_second * 1e9)
        link = network if far_peers else node
        each = link.collective.base_microseconds + far_peers * many.message_microseconds
        return max(near, far), times * each * 1e-6

    def _tile(
        self, degree: int, tile: tuple[int, int], setting: Mapping[str, Any], method: Method
    ) -> tuple[float, float]:
        """Queries and keys of other units, and partial results back: seconds of the bytes, and of
        the messages."""
        (a, b), node, network = tile, self._cluster.node, self._cluster.network
        if a * b == 1:
            return 0.0, 0.0
        q, out, kv = self._sides(degree)
        again = self._backward and setting.get("keep") != Keep.GATHERED
        grads = 2 if again or (self._backward and method.rotates) else 1
        q_side, kv_side = degree * (grads * q + out), degree * grads * kv
        if method.rotates:
            link = network.peer if self._ranks > node.ranks else node.peer
            seconds = (b - 1) * kv_side / (link.gb_per_second * 1e9)
            return seconds, (b - 1) * grads * link.latency_microseconds * 1e-6
        units = setting.get("units_per_node") or max(1, node.ranks // degree)
        near_a, near_b = min(a, units), min(b, max(1, units // a))
        near = (near_a - 1) * q_side + (near_b - 1) * kv_side
        far = (a - 1) * q_side + (b - 1) * kv_side - near
        if method.by_stretches:
            peers = max(1, a - near_a + b - near_b) if far else 0
            times = 1 + (a > 1 or self._backward)
            return self._to_all(near, peers, far / max(1, peers), times=times)
        rate = network.collective.gb_per_second * network.nics / node.ranks
        seconds = max(near / (node.collective.gb_per_second * 1e9), far / (rate * 1e9))
        latency = 0.0
        for size, inside, each in ((a, near_a, 2), (b, near_b, grads)):
            nodes = -(-size // inside)
            link = network.collective if nodes > 1 else node.collective
            hops = (nodes - 1) * network.collective.hop_microseconds
            hops += (size - nodes) * node.collective.hop_microseconds
            latency += (size > 1) * each * (link.base_microseconds + hops) * 1e-6
        return seconds, latency


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
_WHOLE_ROWS = _parts("1x1 1x1/2 1x1/4:4 1x1/4 1x1/2:4 1x1/8:4")

# Seconds that a shape takes. Of less, cuts cost more in launches and latency than they hide: few
# parts are tried first, or none at all.
_SHORT, _TINY = 1e-3, 1e-4


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
    seconds, _ = shape.promise
    if seconds < _SHORT:
        parts = tuple(sorted(parts, key=_num_parts))
    if seconds < _TINY:
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
    setting: Mapping[str, Any], shape: Shape, *, even: bool, reduces_far: bool = False
) -> Iterator[dict[str, Any]]:
    """The same setting with a short first chunk of keys, with chunks of even work (`even`: where
    the mask gives ranks chunks of unlike work), and with gradients of keys that are added inside
    nodes first (`reduces_far`: where columns of the grid leave nodes)."""
    known = METHODS[shape.name].options()
    kq, kkv = setting.get("chunks") or (1, 1)
    if reduces_far and "combine" in known and "combine" not in setting and shape.tile[1] > 1:
        yield {**setting, "combine": Combine.NODES.value}
    if shape.degree == 1:  # both are about what is exchanged for heads
        return
    if "short_start" in known and "short_start" not in setting and kkv > 1:
        yield {**setting, "short_start": True}
    if "even_chunks" in known and even and "even_chunks" not in setting and kq * kkv > 1:
        yield {**setting, "even_chunks": True}
