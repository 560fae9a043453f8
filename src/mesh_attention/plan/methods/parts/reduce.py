"""Reductions: each owner gets the combination of all partial results of its rows.

exchange         one all-to-all carries every partial (with its LSE), and the owner combines them in
                 fp32; rounds once, best inside a node
nodes            an exchange inside each node, to the member with the owner's place there, and one
                 between nodes of what each node has combined; the same bytes, but only one partial
                 of each node crosses to another, with one more rounding
reduce-scatter   the transport adds on the way, and rounds at every hop where elements are narrower
                 than accumulators; partial outputs are first rescaled to the global LSE. No
                 transport reduces by log-sum-exp, so that LSE takes an all-to-all, a merge by the
                 owner and an all-gather: half the bytes of max-then-sum
local            the group is this rank alone

Used by tiles and by StarTrail (algorithm.md, section 4). These functions only make operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Merge,
    MergeRule,
    Move,
    Operation,
    ReduceScatter,
    Task,
)
from mesh_attention.plan.methods.parts.chunks import Chunk, in_stack, in_whole, stack_rows
from mesh_attention.plan.problem.spans import Spans

Pieces = tuple[Piece, ...]
Exchanged = tuple[tuple[Pieces, ...], tuple[Pieces, ...]]  # sent and received, by member


def by_member(size: int, pieces: Mapping[int, Pieces]) -> tuple[Pieces, ...]:
    """The pieces of each member of a group; none for members that are not named."""
    return tuple(pieces.get(member, ()) for member in range(size))


class Combine(StrEnum):
    # Exchange where every Q group is inside one node; otherwise reduce-scatter for elements that
    # accumulate in their own precision, and nodes for narrower ones.
    AUTO = "auto"
    EXCHANGE = "exchange"
    REDUCE_SCATTER = "reduce-scatter"
    NODES = "nodes"


class ReduceBy(StrEnum):
    LOCAL = "local"
    EXCHANGE = "exchange"
    NODES = "nodes"
    REDUCE_SCATTER = "reduce-scatter"


@dataclass(frozen=True, slots=True)
class Reduction:
    """How partials of one chunk are reduced in one group.

    Where the owners are not the whole group, `owner_slots` are the group members that own a part of
    the whole, and `user_slots` the members that hold partials of this rank's chunk. By nodes:
    `per_node` members follow each other in a node, and `member` is this one.
    """

    by: ReduceBy
    group: str
    group_size: int
    chunk: Chunk
    num_owners: int
    owner_slots: tuple[int, ...] | None = None
    user_slots: tuple[int, ...] | None = None
    per_node: int = 1
    member: int = 0

    def of_member(self, member: int, per_node: int) -> Reduction:
        """The reduction of one member; members differ only by nodes."""
        by_nodes = self.by is ReduceBy.NODES
        return replace(self, member=member, per_node=per_node) if by_nodes else self

    @property
    def num_nodes(self) -> int:
        return self.num_owners // self.per_node

    @property
    def counterparts(self) -> tuple[int, ...]:
        """The members with this one's place in each node: it combines for them in its own."""
        return tuple(range(self.member % self.per_node, self.num_owners, self.per_node))

    def to_owners(
        self, task: Task, rule: MergeRule, pairs: tuple[tuple[str, ...], ...]
    ) -> tuple[list[Operation], str]:
        """The transfers, and the ending of the names of the stacks in which partials arrive for the
        last merges. `pairs` are the buffers of partials that one merge combines."""
        if self.by is not ReduceBy.NODES:
            names = [name for pair in pairs for name in pair]
            return [self.exchange(task, tuple((name, f"{name}.in") for name in names))], "in"
        inside, merged, between = _by_nodes(replace(self, group=""), pairs)
        operations: list[Operation] = [
            AllToAll(task.at("node"), self.group, *inside),
            *(Merge(task.at("node-merge"), rule, *pieces) for pieces in merged),
            AllToAll(task, self.group, *between),
        ]
        return operations, "nodes"

    @property
    def num_copies(self) -> int:
        """Partials that arrive for one chunk."""
        if self.by is ReduceBy.NODES:
            return self.num_nodes
        return self.num_owners if self.user_slots is None else len(self.user_slots)

    def exchange(self, task: Task, pairs: tuple[tuple[str, str], ...]) -> AllToAll:
        """Each owner's rows of the partials, to the owner's stacks; pairs of (partial, stack)."""
        owners = self.owner_slots or tuple(range(self.num_owners))
        users = self.user_slots or tuple(range(self.num_owners))
        sends = {
            slot: tuple(
                piece
                for partial, _ in pairs
                for piece in in_whole(partial, index, self.num_owners, self.chunk)
            )
            for index, slot in enumerate(owners)
        }
        receives = {
            slot: tuple(piece for _, stack in pairs for piece in in_stack(stack, index, self.chunk))
            for index, slot in enumerate(users)
        }
        size = self.group_size
        return AllToAll(task, self.group, by_member(size, sends), by_member(size, receives))

    def copies(self, stack: str) -> tuple[Piece, ...]:
        size = self.chunk.size
        return tuple(Piece(stack, i * size, (i + 1) * size) for i in range(self.num_copies))

    def whole(self, buffer: str) -> Piece:
        return Piece(buffer, 0, self.num_owners * self.chunk.size)


