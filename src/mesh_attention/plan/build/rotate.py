"""Rotations: blocks that go round a group by point-to-point steps.

At step s a member holds block `blocks[s]`; step 0 is a block it has already. A rotation says, for
every later step, which member the block comes from and which earlier block is passed on to whom.
While a block is being used, the next is already on its way. Results that belong to a block go
*direct* to its owner, or *travel* with it: each member adds its part and passes the sum on, and the
last one hands it to the owner. The owner's own part never leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.program import SendRecv, Task


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
