"""One side of what is seen: the queries, or the keys and values, that a rank works on.

Rows of others arrive before the attention, partial results of those rows go back after it, and the
owner combines the partials of each of its rows. A side knows which tensors these are, under which
names they lie in a program, and nothing of the other side.

Names: `k.0` are the gathered keys of slice 0, `grad_k.0` their partial gradients, `.wire` what
travels, `.in` what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.language.program import Merge, MergeRule, Operation, Task
from mesh_attention.plan.methods.parts.chunks import Chunk
from mesh_attention.plan.methods.parts.head_group import HeadGroup
from mesh_attention.plan.methods.parts.needed_share import ByRank, SeenShare, Stretches, Summand
from mesh_attention.plan.problem.spans import Spans

Pieces = tuple[Piece, ...]
ByMember = dict[int, Pieces]


class SeenSide:
    def __init__(
        self,
        head_group: HeadGroup,
        shares: Callable[[int], SeenShare],
        slices: tuple[int, ...],
        *,
        travels: bool,
        inputs: tuple[Kind, ...],
        partials: tuple[Kind, ...],
        rule: MergeRule,
    ) -> None:
        self.head_group = head_group
        self.shares = shares
        self.travels = travels  # does any rank work on rows of another?
        self.inputs = inputs
        self.partials = partials
        self.rule = rule  # of partials
        self.slots = head_group.layout(inputs[0]).slots
        self.chunks = head_group.chunks(inputs[0], 1, slices)
        self._pieces, self._piece = cache(_pieces), cache(Piece)  # ranks exchange alike rows

    # Operands of an attention.

    def operand(self, share: SeenShare, kind: Kind, part: int) -> Piece:
        if share.local:
            return self.chunks[part].local(self.head_group.local(kind))
        return Piece(f"{kind}.{part}", 0, share.num_rows)

    def sums(self, share: SeenShare, part: int) -> Pieces:
        return tuple(Piece(f"{kind}.{part}", 0, share.num_rows) for kind in self.partials)

    # What is exchanged, by member of the group.

    def given(self, share: SeenShare, part: int) -> ByMember:
        own = tuple(self.head_group.local(kind) for kind in self.inputs)
        return self._by_member(share.given, own, self.chunks[part].heads)

    def gathered(self, share: SeenShare, part: int) -> ByMember:
        return self._by_member(share.gathered, tuple(f"{kind}.{part}" for kind in self.inputs))

    def sent(self, share: SeenShare, part: int) -> ByMember:
        """Partial results of rows of others."""
        others = {m: rows for m, rows in share.gathered.items() if m != share.rank}
        wires = tuple(self._own_partial(share, kind, part) for kind in self.partials)
        return self._by_member(others, wires)

    def arriving(self, share: SeenShare, part: int) -> ByMember:
        return self._by_member(share.stacked, tuple(f"{kind}.{part}.in" for kind in self.partials))

    def _by_member(
        self, rows: ByRank, buffers: tuple[str, ...], heads: tuple[int, int] | None = None
    ) -> ByMember:
        pieces = self._pieces
        return {member: pieces(buffers, stretches, heads) for member, stretches in rows.items()}

    # Partials on their way to the owner.

    def to_wire(self, task: Task, share: SeenShare, part: int) -> list[Operation]:
        casts: list[Operation] = []
        for kind in self.partials:
            name, wire = f"{kind}.{part}", self._own_partial(share, kind, part)
            if wire != name:
                whole, travels = (Piece(buffer, 0, share.num_rows) for buffer in (name, wire))
                casts.append(Merge(task.at("cast"), MergeRule.SUM, (whole,), (travels,)))
        return casts

    def merges(self, task: Task, share: SeenShare, part: int) -> list[Operation]:
        """To the results of own rows; of nothing where nobody has a partial."""
        together = self.rule is MergeRule.SOFTMAX
        groups = [self.partials] if together else [(kind,) for kind in self.partials]
        merges: list[Operation] = []
        for kinds in groups:
            ends = [self.head_group.local(kind) for kind in kinds]
            buffers = [(self._own_partial(share, k, part), f"{k}.{part}.in") for k in kinds]
            for stretch, summands in share.sums:
                inputs = tuple(
                    [self._summand(of, one, stretch) for one in summands for of in buffers]
                )
                outputs = tuple([Piece(end, *stretch, self.chunks[part].heads) for end in ends])
                merges.append(Merge(task, self.rule, inputs, outputs))
        return merges

    def _summand(self, buffers: tuple[str, str], one: Summand, stretch: tuple[int, int]) -> Piece:
        shift = one.row - one.start
        return self._piece(buffers[one.arrives], stretch[0] + shift, stretch[1] + shift)

    def _own_partial(self, share: SeenShare, kind: Kind, part: int) -> str:
        """The buffer in which partials travel; those of a rank that sends none stay wide."""
        problem = self.head_group.problem
        same = kind.is_statistic or problem.accumulate_bytes == problem.element_bytes
        return f"{kind}.{part}" if same or share.local else f"{kind}.{part}.wire"

    # Buffers; those that a rank does not use are left out of its program.

    def buffers(self, share: SeenShare) -> Iterator[Buffer]:
        for part, chunk in enumerate(self.chunks):
            for kind in self.inputs if not share.local else ():
                yield self._buffer(f"{kind}.{part}", kind, share.rows, chunk)
            for kind in self.partials:
                name = f"{kind}.{part}"
                yield self._buffer(name, kind, share.rows, chunk, Precision.ACCUMULATE)
                if self._own_partial(share, kind, part) != name:
                    yield self._buffer(f"{name}.wire", kind, share.rows, chunk)
                if share.stack:
                    yield self._buffer(f"{name}.in", kind, share.stack, chunk)

    def _buffer(
        self, name: str, kind: Kind, rows: Spans, chunk: Chunk, precision: Precision | None = None
    ) -> Buffer:
        heads = chunk.heads or self.head_group.heads(kind)
        return Buffer(name, kind, rows, heads, precision or kind.precision)


def _pieces(
    buffers: tuple[str, ...], stretches: Stretches, heads: tuple[int, int] | None
) -> Pieces:
    return tuple([Piece(name, a, b, heads) for name in buffers for a, b in stretches])
