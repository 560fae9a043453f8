"""Measures a kernel on the GPU at hand and prints its sections of a cluster's file.

    python benchmarks/kernel_curves.py --kernel cudnn_ranges
    python benchmarks/kernel_curves.py --kernel flash_attn3 --pass forward --json result.json

bf16, heads of 128. Full calls: squares of 1K to 32K, tall and wide ones, few heads. Causal calls of
kernels for rectangles: squares. Row ranges of kernels that take any mask: causal squares, tiles of
zigzag partitions as ranks gather them, windows and documents. Calls shorter than twice the host's
time for one are left out of the fit.

Whether a transfer can begin in the middle of a call: a kernel on 16 SMs, on a stream of high
priority, is asked for at 20, 40 and 60 % of a long call, with and without a margin of SMs, and it
is seen when it is done. Last line: all points as JSON.

`--sustained`: as in a model, calls follow each other for so long that the power limit has brought
the clock down, a tenth below that of short measurements; calls as ranks with one head have them,
beside several heads, with and without a margin. No curve is fitted: the shipped ones are, by hand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from kernels_on_masks import log_normal_pack
from provenance import taken

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.kernels import (
    BlockMask,
    Causal,
    Full,
    Kernel,
    MaskKind,
    Request,
    RowRange,
)
from mesh_attention.kernels.registry import choose, kernel_names
from mesh_attention.machine.kernel_facts import PassRates
from mesh_attention.measure.curve_fit import Point, fit, pass_section
from mesh_attention.measure.kernel_rates import KernelCall
from mesh_attention.measure.ranks import Work
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attend, CallKind
from mesh_attention.runtime.execute.call_masks import row_range

K = 1024
DIM = 128
DTYPE = torch.bfloat16
MARGIN = 16  # SMs that a transfer takes, and that a kernel is asked to leave
ASKED_AT = (0.2, 0.4, 0.6)


@dataclass(frozen=True)
class Case:
    """What a call computes. `tile`: of zigzag partitions, 4 x 4 of 16."""

    what: str
    rows: int
    columns: int
    heads: int = 64
    mask: Mask | None = None
    tile: bool = False


def cases(kind: CallKind) -> Iterator[Case]:
    if kind is CallKind.FULL:
        for rows, columns in (
            *((n * K, n * K) for n in (1, 2, 4, 8, 16, 32)),
            *((2 * K, 16 * K), (16 * K, 2 * K), (K, 32 * K), (32 * K, K)),
        ):
            yield Case(f"{rows} x {columns}", rows, columns)
        for n, heads in ((8, 8), (32, 4), (32, 1), (4, 16)):
            yield Case(f"{n}K, {heads} heads", n * K, n * K, heads)
        return
    for n in (1, 2, 4, 8, 16, 32):
        yield Case(f"causal {n}K", n * K, n * K, mask=Mask(causal=True))
    for n, heads in ((8, 8), (32, 4), (4, 16)):
        yield Case(f"causal {n}K, {heads} heads", n * K, n * K, heads, Mask(causal=True))
    if kind is CallKind.RANGE:
        for n in (4, 8, 16, 32):
            yield Case(f"zigzag tile {n}K", n * K, n * K, mask=Mask(causal=True), tile=True)
        window = Mask(causal=True, window=(1023, 0))
        yield Case("window of 1,024, 16K, 16 heads", 16 * K, 16 * K, 16, window)
        for mean in (8 * K, 2 * K):
            cuts = log_normal_pack(16 * K, mean, seed=mean)
            documents = Mask(causal=True, documents=cuts)
            yield Case(f"documents of {mean}, 16K, 16 heads", 16 * K, 16 * K, 16, documents)


SUSTAINED: dict[CallKind, tuple[Case, ...]] = {
    CallKind.FULL: tuple(
        Case(f"{rows}K x {keys}K, {heads} heads", rows * K, keys * K, heads)
        for rows, keys, heads in (
            *((16, 64, 7), (64, 64, 2), (128, 64, 1), (32, 64, 1), (128, 16, 1)),
            *((512, 128, 1), (8, 8, 64), (32, 32, 16)),
        )
    ),
    CallKind.CAUSAL: tuple(
        Case(f"causal {n}K, {heads} heads", n * K, n * K, heads, Mask(causal=True))
        for n, heads in ((8, 64), (16, 16), (32, 1), (64, 1), (128, 1))
    ),
    CallKind.RANGE: tuple(
        Case(
            f"{'zigzag tile' if tile else 'causal'} {n}K, {heads} heads",
            *(n * K, n * K, heads, Mask(causal=True), tile),
        )
        for n, heads, tile in ((8, 64, False), (16, 16, False), (64, 1, False), (64, 1, True))
    ),
}
SETTLES = 0.2  # seconds until a clock has come down


def range_mask(case: Case, device: torch.device) -> tuple[RowRange, int]:
    """What the rows see of the keys, and how many pairs that is."""
    tokens, ranks, tile = (4 * case.rows, 16, (4, 4)) if case.tile else (case.rows, 1, (1, 1))
    problem = Problem(tokens, 1, DIM, mask=case.mask or Mask())
    plan = make_plan(
        problem, ranks, method="mesh", tile=tile, chunks=(1, 1), directions=(Direction.FORWARD,)
    )
    program = plan.program(ranks - 1, Direction.FORWARD)
    table = program.buffer_table()
    op = next(
        o for o in program.operations if isinstance(o, Attend) and o.q.stop - o.q.start == case.rows
    )
    queries, keys = (
        tuple(run for span in piece.spans(table[piece.buffer]) for run in layout.runs(*span))
        for piece, layout in ((op.q, plan.q_layout), (op.k, plan.kv_layout))
    )
    mask = row_range(problem.rows, queries, keys, device)
    place = mask.key_position.sort().values
    ends = [torch.searchsorted(place, x.to(place.dtype).contiguous()) for x in (mask.lo, mask.hi)]
    return mask, int((ends[1] - ends[0]).clamp(min=0).sum())


def kernel_call(
    kernel: Kernel, direction: Direction, kind: CallKind, case: Case, device: torch.device
) -> KernelCall:
    """One call of a kernel, forward or backward."""
    mask: BlockMask = Full()
    pairs = case.rows * case.columns
    if kind is CallKind.CAUSAL:
        mask, pairs = Causal(), case.rows * (case.rows + 1) // 2
    elif kind is CallKind.RANGE:
        mask, pairs = range_mask(case, device)
    shape = (case.rows, case.columns, case.heads, DIM)
    return KernelCall(kernel, direction, DTYPE, device, *shape, mask, pairs)


def seconds(work: Work, repeats: int) -> float:
    """Of the GPU: calls follow each other without a pause, so that the host's time hides."""
    for _ in range(3):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    return float(statistics.median(times)) * 1e-3


