"""The pieces of all members of an exchange, in brief.

An exchange of tokens for heads, or of partial results, has pieces of each tensor for each member of
its group: thousands in the programs that a search looks at. All of them are rows of some units with
the heads of some head groups, so names, areas and bytes follow from these, and pieces are made
where somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import add
from typing import NamedTuple, overload

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.problem.spans import Spans

Heads = tuple[int, int] | None  # None: all of a buffer
Pieces = tuple[Piece, ...]
Bytes = tuple[int, int]  # all, and without statistics


@lru_cache(maxsize=4096)
def heads_as_bits(heads: Heads) -> int:
    """
    >>> bin(heads_as_bits((1, 3))), heads_as_bits(None)
    ('0b110', -1)
    """
    return -1 if heads is None else (1 << heads[1]) - (1 << heads[0])


class Holders:
    """The heads that each of some head groups holds, with the end of the name of the buffer that
    they are in. For each of these buffers `bits` are all heads, and `counts` those of each head
    group: 0 where it has none there, -1 where it has all of the buffer."""

    __slots__ = ("bits", "counts", "parts")

    def __init__(self, parts: Sequence[Sequence[tuple[str, Heads]]]) -> None:
        self.parts = parts
        self.bits: dict[str, int] = {}
        self.counts: dict[str, list[int]] = {}
        for group, part in enumerate(parts):
            for end, heads in part:
                self.bits[end] = self.bits.get(end, 0) | heads_as_bits(heads)
                counts = self.counts.setdefault(end, [0] * len(parts))
                counts[group] += heads[1] - heads[0] if heads else -1


class MovedTensor(NamedTuple):
    """Rows of a tensor for each unit, and the heads of them for each head group."""

    name: str
    rows: tuple[Spans, ...]
    holders: Holders


class MemberPieces(Sequence[Pieces]):
    """For each member, unit by unit, the rows of its unit with the heads of its head group. Made
    when asked for, and kept; equal to a tuple of the same pieces."""

    def __init__(self, tensors: tuple[MovedTensor, ...]) -> None:
        self.tensors = tensors
        first = tensors[0]
        self._groups = len(first.holders.parts)
        self._made: list[Pieces | None] = [None] * (len(first.rows) * self._groups)

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> Pieces: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Pieces, ...]: ...
    def __getitem__(self, index: int | slice) -> Pieces | tuple[Pieces, ...]:
        if isinstance(index, slice):
            return tuple([self[member] for member in range(len(self))[index]])
        made = self._made[index]
        if made is None:
            unit, group = divmod(range(len(self))[index], self._groups)
            made = self._made[index] = tuple(
                [
                    Piece(tensor.name + end, start, stop, heads)
                    for tensor in self.tensors
                    for start, stop in tensor.rows[unit]
                    for end, heads in tensor.holders.parts[group]
                ]
            )
        return made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MemberPieces) and self.tensors == other.tensors:
            return True
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type[tuple[Pieces, ...]], tuple[tuple[Pieces, ...]]]:
        return tuple, (tuple(self),)

    def names(self) -> tuple[str, ...]:
        """Of the buffers, as the pieces name them in turn."""
        names: dict[str, None] = {}
        count = sum([len(tensor.holders.bits) for tensor in self.tensors])
        for unit in range(len(self.tensors[0].rows)):
            filled = [tensor for tensor in self.tensors if tensor.rows[unit]]
            for group in range(self._groups):
                parts = [(x.name + end, None) for x in filled for end, _ in x.holders.parts[group]]
                names.update(parts)
                if len(names) == count:
                    return tuple(names)
        return tuple(names)

    def num_bytes(self, row_bytes: Callable[[str], tuple[int, int, bool]]) -> dict[int, Bytes]:
        """The bytes of each member that has pieces. `row_bytes`: heads of a buffer, bytes of a row
        and head, and whether it holds tokens."""
        # Most tensors have the same rows and heads: the bytes of their rows are added up first.
        alike: dict[tuple[int, int, str, int], tuple[MovedTensor, list[int]]] = {}
        for tensor in self.tensors:
            for end in tensor.holders.counts:
                heads, size, holds_tokens = row_bytes(tensor.name + end)
                key = id(tensor.rows), id(tensor.holders), end, heads
                _, sums = alike.setdefault(key, (tensor, [0, 0]))
                sums[0] += size
                sums[1] += size * holds_tokens
        everything, tokens = [0] * len(self), [0] * len(self)
        for (_, _, end, heads), (tensor, (size, size_of_tokens)) in alike.items():
            each = [heads if count < 0 else count for count in tensor.holders.counts[end]]
            rows = [sum([stop - start for start, stop in spans]) for spans in tensor.rows]
            area = [of_unit * of_group for of_unit in rows for of_group in each]
            everything = [*map(add, everything, [size * x for x in area])]
            tokens = [*map(add, tokens, [size_of_tokens * x for x in area])]
        filled = [any(of_unit) for of_unit in zip(*[x.rows for x in self.tensors], strict=True)]
        both = enumerate(zip(everything, tokens, strict=True))
        return {member: size for member, size in both if filled[member // self._groups]}
