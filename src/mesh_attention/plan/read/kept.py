"""What a layer holds between its passes, and what it need not fetch again for that.

The command line, the reports of an object and the searches read it; nothing here changes a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Role
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import AllToAll, Communication, Program, SendRecv
from mesh_attention.plan.language.traffic import TrafficMeter
from mesh_attention.plan.problem.problem import Problem

_FETCHED = (Kind.Q, Kind.K, Kind.V)


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Of the rank that holds most. `kept_bytes`: rows of other ranks, or in other layouts, that the
    forward pass leaves; `held_bytes`: these, and the caller's tensors that the backward pass takes
    again; `shard_bytes`: the caller's tensors alone, which is held where nothing is kept.
    `saved_bytes`: rows of q, k and v that a rank receives forward and not backward, in the mean.
    """

    kept_bytes: int
    held_bytes: int
    shard_bytes: int
    saved_bytes: float

    @property
    def extra_bytes(self) -> int:
        """What keeping costs."""
        return self.held_bytes - self.shard_bytes

    def of_layers(self, layers: int) -> KeptBytes:
        """Held at once by so many layers; each saves as much."""
        kept, held, shards = (
            layers * size for size in (self.kept_bytes, self.held_bytes, self.shard_bytes)
        )
        return KeptBytes(kept, held, shards, self.saved_bytes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"extra_bytes": self.extra_bytes}


def kept_bytes(plan: Plan) -> KeptBytes:
    """Of a plan with both passes, for one layer and a batch of one."""
    problem, ranks = plan.problem, range(plan.num_ranks)
    forward, backward = (plan.direction(direction) for direction in Direction)
    largest = max(
        (_held(forward.programs[rank], backward.programs[rank], problem) for rank in ranks),
        key=lambda sizes: sizes[1],
    )
    fetched = [
        sum(_fetched(pass_, rank, problem) for rank in ranks) for pass_ in (forward, backward)
    ]
    saved = (fetched[0] - fetched[1]) / plan.num_ranks if largest[0] else 0.0
    return KeptBytes(*largest, saved)


def recalled(program: Program) -> tuple[Buffer, ...]:
    """The buffers that a backward program takes from the forward program of its rank."""
    return tuple(buffer for buffer in program.buffers if buffer.role is Role.RECALLED)


def _held(forward: Program, backward: Program, problem: Problem) -> tuple[int, int, int]:
    kept = _bytes_of(recalled(backward), problem)
    inputs = [b for b in backward.buffers if b.role is Role.INPUT and b.kind is not Kind.GRAD_OUT]
    callers = [b for b in forward.buffers if b.role in (Role.INPUT, Role.OUTPUT)]
    return kept, kept + _bytes_of(inputs, problem), _bytes_of(callers, problem)


def _bytes_of(buffers: Iterable[Buffer], problem: Problem) -> int:
    return sum(buffer.num_bytes(problem) for buffer in buffers)


def _fetched(pass_: Pass, rank: int, problem: Problem) -> int:
    """Bytes of q, k and v that a rank receives."""
    program = pass_.programs[rank]
    table = program.buffer_table()
    meter, total = TrafficMeter(problem, table), 0

    def only(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces if table[piece.buffer].kind in _FETCHED)

    for op in program.operations:
        if not isinstance(op, Communication):
            continue
        if isinstance(op, AllToAll):
            op = replace(op, sends=(), receives=tuple(map(only, op.receives)))
        elif isinstance(op, SendRecv):
            op = replace(op, sends=(), receives=only(op.receives))
        else:
            op = replace(op, moves=tuple(move for move in op.moves if only((move.part,))))
        group = pass_.groups[op.group]
        total += meter.traffic(op, pass_.members[op.group][rank], len(group)).received_bytes
    return total
