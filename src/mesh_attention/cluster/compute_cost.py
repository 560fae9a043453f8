"""Seconds of the compute operations: kernel calls on the cluster's curves, and passes over memory.

A call lasts as long as its pairs at the rate its rows and columns allow, but no less than the host
needs to launch it. Merging a partial result and adding gradients are passes over memory.

An attention is its rectangles, each on the kernel that is fastest for it and merged, or one call on
a kernel that takes any mask (`PassRates.ranges`): whichever takes less time. A communication that
comes in the middle of a call that keeps it waiting loses half of that call in the mean, so where
there are communications a choice counts that as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mesh_attention.cluster.cluster import REFERENCE_HEADS, Cluster, PassRates
from mesh_attention.cluster.load import ClusterError
from mesh_attention.cluster.timed_call import TimedCall, divided, joined, score
from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.draw.work import CallPairs
from mesh_attention.plan.layout import LayoutKind
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.program import (
    Attend,
    AttendBackward,
    Attention,
    CallKind,
    Free,
    Merge,
    Operation,
)
from mesh_attention.plan.split_calls import split_calls


class _Sizes(NamedTuple):
    """Of an attention, as far as its costs go: rows and keys of its pieces, heads, and whether its
    accumulators hold nothing yet."""

    rows: int
    columns: int
    heads: int
    kv_heads: int
    fresh: tuple[bool, bool]  # out and lse, or the gradient of q; gradients of k and v


class _CallSize(NamedTuple):
    kind: CallKind
    rows: int
    columns: int
    pairs: int


# Of kernels that take any mask: keys that lie one by one are refused, and rows that hold nothing.
KEYS_IN_RUNS = frozenset({"cudnn_ranges"})


def kernels_for(
    kernels: dict[str, PassRates], layout: LayoutKind | None, *, padded: bool = False
) -> dict[str, PassRates]:
    """Those that the runtime would use; all, where nothing else takes any mask."""
    if layout is not LayoutKind.STRIPED and not padded:
        return kernels
    others = {name: one for name, one in kernels.items() if name not in KEYS_IN_RUNS}
    return others if any(one.ranges for one in others.values()) else kernels


class ComputeCosts:
    def __init__(
        self, cluster: Cluster, plan: Plan, direction: Direction, kernel: str | None = None
    ) -> None:
        """`kernel`: one that does all that it can do; other kernels do the rest."""
        if kernel is not None and kernel not in cluster.kernels:
            known = ", ".join(cluster.kernels)
            raise ClusterError(f"kernel={kernel}: {cluster.name} has curves of {known}")
        self._cluster = cluster
        self._problem = plan.problem
        self._direction = direction
        padded = any(one.padded_tokens > one.num_tokens for one in (plan.q_layout, plan.kv_layout))
        self._kernels = kernels_for(cluster.passes(direction), plan.kv_layout.kind, padded=padded)
        self._communicates = plan.num_ranks > 1
        forced = None if kernel is None else self._kernels.get(kernel)
        only = [] if kernel is None or forced is None else [{kernel: forced}]
        self._choices: list[Mapping[str, PassRates]] = [*only, self._kernels]
        self._pairs = CallPairs(plan)
        self._known: dict[tuple[object, ...], tuple[TimedCall, ...]] = {}
        self._known_calls: dict[tuple[object, ...], TimedCall | None] = {}

    def calls(
        self, op: Operation, table: Mapping[str, Buffer], splits: int
    ) -> tuple[TimedCall, ...]:
        """Kernel calls in turn. Long ones of the forward pass are split (`plan/split_calls.py`) on
        kernels that would keep a communication waiting."""
        match op:
            case Attend() | AttendBackward():
                return self._attention(op, table, splits)
            case Merge():
                touched = (*op.inputs, *op.outputs)
                moved = sum(p.num_bytes(table[p.buffer], self._problem) for p in touched)
                return (TimedCall(self._gap + self._memory(moved)),)
            case Free():
                return ()
        raise AssertionError(op)  # communication has costs of its own

    @property
    def _gap(self) -> float:
        return self._cluster.gpu.gap_microseconds * 1e-6

    def _memory(self, num_bytes: float) -> float:
        return num_bytes / (self._cluster.gpu.memory_gb_per_second * 1e9)

    def _attention(
        self, op: Attention, table: Mapping[str, Buffer], splits: int
    ) -> tuple[TimedCall, ...]:
        if not op.calls:
            return ()
        fresh = (op.fresh, False) if isinstance(op, Attend) else (op.fresh_q, op.fresh_kv)
        sizes = _Sizes(
            *(op.q.stop - op.q.start, op.k.stop - op.k.start),
            *(op.q.num_heads(table[op.q.buffer]), op.k.num_heads(table[op.k.buffer])),
            fresh,
        )
        pairs = self._pairs
        shapes = tuple(
            [
                _CallSize(c.kind, c.q_stop - c.q_start, c.k_stop - c.k_start, pairs(op, table, c))
                for c in op.calls
            ]
        )
        key = (sizes, shapes, splits)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._fastest(op, sizes, shapes, splits)
        return known

    def _fastest(
        self, op: Attention, sizes: _Sizes, shapes: tuple[_CallSize, ...], splits: int
    ) -> tuple[TimedCall, ...]:
        for kernels in self._choices:
            rectangles, whole = self._ways(kernels, sizes, shapes)
            if rectangles is not None and isinstance(op, Attend):
                pairs = zip(rectangles, split_calls(op, sizes.heads, splits), strict=True)
                rectangles = [part for call, split in pairs for part in divided(call, split)]
            ways = [way for way in (rectangles, whole) if way is not None]
            if ways:
                return joined(min(ways, key=score))
        raise AssertionError(shapes)  # the cluster was read so that every call has a kernel

    def _ways(
        self, kernels: Mapping[str, PassRates], sizes: _Sizes, shapes: tuple[_CallSize, ...]
    ) -> tuple[list[TimedCall] | None, list[TimedCall] | None]:
        """To do an attention with these kernels: as rectangles, and in one call."""
        merging = sizes._replace(rows=0, columns=0, fresh=(False, False))
        rectangles = []
        for shape in shapes:
            key = (len(kernels), shape, merging)  # one kernel that was asked for, or all
            if key not in self._known_calls:
                self._known_calls[key] = self._call(kernels, shape, merging)
            if (known := self._known_calls[key]) is not None:
                rectangles.append(known)
        pairs = sum(shape.pairs for shape in shapes)
        kind = CallKind.FULL if pairs == sizes.rows * sizes.columns else CallKind.RANGE
        whole = self._call(
            {name: one for name, one in kernels.items() if one.ranges},
            _CallSize(kind, sizes.rows, sizes.columns, pairs),
            sizes,
        )
        return (
            rectangles if len(rectangles) == len(shapes) else None,
            None if whole is None else [whole],
        )

    def _call(
        self, kernels: Mapping[str, PassRates], shape: _CallSize, sizes: _Sizes
    ) -> TimedCall | None:
        """On the kernel that is fastest for it, with the pass over its results."""
        found = [
            TimedCall(
                seconds,
                name,
                not rates.lets_transfers_begin and self._communicates,
                self._lost(rates, shape, sizes.heads),
                shape.kind is CallKind.CAUSAL and bool(rates.sm_margin) and self._communicates,
            )
            for name, rates in kernels.items()
            if (seconds := self._kernel(rates, shape, sizes.heads)) is not None
        ]
        if not found:
            return None
        best = min(found, key=lambda call: score([call]))
        after = self._gap + self._memory(self._result_bytes(shape, sizes))
        keys = kernels[best.kernel].tile_keys
        if keys and self._communicates:
            programs = -(-shape.columns // keys) * sizes.heads
            rounds = _ENDS_OF_A_ROUND * -(-programs // self._cluster.gpu.sms)
            best = best._replace(round=best.seconds / rounds)
        return best._replace(seconds=best.seconds + after)

    def _kernel(self, rates: PassRates, shape: _CallSize, heads: int) -> float | None:
        """None where the kernel does not take such calls."""
        kind, rows, columns, pairs = shape
        if rates.ranges and kind is not CallKind.FULL:
            rate, seen = rates.range, 2 * pairs / rows
        else:
            rate, seen = rates.rate(kind), columns
        if rate is None:
            return None
        slower = 1.0 + rate.half_rows / (rows * heads / REFERENCE_HEADS)
        slower += rate.half_columns / seen if seen else 0.0
        backward = self._direction is Direction.BACKWARD
        flops = self._problem.flops(pairs, backward=backward) * (heads / self._problem.num_heads)
        slower *= self._unfilled(rates, shape, heads)
        kernel = self._gap + flops * slower / (rate.tflops * 1e12)
        return max(kernel, rates.launch_microseconds * 1e-6)

    def _unfilled(self, rates: PassRates, shape: _CallSize, heads: int) -> float:
        """How much longer a call takes because it lasts a whole number of rounds of tiles over all
        SMs. Of a causal square the tiles are unlike, and shared out as SMs fall free: none takes
        less time than its largest, twice the mean."""
        if not rates.tile_rows or not shape.rows:
            return 1.0
        sms, tiles = self._cluster.gpu.sms, _tiles(rates, shape, heads)
        if shape.kind is CallKind.FULL:
            return -(-tiles // sms) * sms / tiles
        return max(1.0, 2 * sms / tiles)

    def _lost(self, rates: PassRates, shape: _CallSize, heads: int) -> float | None:
        """Of its speed beside a communication: the SMs that it leaves. Calls of one or two rounds
        are not split (`plan/leave_sms.py`), and last a round more. Sometimes the next call fills
        that round, sometimes not: 12 % of a pass were lost where this was not counted."""
        sms = self._cluster.gpu.sms
        lost = rates.lost(sms)
        full = shape.kind is CallKind.FULL and shape.rows
        if not rates.sm_margin or lost is None or not rates.tile_rows or not full:
            return lost
        tiles = _tiles(rates, shape, heads)
        rounds, fewer = -(-tiles // sms), -(-tiles // (sms - rates.sm_margin))
        return max(lost, 1 - rounds / fewer) if rounds <= _UNSPLIT_ROUNDS else lost

    def _result_bytes(self, shape: _CallSize, sizes: _Sizes) -> int:
        """A result is read, and its accumulator read, unless it is fresh, and written."""
        problem, (fresh, fresh_kv) = self._problem, sizes.fresh
        once, once_kv = (
            problem.element_bytes + (1 if new else 2) * problem.accumulate_bytes
            for new in (fresh, fresh_kv)
        )
        if self._direction is Direction.FORWARD:
            return shape.rows * sizes.heads * problem.v_dim * once
        q_side = shape.rows * sizes.heads * problem.head_dim
        kv_side = shape.columns * sizes.kv_heads * (problem.head_dim + problem.v_dim)
        return q_side * once + kv_side * once_kv


_UNSPLIT_ROUNDS = 2
_ENDS_OF_A_ROUND = 2  # programs of a round are not alike: fitted to 24 replayed backward passes


def _tiles(rates: PassRates, shape: _CallSize, heads: int) -> int:
    return -(-shape.rows // (rates.tile_rows or shape.rows)) * heads
