"""One attention on the plans of an object: `ContextParallel.attention`, models and replaced SDPA.

A call is checked once: what its checks depend on is its key, and an equal call later finds the
prepared call by it. Whatever has no key (DTensors, tensors inside transforms, compiled code,
faults) goes through the checks each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.autograd import Attention
from mesh_attention.request.compiled_attention import OfCall
from mesh_attention.request.kept_calls import KEEPING, THREAD, Recording
from mesh_attention.request.object_calls import ObjectCalls, UserCall
from mesh_attention.request.operators import attention_op, need_grad
from mesh_attention.runtime.session.caches import Shardings
from mesh_attention.runtime.session.distributed_tensors import Spread, is_dtensor, own_heads
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.runtime.session.modes import (
    OUTSIDE_BACKWARD,
    as_under_autocast,
    outside_autocast,
    outside_inference_mode,
)

_MOST_WARM = 64
_PLAIN = (Tensor, torch.nn.Parameter)


def attend(
    calls: ObjectCalls,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fault: MeshAttentionError | None = None,
    *,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    label: str | int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    block: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse); called inside a `collective_call`. `fault`: what is wrong already, for all ranks
    to raise. A scale is of this call; `is_causal`: what the caller takes the mask for; `block`: the
    number of a block that replaces PyTorch's attention. Without `return_lse` lse may be empty; a
    gradient of lse is refused in backward, unless the options of the call ask for it."""
    if is_dynamo_compiling():
        (q, k, v), sinks, traced = own_heads(calls.ranks, 2, sinks, q=q, k=k, v=v)
        out, lse = _traced(
            calls,
            q,
            k,
            v,
            sinks,
            documents,
            fault or traced.fault,
            label,
            softmax_scale,
            is_causal,
            block,
            return_lse,
        )
        return traced.whole(out), traced.whole(lse, 1)
    autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    if autocast:
        q, k, v = as_under_autocast(q, k, v)
    around = THREAD.innermost
    if around is not None:
        fault = around.fault() or fault
    number = plans = warm = key = None
    spread: Spread | None = None
    known = calls.warm
    if isinstance(documents, Documents):
        number, plans = documents.number, documents.plans
    if fault is None and (documents is None or number is not None):
        cut = calls.session.shardings if documents is None else None
        key = _key(calls.name, q, k, v, sinks, softmax_scale, is_causal, return_lse, cut)
    if key is None:
        (q, k, v), sinks, spread = own_heads(calls.ranks, 2, sinks, q=q, k=k, v=v)
        fault = fault or spread.fault
        needs_grad = fault is None and need_grad(q, k, v, sinks)
    else:
        needs_grad = key[0]
        if plans is not None:
            known = plans.warm
        warm = known.get(key)
    needs_grad = needs_grad or (fault is None and isinstance(around, Recording))
    if warm is not None and warm.call.is_warm(needs_grad):
        calls.user.refuse_if_closed()
        calls.latest, calls.batch = warm.latest, warm.batch
    else:
        call = calls.prepare(
            q,
            k,
            v,
            fault,
            needs_grad=needs_grad,
            sinks=sinks,
            documents=documents if plans is None else plans,
            softmax_scale=softmax_scale,
            is_causal=is_causal,
            keeps=not KEEPING.on,
            return_lse=return_lse,
        )
        warm = UserCall(calls.user, call, calls.name, calls.latest, calls.batch)
        if key is not None and not call.to_be_refused:
            _keep(known, key, warm)
    if autocast or torch.is_inference_mode_enabled():
        with outside_inference_mode(), outside_autocast():
            out, lse = _run(warm, q, k, v, sinks, number, label, needs_grad)
    else:
        out, lse = _run(warm, q, k, v, sinks, number, label, needs_grad)
    return (out, lse) if spread is None else (spread.whole(out), spread.whole(lse, 1))


