"""What the members of all query rings of a pass hold alike at a step: pieces and operations.

As for keys (`key_steps.py`): all but the transfers is made once for a step and shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mesh_attention.plan.buffers import Kind, Piece, Precision
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import Attend, AttendBackward, Call, Merge, MergeRule, Operation

__all__ = ["Cast", "Form", "Pieces", "QuerySteps"]

Pieces = tuple[Piece, ...]
Form = tuple[Kind, Precision]


@dataclass(frozen=True, slots=True)
class Cast:
    """A partial result rounded to travel."""

    form: Form
    operation: Merge


class QuerySteps:
    """Calls are told apart by identity: `Lowerings` makes equal calls the same object."""

    def __init__(self, mesh: MeshPass) -> None:
        self._mesh = mesh
        self._block_rows = mesh.strand.size(Kind.Q)
        self.inputs = mesh.q_inputs
        # What a partial result of a Q block consists of.
        self.kinds = tuple(kind for _, kind in mesh.q_partials())
        self.input_forms = [(kind, mesh.precision_of(kind)) for kind in self.inputs]
        self.wire_forms = [(kind, mesh.precision_of(kind)) for kind in self.kinds]
        self.sum_forms = [(kind, Precision.ACCUMULATE) for kind in self.kinds]
        self.backward = mesh.direction is Direction.BACKWARD
        self.rule = MergeRule.SUM if self.backward else MergeRule.SOFTMAX
        self._attends: dict[tuple[int, int, bool], Operation] = {}
        self.queries = cache(self._queries)
        self.partial = cache(self._partial)
        self.results = self._pieces([mesh.strand.local(kind) for kind in self.kinds])
        self.empty = cache(self._empty)
        self.merge_on = cache(self._merge_on)
        self.casts = cache(self._casts)

    def _pieces(self, names: list[str]) -> Pieces:
        return tuple(Piece(name, 0, self._block_rows) for name in names)

    def _queries(self, step: int) -> Pieces:
        local = self._mesh.strand.local
        return self._pieces([f"{x}.{step}" if step else local(x) for x in self.inputs])

    def _partial(self, suffix: str) -> Pieces:
        """Partial results: `3.sum` of step 3, `3.wire` as it travels, `3.in` as it arrives, ..."""
        return self._pieces([f"{kind}.{suffix}" for kind in self.kinds])

    def attend(self, step: int, calls: tuple[Call, ...], *, fresh_kv: bool) -> Operation:
        key = (step, id(calls), fresh_kv)
        if key not in self._attends:
            self._attends[key] = self._attend(step, calls, fresh_kv)
        return self._attends[key]

    def _attend(self, step: int, calls: tuple[Call, ...], fresh_kv: bool) -> Operation:
        mesh, name, sums = self._mesh, f"C-{step}-0", self.partial(f"{step}.sum")
        query = dict(zip(self.inputs, self.queries(step), strict=True))
        keys = (mesh.kv_piece("k", 0), mesh.kv_piece("v", 0))
        if not self.backward:
            return Attend(name, query[Kind.Q], *keys, sums[0], sums[1], calls, fresh=True)
        return AttendBackward(
            name,
            query[Kind.Q],
            *keys,
            query[Kind.GRAD_OUT],
            query[Kind.LSE],
            query.get(Kind.OUT),
            query.get(Kind.DELTA),
            sums[0],
            mesh.kv_partial("grad_k", 0),
            mesh.kv_partial("grad_v", 0),
            calls,
            fresh_q=True,
            fresh_kv=fresh_kv,
        )

    def _empty(self, step: int) -> Operation:
        return Merge("C.empty", self.rule, (), self.partial(f"{step}.sum"))

    def _merge_on(self, step: int) -> Operation:
        """RingQ/O: merge into what came with the block."""
        came = self.partial(f"{step}.sofar") if step > 1 else ()
        parts = self.partial(f"{step}.sum") + came
        return Merge(f"O-{step}.merge", self.rule, parts, self.partial(f"{step}.wire"))

    def end_of_travel(self, *, came_home: bool) -> Operation:
        parts = self.partial("0.sum") + (self.partial("home") if came_home else ())
        return Merge("O.end", self.rule, parts, self.results)

    def _casts(self, step: int) -> tuple[Pieces, tuple[Cast, ...]]:
        """Pass-Q: the pieces in which a partial travels, and the casts that it takes."""
        name, outgoing = f"{self._mesh.q_return}-0.cast", []
        casts = []
        for form, total in zip(self.wire_forms, self.partial(f"{step}.sum"), strict=True):
            wire = total.buffer if form[0].is_statistic else self._mesh.wire(total.buffer)
            if wire == total.buffer:
                outgoing.append(total)
            else:
                outgoing.append(Piece(wire, 0, self._block_rows))
                casts.append(Cast(form, Merge(name, MergeRule.SUM, (total,), (outgoing[-1],))))
        return tuple(outgoing), tuple(casts)

    def merge_all(self, num_steps: int) -> Operation:
        """The own partial and those of all others."""
        arrived = (piece for step in range(1, num_steps) for piece in self.partial(f"{step}.in"))
        parts = (*self.partial("0.sum"), *arrived)
        return Merge(f"{self._mesh.q_return}-0.merge", self.rule, parts, self.results)
