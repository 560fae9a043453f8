"""Reads the arguments that say how calls are made, and not on what plan, into `CallOptions`.
`read_arguments` (`arguments.py`) calls it.

`same_bits=True`: n ranks give the bits that one rank gives, in both passes, for reinforcement
learning, where trainer and sampler must agree. Each head is whole on one rank, its rows are in the
order of the tokens, and one kernel call computes it. In the backward pass delta is computed from
the rows of a shard, so the kernel must be one that takes delta.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from numbers import Real
from typing import Any

import torch.distributed as dist

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import kernel_names
from mesh_attention.plan.methods.table import AUTO
from mesh_attention.plan.problem.arguments import choice, flag, real
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.runtime.session.call_options import CallOptions, Determinism, asked_of_torch
from mesh_attention.runtime.session.transports import TransportName
from mesh_attention.runtime.transport.groups import backend_of

MOST_SOFTCAP = 1e30  # scores divided by more are lost in float32
CALL_ARGUMENTS = (
    "softmax_scale", "softcap", "differentiable_lse", "kernel", "transport", "cuda_graph",
    "deterministic", "same_bits", "nvtx", "timeout",
)  # fmt: skip
_FOR_SAME_BITS: dict[str, Any] = {
    "method": "ulysses",
    "layout": "contiguous",
    "chunks": (1, 1),
    "deterministic": True,
    "differentiable_lse": True,
}


def call_options(group: dist.ProcessGroup, chosen: Mapping[str, Any]) -> CallOptions:
    """`chosen`: the arguments among `CALL_ARGUMENTS` that are not left out, by name."""
    scale, softcap = chosen.get("softmax_scale"), chosen.get("softcap")
    zero = isinstance(softcap, Real) and not isinstance(softcap, bool) and softcap == 0
    none = softcap is None or zero
    cap = 0.0 if none else real("softcap", softcap)
    if cap > MOST_SOFTCAP:
        raise MeshAttentionError(f"softcap={softcap!r}: at most {MOST_SOFTCAP:g}; None is none")
    kernel, timeout = chosen.get("kernel"), chosen.get("timeout")
    if kernel is not None and not (isinstance(kernel, str) and kernel in kernel_names()):
        known = ", ".join(kernel_names())
        raise MeshAttentionError(f"no kernel is named {kernel!r}; known: {known}")
    transport = choice(TransportName, "transport", chosen.get("transport", TransportName.AUTO))
    if timeout is not None and not isinstance(timeout, timedelta):
        raise MeshAttentionError(f"timeout={timeout!r}: must be a datetime.timedelta")
    if timeout is not None and timeout <= timedelta(0):
        raise MeshAttentionError(
            f"timeout={timeout!r}: must be above 0; leave it out for that of the group"
        )
    flags = ("differentiable_lse", "cuda_graph", "deterministic", "same_bits", "nvtx")
    asked = {name: flag(name, chosen.get(name, False)) for name in flags}
    graph, backend = asked["cuda_graph"], backend_of(group)
    if graph and backend != dist.Backend.NCCL:
        raise MeshAttentionError(
            f"cuda_graph=True needs a group over nccl, and this one is over {backend}: "
            "only what lives on CUDA streams can be captured; leave cuda_graph out"
        )
    if graph and transport is TransportName.SYMMETRIC:
        raise MeshAttentionError(
            "cuda_graph=True with transport='symmetric' is not supported; leave one of them out"
        )
    deterministic = Determinism.REQUIRED if asked["deterministic"] else asked_of_torch()
    return CallOptions(
        softmax_scale=None if scale is None else real("softmax_scale", scale),
        softcap=cap,
        differentiable_lse=asked["differentiable_lse"],
        kernel=kernel,
        transport=transport,
        cuda_graph=graph,
        nvtx=asked["nvtx"],
        timeout=timeout,
        must_be_deterministic=asked["deterministic"],
        deterministic=Determinism.ANY_RANKS if asked["same_bits"] else deterministic,
    )


def wants_same_bits(arguments: Mapping[str, Any]) -> bool:
    value = arguments.get("same_bits")
    return value is not None and flag("same_bits", value)


def with_same_bits(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with the values that `same_bits` needs; raises if they say other values."""
    if not wants_same_bits(arguments):
        return arguments
    defaults = {"method": AUTO, "deterministic": False, "differentiable_lse": False}
    for name in ("plan", "tuned", "head_slices", "relayout"):
        if arguments.get(name):
            raise _refused(f"{name}={arguments[name]!r} says otherwise; leave it out")
    for name, wanted in _FOR_SAME_BITS.items():
        value = arguments.get(name)
        if value not in (None, wanted) and value != defaults.get(name):
            raise _refused(f"{name} must be {wanted!r}, not {value!r}; leave it out")
    return arguments | _FOR_SAME_BITS


def check_same_bits(problem: Problem, num_ranks: int) -> None:
    """Raises if heads cannot be dealt to ranks whole, or if the mask makes a kernel call stop at
    the bounds of shards, which changes the order of sums."""
    mask = problem.mask
    for name, value in (("window", mask.window), ("prefix", mask.prefix), ("slices", mask.slices)):
        if value:
            raise _refused(f"the mask has {name}; causal and full ones, with documents or without")
    for name in ("num_heads", "num_kv_heads"):
        heads = getattr(problem, name)
        if heads % num_ranks:
            raise _refused(
                f"{name}={heads} does not divide by {num_ranks} ranks, and each head must be whole "
                "on one rank; use fewer ranks in the group"
            )


def _refused(reason: str) -> MeshAttentionError:
    return MeshAttentionError(f"same_bits=True: {reason}")
