"""The first answer of `auto`: a method and a setting at once, in closed form, without any plan.

A constructor must not wait for a search, also on thousands of ranks. A rank's work is a box of
heads x queries x keys: `U` ranks exchange tokens for heads, and on what is left the tile `a x b` of
units gathers queries and keys, or keys rotate in a ring. Ulysses, USP, the mesh and Mesh-USP are
all such boxes; where a mask shows little, only what is seen travels. The bytes of a box are exact
(but for statistics), seconds follow from the rates of a machine as in `way_costs.py`: of these only
the proportions matter. `find_best_of_all` searches and simulates, and knows all methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mesh_attention.cost.machine.rates import Rates, usual_rates
from mesh_attention.errors import PlanError
from mesh_attention.plan.arguments import number, pair
from mesh_attention.plan.build.head_group import ulysses_degrees
from mesh_attention.plan.layout import Layout, LayoutKind
from mesh_attention.plan.methods.seen import usual_layout
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.runs import Run, visible_pairs
from mesh_attention.plan.way_costs import LayerCosts

_GATHERED, _ROTATED, _HEADS = ("mesh", "mesh-usp"), ("usp",), "ulysses"
_SEEN = "seen"
_MOST_SLICES = 8
_LOST = 0.12  # of the speed of attention, beside a transfer: SMs that NCCL's channels hold
_MOST_RANKS_SEEN = 512  # what each sees of each is counted up to here


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """`seconds` of the forward and the backward pass; `received_bytes` forward, of a rank."""

    name: str  # of the method
    options: dict[str, Any]
    seconds: tuple[float, float]
    received_bytes: float

    @property
    def total(self) -> float:
        return sum(self.seconds)


# As of 0.1, and what to write now.
RENAMED_OPTIONS = {
    "heads_at_once": "it is 'head_slices' now",
    "backward_heads_at_once": "it is 'backward_head_slices' now",
    "max_buffer_bytes": "it is 'max_memory_bytes' now",
    "auto_cut": "leave it out: plans are cut by default",
}


# No options of plans, and who takes them.
_TAKEN_ELSEWHERE = {
    "cluster": "plan_on(cluster, problem, ranks, ...) of mesh_attention.cost.planning plans for "
    "one, find_best_of_all of mesh_attention.choose.auto searches on it, and ContextParallel("
    "cluster=...) chooses by it",
}


def renamed(option: str) -> str:
    """What to say of it in brackets; nothing where it never was one."""
    known = RENAMED_OPTIONS | _TAKEN_ELSEWHERE
    return f" ({known[option]})" if option in known else ""


def methods_with(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Those that have all of these options."""
    given = {name for name, value in options.items() if value is not None}
    fits = tuple(name for name, method in METHODS.items() if given <= method.options().keys())
    if not fits:
        known = {option for method in METHODS.values() for option in method.options()}
        for name in sorted(given - known):
            near = get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near and not renamed(name) else ""
            raise PlanError(f"no method has an option {name!r}{renamed(name)}{meant}")
        raise PlanError(
            f"no method has all of the options {', '.join(sorted(given))}; leave one out, or name "
            "a method"
        )
    return fits


def first_answers(
    problem: Problem,
    num_ranks: int,
    options: Mapping[str, Any] | None = None,
    rates: Rates | None = None,
) -> list[FirstAnswer]:
    """The best first, of methods that have all the options given; these stay as they are, and are
    not repeated in an answer."""
    given = {name: value for name, value in (options or {}).items() if value is not None}
    fits = methods_with(given)
    found = []
    if num_ranks > 1:
        boxes = _Boxes(problem, num_ranks, rates or usual_rates())
        found = [*boxes.answers(fits, given)]
        if _SEEN in fits and _shows_little(problem) and num_ranks <= _MOST_RANKS_SEEN:
            found += _seen(problem, num_ranks, given, rates or usual_rates())
    if not found:  # alone, or options of some other method
        found = [FirstAnswer(fits[0], {}, (0.0, 0.0), 0.0)]
    return sorted(found, key=lambda one: (one.total, len(one.options)))


