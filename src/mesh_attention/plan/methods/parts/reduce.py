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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.member_pieces import Holders, MemberPieces, MovedTensor
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
Sides = tuple[MemberPieces, MemberPieces]  # what is sent, and what is received
_WHOLE = Holders([[("", None)]])  # all heads of a buffer


def by_member(size: int, pieces: Mapping[int, Pieces]) -> tuple[Pieces, ...]:
    """The pieces of each member of a group; none for members that are not named."""
    return tuple([pieces.get(member, ()) for member in range(size)])


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


class PartialBuffers(NamedTuple):
    """Buffers of one tensor of a chunk: the accumulator, what is sent of it (the accumulator itself
    where precisions are equal), and the result. Partials arrive in `<sent>.in`."""

    total: str
    sent: str
    result: str


Together = tuple[PartialBuffers, ...]  # for one merge: an output with its LSE, or one gradient


@dataclass(frozen=True, slots=True)
class Reduction:
    """How partials of one chunk are reduced in one group, as `member` sees it.

    `owners` are the members that own a part of the whole, and `users` those that hold partials of
    this member's chunk. By nodes `per_node` members follow each other in a node.
    """

    by: ReduceBy
    group: str
    group_size: int
    chunk: Chunk
    owners: Sequence[int]
    users: Sequence[int]
    member: int = 0
    per_node: int = 1

    def counterparts(self) -> range:
        """The members with this one's place in each node: it combines for them in its own."""
        return range(self.member % self.per_node, len(self.owners), self.per_node)

    def stacks(self, name: str, owned: Sequence[Spans], own: Spans) -> dict[str, Spans]:
        """The rows of the stacks in which partials called `name` arrive. `owned`: the rows of all
        members of the group, needed only by nodes; `own`: those of this one."""
        if self.by is not ReduceBy.NODES:
            return {f"{name}.in": stack_rows(own, len(self.users), self.chunk)}
        near: Spans = ()
        for owner in self.counterparts():
            near += stack_rows(owned[owner], 1, self.chunk)
        return {
            f"{name}.in": near * self.per_node,
            f"{name}.node": near,
            f"{name}.nodes": stack_rows(own, len(self.counterparts()), self.chunk),
        }

    def operations(
        self, task: Task, rule: MergeRule, tensors: Sequence[Together]
    ) -> list[Operation]:
        """Partial results of a whole chunk, to their owners."""
        ends = [tuple([self.chunk.local(x.result) for x in group]) for group in tensors]
        softmax = rule is MergeRule.SOFTMAX
        if self.by is ReduceBy.LOCAL:
            last = task.at("merge" if softmax else "copy")
            totals = [tuple([self._whole(x.total) for x in group]) for group in tensors]
            return [Merge(last, rule, *pieces) for pieces in zip(totals, ends, strict=True)]
        if self.by is ReduceBy.REDUCE_SCATTER and softmax:
            return self._scatter_outputs(task, *tensors[0])
        operations: list[Operation] = [
            Merge(task.at("cast"), MergeRule.SUM, (self._whole(x.total),), (self._whole(x.sent),))
            for group in tensors
            for x in group
            if x.sent != x.total
        ]
        names = tuple([tuple([x.sent for x in group]) for group in tensors])
        if self.by is ReduceBy.REDUCE_SCATTER:
            pairs = zip(ends, names, strict=True)
            moves = [Move(end, self._whole(sent), self.chunk.cuts) for (end,), (sent,) in pairs]
            return [*operations, ReduceScatter(task, self.group, tuple(moves))]
        ending, copies = "in", len(self.users)
        if self.by is ReduceBy.NODES:
            ending, copies = "nodes", len(self.counterparts())
            inside, merged, between = _by_nodes(replace(self, group=""), names)
            operations.append(AllToAll(task.at("node"), self.group, *inside))
            operations += [Merge(task.at("node-merge"), rule, *pieces) for pieces in merged]
            operations.append(AllToAll(task, self.group, *between))
        else:
            operations.append(self._exchange(task, [name for group in names for name in group]))
        last = task.at("merge" if softmax else "sum")
        for group, end in zip(names, ends, strict=True):
            parts = _copies([f"{name}.{ending}" for name in group], copies, self.chunk.size)
            operations.append(Merge(last, rule, parts, end))
        return operations

    def _scatter_outputs(
        self, task: Task, out: PartialBuffers, lse: PartialBuffers
    ) -> list[Operation]:
        end_out, end_lse = self.chunk.local(out.result), self.chunk.local(lse.result)
        everywhere, sent = self._whole(f"{lse.total}.all"), self._whole(out.sent)
        parts = (self._whole(out.total), self._whole(lse.total), everywhere)
        copies = _copies([f"{lse.total}.in"], len(self.users), self.chunk.size)
        return [
            self._exchange(task.at("lse"), [lse.total]),
            Merge(task.at("lse-merge"), MergeRule.LSE, copies, (end_lse,)),
            AllGather(
                task.at("lse-all"), self.group, (Move(end_lse, everywhere, self.chunk.cuts),)
            ),
            Merge(task.at("rescale"), MergeRule.RESCALE, parts, (sent,)),
            ReduceScatter(task, self.group, (Move(end_out, sent, self.chunk.cuts),)),
        ]

    def _exchange(self, task: Task, names: Sequence[str]) -> AllToAll:
        """Each owner's rows of the partials, to the owner's stacks."""
        stacks = [f"{name}.in" for name in names]
        owned = {owner: self._owned(at) for at, owner in enumerate(self.owners)}
        sides = self._side(names, owned), self._side(stacks, self._stacked(self.users))
        return AllToAll(task, self.group, *sides)

    def _side(self, names: Sequence[str], rows: Mapping[int, Spans]) -> MemberPieces:
        """These rows of each name, by member; none for members that are not named."""
        of_members = tuple([rows.get(member, ()) for member in range(self.group_size)])
        return MemberPieces(tuple([MovedTensor(name, of_members, _WHOLE) for name in names]))

    def _owned(self, owner: int) -> Spans:
        """The rows of an owner in a whole."""
        return in_whole(owner, len(self.owners), self.chunk)

    def _stacked(self, members: Iterable[int]) -> dict[int, Spans]:
        """The rows of each of these members in a stack of them."""
        return {member: in_stack(at, self.chunk) for at, member in enumerate(members)}

    def _whole(self, buffer: str) -> Piece:
        return Piece(buffer, 0, len(self.owners) * self.chunk.size)


