"""Methods whose queries stay and whose keys wander: Ring-Attention and what is made of it.

A team of `a` units gathers its Q (a = 1: Ring-Attention); the KV blocks wander along a route. The
backward pass sends dK and dV after them, travelling or direct (`circulate.py`). algorithm.md, 9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mesh_attention.plan.buffers import Buffer, Kind, Precision
from mesh_attention.plan.layout import Spans
from mesh_attention.plan.methods.circulate import Route, hop
from mesh_attention.plan.methods.key_steps import Gradients, KeySteps, Pair, QueryPieces
from mesh_attention.plan.methods.lowerings import Lowerings
from mesh_attention.plan.program import Call, Merge, MergeRule, Operation, SendRecv

__all__ = ["KeyRing"]

_KEYS = (Kind.K, Kind.V)
_GRADS = (Kind.GRAD_K, Kind.GRAD_V)


class KeyRing:
    """The steps of one member. `blocks(member)` gives the rows of a member's block."""

    def __init__(
        self,
        group: str,
        route: Route,
        blocks: Callable[[int], Spans],
        heads: tuple[int, int],
        rows: Spans,
        queries: QueryPieces,
        steps: KeySteps,
        lowerings: Lowerings,
    ) -> None:
        self._group = group
        self._route = route
        self._queries = queries
        self._seen = lowerings.queries(rows)
        self._lowerings = lowerings
        self._heads = heads
        self._steps = steps
        self._rows = [blocks(member) for member in route.blocks]
        self.buffers: dict[str, Buffer] = {}
        for step in range(1, route.size):
            self._add(steps.keys(step), _KEYS, step)

    def _add(
        self,
        pieces: Pair,
        kinds: tuple[Kind, Kind],
        step: int,
        precision: Precision = Precision.ELEMENT,
    ) -> None:
        """Declare the buffers that hold rows of a step's block."""
        for piece, kind in zip(pieces, kinds, strict=True):
            name = piece.buffer
            self.buffers[name] = Buffer(name, kind, self._rows[step], self._heads, precision)

    def _bring(self, step: int) -> list[Operation]:
        """The transfer of a step's block; nothing after the last."""
        if step >= self._route.size:
            return []
        return [hop(f"KV-{step}", self._group, self._route, step, self._steps.keys)]

    def _calls(self, step: int) -> tuple[Call, ...]:
        return self._lowerings.calls(self._seen, self._lowerings.keys(self._rows[step]))

    def forward(self) -> list[Operation]:
        """Attention over all blocks, merged into the partial output."""
        operations: list[Operation] = []
        begun = False
        for step in range(self._route.size):
            operations += self._bring(step + 1)
            calls = self._calls(step)
            if calls:
                operations.append(self._steps.attend(step, calls, fresh=not begun))
                begun = True
        if not begun:
            empty = (self._queries.out, self._queries.lse)
            operations.append(Merge("C.empty", MergeRule.SOFTMAX, (), empty))
        return operations

    def backward(self, gradients: Gradients, results: tuple[str, str]) -> list[Operation]:
        """Gradients of all blocks; `results` are buffers of this member's own block."""
        steps, grad_q = self._steps, self._queries.grad_q
        assert grad_q is not None
        operations: list[Operation] = []
        begun = False
        for step in range(self._route.size):
            operations += self._bring(step + 1)
            calls = self._calls(step)
            self._add(steps.sums(step), _GRADS, step, Precision.ACCUMULATE)
            if calls:
                operations.append(steps.attend_backward(step, calls, fresh_q=not begun))
                begun = True
            if step > 0:
                operations += self._send_home(gradients, step, computed=bool(calls))
            elif not calls:
                operations += [
                    Merge("C.empty", MergeRule.SUM, (), (total,)) for total in steps.sums(0)
                ]
        if not begun:
            operations.append(Merge("C.empty", MergeRule.SUM, (), (grad_q,)))
        came_home = gradients is Gradients.TRAVEL and self._route.size > 1
        return operations + steps.end(results, came_home=came_home)

    def _send_home(self, gradients: Gradients, step: int, *, computed: bool) -> list[Operation]:
        """This member's part of the gradients of a step's block, on its way to the owner."""
        route, steps = self._route, self._steps
        travels = gradients is Gradients.TRAVEL
        if travels:
            to_member, from_member = route.hops[0].to_member, route.hops[0].from_member
            last = step == route.size - 1
            suffix, arrives = ("home", 0) if last else (f"{step + 1}.sofar", step + 1)
        else:
            to_member, from_member = route.blocks[step], route.users[step]
            suffix, arrives = f"home{step}", 0
        outgoing, incoming = steps.wires(step), steps.arriving(suffix)
        self._add(outgoing, _GRADS, step)
        self._add(incoming, _GRADS, arrives)
        return [
            *steps.sum_up(step, computed, travels),
            SendRecv(f"dKV-{step}", self._group, to_member, outgoing, from_member, incoming),
            *(() if travels else steps.add_arrivals(step)),
        ]

    def steps(self, backward: bool) -> list[tuple[str | None, Sequence[str]]]:
        """The schedule: transfers beside the computation they hide behind."""
        size = self._route.size
        steps: list[tuple[str | None, Sequence[str]]] = []
        for step in range(size):
            steps.append((f"KV-{step + 1}" if step + 1 < size else None, (f"C-0-{step}",)))
            if backward and step > 0:
                steps.append((f"dKV-{step}", ()))
        return steps
