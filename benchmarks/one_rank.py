"""One rank's computation on this machine, without a network, and how long work on a GPU takes.

Scripts that measure kernels and executors share it. Communications of a rank that runs alone move
nothing.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mesh_attention.kernels import BackwardInputs, Block, BlockMask, Kernel, RowRange
from mesh_attention.kernels.rows import delta
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Communication, Program, writes
from mesh_attention.runtime.device import Marks, Workspace
from mesh_attention.runtime.execute.call_masks import KnownRanges
from mesh_attention.runtime.execute.executor import CallShape, Executor
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.transport.interface import Handle, Start, View

Work = Callable[[], object]
_CALLS_AHEAD = 3  # they run before the timed ones


def need_cuda() -> None:
    """Ends a script that has nothing to measure on."""
    if not torch.cuda.is_available():
        raise SystemExit(f"needs a CUDA GPU, and torch {torch.__version__} finds none")


def timing_events(count: int = 2) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]


def in_turns(works: Mapping[str, Work], rounds: int, calls: int = 10) -> dict[str, float]:
    """Milliseconds of a call where calls follow each other, as layers do.

    The works take turns, so that the GPU is equally hot for all. A few calls run ahead of the timed
    ones, so that these do not wait for the host, unless the host is slower than the device.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):  # the first round warms up
        for name, work in works.items():
            begin, end = timing_events()
            torch.cuda.synchronize()
            for at in range(_CALLS_AHEAD + calls):
                if at == _CALLS_AHEAD:
                    begin.record()
                work()
            end.record()
            torch.cuda.synchronize()
            if number:
                times[name].append(float(begin.elapsed_time(end)) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


class AloneTransport:
    """One rank without the others: communications move nothing, or whatever `receive` writes."""

    in_order = True
    own_stream = True
    shows_workspace = False

    def __init__(
        self, program: Program, receive: Callable[[Buffer, Tensor], None] | None = None
    ) -> None:
        self._table = program.buffer_table()
        self._receive = receive

    def prepare(self, op: Communication, view: View) -> Start:
        landed = [(self._table[piece.buffer], view(piece)) for piece in writes(op)]

        def start(after: Marks) -> Handle:
            if self._receive is not None:
                for buffer, tensor in landed:
                    self._receive(buffer, tensor)
            return _Done()

        return start


class _Done(Handle):
    def wait(self) -> None: ...


def executor_alone(
    plan: Plan,
    direction: Direction,
    shape: CallShape,
    *,
    rank: int = 0,
    known_ranges: KnownRanges | None = None,
) -> Executor:
    """The executor of a rank."""
    pass_ = plan.direction(direction)
    transport = AloneTransport(pass_.programs[rank])
    return make_executor(
        plan,
        pass_,
        rank,
        transport,
        Workspace(),
        shape,
        CallOptions(),
        known_ranges=known_ranges,
    )


def mask_of_the_call(executor: Executor) -> BlockMask | None:
    """The mask of its kernel call, or None where there are several calls.

    A copy without what the executor's kernel keeps with it: that goes by the strides of tensors.
    """
    masks = [mask for of_operation in executor.attentions.masks.values() for mask in of_operation]
    if len(masks) != 1:
        return None
    mask = masks[0]
    return replace(mask, kept={}) if isinstance(mask, RowRange) else mask


def bare_pass(
    kernel: Kernel, direction: Direction, tensors: list[Tensor], mask: BlockMask
) -> Callable[[], tuple[Tensor, ...]]:
    """One call of a kernel on q, k, v and the gradient of out, each (1, tokens, heads, width)."""
    q, k, v, grad_out = tensors
    block = Block(q, k, v, mask, q.shape[3] ** -0.5)
    if direction is Direction.FORWARD:
        return lambda: kernel.forward(block)
    out, lse = kernel.forward(block)
    needs = kernel.backward_needs
    # A kernel that takes `out` makes row sums of it, as a call of its own library does.
    sums = delta(out, grad_out) if needs is not None and needs.delta else None
    inputs = BackwardInputs(grad_out, None if sums is not None else out, lse.contiguous(), sums)
    return lambda: kernel.backward(block, inputs)


def log_normal_pack(tokens: int, mean: int, seed: int) -> tuple[int, ...]:
    """Cumulative starts of documents whose lengths have this mean."""
    chance = random.Random(seed)
    cuts = [0]
    while cuts[-1] < tokens:
        length = max(1, round(chance.lognormvariate(0.0, 1.0) * mean / 1.6487))
        cuts.append(min(tokens, cuts[-1] + length))
    return tuple(cuts)