def _keep(known: dict[Any, UserCall], key: Any, warm: UserCall) -> None:
    """Calls that the session has dropped are let go, with the memory they hold."""
    for other in [other for other, kept in known.items() if not kept.call.kind.is_kept]:
        del known[other]
    if len(known) >= _MOST_WARM:
        known.pop(next(iter(known)))
    known[key] = warm


def _run(
    prepared: UserCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    label: str | int | None,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    options = prepared.call.options
    of_call = OfCall(
        prepared.name,
        prepared.number,
        not KEEPING.on,
        options.return_lse,
        needs_grad,
        label if isinstance(label, str) else None,
        label if isinstance(label, int) else None,
        options.softmax_scale,
    )
    if needs_grad:
        out, lse, *_ = Attention.apply(q, k, v, sinks, documents, None, of_call)  # type: ignore[no-untyped-call]
    else:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, _, _ = attention_op(q, k, v, sinks, documents, None, *of_call)
    return out, lse


def _key(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    softmax_scale: float | None,
    is_causal: bool | None,
    return_lse: bool,
    cut: Shardings | None,
) -> tuple[Any, ...] | None:
    """All that the checks and the preparation of a call depend on, first whether gradients are
    needed; None where they must look. `cut`: what was, where the call has no documents."""
    if (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or not (softmax_scale is None or type(softmax_scale) is float)
    ):
        return None
    needs_grad = is_inference = False
    key: list[Any] = []
    for x in (q, k, v) if sinks is None else (q, k, v, sinks):
        if type(x) not in _PLAIN or x.is_nested:
            return None
        needs_grad = needs_grad or x.requires_grad
        is_inference = is_inference or x.is_inference()
        key += x.shape, x.dtype, x.device, x.layout
    needs_grad = needs_grad and torch.is_grad_enabled()
    if needs_grad and is_inference:
        return None
    # A call that is made again in a backward pass was looked at in the forward pass.
    if cut is not None and torch._C._current_graph_task_id() == OUTSIDE_BACKWARD:
        of, latest = cut.of, cut.latest
        for x in (q, k) if q.ndim == k.ndim == 4 else ():
            _, slots, heads, _ = x.shape
            key += of.get((name, slots)) or of.get(slots) or of.get(heads), slots == latest
    return (
        needs_grad,
        name,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        softmax_scale,
        is_causal,
        return_lse,
        KEEPING.on,
        isinstance(THREAD.innermost, Recording),
        *key,
    )


def _traced(
    calls: ObjectCalls,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Any,
    fault: MeshAttentionError | None,
    label: str | int | None,
    softmax_scale: float | None,
    is_causal: bool | None,
    block: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`attend` as it stands in a graph. All ranks raise what is wrong when the graph runs."""
    refusal = None if fault is None else fault.args[0]
    if not isinstance(documents, Documents | None):
        refusal = f"documents is of {type(documents).__name__}: give what documents() returned"
        documents = None
    for x, called in ((q, "q"), (k, "k"), (v, "v"), (sinks, "sinks")):
        missing = not isinstance(x, Tensor) and (x is not None or called != "sinks")
        if missing or is_dtensor(x):
            way_out = (
                "it must be a torch.Tensor" if missing else "in compiled code give x.to_local()"
            )
            refusal = f"{called} is {type(x).__name__}; {way_out}"
            q = k = v = torch.empty(0, device="cpu")
            sinks = None
    q, k, v = as_under_autocast(q, k, v)
    of_call = OfCall(
        calls.name,
        None,
        documents is None and calls.fixed is not None and (not KEEPING.on or calls.fixed.is_given),
        return_lse,
        need_grad(q, k, v, sinks),
        label if isinstance(label, str) else None,
        label if isinstance(label, int) else None,
        softmax_scale,
        is_causal,
        refusal,
    )
    number = None if documents is None else documents.number
    out, lse, _, _ = attention_op(q, k, v, sinks, number, block, *of_call)
    return out, lse
