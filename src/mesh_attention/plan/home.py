"""Ways for partial results to come home: each owner gets the combination of all partials.

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
from mesh_attention.plan.chunks import Chunk, in_stack, in_whole
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Merge,
    MergeRule,
    Move,
    Operation,
    ReduceScatter,
)

__all__ = ["Combine", "Home", "Route", "bring_output_home", "bring_sum_home"]


class Combine(StrEnum):
    AUTO = "auto"  # exchange where every Q group lies inside one node, else reduce-scatter
    EXCHANGE = "exchange"
    REDUCE_SCATTER = "reduce-scatter"


class Route(StrEnum):
    LOCAL = "local"
    EXCHANGE = "exchange"
    REDUCE_SCATTER = "reduce-scatter"


@dataclass(frozen=True, slots=True)
class Home:
    """How partials of one chunk travel in one group.

    `members` are the group's owners in the order of the whole. When the owners are not the whole
    group (`owner_slots`, `user_slots`), an exchange names the group members that own a part of the
    whole, and those that hold partials of this rank's chunk.
    """

    route: Route
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

    def exchange(self, name: str, pairs: tuple[tuple[str, str], ...]) -> AllToAll:
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
        return AllToAll(name, self.group, tuple(sends), tuple(receives))

    def copies(self, stack: str) -> tuple[Piece, ...]:
        size = self.chunk.size
        return tuple(Piece(stack, i * size, (i + 1) * size) for i in range(self.num_copies))

    def whole(self, buffer: str) -> Piece:
        return Piece(buffer, 0, self.num_owners * self.chunk.size)


def bring_output_home(
    name: str, home: Home, *, partial: tuple[str, str], wire: str, out: str, lse: str
) -> list[Operation]:
    """Partial (out, lse) accumulators of a whole chunk, to (out, lse) of the owners.

    `wire` is the buffer in which partial outputs travel; it may be the accumulator itself.
    Buffers of the stacks are named after the partials: `<wire>.in`, `<lse>.in`, `<lse>.all`.
    """
    acc_out, acc_lse = partial
    ends = (home.chunk.local(out), home.chunk.local(lse))
    whole_out, whole_lse, whole_wire = map(home.whole, (acc_out, acc_lse, wire))
    if home.route is Route.LOCAL:
        return [Merge(f"{name}.merge", MergeRule.SOFTMAX, (whole_out, whole_lse), ends)]
    if home.route is Route.EXCHANGE:
        stacks = (f"{wire}.in", f"{acc_lse}.in")
        copies = zip(*map(home.copies, stacks), strict=True)
        return [
            *_to_wire(name, whole_out, whole_wire),
            home.exchange(name, ((wire, stacks[0]), (acc_lse, stacks[1]))),
            Merge(
                f"{name}.merge", MergeRule.SOFTMAX, tuple(p for pair in copies for p in pair), ends
            ),
        ]
    stack, everywhere = f"{acc_lse}.in", home.whole(f"{acc_lse}.all")
    cuts = home.chunk.cuts
    return [
        home.exchange(f"{name}.lse", ((acc_lse, stack),)),
        Merge(f"{name}.lse-merge", MergeRule.LSE, home.copies(stack), (ends[1],)),
        AllGather(f"{name}.lse-all", home.group, (Move(ends[1], everywhere, cuts),)),
        Merge(
            f"{name}.rescale", MergeRule.RESCALE, (whole_out, whole_lse, everywhere), (whole_wire,)
        ),
        ReduceScatter(name, home.group, (Move(ends[0], whole_wire, cuts),)),
    ]


def bring_sum_home(
    name: str, home: Home, tensors: tuple[tuple[str, str, str], ...]
) -> list[Operation]:
    """Sums of partial gradients to their owners; tensors are (accumulator, wire, result)."""
    ends = [home.chunk.local(result) for _, _, result in tensors]
    wholes = [(home.whole(acc), home.whole(wire)) for acc, wire, _ in tensors]
    operations: list[Operation] = []
    if home.route is Route.LOCAL:
        pairs = zip(wholes, ends, strict=True)
        return [Merge(f"{name}.copy", MergeRule.SUM, (acc,), (end,)) for (acc, _), end in pairs]
    for acc, wire in wholes:
        operations += _to_wire(name, acc, wire)
    if home.route is Route.REDUCE_SCATTER:
        moves = tuple(
            Move(end, wire, home.chunk.cuts) for end, (_, wire) in zip(ends, wholes, strict=True)
        )
        return [*operations, ReduceScatter(name, home.group, moves)]
    operations.append(home.exchange(name, tuple((w, f"{w}.in") for _, w, _ in tensors)))
    for (_, travels, _), end in zip(tensors, ends, strict=True):
        copies = home.copies(f"{travels}.in")
        operations.append(Merge(f"{name}.sum", MergeRule.SUM, copies, (end,)))
    return operations


def _to_wire(name: str, acc: Piece, wire: Piece) -> list[Operation]:
    if acc == wire:
        return []
    return [Merge(f"{name}.cast", MergeRule.SUM, (acc,), (wire,))]
