"""From a plan to an executor: the kernels at hand, the target they make, and the compiled program.

This is where the library asks what is installed. From here on programs are made by pure functions
(`plan/passes/`), and the executor decides nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial

import torch

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import (
    Choice,
    Kernel,
    KernelRefusedError,
    MaskKind,
    Request,
    choose,
    choose_rows,
    table_version,
)
from mesh_attention.machine.cluster import Gpu, Links
from mesh_attention.machine.kernel_facts import facts_of
from mesh_attention.machine.rates import usual_cluster
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import AttendBackward, Attention, Program
from mesh_attention.plan.passes.choose_calls import CallSummary
from mesh_attention.plan.passes.compile import PassCompiler, runs_beside
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.attentions import Attentions
from mesh_attention.runtime.execute.binding import CallShape
from mesh_attention.runtime.execute.call_masks import KnownRanges
from mesh_attention.runtime.execute.executor import Executor, Trace
from mesh_attention.runtime.execute.frame import Frame
from mesh_attention.runtime.session.call_options import CallOptions, Determinism
from mesh_attention.runtime.transport.interface import Transport

_LOG = logging.getLogger("mesh_attention")


def target_here(
    request: Request,
    kernels: Mapping[MaskKind, Kernel],
    call_shape: CallShape,
    transport: Transport,
    links: Links,
) -> Target:
    """For the pass of the request. Calls that must have the bits of any number of ranks stay as the
    plan has them, since what is done for transfers is not done on one rank."""
    by_kind = {str(kind): kernel.name for kind, kernel in kernels.items()}
    forward = request.direction is Direction.FORWARD
    return Target(
        name=request.device_type,
        gpu=_gpu(call_shape.device),
        kernels={kernel.name: facts_of(kernel) for kernel in kernels.values()},
        forward=by_kind if forward else {},
        backward={} if forward else by_kind,
        links=links,
        own_stream=request.device_type == "cuda" and transport.own_stream,
        shows_workspace=transport.shows_workspace,
        element_bytes=call_shape.dtype.itemsize,
        softcap=request.softcap,
        deterministic=request.deterministic,
        lse_gradient=request.lse_gradient,
        two_streams=not request.any_heads,
        rectangles=(request.direction.value,) if request.any_heads else (),
    )


@cache
def _gpu(device: torch.device) -> Gpu:
    """Rates are those of an H200, of which the proportions matter; SMs are counted."""
    usual = usual_cluster().gpu
    if device.type != "cuda":
        return replace(usual, name=device.type)
    there = torch.cuda.get_device_properties(device)
    return replace(usual, name=there.name, sms=there.multi_processor_count)


@lru_cache(maxsize=64)
def _offered(
    request: Request, force: str | None, deterministic: Determinism, _table: int
) -> dict[MaskKind, Choice | str]:
    """For each kind of mask the choice, or why there is none: no call of the program may be of such
    a kind. `_table`: the version of the table of kernels."""
    return {k: _choose(replace(request, mask=k), force, deterministic) for k in MaskKind}


def _choose(request: Request, force: str | None, deterministic: Determinism) -> Choice | str:
    try:
        return choose(request, force=force)
    except KernelRefusedError as refused:
        why = str(refused)
    if deterministic is not Determinism.PREFERRED:
        return why
    try:
        choice = choose(replace(request, deterministic=False), force=force)
    except KernelRefusedError as refused:
        return str(refused)
    warned = f"not deterministic, though warn_only asks for it where there is a way: {why}"
    return replace(choice, warning=warned)


def make_executor(
    plan: Plan,
    pass_: Pass,
    at: int,
    transport: Transport,
    workspace: Workspace,
    call_shape: CallShape,
    options: CallOptions,
    *,
    trace: Trace | None = None,
    known_ranges: KnownRanges | None = None,
) -> Executor:
    """The executor of the program at this place of the pass, for calls of this shape.

    at            the logical rank
    trace         entered around each operation
    known_ranges  masks that the executor of the other pass has made; new masks are added
    """
    _check(plan, pass_, at, call_shape, lse_gradient=options.differentiable_lse)
    deterministic, problem, device = options.deterministic, plan.problem, call_shape.device
    request = Request(
        direction=pass_.direction,
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=call_shape.dtype,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_dim,
        num_heads=problem.num_heads,
        num_kv_heads=problem.kv_heads,
        mask=MaskKind.FULL,
        softcap=bool(options.softcap),
        padded=any(x.padded_tokens > x.num_tokens for x in (plan.q_layout, plan.kv_layout)),
        scattered=plan.kv_layout.kind is LayoutKind.STRIPED,
        intervals=problem.rows.most_intervals,
        deterministic=deterministic is not Determinism.ANY,
        any_heads=deterministic is Determinism.ANY_RANKS,
        lse_gradient=options.differentiable_lse,
    )
    offered = _offered(request, options.kernel, deterministic, table_version())
    # Also for kinds of mask that no call of the program has.
    kernels = {k: c.kernel for k, c in offered.items() if isinstance(c, Choice)}
    target = target_here(request, kernels, call_shape, transport, options.links)
    program_for_mask: Callable[[Plan], Program] | None = None
    if plan.target is None:
        compiler = PassCompiler(plan, pass_, target)
        program, summary = compiler.compiled(at)
        program_for_mask = partial(compiler.leaving_sms, at)
    else:
        program, summary = pass_.programs[at], CallSummary()
    calls = [c for op in program.operations if isinstance(op, Attention) for c in op.calls]
    choices: dict[MaskKind, Choice] = {}
    for kind in sorted({call.kind for call in calls}):
        choice = offered[kind]
        if isinstance(choice, str):
            raise KernelRefusedError(choice)
        choices[kind] = choice
        _log_once(pass_.direction.value, str(kind), choice.kernel.name, device.type)
    by_name = {kernel.name: kernel for kernel in kernels.values()}
    for call in calls:
        if call.kernel not in by_name:  # a compiled plan may bring any
            raise MeshAttentionError(
                f"the plan is compiled for a kernel {call.kernel!r}, and this device has "
                f"{', '.join(by_name)} for such calls; give the plan as it was before"
            )
    for warning in {choice.warning for choice in choices.values() if choice.warning}:
        warnings.warn(warning, stacklevel=2)
    beside = target.takes_turns and runs_beside(program)
    frame = Frame(
        program,
        pass_,
        problem,
        transport,
        workspace,
        call_shape,
        choose_rows(device.type, call_shape.dtype),
        two_streams=beside,
    )
    # Kernels in plain PyTorch skip what is hidden without asking the device.
    by_range = target.kernel(pass_.direction, MaskKind.RANGE)
    on_device = by_range is not None and by_range[1].ranges
    scale = options.softmax_scale
    attentions = Attentions(
        frame,
        plan,
        by_name,
        (problem.head_dim**-0.5 if scale is None else scale, options.softcap),
        deterministic=deterministic is not Determinism.ANY,
        mask_device=device if on_device else torch.device("cpu"),
        known_ranges={} if known_ranges is None else known_ranges,
        program_for_mask=program_for_mask if beside else None,
    )
    return Executor(frame, attentions, choices, str(summary), trace)


@cache
def _log_once(direction: str, kind: str, kernel: str, device: str) -> None:
    """`cp.kernels()` says why."""
    _LOG.info("%s calls with a %s mask on %s: kernel %s", direction, kind, device, kernel)


def _check(plan: Plan, pass_: Pass, at: int, call_shape: CallShape, *, lse_gradient: bool) -> None:
    if call_shape.dtype.itemsize != plan.problem.element_bytes:
        raise MeshAttentionError(
            f"the plan is for {plan.problem.element_bytes}-byte elements, but the tensors are "
            f"{call_shape.dtype}; make one for a "
            f"Problem(..., element_bytes={call_shape.dtype.itemsize})"
        )
    if lse_gradient and any(
        isinstance(op, AttendBackward) and op.out is not None
        for op in pass_.programs[at].operations
    ):
        raise MeshAttentionError(
            "differentiable_lse=True needs a plan whose backward pass works with delta; this "
            "one hands `out` to its attentions"
        )
