"""Arguments of `ContextParallel` that the planner does not see: checked before ranks meet.

A fault is returned, not raised: all ranks must hear of it in their first agreement.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import kernel_names
from mesh_attention.plan.arguments import real
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.runtime.transports import TransportName

__all__ = [
    "argument_fault",
    "checked_device",
    "checked_dim",
    "graph_fault",
    "name_fault",
    "process_group",
]


def name_fault(
    method: object, options: dict[str, Any], own: Iterable[str]
) -> MeshAttentionError | None:
    """An option that is nearly the name of an argument was meant as one."""
    own = [name for name in own if name != "options"]
    known = {option for one in METHODS.values() for option in one.options()}
    for name in sorted(options.keys() - known):
        close = [argument for argument in own if name in argument]
        close += get_close_matches(name, own, n=1, cutoff=0.7)
        if close:
            return MeshAttentionError(
                f"method {method} has no option {name!r}; did you mean the argument {close[0]}?"
            )
    return None


def argument_fault(
    softmax_scale: Any, dtype: Any, kernel: Any, transport: Any, timeout: Any
) -> MeshAttentionError | None:
    """What is wrong with arguments that the planner does not see."""
    try:
        if softmax_scale is not None:
            real("softmax_scale", softmax_scale)
    except MeshAttentionError as error:
        return error
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return MeshAttentionError(f"dtype={dtype!r}: must be a floating-point torch.dtype")
    if kernel is not None and kernel not in kernel_names():
        known = ", ".join(kernel_names())
        return MeshAttentionError(f"no kernel is named {kernel!r}; known: {known}")
    if transport not in list(TransportName):
        known = ", ".join(TransportName)
        return MeshAttentionError(f"transport={transport!r} is unknown; known: {known}")
    if timeout is not None and not isinstance(timeout, timedelta):
        return MeshAttentionError(f"timeout={timeout!r}: must be a datetime.timedelta")
    return None


def graph_fault(
    group: dist.ProcessGroup, transport: Any, cuda_graph: Any, nvtx: Any
) -> MeshAttentionError | None:
    for name, value in (("cuda_graph", cuda_graph), ("nvtx", nvtx)):
        if not isinstance(value, bool):
            return MeshAttentionError(f"{name}={value!r}: must be True or False")
    backend = dist.get_backend(group)
    if cuda_graph and backend != dist.Backend.NCCL:
        return MeshAttentionError(
            f"cuda_graph=True needs a group over nccl, and this one is over {backend}: "
            "only what lives on CUDA streams can be captured; leave cuda_graph out"
        )
    if cuda_graph and transport == TransportName.SYMMETRIC:
        return MeshAttentionError(
            "cuda_graph=True with transport='symmetric' is not supported; leave one of them out"
        )
    return None


def process_group(group_or_mesh: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise MeshAttentionError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    if isinstance(group_or_mesh, DeviceMesh):
        if group_or_mesh.ndim != 1:
            raise MeshAttentionError(
                f"the DeviceMesh has {group_or_mesh.ndim} dimensions "
                f"{group_or_mesh.mesh_dim_names}; pass one of them, as in mesh['cp']"
            )
        if group_or_mesh.get_coordinate() is not None:
            return group_or_mesh.get_group()
        raise MeshAttentionError("this rank is not a member of the DeviceMesh it was given")
    group = dist.group.WORLD if group_or_mesh is None else group_or_mesh
    if isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0:
        return group
    # To ranks it leaves out, new_group gives a number in place of a group.
    if isinstance(group, dist.ProcessGroup | type(dist.GroupMember.NON_GROUP_MEMBER)):
        raise MeshAttentionError("this rank is not a member of the group it was given")
    raise MeshAttentionError(
        f"the group is {group!r}; give a torch.distributed.ProcessGroup, a 1-D DeviceMesh, "
        "or None for the default group"
    )


def checked_dim(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor) or isinstance(dim, bool) or not isinstance(dim, int):
        raise MeshAttentionError(
            f"give a tensor and a dimension, not {type(x).__name__} and {dim!r}"
        )
    if not -x.ndim <= dim < x.ndim:
        raise MeshAttentionError(f"dim={dim} is outside a tensor of {x.ndim} dimensions")
    return dim % x.ndim


def checked_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (TypeError, RuntimeError):
        raise MeshAttentionError(
            f"device={device!r}: give a torch.device that is here, or its name, such as 'cuda:0'"
        ) from None
