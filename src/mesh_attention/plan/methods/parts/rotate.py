"""Rotations: blocks that go round a group by point-to-point steps.

At step s a member holds block `blocks[s]`; step 0 is a block it has already. A rotation says, for
every later step, which member the block comes from and which earlier block is passed on to whom.
While a block is used, the next one is already in flight. The owner keeps its own part of the
results that belong to its block. The parts of the other members reach it in one of two ways:

*direct*: each part is sent and added, in the accumulator's precision, where it arrives. Inside a
node that is at the member with the owner's place in its own node, and from there the sum goes to
the owner. A part is rounded when it is sent, a node's sum when it leaves, and the total at the end,
however many ranks there are; and a block's results enter a node once from each other node.

*travel*: results go round with their block; each member adds its part and passes the sum on, the
last one to the owner. Transfers are then between neighbours only, but each step rounds.

Used by the rings of keys and of queries. Pure functions of a member's place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple


class Hop(NamedTuple):
    """How a member gets the block of one step: `send_step` is the earlier block it passes on."""

    send_step: int
    to_member: int
    from_member: int


class Rotation(NamedTuple):
    """The path of the blocks as one member sees it.

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


def ring(member: int, size: int, inner: int | None = None) -> Rotation:
    """Every step one place on. With `inner`, LoongTrain's double ring: once round the inner ring of
    `inner` members, then one hop of the outer ring.

    Member m sits at (m // inner, m % inner). The block that began an inner round makes the outer
    hop.
    """
    inner = inner or size
    x, y = divmod(member, inner)
    outer = size // inner

    def at(i: int, j: int) -> int:
        return (i % outer) * inner + j % inner

    steps = [(r, t) for r in range(outer) for t in range(inner)]
    hops = [
        Hop(s - 1, at(x, y + 1), at(x, y - 1)) if t else Hop(s - inner, at(x + 1, y), at(x - 1, y))
        for s, (_, t) in enumerate(steps)
        if s
    ]
    blocks = tuple([at(x - r, y - t) for r, t in steps])
    return Rotation(member, blocks, tuple(hops), tuple([at(x + r, y + t) for r, t in steps]))


class GradientRoute(StrEnum):
    """How results that belong to a rotating block (gradients, or outputs) reach its owner."""

    TRAVEL = "travel"
    DIRECT = "direct"


class Delivery(NamedTuple):
    """A transfer of the results of the block of `step`; what arrives belongs to the block of the
    step `arrives`, and is added to it."""

    step: int
    to_member: int
    from_member: int
    arrives: int


def deliveries(
    rotation: Rotation, route: GradientRoute = GradientRoute.DIRECT, per_node: int = 1
) -> list[list[Delivery]]:
    """What is delivered after each step. The results of every block but the own are sent once.

    On the direct route `per_node` members of a `ring` follow each other in a node. Member i of a
    node receives the parts of blocks with place i from the others there, those of one block for
    `per_node` steps; all send their sums when the last part is added.

    >>> deliveries(ring(1, 4), per_node=2)[3]
    [Delivery(step=3, to_member=0, from_member=0, arrives=0), \
Delivery(step=2, to_member=3, from_member=3, arrives=0)]
    """
    if route is GradientRoute.TRAVEL:
        last, (to, source) = rotation.size - 1, (rotation.blocks[-1], rotation.users[-1])
        neighbours = [
            Delivery(step, to, source, 0 if step == last else step + 1)
            for step in range(1, rotation.size)
        ]
        return [[], *([sent] for sent in neighbours)]
    size = per_node if per_node > 1 else rotation.size  # else all are as in one node
    node, place = divmod(rotation.member, size)
    rounds = rotation.size // size
    by_step: list[list[Delivery]] = []
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
        by_step.append(now)
    return by_step


def members_per_node(rings: Iterable[Sequence[int]], nodes: Sequence[int]) -> int:
    """How many members of each ring follow each other in a node; 1 where the numbers differ.
    `nodes`: the node of each unit.

    >>> members_per_node([(0, 1, 2, 3)], [0, 0, 1, 1]), members_per_node([(0, 2)], [0, 0, 1, 1])
    (2, 1)
    """
    sizes = set[int]()
    for members in rings:
        runs = [len([*run]) for _, run in groupby(members, key=lambda member: nodes[member])]
        most = max(Counter(nodes[member] for member in members).values())
        sizes |= {*runs, most}  # a node that the ring comes back to has more than a run
    return sizes.pop() if len(sizes) == 1 else 1