def host_seconds(work: Work) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    return statistics.median(times)


def done_at(work: Work, lasts: float, device: torch.device) -> list[float]:
    """When a small transfer was done that was asked for at parts of the call, as parts of it."""
    from replay.hold import CudaHolder  # Triton comes with CUDA builds only

    holder = CudaHolder(device, MARGIN)
    start = holder.prepare((), 0.0)
    start(())
    found = []
    for part in ASKED_AT:
        begin, end, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        asked = time.perf_counter() + part * lasts
        while time.perf_counter() < asked:
            pass
        start(())
        done.record(holder.stream)
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(done) / begin.elapsed_time(end))
    return found


def begins(found: list[float]) -> bool:
    return all(done < part + 0.15 for part, done in zip(ASKED_AT, found, strict=True))


def measure(
    kernel: Kernel, kinds: list[CallKind], direction: Direction, repeats: int, device: torch.device
) -> tuple[PassRates, dict[CallKind, list[Point]], str]:
    short = kernel_call(kernel, direction, kinds[0], Case("short", K, K, 1), device).work()
    launch = host_seconds(short)
    points: dict[CallKind, list[Point]] = {}
    for kind in kinds:
        points[kind] = []
        for case in cases(kind):
            calls = kernel_call(kernel, direction, kind, case, device)
            columns = float(case.columns)
            if kind is CallKind.RANGE:
                columns = 2 * calls.pairs / case.rows
            lasts = seconds(calls.work(), repeats)
            point = Point(case.what, case.rows, columns, case.heads, calls.flops, lasts)
            print(f"# {direction} {kind}, {case.what}: {point.tflops:.0f} TFLOP/s", flush=True)
            points[kind].append(point)
    causal = Case("long", 32 * K, 32 * K, 32, Mask(causal=True))
    long = kernel_call(kernel, direction, kinds[-1], causal, device)
    alone, beside = (seconds(long.work(leave), repeats) for leave in (0, MARGIN))
    heeds = beside > 1.03 * alone
    without, with_margin = (done_at(long.work(n), alone, device) for n in (0, MARGIN))
    told = "; ".join(
        f"margin {n}: asked for at 20 / 40 / 60 % of a call, done at "
        + " / ".join(f"{100 * part:.0f}" for part in parts)
        for n, parts in ((0, without), (MARGIN, with_margin))
    )
    usable = {k: [p for p in of if p.seconds > 2 * launch] for k, of in points.items()}
    rates = [fit(usable[kind]) if kind in kinds else None for kind in CallKind]
    found = PassRates(
        CallKind.RANGE in kinds,
        begins(with_margin if heeds else without),
        MARGIN if heeds else 0,
        launch * 1e6,
        *rates,
    )
    return found, usable, told


