"""Do the stand-ins of replays behave as transfers do? Durations, bytes, and the SMs they take.

    PYTHONPATH=src python benchmarks/check_stand_ins.py --json result.json

On an idle CUDA device: run it before replays are believed. Each row is a ratio beside the range in
which it must lie; the exit code is 1 if one does not.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from replay.hold import CudaHolder
from script import provenance, save, script_parser
from torch import Tensor

from mesh_attention.kernels import Block, Full
from mesh_attention.kernels.torch_ops import Cudnn
from mesh_attention.plan.language.buffers import Buffer, Kind, Precision

DEVICE = torch.device("cuda", 0)
FASTEST_LINK = 320.0  # GB/s, of those that are modelled
Row = tuple[str, float, float, float]  # what, ratio, at least, at most
Landing = list[tuple[Buffer, Tensor]]


def seconds(work: Callable[[], object], stream: torch.cuda.Stream | None = None) -> float:
    stream = stream or torch.cuda.current_stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record(stream)
    work()
    end.record(stream)
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def buffer(kind: Kind, precision: Precision = Precision.ELEMENT) -> Buffer:
    return Buffer("there", kind, ((0, 1),), (0, 1), precision)


def landing(megabytes: int) -> Landing:
    rows = megabytes * 2**20 // (64 * 128 * 2)
    whole = torch.empty(rows, 1, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    return [(buffer(Kind.K), whole)]


def exchanged(megabytes: int) -> Landing:
    """What exchanges of heads bring back: two of 64 heads of every row, and their LSE."""
    rows = megabytes * 2**20 // (16 * 128 * 2)
    out = torch.empty(rows, 1, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(rows, 1, 64, 1, device=DEVICE)
    of_lse = buffer(Kind.LSE, Precision.ACCUMULATE)
    heads = [slice(first, first + 2) for first in range(0, 64, 8)]
    pieces = [((buffer(Kind.OUT), out[:, :, h]), (of_lse, lse[:, :, h])) for h in heads]
    return [piece for pair in pieces for piece in pair]


def durations() -> Iterator[Row]:
    for sms in (0, 1, 16):
        for microseconds in (100, 1000, 20000):
            holder, count = CudaHolder(DEVICE, sms), max(5, 20000 // microseconds)
            start = holder.prepare(landing(1), microseconds * 1e-6)
            holder.prepare([], 0.02)(())  # or the host, not the stand-in, would be timed
            start(())
            took = seconds(lambda s=start, n=count: [s(()) for _ in range(n)], holder.stream)  # type: ignore[misc]
            yield f"{microseconds} us on {sms} SMs", took / count / microseconds * 1e6, 0.98, 1.02


def bytes_written() -> Iterator[Row]:
    megabytes = 64
    for name, make, sms in (("rows", landing, 0), ("rows", landing, 16), ("heads", exchanged, 16)):
        holder = CudaHolder(DEVICE, sms)
        start = holder.prepare(make(megabytes), 0.0)
        start(())
        times = [seconds(lambda s=start: s(()), holder.stream) for _ in range(5)]  # type: ignore[misc]
        rate = megabytes * 2**20 / statistics.median(times) / 1e9
        yield f"{name} written by {sms} SMs, over the fastest link", rate / FASTEST_LINK, 1.0, 1e9


def attention(rows: int) -> Callable[[], object]:
    q, k, v = (torch.randn(1, rows, 64, 128, device=DEVICE).bfloat16() for _ in range(3))
    return lambda: Cudnn().forward(Block(q, k, v, Full(), 0.1))


def sms_taken() -> Iterator[Row]:
    work = attention(8192)

    def beside(start: Callable[[], object]) -> float:
        """The median of several; each begins on an idle device."""
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            start()
            time.sleep(0.0005)  # by now its programs lie on their SMs
            times.append(seconds(work))
        return statistics.median(times)

    beside(lambda: None)
    alone = beside(lambda: None)
    for sms, least, most in ((0, 0.97, 1.05), (16, 1.04, 1.35), (32, 1.2, 1.8)):
        start = CudaHolder(DEVICE, sms).prepare(landing(1), 4 * alone)
        ratio = beside(lambda s=start: s(())) / alone  # type: ignore[misc]
        yield f"attention beside {sms} SMs, over alone", ratio, least, most


def whole_device() -> Iterator[Row]:
    """With a stand-in on every SM nothing that begins after it ends before it."""
    holder = CudaHolder(DEVICE, torch.cuda.get_device_properties(DEVICE).multi_processor_count)
    work, lasts = attention(2048), 0.02
    work()
    for name, pieces in (("nothing", []), ("rows", landing(1))):
        start = holder.prepare(pieces, lasts)
        start(())
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(holder.stream)
        start(())
        time.sleep(0.002)
        work()
        end.record()
        torch.cuda.synchronize()
        ended = float(begin.elapsed_time(end)) * 1e-3
        yield f"end of attention behind a full device ({name}), over it", ended / lasts, 1.0, 1.5


def main() -> int:
    args = script_parser(__doc__).parse_args()
    rows = [row for check in (durations, bytes_written, sms_taken, whole_device) for row in check()]
    for what, ratio, least, most in rows:
        print(f"{'' if least <= ratio <= most else 'WRONG '}{what}: {ratio:.3f}")
    save(args.json, {**provenance(), "rows": rows})
    return int(any(not least <= ratio <= most for _, ratio, least, most in rows))


if __name__ == "__main__":
    sys.exit(main())