def _copies(stacks: Sequence[str], count: int, size: int) -> Pieces:
    """`count` copies of `size` rows in stacks: the first of each, the second of each, ..."""
    return tuple([Piece(stack, i * size, (i + 1) * size) for i in range(count) for stack in stacks])


@lru_cache(maxsize=1024)  # members with equal places in groups of equal size do the same
def _by_nodes(
    reduction: Reduction, tensors: tuple[tuple[str, ...], ...]
) -> tuple[Sides, list[tuple[Pieces, Pieces]], Sides]:
    """The pieces of the exchange inside a node, of each merge there (inputs, outputs), and of the
    exchange between nodes."""
    per_node, others, chunk = reduction.per_node, reduction.counterparts(), reduction.chunk
    num_nodes, rows = len(others), len(others) * chunk.size
    names = [name for group in tensors for name in group]
    stacks, sums, arriving = ([f"{n}.{end}" for n in names] for end in ("in", "node", "nodes"))
    first = reduction.member - reduction.member % per_node
    sends: dict[int, Spans] = {}
    receives: dict[int, Spans] = {}
    for place in range(per_node):
        of_place = range(place, len(reduction.owners), per_node)
        copies = range(place * num_nodes, (place + 1) * num_nodes)
        sends[first + place] = tuple(chain.from_iterable(map(reduction._owned, of_place)))
        receives[first + place] = tuple([x for copy in copies for x in in_stack(copy, chunk)])
    merged = [
        (
            _copies([f"{name}.in" for name in group], per_node, rows),
            _copies([f"{name}.node" for name in group], 1, rows),
        )
        for group in tensors
    ]
    # Stacks hold a chunk of each counterpart.
    stacked = reduction._stacked(others)
    inside = reduction._side(names, sends), reduction._side(stacks, receives)
    return inside, merged, (reduction._side(sums, stacked), reduction._side(arriving, stacked))
