"""Arguments that say how calls are made, whatever is asked for: read into `CallOptions`."""

from __future__ import annotations

from datetime import timedelta
from numbers import Real
from typing import Any

import torch.distributed as dist

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import kernel_names
from mesh_attention.kernels.determinism import Determinism, asked_of_torch
from mesh_attention.plan.problem.arguments import choice, flag, real
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.transports import TransportName

MOST_SOFTCAP = 1e30  # scores divided by more are lost in float32
CALL_ARGUMENTS = (
    "softmax_scale", "softcap", "differentiable_lse", "kernel", "transport", "cuda_graph",
    "deterministic", "same_bits", "nvtx", "timeout",
)  # fmt: skip


def call_options(
    group: dist.ProcessGroup,
    *,
    softmax_scale: Any = None,
    softcap: Any = None,
    differentiable_lse: Any = False,
    kernel: Any = None,
    transport: Any = TransportName.AUTO,
    cuda_graph: Any = False,
    deterministic: Any = False,
    same_bits: Any = False,
    nvtx: Any = False,
    timeout: Any = None,
) -> CallOptions:
    scale = None if softmax_scale is None else real("softmax_scale", softmax_scale)
    none = softcap is None or (isinstance(softcap, Real) and softcap == 0)
    cap = 0.0 if none else real("softcap", softcap)
    if cap > MOST_SOFTCAP:
        raise MeshAttentionError(f"softcap={softcap!r}: at most {MOST_SOFTCAP:g}; None is none")
    if kernel is not None and not (isinstance(kernel, str) and kernel in kernel_names()):
        known = ", ".join(kernel_names())
        raise MeshAttentionError(f"no kernel is named {kernel!r}; known: {known}")
    name = choice(TransportName, "transport", transport)
    if timeout is not None and not isinstance(timeout, timedelta):
        raise MeshAttentionError(f"timeout={timeout!r}: must be a datetime.timedelta")
    if timeout is not None and timeout <= timedelta(0):
        raise MeshAttentionError(
            f"timeout={timeout!r}: must be above 0; leave it out for that of the group"
        )
    graph, backend = flag("cuda_graph", cuda_graph), dist.get_backend(group)
    if graph and backend != dist.Backend.NCCL:
        raise MeshAttentionError(
            f"cuda_graph=True needs a group over nccl, and this one is over {backend}: "
            "only what lives on CUDA streams can be captured; leave cuda_graph out"
        )
    if graph and name is TransportName.SYMMETRIC:
        raise MeshAttentionError(
            "cuda_graph=True with transport='symmetric' is not supported; leave one of them out"
        )
    always = flag("deterministic", deterministic)
    asked = Determinism.REQUIRED if always else asked_of_torch()
    return CallOptions(
        scale,
        cap,
        flag("differentiable_lse", differentiable_lse),
        kernel,
        name,
        graph,
        flag("nvtx", nvtx),
        timeout,
        must_be_deterministic=always,
        deterministic=Determinism.ANY_RANKS if flag("same_bits", same_bits) else asked,
    )