@lru_cache(maxsize=1024)  # members with equal places in groups of equal size do the same
def _by_nodes(
    reduction: Reduction, pairs: tuple[tuple[str, ...], ...]
) -> tuple[Exchanged, tuple[tuple[Pieces, Pieces], ...], Exchanged]:
    """The pieces of the exchange inside a node, of each merge there (inputs, outputs), and of the
    exchange between nodes."""
    chunk, per_node, num_nodes = reduction.chunk, reduction.per_node, reduction.num_nodes
    names = [name for pair in pairs for name in pair]
    sends: dict[int, Pieces] = {}
    receives: dict[int, Pieces] = {}
    first = reduction.member - reduction.member % per_node
    for place in range(per_node):
        sends[first + place] = tuple(
            [
                piece
                for name in names
                for owner in range(place, reduction.num_owners, per_node)
                for piece in in_whole(name, owner, reduction.num_owners, chunk)
            ]
        )
        receives[first + place] = tuple(
            [
                piece
                for name in names
                for node in range(num_nodes)
                for piece in in_stack(f"{name}.in", place * num_nodes + node, chunk)
            ]
        )
    rows = num_nodes * chunk.size
    merged = tuple(
        (
            tuple(
                Piece(f"{name}.in", place * rows, (place + 1) * rows)
                for place in range(per_node)
                for name in pair
            ),
            tuple(Piece(f"{name}.node", 0, rows) for name in pair),
        )
        for pair in pairs
    )
    # Of each counterpart, in stacks of as many chunks as there are nodes.
    stacked = [
        {
            slot: tuple(p for name in names for p in in_stack(f"{name}.{end}", node, chunk))
            for node, slot in enumerate(reduction.counterparts)
        }
        for end in ("node", "nodes")
    ]
    size = reduction.group_size
    inside = (by_member(size, sends), by_member(size, receives))
    return inside, merged, (by_member(size, stacked[0]), by_member(size, stacked[1]))


def reduce_output(
    task: Task, reduction: Reduction, *, partial: tuple[str, str], wire: str, out: str, lse: str
) -> list[Operation]:
    """Partial (out, lse) accumulators of a whole chunk, to (out, lse) of the owners.

    `wire` is the buffer from which partial outputs are sent; it may be the accumulator itself.
    Stacks are named after the partials: `<wire>.in`, `<lse>.in`, `<lse>.all`.
    """
    acc_out, acc_lse = partial
    ends = (reduction.chunk.local(out), reduction.chunk.local(lse))
    whole_out, whole_lse, whole_wire = map(reduction.whole, (acc_out, acc_lse, wire))
    if reduction.by is ReduceBy.LOCAL:
        return [Merge(task.at("merge"), MergeRule.SOFTMAX, (whole_out, whole_lse), ends)]
    if reduction.by is not ReduceBy.REDUCE_SCATTER:
        sent, last = reduction.to_owners(task, MergeRule.SOFTMAX, ((wire, acc_lse),))
        stacks = (reduction.copies(f"{name}.{last}") for name in (wire, acc_lse))
        copies = tuple(piece for pair in zip(*stacks, strict=True) for piece in pair)
        merge = Merge(task.at("merge"), MergeRule.SOFTMAX, copies, ends)
        return [*_to_wire(task, whole_out, whole_wire), *sent, merge]
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
    sent, last = reduction.to_owners(task, MergeRule.SUM, tuple((w,) for _, w, _ in tensors))
    operations += sent
    for (_, travels, _), end in zip(tensors, ends, strict=True):
        copies = reduction.copies(f"{travels}.{last}")
        operations.append(Merge(task.at("sum"), MergeRule.SUM, copies, (end,)))
    return operations


def _to_wire(task: Task, acc: Piece, wire: Piece) -> list[Operation]:
    if acc == wire:
        return []
    return [Merge(task.at("cast"), MergeRule.SUM, (acc,), (wire,))]


def stacks(
    reduction: Reduction, name: str, owners: Sequence[Spans], own: Spans
) -> dict[str, Spans]:
    """The rows of the stacks in which partials called `name` arrive. `owners`: the rows of all
    members of the group, needed only by nodes; `own`: the rows of this one."""
    if reduction.by is not ReduceBy.NODES:
        return {f"{name}.in": stack_rows(own, reduction.num_copies, reduction.chunk)}
    near: Spans = ()
    for owner in reduction.counterparts:
        near += stack_rows(owners[owner], 1, reduction.chunk)
    return {
        f"{name}.in": near * reduction.per_node,
        f"{name}.node": near,
        f"{name}.nodes": stack_rows(own, reduction.num_nodes, reduction.chunk),
    }
