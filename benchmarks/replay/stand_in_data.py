"""What stand-ins for communications write, and where.

Received data are random: normal tokens, and statistics of the size that long sequences have. Never
zeros: matrix units draw less power on them and run faster, and merging zeros tests nothing. A
stand-in reads from a small stock of such numbers, over and over.

A message is written to rows of whole heads, which lie in one stretch of memory, or to some heads of
every row, which lie in equal runs one stride apart. The kernel of a stand-in counts in words: of 4
bytes where everything is a multiple of that, of 2 otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mesh_attention.plan.language.buffers import Buffer, Kind
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.program import Program
from mesh_attention.runtime.execute.binding import CallShape
from mesh_attention.runtime.transport.interface import Start

Landing = tuple[Buffer, Tensor]  # where a message lands: (rows, batch, heads, width)
STOCK_BYTES = 1 << 20  # of each kind of number; small enough to stay in the L2 cache
BLOCK_WORDS = 16384  # written by a program at a time; 16 words for each of its threads
SHORT_BYTES = 64  # a run that is shorter is of statistics
_VECTOR_BYTES = 16


class Holder(Protocol):
    """Keeps time in place of a network; `hold.py` has it for CUDA."""

    def prepare(self, landings: Sequence[Landing], seconds: float) -> Start:
        """A stand-in that lasts so long on the communication stream and fills these tensors."""
        ...


def fill(kind: Kind, tensor: Tensor) -> None:
    """Half a million keys have an LSE of about 13; delta sums products that mostly cancel."""
    tensor.normal_(std=0.1 if kind.is_statistic else 1.0)
    if kind is Kind.LSE:
        tensor.add_(13.0)


def inputs_of(program: Program, plan: Plan, call_shape: CallShape) -> dict[str, Tensor]:
    """Random shards of one rank, as a caller would give them."""
    inputs = {}
    for buffer in program.buffers:
        if buffer.role.is_filled:
            width = buffer.kind.width(plan.problem)
            shape = (buffer.num_rows, call_shape.batch, buffer.num_heads, width)
            tensor = torch.empty(shape, dtype=call_shape.dtype_of(buffer), device=call_shape.device)
            fill(buffer.kind, tensor)
            inputs[buffer.name] = tensor
    return inputs


class Stock:
    """Random numbers by kind and dtype, made when first asked for. Other streams read them, so they
    are complete when `of` returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[object, torch.dtype], Tensor] = {}
        self.num_bytes = 0  # of all tensors ever made: shorter ones from before are still in use

    def of(self, buffer: Buffer, dtype: torch.dtype, count: int = 0) -> Tensor:
        kind = buffer.kind if buffer.kind.is_statistic else Kind.Q
        made = self._made.get((kind, dtype))
        if made is None or made.numel() < count:
            count = max(count, STOCK_BYTES // dtype.itemsize)
            made = torch.empty(count, dtype=dtype, device=self._device)
            fill(kind, made)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._made[kind, dtype] = made
            self.num_bytes += made.nbytes
        return made


@dataclass(frozen=True, slots=True)
class MemoryRuns:
    """Where a message is written: equal runs of bytes, `stride` from the beginning of one to the
    beginning of the next."""

    address: int
    stock: int  # address of the numbers that are written
    total: int
    length: int
    stride: int


def memory_runs(tensor: Tensor, stock: Tensor) -> MemoryRuns:
    """The runs of a (rows, batch, heads, width) view whose last dimensions are contiguous."""
    size = tensor.element_size()
    total = tensor.numel() * size
    if tensor.is_contiguous():
        return MemoryRuns(tensor.data_ptr(), stock.data_ptr(), total, total, total)
    rows, batch, heads, width = tensor.shape
    strides = tensor.stride()
    # Some heads of every row: rows and batch elements follow each other at one distance.
    assert strides[2:] == (width, 1), strides
    assert rows == 1 or batch == 1 or strides[0] == batch * strides[1], strides
    distance = strides[1] if batch > 1 else strides[0]
    return MemoryRuns(
        tensor.data_ptr(), stock.data_ptr(), total, heads * width * size, distance * size
    )


@dataclass(frozen=True, slots=True)
class WriteTable:
    """`numbers` is the table that the kernel reads, the rest are its compile-time choices."""

    numbers: tuple[tuple[int, int, int, int, int], ...]
    word_bytes: int
    rows: int
    columns: int
    aligned: bool


def write_tables(pieces: Sequence[MemoryRuns]) -> tuple[WriteTable, WriteTable]:
    """A table of tokens and a table of statistics: an LSE of two heads is 8 bytes of every row, and
    blocks cut for such runs write tokens at a quarter of the speed."""
    long = [piece for piece in pieces if piece.length >= SHORT_BYTES]
    short = [piece for piece in pieces if piece.length < SHORT_BYTES]
    return write_table(long), write_table(short)


def write_table(pieces: Sequence[MemoryRuns]) -> WriteTable:
    """A table of all these pieces, in the largest words that fit all of them."""
    sizes = [size for p in pieces for size in (p.address, p.total, p.length, p.stride)]
    word = 4 if all(size % 4 == 0 for size in sizes) else 2
    assert all(size % word == 0 for size in sizes)
    shortest = min((p.length // word for p in pieces), default=1)
    columns = min(BLOCK_WORDS, 1 << max(shortest - 1, 0).bit_length())
    folded = [_fold(p, columns * word) for p in pieces]
    return WriteTable(
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


def _fold(piece: MemoryRuns, columns_bytes: int) -> MemoryRuns:
    """One long run as many short ones, so that a block of short runs fills its rows with it."""
    if piece.length < piece.total or piece.length <= columns_bytes:
        return piece
    return MemoryRuns(piece.address, piece.stock, piece.total, columns_bytes, columns_bytes)
