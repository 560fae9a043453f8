"""From a plan to an executor: the kernels at hand, the target they make, and the compiled program.

This is where the library asks what is installed. From here on programs are made by pure functions
(`plan/passes/`), and the executor decides nothing.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from functools import cache

import torch

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import (
    Choice,
    Kernel,
    KernelRefusedError,
    MaskKind,
    Request,
    RowKernels,
    choose,
    choose_rows,
)
from mesh_attention.kernels.determinism import Determinism, asked_of_torch
from mesh_attention.machine.cluster import Gpu, Links
from mesh_attention.machine.kernel_facts import facts_of
from mesh_attention.machine.rates import usual_cluster, usual_links
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import AttendBackward, Attention, Program
from mesh_attention.plan.passes.choose_calls import CallSummary
from mesh_attention.plan.passes.compile import PassCompiler, runs_beside
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.binding import CallShape
from mesh_attention.runtime.execute.call_masks import KnownRanges
from mesh_attention.runtime.execute.compute import Scores
from mesh_attention.runtime.execute.executor import Executor, Trace
from mesh_attention.runtime.transport.interface import Transport

_LOG = logging.getLogger("mesh_attention")
Choices = dict[MaskKind, Choice | KernelRefusedError]


@dataclass(frozen=True)
class KernelsAtHand:
    """The choice for every kind of call in one pass, or why there is none."""

    choices: Choices

    @property
    def by_kind(self) -> dict[MaskKind, Kernel]:
        return {k: c.kernel for k, c in self.choices.items() if isinstance(c, Choice)}

    @property
    def by_name(self) -> dict[str, Kernel]:
        return {kernel.name: kernel for kernel in self.by_kind.values()}

    def choice(self, kind: MaskKind) -> Choice:
        choice = self.choices[kind]
        if isinstance(choice, KernelRefusedError):
            raise choice
        return choice


def target_here(
    kernels: KernelsAtHand,
    direction: Direction,
    call_shape: CallShape,
    transport: Transport,
    links: Links,
    *,
    softcap: bool,
    deterministic: Determinism,
    lse_gradient: bool,
    two_streams: bool | None,
) -> Target:
    """For one pass. `two_streams`: left out, where transfers have a stream of their own. Calls that
    must have the bits of any number of ranks stay as the plan has them, since what is done for
    transfers is not done on one rank."""
    as_planned = deterministic is Determinism.ANY_RANKS
    by_kind = {str(kind): kernel.name for kind, kernel in kernels.by_kind.items()}
    forward = direction is Direction.FORWARD
    cuda = call_shape.device.type == "cuda"
    return Target(
        name=call_shape.device.type,
        gpu=_gpu(call_shape.device),
        kernels={name: facts_of(kernel) for name, kernel in kernels.by_name.items()},
        forward=by_kind if forward else {},
        backward={} if forward else by_kind,
        links=links,
        own_stream=cuda and (transport.own_stream if two_streams is None else two_streams),
        shows_workspace=transport.shows_workspace,
        element_bytes=call_shape.dtype.itemsize,
        softcap=softcap,
        deterministic=deterministic is not Determinism.ANY,
        lse_gradient=lse_gradient,
        two_streams=not as_planned,
        rectangles=(direction.value,) if as_planned else (),
    )


def _gpu(device: torch.device) -> Gpu:
    """Rates are those of an H200, of which the proportions matter; SMs are counted."""
    usual = usual_cluster().gpu
    if device.type != "cuda":
        return replace(usual, name=device.type)
    there = torch.cuda.get_device_properties(device)
    return replace(usual, name=there.name, sms=there.multi_processor_count)


def kernels_at_hand(
    plan: Plan,
    call_shape: CallShape,
    direction: Direction,
    force: str | None,
    *,
    softcap: bool,
    deterministic: Determinism,
    lse_gradient: bool,
) -> KernelsAtHand:
    """For every kind of mask, also those that no call of the program may have."""
    problem = plan.problem
    cuda = call_shape.device.type == "cuda"
    padded = any(x.padded_tokens > x.num_tokens for x in (plan.q_layout, plan.kv_layout))
    choices: Choices = {}
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
            any_heads=deterministic is Determinism.ANY_RANKS,
            lse_gradient=lse_gradient,
        )
        try:
            choices[kind] = _choose(request, force, deterministic)
        except KernelRefusedError as refused:
            choices[kind] = refused
    return KernelsAtHand(choices)


def _choose(request: Request, force: str | None, deterministic: Determinism) -> Choice:
    try:
        return choose(request, force=force)
    except KernelRefusedError as refused:
        if deterministic is not Determinism.PREFERRED:
            raise
        choice = choose(replace(request, deterministic=False), force=force)
        warned = f"not deterministic, though warn_only asks for it where there is a way: {refused}"
        return replace(choice, warning=warned)


def make_executor(
    plan: Plan,
    pass_: Pass,
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
    _check(plan, pass_, at, call_shape, lse_gradient=lse_gradient)
    deterministic = asked_of_torch() if deterministic is None else deterministic
    kernels = kernels_at_hand(
        plan,
        call_shape,
        pass_.direction,
        kernel,
        softcap=bool(softcap),
        deterministic=deterministic,
        lse_gradient=lse_gradient,
    )
    target = target_here(
        kernels,
        pass_.direction,
        call_shape,
        transport,
        links or usual_links(),
        softcap=bool(softcap),
        deterministic=deterministic,
        lse_gradient=lse_gradient,
        two_streams=two_streams,
    )
    if plan.target is None:
        program, summary = PassCompiler(plan, pass_, target).compiled(at)
    else:
        program, summary = pass_.programs[at], CallSummary()
    choices = {kind: kernels.choice(kind) for kind in sorted(_kinds(program))}
    by_name = _by_name(kernels, program)
    for warning in {choice.warning for choice in choices.values() if choice.warning}:
        warnings.warn(warning, stacklevel=2)
    for kind, choice in choices.items():
        _log_once(pass_.direction.value, str(kind), choice.kernel.name, call_shape.device.type)
    row_choice = choose_rows(call_shape.device.type, call_shape.dtype)
    # Kernels in plain PyTorch skip what is hidden without asking the device.
    by_range = target.kernel(pass_.direction, MaskKind.RANGE)
    on_device = by_range is not None and by_range[1].ranges
    executor = Executor(
        plan,
        pass_,
        program,
        by_name,
        transport,
        workspace,
        call_shape,
        Scores(softmax_scale, softcap),
        rows=rows or row_choice.rows,
        deterministic=deterministic is not Determinism.ANY,
        two_streams=target.takes_turns and runs_beside(program),
        mask_device=call_shape.device if on_device else torch.device("cpu"),
        known_ranges={} if known_ranges is None else known_ranges,
        trace=trace,
    )
    executor.choices, executor.row_choice, executor.calls = choices, row_choice, str(summary)
    return executor


@cache
def _log_once(direction: str, kind: str, kernel: str, device: str) -> None:
    """`cp.kernels()` says why."""
    _LOG.info("%s calls with a %s mask on %s: kernel %s", direction, kind, device, kernel)


def _kinds(program: Program) -> set[MaskKind]:
    return {
        MaskKind(call.kind)
        for op in program.operations
        if isinstance(op, Attention)
        for call in op.calls
    }


def _by_name(kernels: KernelsAtHand, program: Program) -> dict[str, Kernel]:
    """The kernels that the program names, which a compiled plan may bring."""
    by_name = kernels.by_name
    for op in program.operations:
        for call in op.calls if isinstance(op, Attention) else ():
            if call.kernel not in by_name:
                there = ", ".join(by_name)
                raise MeshAttentionError(
                    f"the plan is compiled for a kernel {call.kernel!r}, and this device has "
                    f"{there} for such calls; give the plan as it was before"
                )
    return by_name


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
