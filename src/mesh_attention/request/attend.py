"""`attend`: one attention on the plans of an object, for `ContextParallel.attention`, the function
`mesh_attention`, models of transformers and replaced SDPA.

The first of equal calls is checked and prepared. The prepared call is kept by a key, which is all
that checks and preparation depend on, and later calls with an equal key run it. A call without a
key (DTensors, transforms, faults) is checked and prepared each time. Compiled code records an
operator, which checks and prepares when the graph runs. Inputs are not changed; the object notes
the plans of its latest call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.autograd import Attention
from mesh_attention.request.compiled_attention import OfCall, UserCall
from mesh_attention.request.kept_calls import KEEPING, THREAD, Recording
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.request.operators import attention_op, need_grad
from mesh_attention.request.port_checks import layout_of_output
from mesh_attention.request.tensor_checks import AttentionCall
from mesh_attention.runtime.session.distributed_tensors import Spread, is_dtensor, own_heads
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.runtime.session.layouts import KNOWN_LAYOUTS
from mesh_attention.runtime.session.modes import (
    OUTSIDE_BACKWARD,
    as_under_autocast,
    outside_autocast,
    outside_inference_mode,
)

_MOST_KEPT = 64  # prepared calls of an object, or of documents
_PLAIN = (Tensor, torch.nn.Parameter)


def attend(
    calls: ObjectCalls, call: AttentionCall, fault: MeshAttentionError | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse). Callers are inside a `collective_call`. `fault`: an error that this rank
    knows already, which all ranks then raise. Without `return_lse` lse may be empty. The backward
    pass refuses a gradient of lse, unless the options of the call ask for it."""
    q, k, v, sinks, documents = call[:5]
    spread: Spread | None = None  # of DTensors, and of other calls that are checked each time
    if is_dynamo_compiling():
        (q, k, v), sinks, spread = own_heads(calls.ranks, 2, sinks, q=q, k=k, v=v)
        call = AttentionCall(q, k, v, sinks, *call[4:])
        out, lse = _traced(calls, call, fault or spread.fault)
        return spread.whole(out), spread.whole(lse, 1)
    autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    if autocast:
        q, k, v = as_under_autocast(q, k, v)
        call = AttentionCall(q, k, v, *call[3:])
    around = THREAD.innermost  # such as a checkpoint that records or replays results
    if around is not None:
        fault = around.fault() or fault
    # The number of the documents, for the operator; kept calls, of the documents or the object.
    number, kept_calls = None, calls.warm
    if isinstance(documents, Documents):
        number, kept_calls = documents.number, documents.plans.warm
    prepared = key = None
    if fault is None and (documents is None or number is not None):
        key = _key(calls, call)
    if key is None:
        (q, k, v), sinks, spread = own_heads(calls.ranks, 2, sinks, q=q, k=k, v=v)
        call = AttentionCall(q, k, v, sinks, *call[4:])
        fault = fault or spread.fault
        needs_grad = fault is None and need_grad(q, k, v, sinks)
    else:
        needs_grad = key[0]
        prepared = kept_calls.get(key)
    needs_grad = needs_grad or (fault is None and isinstance(around, Recording))
    if prepared is not None and prepared.call.is_warm(needs_grad):
        calls.user.refuse_if_closed()
        calls.latest, calls.batch = prepared.latest, prepared.batch
    else:
        how = {"needs_grad": needs_grad, "keeps": not KEEPING.on}
        prepared = UserCall(calls, calls.prepare(call, fault, **how), **how)
        if key is not None and not prepared.call.to_be_refused:
            _keep(kept_calls, key, prepared)
    layout = prepared.layout
    if spread is None and any(known := [KNOWN_LAYOUTS.of(x) for x in (q, k, v)]):
        layout = layout_of_output(calls.session, prepared.call.rank_plan, (q, k, v), known)
    if autocast or torch.is_inference_mode_enabled():
        with outside_inference_mode(), outside_autocast():
            out, lse = _run(prepared, call, number)
    else:
        out, lse = _run(prepared, call, number)
    if spread is not None:
        return spread.whole(out), spread.whole(lse, 1)
    if layout is not None:
        KNOWN_LAYOUTS.keep(out, layout, calls.session.groups.ranks, 1)
    return out, lse


def _keep(kept_calls: dict[Any, UserCall], key: Any, prepared: UserCall) -> None:
    """Keeps a prepared call by its key. Calls that the session has dropped are removed, with the
    memory that they hold, and the oldest call if there are too many."""
    for other in [other for other, kept in kept_calls.items() if not kept.call.kind.is_kept]:
        del kept_calls[other]
    if len(kept_calls) >= _MOST_KEPT:
        kept_calls.pop(next(iter(kept_calls)))
    kept_calls[key] = prepared


def _run(
    prepared: UserCall, call: AttentionCall, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    of_call = prepared.of_call
    if call.label is not None:
        text, number = _label_constants(call.label)
        of_call = of_call._replace(label_text=text, label_number=number)
    if of_call.needs_grad:
        out, lse, *_ = Attention.apply(*call[:4], documents, None, of_call)  # type: ignore[no-untyped-call]
    else:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, _, _ = attention_op(*call[:4], documents, None, *of_call)
    return out, lse


def _key(calls: ObjectCalls, call: AttentionCall) -> tuple[Any, ...] | None:
    """All that the checks and the preparation of a call depend on; the first item is whether
    gradients are needed. None if such a call must be checked each time."""
    q, k, v, sinks, scale = *call[:4], call.softmax_scale
    if (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or not (scale is None or type(scale) is float)
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
    # A call without documents is compared with what was cut before it. A call that a backward pass
    # makes again was compared in the forward pass.
    if call.documents is None and torch._C._current_graph_task_id() == OUTSIDE_BACKWARD:
        cuts, latest = calls.session.shardings.of, calls.session.shardings.latest
        for x in (q, k) if q.ndim == k.ndim == 4 else ():
            _, slots, heads, _ = x.shape
            cut = cuts.get((calls.name, slots)) or cuts.get(slots) or cuts.get(heads)
            key += cut, slots == latest
    return (
        needs_grad,
        calls.name,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        scale,
        call.is_causal,
        call.return_lse,
        KEEPING.on,
        isinstance(THREAD.innermost, Recording),
        *key,
    )


def _traced(
    calls: ObjectCalls, call: AttentionCall, fault: MeshAttentionError | None
) -> tuple[Tensor, Tensor]:
    """`attend` in code that is being compiled: records the operator, with the name of the object.
    A fault becomes a constant of the graph, and all ranks raise it when the graph runs."""
    q, k, v, sinks, documents = call[:5]
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
        call.return_lse,
        need_grad(q, k, v, sinks),
        *_label_constants(call.label),
        call.softmax_scale,
        call.is_causal,
        refusal,
    )
    number = None if documents is None else documents.number
    out, lse, _, _ = attention_op(q, k, v, sinks, number, call.block, *of_call)
    return out, lse


def _label_constants(label: str | int | None) -> tuple[str | None, int | None]:
    return label if isinstance(label, str) else None, label if isinstance(label, int) else None
