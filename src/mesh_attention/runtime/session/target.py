"""The target of a process: the kernels at hand for a plan on its device, and how transfers run.

This is where the library asks what is installed. From here on programs are made by pure functions
(`plan/passes/`), and the executor decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mesh_attention.kernels import Choice, Kernel, KernelRefusedError, MaskKind, Request, choose
from mesh_attention.kernels.determinism import Determinism
from mesh_attention.machine.cluster import Gpu, Links
from mesh_attention.machine.kernel_facts import facts_of
from mesh_attention.machine.rates import usual_cluster
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.runtime.execute.binding import CallShape
from mesh_attention.runtime.transport.interface import Transport

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
        found = self.choices[kind]
        if isinstance(found, KernelRefusedError):
            raise found
        return found


def target_here(
    kernels: KernelsAtHand,
    direction: Direction,
    call_shape: CallShape,
    transport: Transport,
    links: Links,
    *,
    softcap: bool,
    deterministic: bool,
    lse_gradient: bool,
    two_streams: bool | None,
) -> Target:
    """For one pass. `two_streams`: left out, where transfers have a stream of their own."""
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
        deterministic=deterministic,
        lse_gradient=lse_gradient,
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
    found: Choices = {}
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
    return KernelsAtHand(found)


def _choose(request: Request, force: str | None, deterministic: Determinism) -> Choice:
    try:
        return choose(request, force=force)
    except KernelRefusedError as refused:
        if deterministic is not Determinism.PREFERRED:
            raise
        found = choose(replace(request, deterministic=False), force=force)
        warned = f"not deterministic, though warn_only asks for it where there is a way: {refused}"
        return replace(found, warning=warned)
