"""How long the strategies for a batch of documents take, roughly and in closed form.

Only enough to choose between them, for a new batch at every step: pairs and rows are counted by
intervals, exactly, and become seconds by the rates of the usual cluster. Of these only the
proportions matter. The estimate of `cost/` needs the programs of every candidate, which takes fifty
times as long as all of this: too long for every batch.

A pass lasts as long as the attention of the rank with the most work, or as its transfers where they
take longer; and what no attention can hide comes on top: the first of about eight slices of heads
(and the last, of gradients), of an exchange of tokens for heads as well where it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesh_attention.choose.busiest import COUNTED
from mesh_attention.machine.kernel_facts import REFERENCE_HEADS, KernelRate
from mesh_attention.machine.rates import usual_cluster
from mesh_attention.plan.language.computed_pairs import pairs_of_tiles
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.parts.chunks import sizes_for, suggested_cut
from mesh_attention.plan.methods.parts.head_group import ulysses_degrees
from mesh_attention.plan.methods.parts.needed_rows import needed_keys, pairs_of_ranks
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.problem import Problem

Array = NDArray[np.float64]

_MOST_SLICES = 8


class Cost(NamedTuple):
    """What one layer costs: seconds of both passes, the most bytes that a rank receives forward,
    and the most work of a rank over the mean."""

    seconds: float
    received_bytes: float
    unevenness: float

    def longer_by(self, seconds: float) -> Cost:
        return self._replace(seconds=self.seconds + seconds)


class LayerCosts:
    """The costs of one layer of a batch, by the method that does it."""

    def __init__(self, problem: Problem, num_ranks: int, ranks_per_node: int | None = None) -> None:
        """`ranks_per_node`: of the usual cluster where it is None."""
        self._problem, self._ranks, self._rows = problem, num_ranks, problem.rows
        self._per_node = ranks_per_node or usual_cluster().node.ranks
        p = problem
        self._kv_bytes = p.kv_heads * (p.head_dim + p.v_dim) * p.element_bytes  # of a token
        self._slots = -(-p.q_tokens // num_ranks)
        self._kv_slots = -(-p.keys // num_ranks)
        self._hidden = 1 - 1 / min(_MOST_SLICES, p.kv_heads)
        every = Layout(LayoutKind.CONTIGUOUS, p.q_tokens, 1)
        self._all_pairs = float(pairs_of_ranks(every, self._rows)[0])

    def heads_first(self) -> Cost:
        """Every rank has all tokens of its heads, so its work does not depend on the mask."""
        p, n, slots, kv_slots = self._problem, self._ranks, self._slots, self._kv_slots
        heads = -(-p.num_heads // n)
        kv_heads = -(-heads // p.heads_per_kv_head)
        width, kv_width = p.head_dim + p.v_dim, kv_heads * (p.head_dim + p.v_dim)
        others, kv_others = (n - 1) * slots, (n - 1) * kv_slots  # tokens of other ranks
        own = slots * (p.num_heads - heads)  # what of its tokens other ranks have
        forward = others * heads * p.head_dim + kv_others * kv_width + own * p.v_dim
        backward = others * heads * width + 2 * kv_others * kv_width + own * p.head_dim
        seconds, open_part = 0.0, 1 / self._exchanges()
        for at, volume in enumerate((forward, backward)):
            moved = self._spread(volume * p.element_bytes, n - 1)
            attention = self._attention(self._all_pairs, p.q_tokens, heads, at)
            seconds += moved * open_part + max(attention, moved * (1 - open_part))
        even = self._all_pairs * p.num_heads / n
        uneven = self._all_pairs * heads / even if even else 1.0
        return Cost(seconds, forward * p.element_bytes, uneven)

    def seen(self, layout: Layout, kv_layout: Layout) -> Cost:
        """Every rank has its own queries, and receives the keys that they see."""
        n = self._ranks
        pairs = pairs_of_ranks(layout, self._rows)
        tokens = needed_keys(layout, kv_layout, self._rows, 1).tokens_between()
        np.fill_diagonal(tokens, 0)
        node = np.arange(n) // self._per_node
        near = np.where(node[:, None] == node, tokens, 0)
        inside, every = (np.maximum(x.sum(0), x.sum(1)) for x in (near, tokens))
        received = float(tokens.sum(1).max()) * self._kv_bytes
        peers = int((tokens > 0).sum(1).max())
        moved = _transfer_seconds(
            float(inside.max()) * self._kv_bytes,
            float((every - inside).max()) * self._kv_bytes,
            peers,
        )
        return self._overlapped(float(pairs.max()), layout.slots, (moved, 2 * moved), received)

    def mesh(self, tile: tuple[int, int], layouts: tuple[Layout, Layout] | None = None) -> Cost:
        """All keys and queries of a tile travel, whatever they see. Without layouts, and where
        shards lie in no order, as if the work of the tiles were even."""
        p, (a, b), per_node = self._problem, tile, self._per_node
        pairs = self._all_pairs / self._ranks
        if layouts and layouts[0].kind in COUNTED:
            pairs = float(pairs_of_tiles(*layouts, self._rows, tile).max())
        head, v_head = (
            self._slots * p.num_heads * d * p.element_bytes for d in (p.head_dim, p.v_dim)
        )
        kv = self._kv_slots * self._kv_bytes
        near = min(a, per_node) - 1, min(b, -(-per_node // a)) - 1  # of the peers in its node
        seconds = []
        for q_side, kv_side in ((head + v_head, kv), (2 * head + v_head, 2 * kv)):
            inside = near[0] * q_side + near[1] * kv_side
            outside = (a - 1) * q_side + (b - 1) * kv_side - inside
            seconds.append(_transfer_seconds(inside, outside, a + b - 2))
        received = (a - 1) * (head + v_head) + (b - 1) * kv
        return self._overlapped(pairs, a * self._slots, seconds, received)

    def relayout(self) -> float:
        """Seconds of exchanges from contiguous shards and back, forward and backward; as if all
        rows changed their rank."""
        p, slots, kv_slots = self._problem, self._slots, self._kv_slots
        width, kv = p.head_dim + p.v_dim, kv_slots * self._kv_bytes
        forward = slots * p.num_heads * width * p.element_bytes + kv
        backward = slots * p.num_heads * (width + p.head_dim) * p.element_bytes + 2 * kv
        return self._spread(forward, 4) + self._spread(backward, 4)

    def _exchanges(self) -> int:
        """In how many parts tokens are exchanged for heads; uneven shares go in one."""
        p, n = self._problem, self._ranks
        if n not in ulysses_degrees(p):
            return 1
        (queries, _), slices = suggested_cut(p, n, (1, 1), n)
        return queries if slices is None else len(sizes_for(p, n, slices))

    def _spread(self, num_bytes: float, messages: int) -> float:
        """Seconds of bytes that go to all other ranks alike."""
        n = self._ranks
        outside = max(n - self._per_node, 0) / (n - 1) * num_bytes if n > 1 else 0.0
        return _transfer_seconds(num_bytes - outside, outside, messages)

    def _attention(self, pairs: float, rows: int, heads: int, backward: int) -> float:
        """Seconds of one call, which shows so many pairs of a head."""
        if not pairs:
            return 0.0
        p, curves = self._problem, _under_a_mask()
        flops = p.flops(1, backward=bool(backward)) * pairs * heads / p.num_heads
        slower = 1 + curves[0].half_rows * REFERENCE_HEADS / (rows * heads)
        slower += curves[backward].half_columns / (2 * (pairs / rows))
        return _launch_seconds() + flops * slower / (curves[backward].tflops * 1e12)

    def _overlapped(
        self, pairs: float, rows: int, transfers: Sequence[float], received_bytes: float
    ) -> Cost:
        """`pairs`: of the rank with the most work. `transfers`: seconds forward and backward."""
        seconds, mean = 0.0, self._all_pairs / self._ranks
        for at, moved in enumerate(transfers):
            attention = self._attention(pairs, rows, self._problem.num_heads, at)
            hidden = moved * self._hidden
            seconds += moved - hidden + max(attention, hidden)
        return Cost(seconds, received_bytes, pairs / mean if mean else 1.0)


@cache
def _under_a_mask() -> tuple[KernelRate, KernelRate]:
    """The fastest curve for calls with a mask, forward and backward."""
    forward, backward = (
        max(
            (rate for kernel in kernels for kind, rate in kernel.rates.items() if kind != "full"),
            key=lambda rate: rate.tflops,
        )
        for kernels in (usual_cluster().passes(direction).values() for direction in Direction)
    )
    return forward, backward


@cache
def _launch_seconds() -> float:
    kernels = usual_cluster().passes(Direction.FORWARD).values()
    return min(kernel.launch_microseconds for kernel in kernels) * 1e-6


def _transfer_seconds(inside: float, between: float, messages: int) -> float:
    """Seconds of a rank's bytes on both kinds of links at once, and something for each message."""
    if inside + between == 0:
        return 0.0
    node, network = usual_cluster().node, usual_cluster().network
    link = network.collective
    moved = max(
        inside / (node.collective.gb_per_second * 1e9),
        between / (link.gb_per_second * 1e9 * network.nics / node.ranks),
    )
    latency = (link.base_microseconds + link.hop_microseconds) * 1e-6
    return moved + latency + messages * (network.many_peers.message_microseconds * 1e-6)
