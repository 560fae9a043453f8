"""The kernel that stands in for a communication: it takes SMs, writes bytes, and keeps time.

1,024 threads of a program and tens of registers for each leave no room on an SM for a program of
attention (a test asks the GPU), as a communication kernel of NCCL does. Time is that of the GPU's
own clock, `%globaltimer`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["hold_kernel", "stamp_kernel", "until_kernel"]


@triton.jit
def _now() -> tl.tensor:
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _later() -> tl.tensor:
    """The time after a short rest, so that waiting takes no issue slots or power to speak of."""
    return tl.inline_asm_elementwise(
        "nanosleep.u32 100; mov.u64 $0, %globaltimer;",
        "=l",
        [],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


# Numbers that change from one message to the next must not compile anything anew.
@triton.jit(do_not_specialize=["num_pieces", "nanoseconds"])
def hold_kernel(
    pieces: tl.tensor,
    num_pieces: tl.int32,
    nanoseconds: tl.int64,
    WORD: tl.constexpr,
    STOCK_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """`pieces` holds for each piece: target, stock (addresses), words, words of a run, stride.

    A piece is runs of words, one stride apart. Each program writes every n-th block of it, then
    waits until `nanoseconds` have passed since it began.
    """
    begin = _now()
    run = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    for piece in range(num_pieces):
        entry = pieces + piece * 5
        target = tl.load(entry).to(tl.pointer_type(WORD))
        stock = tl.load(entry + 1).to(tl.pointer_type(WORD))
        words, length, stride = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
        if ALIGNED:
            target = tl.multiple_of(target, 16)
            stock = tl.multiple_of(stock, 16)
            stride = tl.multiple_of(stride, 16)
            length = tl.multiple_of(length, 16)
            words = tl.multiple_of(words, 16)
        across = tl.cdiv(length, COLUMNS)
        down = tl.cdiv(tl.cdiv(words, length), ROWS)
        for block in range(tl.program_id(0), across * down, tl.num_programs(0)):
            rows = (block // across) * ROWS + run
            columns = (block % across) * COLUMNS + column
            inside = (columns < length) & (rows * length + columns < words)
            start = tl.multiple_of((block * (ROWS * COLUMNS)) % STOCK_WORDS, ROWS * COLUMNS)
            number = tl.load(stock + start + run * COLUMNS + column)
            tl.store(target + rows * stride + columns, number, inside)
    now = begin
    while now - begin < nanoseconds:
        now = _later()


@triton.jit
def stamp_kernel(stamp: tl.tensor) -> None:
    tl.store(stamp, _now())


@triton.jit(do_not_specialize=["nanoseconds"])
def until_kernel(stamp: tl.tensor, nanoseconds: tl.int64) -> None:
    """One warp: as near to taking no SM as a kernel can be."""
    begin = tl.load(stamp)
    now = begin
    while now - begin < nanoseconds:
        now = _later()
