"""Reductions: each owner gets the combination of all partial results of its rows.

`exchange`: one all-to-all that carries every partial (with its LSE), combined by the owner in fp32;
rounds once, best inside a node. `reduce-scatter`: the transport adds on the way, so a partial
crosses into a node once; partial outputs are first rescaled to the global LSE. That LSE is an
all-reduce whose operator is log-sum-exp: as no transport reduces with it, it is done as an
all-to-all, a merge by the owner and an all-gather, which moves half of what max-then-sum would.
`local`: the group is this rank alone. (algorithm.md, section 4)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.build.chunks import Chunk, in_stack, in_whole
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Merge,
    MergeRule,
    Move,
    Operation,
    ReduceScatter,
    Task,
)


class Combine(StrEnum):
    AUTO = "auto"  # exchange where every Q group lies inside one node, else reduce-scatter
    EXCHANGE = "exchange"
    REDUCE_SCATTER = "reduce-scatter"


class ReduceBy(StrEnum):
    LOCAL = "local"
    EXCHANGE = "exchange"
    REDUCE_SCATTER = "reduce-scatter"


@dataclass(frozen=True, slots=True)
class Reduction:
    """How partials of one chunk travel in one group.

    `members` are the group's owners in the order of the whole. When the owners are not the whole
    group (`owner_slots`, `user_slots`), an exchange names the group members that own a part of the
    whole, and those that hold partials of this rank's chunk.
    """

    by: ReduceBy
    group: str
    group_size: int
    chunk: Chunk
    num_owners: int
    owner_slots: tuple[int, ...] | None = None
    user_slots: tuple[int, ...] | None = None

    @property
    def num_copies(self) -> int:
        """Partials that arrive for one chunk."""
        return self.num_owners if self.user_slots is None else len(self.user_slots)

    def exchange(self, task: Task, pairs: tuple[tuple[str, str], ...]) -> AllToAll:
        """Each owner's rows of the partials, to the owner's stacks; pairs of (partial, stack)."""
        owners = self.owner_slots or tuple(range(self.num_owners))
        users = self.user_slots or tuple(range(self.num_owners))
        sends: list[tuple[Piece, ...]] = [()] * self.group_size
        receives: list[tuple[Piece, ...]] = [()] * self.group_size
        for index, slot in enumerate(owners):
            sends[slot] = tuple(
                piece
                for partial, _ in pairs
                for piece in in_whole(partial, index, self.num_owners, self.chunk)
            )
        for index, slot in enumerate(users):
            receives[slot] = tuple(
                piece for _, stack in pairs for piece in in_stack(stack, index, self.chunk)
            )
        return AllToAll(task, self.group, tuple(sends), tuple(receives))

    def copies(self, stack: str) -> tuple[Piece, ...]:
        size = self.chunk.size
        return tuple(Piece(stack, i * size, (i + 1) * size) for i in range(self.num_copies))

    def whole(self, buffer: str) -> Piece:
        return Piece(buffer, 0, self.num_owners * self.chunk.size)


def reduce_output(
    task: Task, reduction: Reduction, *, partial: tuple[str, str], wire: str, out: str, lse: str
) -> list[Operation]:
    """Partial (out, lse) accumulators of a whole chunk, to (out, lse) of the owners.

    `wire` is the buffer in which partial outputs travel; it may be the accumulator itself.
    Buffers of the stacks are named after the partials: `<wire>.in`, `<lse>.in`, `<lse>.all`.
    """
    acc_out, acc_lse = partial
    ends = (reduction.chunk.local(out), reduction.chunk.local(lse))
    whole_out, whole_lse, whole_wire = map(reduction.whole, (acc_out, acc_lse, wire))
    if reduction.by is ReduceBy.LOCAL:
        return [Merge(task.at("merge"), MergeRule.SOFTMAX, (whole_out, whole_lse), ends)]
    if reduction.by is ReduceBy.EXCHANGE:
        stacks = (f"{wire}.in", f"{acc_lse}.in")
        copies = zip(*map(reduction.copies, stacks), strict=True)
        return [
            *_to_wire(task, whole_out, whole_wire),
            reduction.exchange(task, ((wire, stacks[0]), (acc_lse, stacks[1]))),
            Merge(
                task.at("merge"), MergeRule.SOFTMAX, tuple(p for pair in copies for p in pair), ends
            ),
        ]
    stack, everywhere = f"{acc_lse}.in", reduction.whole(f"{acc_lse}.all")
    cuts = reduction.chunk.cuts
    return [
        reduction.exchange(task.at("lse"), ((acc_lse, stack),)),
        Merge(task.at("lse-merge"), MergeRule.LSE, reduction.copies(stack), (ends[1],)),
        AllGather(task.at("lse-all"), reduction.group, (Move(ends[1], everywhere, cuts),)),
        Merge(
            task.at("rescale"), MergeRule.RESCALE, (whole_out, whole_lse, everywhere), (whole_wire,)
        ),
        ReduceScatter(task, reduction.group, (Move(ends[0], whole_wire, cuts),)),
    ]


def reduce_sum(
    task: Task, reduction: Reduction, tensors: tuple[tuple[str, str, str], ...]
) -> list[Operation]:
    """Sums of partial gradients to their owners; tensors are (accumulator, wire, result)."""
    ends = [reduction.chunk.local(result) for _, _, result in tensors]
    wholes = [(reduction.whole(acc), reduction.whole(wire)) for acc, wire, _ in tensors]
    operations: list[Operation] = []
    if reduction.by is ReduceBy.LOCAL:
        pairs = zip(wholes, ends, strict=True)
        return [Merge(task.at("copy"), MergeRule.SUM, (acc,), (end,)) for (acc, _), end in pairs]
    for acc, wire in wholes:
        operations += _to_wire(task, acc, wire)
    if reduction.by is ReduceBy.REDUCE_SCATTER:
        moves = tuple(
            Move(end, wire, reduction.chunk.cuts)
            for end, (_, wire) in zip(ends, wholes, strict=True)
        )
        return [*operations, ReduceScatter(task, reduction.group, moves)]
    operations.append(reduction.exchange(task, tuple((w, f"{w}.in") for _, w, _ in tensors)))
    for (_, travels, _), end in zip(tensors, ends, strict=True):
        copies = reduction.copies(f"{travels}.in")
        operations.append(Merge(task.at("sum"), MergeRule.SUM, copies, (end,)))
    return operations


def _to_wire(task: Task, acc: Piece, wire: Piece) -> list[Operation]:
    if acc == wire:
        return []
    return [Merge(task.at("cast"), MergeRule.SUM, (acc,), (wire,))]
