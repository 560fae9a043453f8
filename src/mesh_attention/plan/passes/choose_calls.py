"""Choose the kernel calls of an attention: the rectangles that the method wrote, or one call.

`compile.py` asks `CallChooser` for every attention. Any dense kernel can do rectangles. A kernel
that takes any mask can do all gathered rows in one call, in whatever order they lie, and nothing
has to be merged. The faster of the two is taken, and one call where they are near.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mesh_attention.machine.kernel_facts import PassRates
from mesh_attention.machine.seconds import CallSize
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attend, Attention, Call, CallKind, whole_call
from mesh_attention.plan.passes.seconds import CallSeconds

# Rates are rough, and the host launches every call and every merge: three calls that were predicted
# to be 0.6 % faster than one took 4 % longer on an H200, and 36 % from a standing start.
SEVERAL_GAIN = 0.02


@dataclass(frozen=True, slots=True)
class CallSummary:
    """What was chosen for the attentions of a program, and why: predicted seconds of all calls."""

    whole: int = 0  # attentions that are one call by row ranges
    cut: int = 0  # attentions that stay rectangles, though one call could do them
    seconds_whole: float = 0.0
    seconds_cut: float = 0.0

    def __add__(self, other: CallSummary) -> CallSummary:
        return CallSummary(
            self.whole + other.whole,
            self.cut + other.cut,
            self.seconds_whole + other.seconds_whole,
            self.seconds_cut + other.seconds_cut,
        )

    def __str__(self) -> str:
        both = self.whole + self.cut
        if not both:
            return "rectangles: no kernel takes any mask at a good rate"
        said = f"{self.whole} of {both} attentions in one call by row ranges"
        if math.isinf(self.seconds_cut):
            return f"{said}: the kernel asked for does not take the rectangles of all"
        gain = f"; several calls must be {SEVERAL_GAIN:.0%} faster than one"
        near = not self.cut and self.seconds_cut < self.seconds_whole
        return (
            f"{said}, predicted {self.seconds_whole * 1e3:.3g} ms if all were, "
            f"{self.seconds_cut * 1e3:.3g} ms as rectangles{gain if near else ''}"
        )


class CallChooser:
    """Chooses for the attentions of a pass. Attentions of the same sizes are decided once."""

    def __init__(self, plan: Plan, clock: CallSeconds) -> None:
        self._clock, target, direction = clock, clock.target, clock.direction
        self._holds = target.own_stream and plan.num_ranks > 1
        self._kernels: dict[str, tuple[str, PassRates] | None] = {
            kind: target.kernel(direction, kind) for kind in CallKind
        }
        self._names = {kind: kernel[0] if kernel else "" for kind, kernel in self._kernels.items()}
        by_range = self._kernels[CallKind.RANGE]
        may_be_one = direction not in target.rectangles
        self._takes_whole = may_be_one and by_range is not None and by_range[1].ranges
        self._hides_merges = target.takes_turns and direction is Direction.FORWARD
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    def __call__(
        self, op: Attention, table: Mapping[str, Buffer], splits: int
    ) -> tuple[Attention, CallSummary]:
        """The attention with its calls. `splits`: parts that long calls are split into where they
        keep transfers waiting."""
        if not op.calls:
            return op, CallSummary()
        summary = CallSummary(whole=int(self._takes_whole))
        single = whole_call(op, CallKind.RANGE)
        if self._takes_whole and (single,) != op.calls:
            whole, cut = self._seconds(op, table, single, splits)
            better = whole * (1 - SEVERAL_GAIN * (len(op.calls) > 1)) < cut
            summary = CallSummary(int(better), int(not better), whole, cut)
            if better:
                return replace(op, calls=(single.by(self._names[CallKind.RANGE]),)), summary
        names = self._names
        return replace(op, calls=tuple([c.by(names[c.kind]) for c in op.calls])), summary

    def _seconds(
        self, op: Attention, table: Mapping[str, Buffer], single: Call, splits: int
    ) -> tuple[float, float]:
        """Predicted seconds of a single call for all rows, and of the calls as they are."""
        clock = self._clock
        sizes = clock.sizes(op, table)
        whole = sizes[0]._replace(
            kind=single.kind,
            rows=single.q_stop,
            columns=single.k_stop,
            pairs=sum(size.pairs for size in sizes),
        )
        key = (whole, *sizes, splits, *clock.fresh(op))
        if key not in self._known:
            alone = len(sizes) == 1
            cut = self._predicted(op, sizes, clock.fresh(op) if alone else (False, False), splits)
            self._known[key] = self._predicted(op, [whole], clock.fresh(op), 1), cut
        return self._known[key]

    def _predicted(
        self, op: Attention, sizes: Sequence[CallSize], fresh: tuple[bool, bool], splits: int
    ) -> float:
        """Seconds of these calls and of a wait: a transfer that becomes ready while a call holds
        the GPU waits for half of the call in the mean."""
        total = held = 0.0
        for at, size in enumerate(sizes):
            kernel = self._kernels[size.kind]
            if kernel is None:
                return math.inf  # the kernel that was asked for by name refuses it
            seconds = self._clock.kernel(kernel[1], size)
            if seconds is None:
                return math.inf
            if self._holds and not kernel[1].lets_transfers_begin:
                parts = splits if isinstance(op, Attend) and size.kind == CallKind.FULL else 1
                held = max(held, seconds / parts)
            total += seconds
            if not self._hides_merges or at + 1 == len(sizes):  # others are hidden by the next call
                total += self._clock.merge(size, fresh)
        return total + held / 2