class _Boxes:
    """Seconds and bytes of boxes of heads, queries and keys."""

    def __init__(self, problem: Problem, num_ranks: int, rates: Rates) -> None:
        self._p, self._n, self._rates = problem, num_ranks, rates
        self._slots = -(-problem.q_tokens // num_ranks)
        self._kv_slots = -(-problem.keys // num_ranks)
        everything = [Run(0, problem.q_tokens)], [Run(0, problem.keys)]
        pairs = int(visible_pairs(*everything, problem.rows)[0, 0])
        self._pairs = pairs / num_ranks  # of a rank, as if it had all heads

    def answers(self, methods: tuple[str, ...], given: Mapping[str, Any]) -> Iterator[FirstAnswer]:
        n, p = self._n, self._p
        tile = None if given.get("tile") is None else pair("tile", given["tile"])
        wanted = given.get("ulysses")
        degree = None if wanted is None else number("ulysses", wanted)
        if _HEADS in methods and n <= p.num_heads:
            yield self._answer(_HEADS, {}, n, (1, 1), rotates=False)
        for name in methods:
            if name not in (*_GATHERED, *_ROTATED):
                continue
            for shape in METHODS[name].candidates(p, n, None):
                options = {key: x for key, x in shape.items() if key not in given}
                u = shape.get("ulysses", 1) if degree is None else degree
                if n % u or u not in ulysses_degrees(p, n):
                    continue
                rotates = name in _ROTATED
                box = tile or shape.get("tile") or (1, n // u)
                if box[0] * box[1] == n // u:
                    yield self._answer(name, options, u, box, rotates=rotates)

    def _answer(
        self, name: str, options: dict[str, Any], u: int, tile: tuple[int, int], *, rotates: bool
    ) -> FirstAnswer:
        p, (a, b) = self._p, tile
        heads = -(-p.num_heads // u)
        kv_heads = max(1, -(-heads // p.heads_per_kv_head))
        q, v = self._slots * heads, self._slots * heads * p.v_dim
        kv = self._kv_slots * kv_heads * (p.head_dim + p.v_dim)
        away = self._slots * (p.num_heads - heads)  # what of its tokens other ranks have
        seconds, received = [], 0.0
        for backward in (False, True):
            grads = 2 if backward else 1
            exchange = (u - 1) * (q * p.head_dim + grads * kv + (v if backward else 0))
            exchange += away * (p.head_dim if backward else p.v_dim)
            q_side = u * (grads * q * p.head_dim + v)  # of a partition, out and back
            kv_side = u * grads * kv
            element = p.element_bytes
            if not backward:
                moved = exchange + (a - 1) * q_side + (b - 1) * kv_side
                received = moved * element
            opened = self._exchange(exchange * element, u)
            if rotates:
                transfer = self._ring(kv_side * element, b, u)
                attention = self._attention(u, a, heads, b, backward)
                seconds.append(opened + max(attention + _LOST * transfer, transfer))
                continue
            transfer = self._gather(q_side * element, kv_side * element, tile, u)
            slices = min(_MOST_SLICES, kv_heads) if a * b > 1 else 1
            attention = self._attention(u, a, heads, 1, backward, slices)
            hidden = transfer * (1 - 1 / max(slices, 2))
            busy = attention + _LOST * hidden
            seconds.append(opened + transfer - hidden + max(busy, hidden))
        return FirstAnswer(name, options, (seconds[0], seconds[1]), received)

    def _exchange(self, num_bytes: float, u: int) -> float:
        if u == 1:
            return 0.0
        far = max(u - self._rates.ranks_per_node, 0) / (u - 1)
        there = num_bytes / 2  # and as much back
        return 2 * self._rates.transfer(there * (1 - far), there * far, u - 1)

    def _gather(self, q_side: float, kv_side: float, tile: tuple[int, int], u: int) -> float:
        a, b = tile
        units = max(1, self._rates.ranks_per_node // u)  # of a node, along rows of the grid
        near = min(a, units) - 1, min(b, max(1, units // a)) - 1
        inside = near[0] * q_side + near[1] * kv_side
        between = (a - 1) * q_side + (b - 1) * kv_side - inside
        return self._rates.transfer(inside, between, a + b - 2)

    def _ring(self, block: float, steps: int, u: int) -> float:
        """As fast as its slowest link."""
        one = block if self._n > self._rates.ranks_per_node else 0.0
        return (steps - 1) * self._rates.transfer(block - one, one, 1)

    def _attention(
        self, u: int, a: int, heads: int, steps: int, backward: bool, slices: int = 1
    ) -> float:
        """Of a rank's share of all pairs, in so many calls: each step has some of the keys, each
        slice some of the heads."""
        if not self._pairs:
            return 0.0
        rows, calls = max(1, a * u * self._slots), steps * slices
        flops = self._p.flops(1, backward=backward) * self._pairs
        seen = max(self._pairs * u / rows / steps, 1e-9)  # keys of a row in a call
        of_call = flops / calls, rows, seen, heads / slices
        return calls * self._rates.attention(*of_call, backward=backward)


def _shows_little(problem: Problem) -> bool:
    mask = problem.mask
    return mask.window is not None or mask.documents is not None or mask.slices is not None


def _seen(
    problem: Problem, num_ranks: int, given: Mapping[str, Any], rates: Rates
) -> list[FirstAnswer]:
    """Rows only to those who see them, on the shards that suit the mask."""
    # Objects that share the tokens of a batch lay them out alike: by whether there is a mask.
    free = given.get("layout") is None and not given.get("relayout")
    kind = LayoutKind.ZIGZAG if free else given.get("layout") or usual_layout(problem.mask)
    if given.get("tile") is not None or kind not in (LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG):
        return []
    q, kv = (Layout(LayoutKind(kind), size, num_ranks) for size in (problem.q_tokens, problem.keys))
    cost = LayerCosts(problem, num_ranks, rates).seen(q, kv)
    if not math.isfinite(cost.seconds):
        return []
    options = {"layout": kind.value} if free else {}
    return [
        FirstAnswer(_SEEN, options, (0.3 * cost.seconds, 0.7 * cost.seconds), cost.received_bytes)
    ]
