"""Stand-ins for communications on a CUDA stream of their own.

With `sms` > 0 a stand-in is one kernel of so many programs, each of which fills an SM, as NCCL's
rings do. With `sms=0` it stands for copy engines: the driver copies the bytes (a kernel does where
some heads of every row are written), and one warp waits. Either way it ends when the modelled time
has passed since it really began, or when its bytes are written if that takes longer.

1,024 threads of a program and tens of registers for each leave no room on an SM for a program of
attention (a test asks the GPU), as a communication kernel of NCCL does. Time is that of the GPU's
own clock, `%globaltimer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mesh_attention.runtime.device import Marks
from mesh_attention.runtime.transport.interface import Handle, Start
from replay.stand_in_data import (
    STOCK_BYTES,
    Landing,
    Stock,
    WriteTable,
    memory_runs,
    write_tables,
)

WARPS = 32
# Launching and draining a stand-in, taken off its time (found on an H200: 1.9 to 2.2 us).
OVERHEAD_SECONDS = 2e-6
_WORDS = {2: tl.int16, 4: tl.int32}


class Mode(Enum):
    KEEP_TIME = auto()
    HURRY = auto()  # writes the bytes and does not wait, for warming up
    SILENT = auto()  # does nothing: the computation is alone


class CudaHolder:
    def __init__(self, device: torch.device, sms: int, *, high_priority: bool = True) -> None:
        # Lower is earlier: programs of the stand-in take the next SMs that fall free.
        self.stream = torch.cuda.Stream(device, priority=-1 if high_priority else 0)  # type: ignore[no-untyped-call]
        self.mode = Mode.KEEP_TIME
        self._device = device
        self._sms = sms
        self._stock = Stock(device)
        self._tables: dict[WriteTable, Tensor] = {}
        self._stamp = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """GPU memory of the random numbers."""
        return self._stock.num_bytes

    def prepare(self, landings: Sequence[Landing], seconds: float) -> Start:
        work = self._filling(landings) if self._sms else self._copying(landings)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        nanoseconds = max(0, round((seconds - OVERHEAD_SECONDS) * 1e9))

        def start(after: Marks) -> Handle:
            if self.mode is Mode.SILENT:
                return _Skipped()
            with torch.cuda.stream(self.stream):
                for mark in after:
                    self.stream.wait_event(mark)
                work(nanoseconds if self.mode is Mode.KEEP_TIME else 0)
                event.record(self.stream)
            return _Held(event, self._device)

        return start

    def _filling(self, landings: Sequence[Landing]) -> Callable[[int], object]:
        pieces = [memory_runs(x, self._stock.of(buffer, x.dtype)) for buffer, x in landings]
        tables = write_tables(pieces)
        tokens, statistics = map(self._on_device, tables)
        num_tokens, num_statistics = (len(table.numbers) for table in tables)
        shapes: dict[str, Any] = {"TOKENS": _shape(tables[0]), "STATISTICS": _shape(tables[1])}

        def work(nanoseconds: int) -> None:
            hold_kernel[(self._sms,)](
                tokens,
                num_tokens,
                statistics,
                num_statistics,
                nanoseconds,
                **shapes,
                num_warps=WARPS,
            )

        return work

    def _on_device(self, table: WriteTable) -> Tensor:
        # The caller's tensors come anew with every call, most often where they were before.
        if table not in self._tables:
            self._tables[table] = torch.tensor(
                table.numbers or ((0,) * 5,), dtype=torch.int64, device=self._device
            )
        return self._tables[table]

    def _copying(self, landings: Sequence[Landing]) -> Callable[[int], object]:
        pairs = [
            (x, self._stock.of(buffer, x.dtype, x.numel())[: x.numel()].view(x.shape))
            for buffer, x in landings
        ]

        def work(nanoseconds: int) -> None:
            stamp_kernel[(1,)](self._stamp, num_warps=1)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            until_kernel[(1,)](self._stamp, nanoseconds, num_warps=1)

        return work


def _shape(table: WriteTable) -> tuple[Any, ...]:
    """What the kernel is compiled for: words, and blocks of runs."""
    word = table.word_bytes
    return _WORDS[word], STOCK_BYTES // word, table.rows, table.columns, table.aligned


class _Held(Handle):
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Skipped(Handle):
    def wait(self) -> None: ...


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


@triton.jit
def _write(pieces: tl.tensor, num_pieces: tl.int32, SHAPE: tl.constexpr) -> None:
    """`pieces` holds for each piece: target, stock (addresses), words, words of a run, stride.

    A piece is runs of words, one stride apart. Each program writes every n-th block of it.
    """
    WORD: tl.constexpr = SHAPE[0]
    STOCK_WORDS: tl.constexpr = SHAPE[1]
    ROWS: tl.constexpr = SHAPE[2]
    COLUMNS: tl.constexpr = SHAPE[3]
    ALIGNED: tl.constexpr = SHAPE[4]
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


# Numbers that change from one message to the next must not compile anything anew.
@triton.jit(do_not_specialize=["num_tokens", "num_statistics", "nanoseconds"])
def hold_kernel(
    tokens: tl.tensor,
    num_tokens: tl.int32,
    statistics: tl.tensor,
    num_statistics: tl.int32,
    nanoseconds: tl.int64,
    TOKENS: tl.constexpr,
    STATISTICS: tl.constexpr,
) -> None:
    """Writes the pieces of both tables, and waits until so long has passed since it began."""
    begin = _now()
    _write(tokens, num_tokens, TOKENS)
    _write(statistics, num_statistics, STATISTICS)
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
