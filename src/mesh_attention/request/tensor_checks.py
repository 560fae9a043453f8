"""The arguments of one call of attention, and what is wrong with them. The checks return an error
and do not raise it, since the caller must first tell the other ranks, which wait for this one."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Plan


class AttentionCall(NamedTuple):
    """The arguments of one call.

    documents   of the batch, or the plans for them
    is_causal   what the caller takes the mask for
    block       the number of a block that replaces PyTorch's attention
    return_lse  False: nobody looks at lse
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    documents: Any = None
    label: str | int | None = None
    softmax_scale: float | None = None
    is_causal: bool | None = None
    block: Tensor | None = None
    return_lse: bool = False


def fault_of_call(plan: Plan, call: AttentionCall) -> MeshAttentionError | None:
    fault = fault_of_tensors(plan, call.q, call.k, call.v)
    fault = fault or fault_of_sinks(plan, call.q, call.sinks)
    return fault or fault_of_causal(plan, call.is_causal)


def fault_of_tensors(plan: Plan, q: Any, k: Any, v: Any) -> MeshAttentionError | None:
    fault = fault_of_kind(q=q, k=k, v=v)
    if fault is not None:
        return fault
    p = plan.problem
    batch = q.shape[0] if q.ndim == 4 else 1
    if batch == 0:
        return MeshAttentionError(f"q has shape {tuple(q.shape)}: a batch of 0 is not supported")
    slots, kv_slots = (shards.slots for shards in plan.shards)
    wanted = {
        "q": (q, (batch, slots, p.num_heads, p.head_dim)),
        "k": (k, (batch, kv_slots, p.kv_heads, p.head_dim)),
        "v": (v, (batch, kv_slots, p.kv_heads, p.v_dim)),
    }
    for name, (x, shape) in wanted.items():
        if tuple(x.shape) != shape:
            tokens = p.q_tokens if name == "q" else p.keys
            return MeshAttentionError(
                f"{name} has shape {tuple(x.shape)}, expected {shape} = (batch, local_seq, "
                f"heads, head_dim); {_way_to_shape(tuple(x.shape[1:]), shape, tokens)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            return MeshAttentionError(
                f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}"
            )
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return MeshAttentionError(f"dtype {q.dtype} is not a floating-point type of attention")
    return None


def _way_to_shape(actual: tuple[int, ...], wanted: tuple[int, ...], tokens: int) -> str:
    """`actual` is without the batch; `tokens`: of the whole tensor."""
    _, slots, heads, width = wanted
    shard = (
        "cut the whole tensor with ContextParallel.shard(x, 1), and documents= if the call has some"
    )
    if actual == (heads, slots, width):
        return "heads come after tokens: give x.transpose(1, 2)"
    if actual == (heads, tokens, width):
        return f"heads come after tokens: give x.transpose(1, 2), and {shard}"
    if actual[1:] == (heads, width):
        return shard
    if actual[:1] == (slots,):
        return f"this ContextParallel was made for {heads} such heads of {width}"
    return shard


def fault_of_kind(**tensors: Any) -> MeshAttentionError | None:
    """Tensors, by name, that hold no plain numbers of this process: kernels and transports read
    memory, and would fail in the middle of a call, or read something else."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            kind, way_out = type(x).__name__, "it must be a torch.Tensor"
        elif x.is_nested:
            kind, way_out = "a nested tensor", "give a dense one, and documents in the mask"
        elif x.layout is not torch.strided:
            kind, way_out = f"a {x.layout} tensor", "it must be a dense torch.Tensor"
        elif type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            kind, way_out = f"a {type(x).__name__}", _WAYS_OUT.get(type(x).__name__, _PLAIN)
        elif x.is_meta:
            kind, way_out = "on the meta device", "it must have data"
        elif forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            kind, way_out = "a dual tensor", "forward-mode derivatives are not supported"
        else:
            continue
        return MeshAttentionError(f"{name} is {kind}; {way_out}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values()):
        for name, x in tensors.items():
            if x.is_inference():
                return MeshAttentionError(
                    f"{name} was made in inference mode, and another input requires grad: autograd "
                    f"cannot save it; give {name}.clone(), or make it in torch.no_grad()"
                )
    if torch._C._are_functorch_transforms_active():
        return MeshAttentionError(
            "transforms of torch.func (vmap, grad, jvp, ...) around attention are not supported"
        )
    if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is not None:
        return MeshAttentionError(f"a FakeTensorMode is active; {_WAYS_OUT['FakeTensor']}")
    return None


_PLAIN = "give the plain torch.Tensor that this rank holds"
_WAYS_OUT = {
    "FakeTensor": "of what traces, torch.compile is supported: call this in compiled code",
    "DTensor": f"{_PLAIN}: x.to_local() of a replicated one, x.full_tensor() of others",
    "AsyncCollectiveTensor": f"{_PLAIN}, x.wait()",
}


def fault_of_sinks(plan: Plan, q: Any, sinks: Any) -> MeshAttentionError | None:
    """After `fault_of_tensors` found nothing."""
    if sinks is None:
        return None
    fault = fault_of_kind(q=q, sinks=sinks)
    if fault is not None:
        return fault
    heads = plan.problem.num_heads
    if tuple(sinks.shape) != (heads,) or not sinks.dtype.is_floating_point:
        return MeshAttentionError(
            f"sinks is {tuple(sinks.shape)} of {sinks.dtype}; expected one floating-point number "
            f"for each query head, ({heads},)"
        )
    if sinks.device != q.device:
        return MeshAttentionError(f"sinks is on {sinks.device} but q is on {q.device}")
    return None


def fault_of_causal(plan: Plan, is_causal: bool | None) -> MeshAttentionError | None:
    """None: the caller leaves the mask to the object."""
    mask = plan.problem.mask
    if is_causal is None or is_causal == mask.causal:
        return None
    return MeshAttentionError(
        f"is_causal={is_causal}, but the mask of this ContextParallel is {mask.describe()}; make "
        f"it with causal={is_causal}, or call with is_causal={mask.causal}"
    )


UNSUPPORTED = {
    "dropout_p": "dropout of attention weights is not supported; drop elements of the output "
    "instead, with torch.nn.functional.dropout, and leave dropout_p out",
    "alibi_slopes": "a bias by distance (ALiBi) is not supported; rotate q and k by "
    "ContextParallel.positions() (RoPE), or give a window, and leave alibi_slopes out",
}


def fault_of_unsupported(**arguments: Any) -> MeshAttentionError | None:
    """What people who come from flash-attn may pass: no dropout and no slopes are fine."""
    for name, value in arguments.items():
        nothing = value is None or (isinstance(value, Real) and value == 0)
        if name in UNSUPPORTED and not nothing:
            text = f"{name}={value}" if isinstance(value, Real) else name
            return MeshAttentionError(f"{text}: {UNSUPPORTED[name]}")
    return None


def read_label(label: Any) -> Any:
    """numpy's whole numbers are whole numbers."""
    return int(label) if isinstance(label, Integral) and not isinstance(label, bool) else label


def fault_of_flag(name: str, value: Any) -> MeshAttentionError | None:
    is_flag = isinstance(value, bool)
    return None if is_flag else MeshAttentionError(f"{name}={value!r}: must be True or False")


def fault_of_label(label: Any) -> MeshAttentionError | None:
    if isinstance(label, int) and not -(2**63) <= label < 2**63:
        return MeshAttentionError(f"label={label!r}: a number must have at most 64 bits")
    if label is None or (isinstance(label, str | int) and not isinstance(label, bool)):
        return None
    return MeshAttentionError(f"label={label!r}: must be a str or an int")
