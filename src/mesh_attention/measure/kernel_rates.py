"""How fast the kernels are that would be chosen here: calls of both passes at a few sizes, merges,
and products of matrices, which stand for the peak of a processor without a data sheet.

`profile.py` and `benchmarks/kernel_curves.py` measure with this. All ranks measure at once, since
on one machine they share memory, and on CPUs the processor too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from mesh_attention.cost.planning import num_pairs
from mesh_attention.kernels import (
    BackwardInputs,
    Block,
    BlockMask,
    Causal,
    Full,
    Kernel,
    KernelRefusedError,
    Request,
)
from mesh_attention.kernels.registry import choose, choose_rows
from mesh_attention.kernels.rows import accumulator_dtype, delta
from mesh_attention.machine.kernel_facts import PassRates, facts_of
from mesh_attention.measure.curve_fit import Point, fit, fit_terms
from mesh_attention.measure.ranks import MeasureError, Ranks, Work, cuda_event
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import CallKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.runs import Run
from mesh_attention.runtime.device import transfer_stream
from mesh_attention.runtime.execute.call_masks import row_range

MARGIN = 16  # SMs that a transfer takes, and that a kernel is asked to leave
ASKED_AT = 0.3  # of a call: when a transfer is asked for that shows whether it can begin
_LARGEST = 1 << 15  # tokens of a call


class KernelCall(NamedTuple):
    """A call of a kernel on random tensors. `pairs` of a query and a key that the mask shows;
    `flops` of the pass for all heads. `work(sms)` is what is timed: the call, asked to leave so
    many multiprocessors to transfers."""

    pairs: int
    flops: float
    work: Callable[[int], Work]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the calls and transfers that are measured. `lasting`: seconds of a measurement,
    about."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    first: int  # rows of the smallest square of queries and keys
    transfers: tuple[int, ...]  # bytes, ascending
    lasting: float

    @staticmethod
    def usual(
        device: torch.device,
        *,
        heads: int | None = None,
        head_dim: int = 128,
        dtype: torch.dtype | None = None,
        quick: bool = False,
    ) -> Sizes:
        lasting = 0.02 if quick else 0.2
        kib: tuple[int, ...]
        if device.type == "cuda":
            first, kib = 1024, (64, 1024, 8192) if quick else (64, 512, 4096, 16384, 65536)
            usual_heads, usual_dtype = 32, torch.bfloat16
        else:
            first, kib = 128, (16, 512) if quick else (16, 128, 1024, 4096)
            usual_heads, usual_dtype = 4, torch.float32
        transfers = tuple(n << 10 for n in kib)
        return Sizes(
            heads or usual_heads, head_dim, dtype or usual_dtype, first, transfers, lasting
        )


def kernels_of(
    ranks: Ranks, sizes: Sizes
) -> dict[Direction, dict[str, tuple[Kernel, set[CallKind]]]]:
    """The kernels that would be chosen here by pass and name, with the kinds of calls they take."""
    kernels: dict[Direction, dict[str, tuple[Kernel, set[CallKind]]]] = {}
    for direction in Direction:
        by_name = kernels.setdefault(direction, {})
        for kind in CallKind:
            try:
                kernel = choose(request(ranks, sizes, direction, kind)).kernel
            except KernelRefusedError as error:
                raise MeasureError(str(error)) from error
            by_name.setdefault(kernel.name, (kernel, set()))[1].add(kind)
    return kernels


def request(ranks: Ranks, sizes: Sizes, direction: Direction, kind: CallKind) -> Request:
    capability = torch.cuda.get_device_capability(ranks.device) if ranks.is_cuda else None
    where = (ranks.device.type, capability, sizes.dtype)
    D, H = sizes.head_dim, sizes.heads
    return Request(direction, *where, D, D, H, H, kind)


class KernelMeter:
    """Measures one pass of one kernel."""

    def __init__(
        self, ranks: Ranks, sizes: Sizes, direction: Direction, kernel: Kernel, kinds: set[CallKind]
    ) -> None:
        self._ranks, self._sizes = ranks, sizes
        self._direction, self._kernel = direction, kernel
        known = facts_of(kernel).of(direction)
        self.ranges = CallKind.RANGE in kinds and known is not None and known.ranges
        # A kernel that takes whole attentions does causal calls as row ranges.
        self.kinds = [CallKind.FULL, CallKind.RANGE] if self.ranges else sorted(kinds)

    def call(self, kind: CallKind, rows: int, columns: int, heads: int) -> KernelCall:
        kernel, dtype, head_dim = self._kernel, self._sizes.dtype, self._sizes.head_dim
        is_full = kind is CallKind.FULL
        problem = Problem(rows, heads, head_dim, kv_tokens=columns, mask=Mask(causal=not is_full))
        mask: BlockMask = Full() if is_full else Causal()
        if self.ranges or kind is CallKind.RANGE:
            where = self._ranks.device if self.ranges else torch.device("cpu")
            mask = row_range(problem.rows, (Run(0, rows),), (Run(0, columns),), where)
        q, k, v = (
            torch.randn(1, n, heads, head_dim, device=self._ranks.device, dtype=dtype)
            for n in (rows, columns, columns)
        )
        block, inputs = partial(Block, q, k, v, mask, head_dim**-0.5), list[BackwardInputs]()
        is_backward = self._direction is Direction.BACKWARD
        if is_backward:
            out, lse = kernel.forward(block())
            grad_out = torch.randn_like(out, dtype=dtype)
            out, lse = out.to(dtype), lse.masked_fill(lse == -torch.inf, 1e4)  # exp(x - lse) = 0
            inputs = [BackwardInputs(grad_out, out, lse.contiguous(), delta(out, grad_out))]
        compute, pairs = getattr(kernel, self._direction), num_pairs(problem)
        flops = problem.flops(pairs, backward=is_backward)
        return KernelCall(pairs, flops, lambda sms: partial(compute, block(leave_sms=sms), *inputs))

    def measured(
        self, gap: float, transfer: Work
    ) -> tuple[PassRates, dict[CallKind, list[Point]], str]:
        """The rates, the points that the curves are fitted to, and how it was found whether a
        transfer (`transfer` is small) can begin beside a call. `gap` is what a call costs whatever
        it does, and comes on top of the curves."""
        points = {kind: self._points(kind, gap) for kind in self.kinds}
        begins, margin, done_at = self._room_for_transfers(transfer)
        launch = round(self._launch_seconds() * 1e6, 1)
        rates = [fit(points[kind]) if kind in points else None for kind in CallKind]
        return PassRates(self.ranges, begins, margin, launch, *rates), points, done_at

    def _points(self, kind: CallKind, gap: float) -> list[Point]:
        points: list[Point] = []
        n, heads = self._sizes.first, self._sizes.heads
        while not points or (points[-1].seconds < self._sizes.lasting / 2 and n <= _LARGEST):
            points.append(self._point(kind, n, n, heads, gap))
            n *= 2
        n //= 2
        points.append(self._point(kind, n, n, max(1, heads // 4), gap))
        if kind is not CallKind.CAUSAL:  # causal calls are square
            points.append(self._point(kind, n // 4, n, heads, gap))
        if kind is CallKind.FULL:
            points.append(self._point(kind, n, n // 4, heads, gap))
        return points

    def _point(self, kind: CallKind, rows: int, columns: int, heads: int, gap: float) -> Point:
        call = self.call(kind, rows, columns, heads)
        lasts = self._ranks.seconds(call.work(0), lasting=self._sizes.lasting)
        seen = 2 * call.pairs / rows if self.ranges and kind is CallKind.RANGE else columns
        what = f"{rows} x {columns}, {heads} heads"
        return Point(what, rows, seen, heads, call.flops, max(lasts - gap, lasts / 10))

    def _launch_seconds(self) -> float:
        """The host's time for a call; on a CPU that of the smallest call."""
        work = self.call(self.kinds[0], 16, 16, 1).work(0)
        if not self._ranks.is_cuda:
            return self._ranks.seconds(work, lasting=self._sizes.lasting / 4)
        times = []
        for _ in range(20):
            torch.cuda.synchronize(self._ranks.device)
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return self._ranks.average([sorted(times)[len(times) // 2]])[0]

    def _room_for_transfers(self, transfer: Work) -> tuple[bool, int, str]:
        """Whether a transfer can begin in the middle of a call, the margin of SMs that calls heed,
        and how that was found."""
        ranks = self._ranks
        if not ranks.is_cuda:
            return True, 0, "a processor: transfers have threads of their own"
        n = min(_LARGEST, 16 * self._sizes.first)
        call = self.call(self.kinds[-1], n, n, self._sizes.heads)
        before, beside, after = (
            ranks.seconds(call.work(leave), lasting=self._sizes.lasting) for leave in (0, MARGIN, 0)
        )
        # Slower than both: times vary, most where ranks share a GPU.
        margin = MARGIN if beside > 1.03 * max(before, after) else 0
        done = ranks.average([self._done_at(call.work(margin), beside, transfer)])[0]
        how = f"a transfer asked for at {ASKED_AT:.0%} of a call was done at {done:.0%}"
        return done < ASKED_AT + 0.35, margin, how

    def _done_at(self, work: Work, lasts: float, transfer: Work) -> float:
        device = self._ranks.device
        stream = transfer_stream(device)
        with torch.cuda.stream(stream):
            transfer()
        begin, end, done = (cuda_event() for _ in range(3))
        self._ranks.wait_for_all()
        begin.record()
        work()
        end.record()
        asked = time.perf_counter() + ASKED_AT * lasts
        while time.perf_counter() < asked:
            pass
        with torch.cuda.stream(stream):
            transfer()
            done.record(stream)
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(done) / begin.elapsed_time(end))


def merge_costs(ranks: Ranks, sizes: Sizes) -> tuple[float, float, list[str]]:
    """Seconds before a pass over memory, bytes a second in it, and what was measured: the merge of
    a partial result and the sum of a gradient, bytes counted as the simulator does. The simulator
    knows one rate, so this is the mean of the two."""
    rows = choose_rows(ranks.device.type, sizes.dtype).rows
    wide = accumulator_dtype(sizes.dtype)
    H, D = sizes.heads, sizes.head_dim
    terms, measured, lines = [], [], []
    for n in (4, sizes.first, 4 * sizes.first, 16 * sizes.first):
        acc, part = (
            torch.randn(1, n, H, D, dtype=dtype, device=ranks.device)
            for dtype in (wide, sizes.dtype)
        )
        acc_lse, lse = (torch.randn(1, H, n, dtype=wide, device=ranks.device) for _ in range(2))
        num_bytes = n * H * D * (part.element_size() + 2 * acc.element_size())
        merge = partial(rows.merge_into, acc, acc_lse, part, lse, fresh=False)
        works: list[Work] = [merge, partial(rows.sum, (acc, part), acc)]
        merging, summing = (ranks.seconds(work, lasting=sizes.lasting / 2) for work in works)
        terms.append((1.0, float(num_bytes)))
        measured.append((merging + summing) / 2)
        lines.append(f"{n} rows: merge {merging * 1e6:.4g} us, sum {summing * 1e6:.4g} us")
    gap, per_byte = fit_terms(terms, measured, needed=(1,))
    return gap, 1.0 / per_byte, lines


def matrix_product_tflops(ranks: Ranks, sizes: Sizes) -> float:
    n = 16 * sizes.first if ranks.is_cuda else 512
    a, b = (torch.randn(n, n, dtype=sizes.dtype, device=ranks.device) for _ in range(2))
    return 2.0 * n**3 / ranks.seconds(lambda: a @ b, lasting=sizes.lasting) * 1e-12