def sustained(
    kernel: Kernel, kinds: list[CallKind], direction: Direction, device: torch.device
) -> list[dict[str, Any]]:
    found = []
    cases_of_kinds = [(kind, case) for kind in kinds for case in SUSTAINED[kind]]
    for kind, case in cases_of_kinds:
        calls = kernel_call(kernel, direction, kind, case, device)
        for margin in (0, MARGIN):
            work = calls.work(margin)
            once = seconds(work, 3)
            lasts = seconds(work, max(4, round(SETTLES / once)))
            lasts = seconds(work, max(4, round(SETTLES / lasts)))
            first, then = (calls.flops / x * 1e-12 for x in (once, lasts))
            told = f"{direction} {kind}, {case.what}, margin {margin}"
            print(f"# {told}: {then:.0f} TFLOP/s, at first {first:.0f}", flush=True)
            found.append({"what": told, "tflops": then, "tflops at first": first})
    return found


def kinds_of(kernel: Kernel, direction: Direction, device: torch.device) -> list[CallKind]:
    """Row ranges where it takes them, since those serve causal calls too."""
    capability = torch.cuda.get_device_capability(device)
    refused = {
        kind: kernel.refuses(
            Request(direction, "cuda", capability, DTYPE, DIM, DIM, 64, 64, MaskKind(kind))
        )
        for kind in CallKind
    }
    if direction is Direction.BACKWARD and kernel.backward_needs is None:
        return []
    second = CallKind.CAUSAL if refused[CallKind.RANGE] else CallKind.RANGE
    return [kind for kind in (CallKind.FULL, second) if refused[kind] is None]


def kernel_named(name: str, device: torch.device) -> Kernel:
    capability = torch.cuda.get_device_capability(device)
    request = Request(Direction.FORWARD, "cuda", capability, DTYPE, DIM, DIM, 64, 64, MaskKind.FULL)
    return choose(request, force=name).kernel


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel", required=True, metavar="NAME", help=", ".join(kernel_names()))
    parser.add_argument("--pass", dest="direction", choices=[*Direction], help="default: both")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--sustained", action="store_true", help="clocks settled; no curve")
    parser.add_argument("--json", type=Path, help="write the points here too")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = kernel_named(given.kernel, device)
    report: dict[str, Any] = taken() | {
        "machine": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "kernel": kernel.name,
    }
    source = f"measured on {report['machine']}, {report['date'][:10]}"
    sections = []
    for direction in Direction if given.direction is None else [Direction(given.direction)]:
        kinds = kinds_of(kernel, direction, device)
        if not kinds:
            print(f"# {kernel.name} has no {direction} pass here")
            continue
        if given.sustained:
            report[direction.value] = sustained(kernel, kinds, direction, device)
            continue
        rates, points, told = measure(kernel, kinds, direction, given.repeats, device)
        sections.append(
            pass_section(kernel.name, direction, rates, points, source=source, done_at=told)
        )
        report[direction.value] = {
            "rates": asdict(rates),
            "done_at": told,
            "points": {kind: [asdict(p) for p in of] for kind, of in points.items()},
        }
        torch.cuda.empty_cache()
    print("\n".join(sections))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
