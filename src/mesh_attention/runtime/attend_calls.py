"""Which kernel calls an attention of a program becomes: its rectangles, or one call for all.

A plan holds rectangles, which any dense kernel can do. Where a kernel takes row ranges, one call
sees exactly what the mask shows of all gathered rows, in whatever order they lie, and nothing has
to be merged. The faster way is taken, as `kernels/speed.py` predicts it, one call if they are near.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mesh_attention.kernels import (
    Block,
    BlockMask,
    BlockSize,
    Choice,
    Kernel,
    KernelRefusedError,
    MaskKind,
    Request,
    choose,
)
from mesh_attention.kernels.determinism import Determinism
from mesh_attention.kernels.speed import predicted_seconds, takes_whole_attentions
from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.draw.work import CallPairs
from mesh_attention.plan.layout import LayoutKind
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Attend, AttendBackward, Call, CallKind, Program
from mesh_attention.runtime.binding import CallShape

Kernels = Mapping[MaskKind, Kernel]

# Rates are rough, and the host launches every call and every merge: three calls that were predicted
# to be 0.6 % faster than one took 4 % longer on an H200, and 36 % from a standing start.
_SEVERAL_GAIN = 0.02


def choose_kernels(
    plan: Plan,
    call_shape: CallShape,
    direction: Direction,
    force: str | None,
    *,
    softcap: bool,
    deterministic: Determinism,
    lse_gradient: bool,
) -> dict[MaskKind, Choice | KernelRefusedError]:
    """For every kind of mask, also those that no call of the program may have."""
    problem = plan.problem
    cuda = call_shape.device.type == "cuda"
    padded = any(x.padded_tokens > x.num_tokens for x in (plan.q_layout, plan.kv_layout))
    found: dict[MaskKind, Choice | KernelRefusedError] = {}
    for kind in MaskKind:
        request = Request(
            direction=direction,
            device_type=call_shape.device.type,
            capability=torch.cuda.get_device_capability(call_shape.device) if cuda else None,
            dtype=call_shape.dtype,
            head_dim=problem.head_dim,
            v_head_dim=problem.v_dim,
            num_heads=problem.num_heads,
            num_kv_heads=problem.kv_heads,
            mask=kind,
            softcap=softcap,
            padded=padded,
            scattered=plan.kv_layout.kind is LayoutKind.STRIPED,
            intervals=problem.rows.most_intervals,
            deterministic=deterministic is not Determinism.ANY,
            lse_gradient=lse_gradient,
        )
        try:
            found[kind] = _choose(request, force, deterministic)
        except KernelRefusedError as refused:
            found[kind] = refused
    return found


def _choose(request: Request, force: str | None, deterministic: Determinism) -> Choice:
    try:
        return choose(request, force=force)
    except KernelRefusedError as refused:
        if deterministic is not Determinism.PREFERRED:
            raise
        found = choose(replace(request, deterministic=False), force=force)
        warned = f"not deterministic, though warn_only asks for it where there is a way: {refused}"
        return replace(found, warning=warned)


def chosen(found: Choice | KernelRefusedError) -> Choice:
    if isinstance(found, KernelRefusedError):
        raise found
    return found


@dataclass(frozen=True)
class FasterCalls:
    """What was chosen for the attentions of a program, and why: predicted seconds of all calls."""

    program: Program
    whole: int = 0  # attentions that are one call
    cut: int = 0  # and those that are rectangles
    seconds_whole: float = 0.0
    seconds_cut: float = 0.0

    def __str__(self) -> str:
        both = self.whole + self.cut
        if not both:
            return "rectangles: no kernel takes any mask at a good rate"
        said = f"{self.whole} of {both} attentions in one call by row ranges"
        if math.isinf(self.seconds_cut):
            return f"{said}: the kernel asked for does not take the rectangles of all"
        gain = f"; several calls must be {_SEVERAL_GAIN:.0%} faster than one"
        near = not self.cut and self.seconds_cut < self.seconds_whole
        return (
            f"{said}, by rates of an H200 {self.seconds_whole * 1e3:.3g} ms if all were, "
            f"{self.seconds_cut * 1e3:.3g} ms as rectangles{gain if near else ''}"
        )


def faster_calls(
    program: Program, plan: Plan, kernels: Kernels, direction: Direction
) -> FasterCalls:
    """The program with one call in place of rectangles, where that is predicted to be faster, or
    hardly slower than several."""
    if not takes_whole_attentions(kernels.get(MaskKind.RANGE)):
        return FasterCalls(program)
    pairs_of, table = CallPairs(plan), program.buffer_table()
    operations = list(program.operations)
    numbers = [0, 0]
    seconds = [0.0, 0.0]
    for at, op in enumerate(operations):
        if not isinstance(op, Attend | AttendBackward) or not op.calls:
            continue
        pairs = [pairs_of(op, table, call) for call in op.calls]

        one = whole_call(op)
        cut, whole = (
            _seconds(
                kernels,
                direction,
                [(call, n, call_size(plan.problem, table, op, call)) for call, n in calls],
            )
            for calls in (zip(op.calls, pairs, strict=True), [(one, sum(pairs))])
        )
        better = whole * (1 - _SEVERAL_GAIN * (len(op.calls) > 1)) < cut
        numbers[better] += 1
        seconds[0] += whole
        seconds[1] += cut
        if better:
            operations[at] = replace(op, calls=(one,))
    changed = replace(program, operations=tuple(operations)) if numbers[1] else program
    return FasterCalls(changed, numbers[1], numbers[0], *seconds)


def _seconds(
    kernels: Kernels, direction: Direction, calls: Sequence[tuple[Call, int, BlockSize]]
) -> float:
    kinds = [MaskKind(call.kind) for call, _, _ in calls]
    if any(kind not in kernels for kind in kinds):
        return math.inf  # the kernel that was asked for by name refuses them
    given = [
        (kernels[kind], kind, pairs, size)
        for kind, (_, pairs, size) in zip(kinds, calls, strict=True)
    ]
    return predicted_seconds(direction, given)


def whole_call(op: Attend | AttendBackward) -> Call:
    return Call(CallKind.RANGE, 0, op.q.stop - op.q.start, 0, op.k.stop - op.k.start)


def call_size(
    problem: Problem, table: Mapping[str, Buffer], op: Attend | AttendBackward, call: Call
) -> BlockSize:
    heads, kv_heads = (piece.num_heads(table[piece.buffer]) for piece in (op.q, op.k))
    return BlockSize(
        *(call.q_stop - call.q_start, call.k_stop - call.k_start, heads, kv_heads),
        *(problem.head_dim, problem.v_dim),
        *(problem.element_bytes, problem.accumulate_bytes),
    )


def stand_in_block(call_shape: CallShape, size: BlockSize, mask: BlockMask) -> Block:
    """A block with the shapes of a call, and nothing behind them."""
    nothing = torch.empty((), dtype=call_shape.dtype, device=call_shape.device)

    def stand_in(rows: int, heads: int, width: int) -> Tensor:
        whole = (call_shape.batch, rows, heads, width)
        return nothing.new_empty(1, 1, heads, width).expand(whole)

    q = stand_in(size.num_queries, size.num_heads, size.head_dim)
    k = stand_in(size.num_keys, size.num_kv_heads, size.head_dim)
    v = stand_in(size.num_keys, size.num_kv_heads, size.v_head_dim)
    return Block(q, k, v, mask, softmax_scale=1.0)
