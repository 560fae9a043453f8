"""How long a shape takes, without a plan of it: by the degree and the tile of its box.

`least_seconds` is a lower bound for every cut of it: links carry only its bytes at their best rate,
and the rank with the most work computes at the best rate of any kernel. `moving` estimates its
transfers. `shapes.py` orders the shapes of a search by both; `documents.py` chooses by `moving`,
and by the time of a call, for each batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from mesh_attention.choose.busiest import (
    COUNTED,
    MOST_COUNTED,
    busiest_unit,
    is_counted,
    needed_tokens,
    shows_little,
)
from mesh_attention.cost.planning import num_pairs
from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.parts.assignment import (
    PLACES,
    Tile,
    devices_of,
    patch_widths,
    squarest_width,
)
from mesh_attention.plan.methods.parts.needed_rows import pairs_of_ranks
from mesh_attention.plan.methods.parts.setting import Keep, kept_kinds
from mesh_attention.plan.methods.table import METHODS, Method
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.problem import Problem

Layouts = tuple[Layout, Layout]  # of queries, and of keys


class Moving(NamedTuple):
    """The transfers of the rank that has the most of them."""

    seconds: float = 0.0  # of the bytes
    latency: float = 0.0  # of the messages
    received_bytes: float = 0.0

    @property
    def total_seconds(self) -> float:
        return self.seconds + self.latency

    def then(self, other: Moving) -> Moving:
        return Moving(*(a + b for a, b in zip(self, other, strict=True)))


class ShapeSeconds:
    """Seconds of the shapes of one problem, on one cluster, in one pass."""

    def __init__(
        self, problem: Problem, num_ranks: int, cluster: Cluster, direction: Direction
    ) -> None:
        self._problem, self._ranks, self._cluster = problem, num_ranks, cluster
        self._rows = problem.rows  # asked for often, and by a long key
        self._backward = direction is Direction.BACKWARD
        self.num_pairs = num_pairs(problem)
        self._flops_per_second = cluster.best_tflops(direction) * 1e12
        self._counts_ranks = num_ranks <= MOST_COUNTED
        # The part of the pairs of a full or causal mask that this mask shows. Where only visible
        # rows travel, about the same part of the rows does.
        whole = problem.q_tokens * problem.keys / (2 if problem.mask.causal else 1)
        self._seen = min(1.0, self.num_pairs / whole)
        # Otherwise rows that the mask hides from all other ranks may stay.
        self._all_travels = not shows_little(problem)
        self._layouts: dict[LayoutKind, Layouts] = {}
        self._counts_needed_rows = self._counts_ranks and not self._all_travels

    def least_and_moving(
        self,
        name: str,
        setting: Mapping[str, Any],
        layout: LayoutKind,
        degree: int,
        tile: tuple[int, int],
    ) -> tuple[float, float]:
        """`least_seconds` of a shape, and the seconds of its transfers."""
        method, bound, seconds = METHODS[name], 0.0, 0.0
        layouts = self._layouts_of(LayoutKind(setting.get("layout") or layout), setting)
        if self._ranks > 1:
            moving = self.moving(name, setting, layouts, degree, tile)
            seconds = moving.total_seconds
            counts = method.by_stretches and self._counts_needed_rows
            if counts or (self._all_travels and (method.is_plain_box or method.by_stretches)):
                bound = moving.seconds
            elif self._all_travels:
                # A double ring has most of its hops inside nodes.
                bound = self._inner_ring(degree, tile, method)
            elif method.by_stretches:
                seconds *= self._seen
        pairs = self.busiest_pairs(setting, layouts, degree, tile)
        flops = self._problem.flops(1, backward=self._backward) * pairs
        return max(flops / self._flops_per_second, bound), seconds

    def moving(
        self,
        name: str,
        setting: Mapping[str, Any],
        layouts: Layouts,
        degree: int,
        tile: tuple[int, int],
    ) -> Moving:
        method, exchange = METHODS[name], self._exchange(degree, setting)
        if method.by_stretches and self._counts_needed_rows:
            return exchange.then(self._needed_rows(tile, setting, layouts))
        return exchange.then(self._tile(degree, tile, setting, method))

    def busiest_pairs(
        self, setting: Mapping[str, Any], layouts: Layouts, degree: int, tile: tuple[int, int]
    ) -> float:
        """Visible pairs of the rank with the most work, as if each had all heads: it has the
        largest share of heads, in the tile with the most visible pairs. Tiles of a zigzag have
        equally many unless the mask shows little."""
        problem, pairs = self._problem, self.num_pairs * degree / self._ranks
        kind = layouts[0].kind
        balanced = problem.mask.is_full or (kind is LayoutKind.ZIGZAG and self._all_travels)
        if balanced or tile == (1, 1) or not self._counts_ranks:
            pass
        elif tile[0] == degree == 1 and kind is not LayoutKind.STRIPED:
            pairs = float(pairs_of_ranks(layouts[0], self._rows).max())
        elif kind in COUNTED:
            places = tuple(setting.get(name) for name in PLACES)
            per_node = self._cluster.node.ranks
            q_layout, kv_layout = _on_devices(*layouts, tile, degree, per_node, places)
            if is_counted(q_layout):
                most = busiest_unit(q_layout, kv_layout, self._rows, tile, degree)[1]
                pairs = max(pairs, most)
        return pairs * -(-problem.num_heads // degree) / problem.num_heads

    def _layouts_of(self, kind: LayoutKind, setting: Mapping[str, Any]) -> Layouts:
        if kind not in self._layouts:
            tokens, stretches = self._problem.q_tokens, setting.get("stretches")
            q = kv = Layout(kind, tokens, self._ranks, stretches=stretches)
            if tokens != self._problem.keys:
                kv = Layout(kind, self._problem.keys, self._ranks, stretches=stretches)
            self._layouts[kind] = q, kv
        return self._layouts[kind]

    def _needed_rows(
        self, tile: tuple[int, int], setting: Mapping[str, Any], layouts: Layouts
    ) -> Moving:
        """Visible rows travel, and partial results go back."""
        if layouts[0].kind is LayoutKind.STRIPED:  # counting single rows would take long
            layouts = self._layouts_of(LayoutKind.CONTIGUOUS, {})
        (a, b), sizes, slots = tile, self._sides(1), self._slots()
        q, out, kv = (size / rows for size, rows in zip(sizes, slots, strict=True))
        grads = 2 if self._backward and setting.get("keep") != Keep.GATHERED else 1
        tokens = needed_tokens(*layouts, self._rows, a, self._cluster.node.ranks)
        q_bytes, kv_bytes = grads * q + out, grads * kv  # of a token
        near, far = (q_bytes * queries + kv_bytes * keys for queries, keys in tokens)
        peers = a + b - 2 if far.any() else 0
        each, times = float(far.max()) / max(1, peers), 1 + (a > 1 or self._backward)
        moving = self._to_all(float(near.max()), peers, each, times=times)
        return moving._replace(received_bytes=float((near + far)[1].max()))

    def _inner_ring(self, degree: int, tile: tuple[int, int], method: Method) -> float:
        if not method.rotates:
            return 0.0
        _, _, kv = self._sides(degree)
        rate = self._cluster.node.peer.gb_per_second * 1e9
        return (tile[1] - 1) * degree * kv / rate

    def _patch(
        self, degree: int, tile: tuple[int, int], setting: Mapping[str, Any]
    ) -> tuple[int, int]:
        """How many units of a node lie in one row of the grid, and in one column."""
        (a, b), units = tile, setting.get("units_per_node")
        width = setting.get("alpha")
        if units and not width and patch_widths(a, b, units):
            width = squarest_width(a, b, units)
        units = units or max(1, self._cluster.node.ranks // degree)
        width = min(a, units) if width is None else max(1, width)  # the method itself refuses 0
        return width, min(b, max(1, units // width))

    def _sides(self, degree: int) -> tuple[float, float, float]:
        """Bytes of Q, of O and of K with V in a partition, for the heads that a rank holds."""
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

    def relayout(self) -> Moving:
        """Contiguous shards are exchanged for shards in another layout, and back, as if every row
        went to another rank."""
        q, out, kv = self._sides(1)
        peer_bytes = (q + out + kv + self._backward * (q + kv)) / self._ranks
        return self._among(self._ranks, peer_bytes, {})

    def _exchange(self, degree: int, setting: Mapping[str, Any]) -> Moving:
        """Tokens are exchanged for heads, and back."""
        if degree == 1:
            return Moving()
        q, out, kv = self._sides(degree)
        peer_bytes = q + out + kv
        if self._backward:
            kept = kept_kinds(Keep(setting.get("keep") or Keep.AUTO), self._problem, degree)
            peer_bytes += (Kind.Q not in kept) * q + (Kind.K not in kept) * kv
        return self._among(degree, peer_bytes, setting)

    def _among(self, degree: int, peer_bytes: float, setting: Mapping[str, Any]) -> Moving:
        """Exchanges to and fro, of so many bytes with each of the others."""
        node, units = self._cluster.node, setting.get("units_per_node")
        near = node.ranks // units if units else min(degree, node.ranks)
        return self._to_all((near - 1) * peer_bytes, max(0, degree - near), peer_bytes, times=2)

    def _to_all(self, near_bytes: float, far_peers: int, far_bytes: float, *, times: int) -> Moving:
        """`times` all-to-alls of these bytes together, `far_bytes` for each far peer."""
        node, network = self._cluster.node, self._cluster.network
        many = network.many_peers
        near = near_bytes / (node.all_to_all_gb_per_second * 1e9)
        far = far_peers * far_bytes / (many.gb_per_second * 1e9)
        link = network if far_peers else node
        latency = link.collective.base_microseconds + far_peers * many.message_microseconds
        received_bytes = near_bytes + far_peers * far_bytes
        return Moving(max(near, far), times * latency * 1e-6, received_bytes)

    def _tile(
        self, degree: int, tile: tuple[int, int], setting: Mapping[str, Any], method: Method
    ) -> Moving:
        """All rows of other units travel, and partial results go back."""
        node, network = self._cluster.node, self._cluster.network
        a, b = (max(1, side) for side in tile)  # the method itself refuses 0
        if a * b == 1:
            return Moving()
        q, out, kv = self._sides(degree)
        regathers = setting.get("keep") != Keep.GATHERED or method.rotates
        grads = 2 if self._backward and regathers else 1
        q_side, kv_side = degree * (grads * q + out), degree * grads * kv
        if method.rotates:
            link = network.peer if self._ranks > node.ranks else node.peer
            received_bytes = (b - 1) * kv_side
            seconds = received_bytes / (link.gb_per_second * 1e9)
            return Moving(
                seconds, (b - 1) * grads * link.latency_microseconds * 1e-6, received_bytes
            )
        near_a, near_b = self._patch(degree, (a, b), setting)
        near = (near_a - 1) * q_side + (near_b - 1) * kv_side
        far = (a - 1) * q_side + (b - 1) * kv_side - near
        if method.by_stretches:
            peers = max(1, a - near_a + b - near_b) if far else 0
            times = 1 + (a > 1 or self._backward)
            return self._to_all(near, peers, far / max(1, peers), times=times)
        rate = network.collective.gb_per_second * network.nics / node.ranks
        seconds = max(near / (node.collective.gb_per_second * 1e9), far / (rate * 1e9))
        latency = 0.0
        for size, inside, times in ((a, near_a, 2), (b, near_b, grads)):
            nodes = -(-size // inside)
            ring = network.collective if nodes > 1 else node.collective
            hops = (nodes - 1) * network.collective.hop_microseconds
            hops += (size - nodes) * node.collective.hop_microseconds
            latency += (size > 1) * times * (ring.base_microseconds + hops) * 1e-6
        return Moving(seconds, latency, near + far)


@lru_cache(maxsize=256)  # both passes ask for the same
def _on_devices(
    q_layout: Layout,
    kv_layout: Layout,
    tile: tuple[int, int],
    degree: int,
    per_node: int,
    places: tuple[int | None, ...],
) -> tuple[Layout, Layout]:
    """The layouts with partitions in the order in which a method places ranks on devices."""
    how = dict(zip(PLACES, places, strict=True))
    try:
        devices = devices_of(Tile(*tile), degree, per_node, **how)
    except PlanError:  # the method says why
        return q_layout, kv_layout
    q_layout, other = q_layout.on_devices(devices), q_layout
    return q_layout, q_layout if kv_layout == other else kv_layout.on_devices(devices)
