"""The messages of an exchange: found once for an operation, given tensors in every call.

In an exchange of heads, the pieces for several members follow each other in the same rows. One
piece holds them all then, and one copy packs or unpacks it: launches cost more than such copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.runtime.transport.interface import Transfers, View


class Message(NamedTuple):
    """`tag`: its number between two ranks, the same on both sides."""

    piece: Piece  # of all its members, in heads of their order
    members: tuple[int, ...]
    tag: int
    sent: bool

    def tensor(self, view: View) -> Tensor:
        """By member in a first dimension, where there are several."""
        rows = view(self.piece)
        if len(self.members) == 1:
            return rows
        num_rows, batch, heads, width = rows.shape
        each = heads // len(self.members)
        return rows.view(num_rows, batch, len(self.members), each, width).movedim(2, 0)


class Messages(NamedTuple):
    between: tuple[Message, ...]  # this member and others
    own: tuple[tuple[Piece, Piece], ...]  # what stays: from where to where


def messages(moved: Transfers, me: int) -> Messages:
    """Of one member of the group."""
    single = [
        Message(piece, (member,), tag, sent)
        for sent, by_member in ((True, moved.sends), (False, moved.receives))
        for member, pieces in enumerate(by_member)
        if member != me
        for tag, piece in enumerate(pieces)
    ]
    own = zip(moved.sends[me], moved.receives[me], strict=True)
    return Messages(tuple(_joined(single)), tuple(own))


def _joined(single: list[Message]) -> Iterator[Message]:
    single.sort(key=lambda message: (message.sent, message.tag, message.members))
    last = single[0] if single else None
    for message in single[1:]:
        assert last is not None
        joined = _join(last, message)
        if joined is None:
            yield last
        last = joined or message
    if last is not None:
        yield last


def _join(first: Message, second: Message) -> Message | None:
    """None if they are no neighbours in the heads of the same rows, or not of equal size."""
    a, b = first.piece, second.piece
    if (first.sent, first.tag) != (second.sent, second.tag) or a.heads is None or b.heads is None:
        return None
    same_rows = (a.buffer, a.start, a.stop) == (b.buffer, b.start, b.stop)
    num_heads = b.heads[1] - b.heads[0]
    equal = a.heads[1] - a.heads[0] == len(first.members) * num_heads
    if not (same_rows and equal and a.heads[1] == b.heads[0]):
        return None
    piece = replace(a, heads=(a.heads[0], b.heads[1]))
    return Message(piece, (*first.members, *second.members), first.tag, first.sent)
