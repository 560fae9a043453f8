"""From a plan to an executor: kernels at hand, the target they make, and the compiled program."""

from __future__ import annotations

import warnings

import torch

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import Kernel, MaskKind, RowKernels, choose_rows
from mesh_attention.kernels.determinism import Determinism, asked_of_torch
from mesh_attention.machine.cluster import Links
from mesh_attention.machine.rates import usual_links
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import AttendBackward, Attention, Program
from mesh_attention.plan.passes.choose_calls import CallSummary
from mesh_attention.plan.passes.compile import PassCompiler, runs_beside
from mesh_attention.runtime.device.workspace import Workspace
from mesh_attention.runtime.execute.binding import CallShape
from mesh_attention.runtime.execute.call_masks import KnownRanges
from mesh_attention.runtime.execute.compute import Scores
from mesh_attention.runtime.execute.executor import Executor, Trace
from mesh_attention.runtime.session.target import KernelsAtHand, kernels_at_hand, target_here
from mesh_attention.runtime.transport.interface import Transport


def make_executor(
    plan: Plan,
    one: Pass,
    at: int,
    transport: Transport,
    workspace: Workspace,
    call_shape: CallShape,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    lse_gradient: bool = False,
    kernel: str | None = None,
    deterministic: Determinism | None = None,
    rows: RowKernels | None = None,
    trace: Trace | None = None,
    two_streams: bool | None = None,
    known_ranges: KnownRanges | None = None,
    links: Links | None = None,
) -> Executor:
    """Of the program at this place of the pass. `deterministic`: left out, as PyTorch is asked.
    `links`: by which calls make room for transfers."""
    _check(plan, one, at, call_shape, lse_gradient=lse_gradient)
    deterministic = asked_of_torch() if deterministic is None else deterministic
    kernels = kernels_at_hand(
        *(plan, call_shape, one.direction, kernel),
        softcap=bool(softcap),
        deterministic=deterministic,
        lse_gradient=lse_gradient,
    )
    target = target_here(
        *(kernels, one.direction, call_shape, transport, links or usual_links()),
        softcap=bool(softcap),
        deterministic=deterministic is not Determinism.ANY,
        lse_gradient=lse_gradient,
        two_streams=two_streams,
    )
    if plan.target is None:
        program, summary = PassCompiler(plan, one, target).compiled(at)
    else:
        program, summary = one.programs[at], CallSummary()
    choices = {kind: kernels.choice(kind) for kind in sorted(_kinds(program))}
    by_name = _by_name(kernels, program)
    for warning in {choice.warning for choice in choices.values() if choice.warning}:
        warnings.warn(warning, stacklevel=2)
    row_choice = choose_rows(call_shape.device.type, call_shape.dtype)
    # Kernels in plain PyTorch skip what is hidden without asking the device.
    by_range = target.kernel(one.direction, MaskKind.RANGE)
    on_device = by_range is not None and by_range[1].ranges
    executor = Executor(
        *(plan, one, program, by_name, transport, workspace, call_shape),
        Scores(softmax_scale, softcap),
        rows=rows or row_choice.rows,
        deterministic=deterministic is not Determinism.ANY,
        two_streams=target.own_stream and runs_beside(program),
        mask_device=call_shape.device if on_device else torch.device("cpu"),
        known_ranges={} if known_ranges is None else known_ranges,
        trace=trace,
    )
    executor.choices, executor.row_choice, executor.calls = choices, row_choice, str(summary)
    return executor


def _kinds(program: Program) -> set[MaskKind]:
    return {
        MaskKind(call.kind)
        for op in program.operations
        if isinstance(op, Attention)
        for call in op.calls
    }


def _by_name(kernels: KernelsAtHand, program: Program) -> dict[str, Kernel]:
    """The kernels that the program names, which a compiled plan may bring."""
    found = kernels.by_name
    for op in program.operations:
        for call in op.calls if isinstance(op, Attention) else ():
            if call.kernel not in found:
                there = ", ".join(found)
                raise MeshAttentionError(
                    f"the plan is compiled for a kernel {call.kernel!r}, and this device has "
                    f"{there} for such calls; give the plan as it was before"
                )
    return found


def _check(plan: Plan, one: Pass, at: int, call_shape: CallShape, *, lse_gradient: bool) -> None:
    if call_shape.dtype.itemsize != plan.problem.element_bytes:
        raise MeshAttentionError(
            f"the plan is for {plan.problem.element_bytes}-byte elements, but the tensors are "
            f"{call_shape.dtype}; make one for a "
            f"Problem(..., element_bytes={call_shape.dtype.itemsize})"
        )
    if lse_gradient and any(
        isinstance(op, AttendBackward) and op.out is not None for op in one.programs[at].operations
    ):
        raise MeshAttentionError(
            "differentiable_lse=True needs a plan whose backward pass works with delta; this "
            "one hands `out` to its attentions"
        )
