"""Tensors as runs of words: how the stand-in's kernel is told where to write.

A message lands in rows of whole heads, which lie in one stretch of memory, or in some heads of
every row, which lie in equal runs one stride apart. Words are 4 bytes where everything is a
multiple of that, 2 otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["BLOCK_WORDS", "Runs", "describe", "runs_of"]

BLOCK_WORDS = 16384  # written by a program at a time; 16 words for each of its threads
_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Runs:
    """In bytes; `stride` is the distance between the beginnings of two runs."""

    address: int
    stock: int  # address of the numbers that are written
    total: int
    length: int
    stride: int


def runs_of(tensor: Tensor, stock: Tensor) -> Runs:
    """Of a (rows, batch, heads, width) view whose last dimensions are contiguous."""
    size = tensor.element_size()
    total = tensor.numel() * size
    if tensor.is_contiguous():
        return Runs(tensor.data_ptr(), stock.data_ptr(), total, total, total)
    rows, batch, heads, width = tensor.shape
    strides = tensor.stride()
    # Some heads of every row: rows and batch elements follow each other at one distance.
    assert strides[2:] == (width, 1), strides
    assert rows == 1 or batch == 1 or strides[0] == batch * strides[1], strides
    distance = strides[1] if batch > 1 else strides[0]
    return Runs(tensor.data_ptr(), stock.data_ptr(), total, heads * width * size, distance * size)


@dataclass(frozen=True, slots=True)
class Description:
    """`numbers` is the table that the kernel reads, the rest are its compile-time choices."""

    numbers: tuple[tuple[int, int, int, int, int], ...]
    word_bytes: int
    rows: int
    columns: int
    aligned: bool


def describe(pieces: Sequence[Runs]) -> Description:
    """One table for all pieces of a message, in the largest words that fit all of them."""
    sizes = [size for p in pieces for size in (p.address, p.total, p.length, p.stride)]
    word = 4 if all(size % 4 == 0 for size in sizes) else 2
    assert all(size % word == 0 for size in sizes)
    shortest = min((p.length // word for p in pieces), default=1)
    columns = min(BLOCK_WORDS, 1 << max(shortest - 1, 0).bit_length())
    folded = [_fold(p, columns * word) for p in pieces]
    return Description(
        tuple(
            (p.address, p.stock, p.total // word, p.length // word, p.stride // word)
            for p in folded
        ),
        word,
        BLOCK_WORDS // columns,
        columns,
        # The kernel may take 16 bytes at a time; it counts in words, so 16 words must divide.
        all(p.address % _VECTOR_BYTES == 0 for p in folded)
        and all(size % (16 * word) == 0 for p in folded for size in (p.total, p.length, p.stride)),
    )


def _fold(piece: Runs, columns_bytes: int) -> Runs:
    """One long run as many short ones, so that a block of short runs fills its rows with it."""
    if piece.length < piece.total or piece.length <= columns_bytes:
        return piece
    return Runs(piece.address, piece.stock, piece.total, columns_bytes, columns_bytes)
