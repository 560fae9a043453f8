"""Rotations: blocks that go round a group by point-to-point steps.

At step s a member holds block `blocks[s]`; step 0 is a block it has already. A rotation says, for
every later step, which member the block comes from and which earlier block is passed on to whom.
While a block is being used, the next is already on its way. The owner's own part of the results
that belong to a block never leaves; the others go

*direct*: they are added in the accumulator's precision where they arrive. Inside a node that is at
the member which has the place there that the owner has in its own node, and from there the sum goes
to the owner. So every part is rounded to travel, a node's sum to leave, and the whole at the end,
however many ranks there are; and a block's results enter a node once from each other.

*travel*: with the block; each member adds its part and passes the sum on, the last one to the
owner. That has the partners of the rotation only, but rounds at every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.program import SendRecv, Task


@dataclass(frozen=True, slots=True)
class Hop:
    """How a member gets the block of one step: `send_step` is the earlier block it passes on."""

    send_step: int
    to_member: int
    from_member: int


@dataclass(frozen=True, slots=True)
class Rotation:
    """The way of the blocks as one member sees it.

    blocks[s]    whose block (by member) it holds at step s; blocks[0] is its own
    hops[s - 1]  how the block of step s arrives
    users[s]     the member that holds this member's own block at step s
    """

    member: int
    blocks: tuple[int, ...]
    hops: tuple[Hop, ...]
    users: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.blocks)


def ring(member: int, size: int) -> Rotation:
    """Every step one place on."""
    back, on = (member - 1) % size, (member + 1) % size
    return Rotation(
        member,
        tuple((member - s) % size for s in range(size)),
        tuple(Hop(s - 1, on, back) for s in range(1, size)),
        tuple((member + s) % size for s in range(size)),
    )


def double_ring(member: int, size: int, inner: int) -> Rotation:
    """LoongTrain: once round the inner ring of `inner` members, then one hop of the outer ring.

    Member m sits at (m // inner, m % inner). The block that began an inner round makes the outer
    hop.
    """
    x, y = divmod(member, inner)
    outer = size // inner

    def at(i: int, j: int) -> int:
        return (i % outer) * inner + j % inner

    steps = [(r, t) for r in range(outer) for t in range(inner)]
    hops = []
    for s, (_, t) in enumerate(steps):
        if s and t:
            hops.append(Hop(s - 1, at(x, y + 1), at(x, y - 1)))
        elif s:
            hops.append(Hop(s - inner, at(x + 1, y), at(x - 1, y)))
    return Rotation(
        member,
        tuple(at(x - r, y - t) for r, t in steps),
        tuple(hops),
        tuple(at(x + r, y + t) for r, t in steps),
    )


class Reach(StrEnum):
    """How results that belong to a rotating block reach its owner."""

    TRAVEL = "travel"
    DIRECT = "direct"


class Delivery(NamedTuple):
    """A transfer of what is there of the results of the block of `step`; what comes with it
    belongs to the block of the step `arrives`, and is added to that."""

    step: int
    to_member: int
    from_member: int
    arrives: int


def deliveries(rotation: Rotation, per_node: int | None) -> tuple[tuple[Delivery, ...], ...]:
    """The direct way, after each step; every block but the own is delivered once.

    `per_node` members of a `ring` follow each other in a node. Member i of a node gets the parts of
    blocks with place i from the others there, those of one block for `per_node` steps; all send
    what they have added up when the last is done.

    >>> deliveries(ring(1, 4), per_node=2)[2:]
    ((), (Delivery(step=3, to_member=0, from_member=0, arrives=0), \
Delivery(step=2, to_member=3, from_member=3, arrives=0)))
    """
    size = per_node or rotation.size
    node, place = divmod(rotation.member, size)
    rounds = rotation.size // size
    made: list[tuple[Delivery, ...]] = []
    for step in range(rotation.size):
        now = []
        if step % size:
            to, source = rotation.blocks[step], rotation.users[step]
            if rounds > 1:
                to, source = (node * size + (place + x) % size for x in (-step, step))
            now.append(Delivery(step, to, source, (place + step) // size % rounds * size))
        away, rest = divmod(step + 1, size)
        if rest == 0 and away > 1:
            to, source = ((node + x) % rounds * size + place for x in (1 - away, away - 1))
            now.append(Delivery((away - 1) * size, to, source, 0))
        made.append(tuple(now))
    return tuple(made)


def members_per_node(rings: Iterable[Sequence[int]], nodes: Sequence[int]) -> int | None:
    """How many members of each ring follow each other in a node; None where they do not lie
    so, or where a node has one of them only. `nodes` of all units.

    >>> members_per_node([(0, 1, 2, 3)], [0, 0, 1, 1]), members_per_node([(0, 2)], [0, 0, 1, 1])
    (2, None)
    """
    found = set()
    for members in rings:
        runs = [len([*run]) for _, run in groupby(members, key=lambda member: nodes[member])]
        most = max(Counter(nodes[member] for member in members).values())
        found |= {*runs, most}  # a node that they come back to has more than a run
    (size, *others) = found
    return None if others or size == 1 else size


def hop(
    task: Task,
    group: str,
    rotation: Rotation,
    step: int,
    pieces: Callable[[int], tuple[Piece, ...]],
) -> SendRecv:
    """The transfer that brings the block of a step; `pieces(s)` are the tensors of step s."""
    way = rotation.hops[step - 1]
    return SendRecv(
        task, group, way.to_member, pieces(way.send_step), way.from_member, pieces(step)
    )
