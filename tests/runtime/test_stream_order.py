"""No two uses of the same memory race, on whichever streams they run: worked out, without a GPU.

What the executor puts on its two compute streams and on that of communications is written down with
all that each waits for. Then of every two uses of memory, of which one writes, one must come before
the other by these waits alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest
import torch

from mesh_attention import Mask
from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import (
    Attend,
    AttendBackward,
    Attention,
    Communication,
    Free,
    Program,
    reads,
    writes,
)
from mesh_attention.plan.language.workspace import WorkspaceMap, dependencies, workspace_map
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.passes.place import placed
from mesh_attention.runtime.execute.attentions import must_follow
from mesh_attention.runtime.execute.kernel_calls import Stretch, coverage
from support.cases import Case
from support.targets import SLOW_AND_ANY_MASK, with_calls

MAIN, SIDE, NETWORK = range(3)


Pieces = Sequence[Piece]


@dataclass
class Streams:
    """`done[s]`: what has happened for certain when the next thing on stream s begins, by bits."""

    done: list[int] = field(default_factory=lambda: [0, 0, 0])
    uses: list[tuple[str, Pieces, Pieces]] = field(default_factory=list)
    before: list[int] = field(default_factory=list)

    def put(self, stream: int, name: str, taken: Pieces, inputs: Pieces) -> None:
        self.before.append(self.done[stream])
        self.done[stream] |= 1 << len(self.uses)
        self.uses.append((name, taken, inputs))


class Launched:
    """As `Executor._run_on` launches a program over a transport with a stream of its own."""

    def __init__(
        self, program: Program, memory: WorkspaceMap, *, without: tuple[str, ...] = ()
    ) -> None:
        self.streams = Streams()
        self._current, self._turn, self._ends = MAIN, 0, [0, 0]
        follow = set() if "follow" in without else must_follow(program.operations, memory)
        waits = dependencies(program, memory)
        if "waits" in without:
            waits = ((),) * len(waits)
        communicates = [isinstance(op, Communication) for op in program.operations]
        done, marks, arrived = self.streams.done, dict[int, int](), dict[int, int]()
        for at, op in enumerate(program.operations):
            if isinstance(op, Free):
                continue
            if isinstance(op, Communication):
                for i in waits[at]:
                    done[NETWORK] |= 0 if communicates[i] else marks[i]
                self.streams.put(NETWORK, op.name, [*reads(op)], [*writes(op)])
                arrived[at] = done[NETWORK]
                continue
            for i in waits[at]:
                for stream in (MAIN, SIDE) if communicates[i] else ():
                    done[stream] |= arrived[i]
            if isinstance(op, Attention):
                self._attention(op, follows=at in follow)
            else:
                self.streams.put(self._current, op.name, [*reads(op)], [*writes(op)])
            marks[at] = done[self._current]

    def _attention(self, op: Attend | AttendBackward, *, follows: bool) -> None:
        streams, done = self.streams, self.streams.done
        sides = [(side, [*pieces]) for side, pieces in _results(op)]
        inputs = [piece for _, pieces in sides for piece in pieces]
        taken = [piece for piece in reads(op) if piece not in inputs]
        for number, call in enumerate(op.calls):
            self._ends[self._turn % 2] = done[self._current]
            self._turn += 1
            self._current = SIDE if self._turn % 2 else MAIN
            if follows and number == 0:
                done[self._current] |= self._ends[(self._turn + 1) % 2]
            written, direct = list[Piece](), list[Piece]()
            rows_of = {"q": (call.q_start, call.q_stop), "k": (call.k_start, call.k_stop)}
            for (side, fresh), pieces in sides:
                start, stop = rows_of[side]
                rows = [
                    replace(piece, start=piece.start + start, stop=piece.start + stop)
                    for piece in pieces
                ]
                written += rows
                first = all(s.fresh for s in self._stretches(op, side, fresh)[number])
                # A kernel writes before it follows only where nothing is there to be added to.
                direct += [p for p in rows if first and not p.buffer.startswith("lse")]
            streams.put(self._current, f"{op.name} kernel {number}", taken, direct)
            done[self._current] |= self._ends[(self._turn + 1) % 2]
            streams.put(self._current, f"{op.name} results {number}", written, written)

    @staticmethod
    def _stretches(
        op: Attend | AttendBackward, side: str, fresh: bool
    ) -> tuple[tuple[Stretch, ...], ...]:
        if side == "q":
            rows = [(call.q_start, call.q_stop) for call in op.calls]
            return coverage(rows, op.q.num_rows, fresh=fresh).stretches
        rows = [(call.k_start, call.k_stop) for call in op.calls]
        return coverage(rows, op.k.num_rows, fresh=fresh).stretches


def _results(
    op: Attend | AttendBackward,
) -> tuple[tuple[tuple[str, bool], tuple[Piece, ...]], ...]:
    """By side and whether they are fresh."""
    if isinstance(op, Attend):
        return ((("q", op.fresh), (op.out, op.lse)),)
    return (
        (("q", op.fresh_q), (op.grad_q,)),
        (("k", op.fresh_kv), (op.grad_k, op.grad_v)),
    )


def races(streams: Streams, memory: WorkspaceMap) -> list[str]:
    def share(piece: Piece, other: Piece) -> bool:
        if piece.buffer == other.buffer:
            return piece.overlaps(other)
        at, to = (memory.offsets.get(x.buffer) for x in (piece, other))
        if at is None or to is None:
            return False
        return at < to + memory.sizes[other.buffer] and to < at + memory.sizes[piece.buffer]

    results = []
    for (i, first), (j, second) in combinations(enumerate(streams.uses), 2):
        if streams.before[j] >> i & 1:
            continue
        pairs = [(w, x) for w in first[2] for x in (*second[1], *second[2])]
        pairs += [(r, w) for r in first[1] for w in second[2]]
        results += [
            f"{first[0]} beside {second[0]}: {a.buffer} and {b.buffer}"
            for a, b in pairs
            if share(a, b)
        ]
    return results


SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "slices": (16, {"method": "mesh", "tile": (4, 4), "head_slices": (1, 2)}),
    "chunks": (16, {"method": "mesh", "tile": (4, 4), "chunks": (2, 2)}),
    "reduced": (8, {"method": "mesh", "tile": (2, 4), "combine": "reduce-scatter"}),
    "heads first": (4, {"method": "ulysses", "layout": "contiguous", "chunks": (1, 1)}),
    "portions": (4, {"method": "ulysses", "layout": "contiguous", "chunks": (2, 2)}),
    "mesh of units": (8, {"method": "mesh-usp", "ulysses": 2, "tile": (2, 2), "chunks": (2, 2)}),
    "exchanged": (4, {"method": "mesh", "tile": (2, 2), "relayout": True}),
    **{f"{method} on {n}": (n, {"method": method}) for method in METHODS for n in (2, 4)},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_use_of_memory_races_with_another(setting: str, shown: bool, dtype: torch.dtype) -> None:
    ranks, options = SETTINGS[setting]
    case = Case(
        *(ranks, 509, 509),
        heads=(16, 8),
        mask=Mask(causal=True),
        dtype=dtype,
        options=options,
    )
    plan, target = case.plan(), replace(SLOW_AND_ANY_MASK, shows_workspace=shown)
    for direction in Direction:
        for rank in {0, ranks - 1}:
            program = plan.program(rank, direction)
            whole, _ = with_calls(program, plan, direction, target)
            for each in (program, whole):
                fused = placed(each, plan.problem, lse_gradient=False, shows_workspace=shown)
                memory = workspace_map(fused, plan.problem)
                assert races(Launched(fused, memory).streams, memory) == []


@pytest.mark.parametrize("without", ["follow", "waits"])
def test_what_is_not_waited_for_is_found(without: str) -> None:
    ranks, options = SETTINGS["ring-q on 4"]
    plan = Case(ranks, 509, 509, heads=(16, 8), mask=Mask(causal=True), options=options).plan()
    results = []
    for direction in Direction:
        program, _ = with_calls(plan.program(0, direction), plan, direction, SLOW_AND_ANY_MASK)
        fused = placed(program, plan.problem, lse_gradient=False, shows_workspace=False)
        memory = workspace_map(fused, plan.problem)
        results += races(Launched(fused, memory, without=(without,)).streams, memory)
    assert results
