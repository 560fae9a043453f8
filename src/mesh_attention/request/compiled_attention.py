"""Attention in code that `torch.compile` traces: two ops, forward and backward, that run the passes
of eager calls.

A graph holds tensors and constants. So an op knows its `ContextParallel` by a number, in words, and
the documents of a batch by a tensor that holds their number, on which no graph depends. All that a
backward pass needs besides the saved tensors is found again by these: nothing is kept for passes
that never come. Other ranks wait for every call, so no op may be left out, joined with another or
moved before one: PyTorch calls that an ordered effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.library import custom_op
from torch.utils.checkpoint import CheckpointPolicy

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.object_calls import BLOCKS, OBJECT_CALLS, ObjectCalls
from mesh_attention.runtime.session.autograd import backward_pass, forward_pass
from mesh_attention.runtime.session.collective_call import collective_call, of_calls
from mesh_attention.runtime.session.documents import BATCH_PLANS, BatchPlans
from mesh_attention.runtime.session.modes import (
    outside_autocast,
    outside_inference_mode,
)

_UNSAFE = torch.Tag.cudagraph_unsafe


@custom_op("mesh_attention::attention", mutates_args=(), tags=(_UNSAFE,))
def attention_op(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    block: Tensor | None,
    label_text: str | None,
    label_number: int | None,
    softmax_scale: float | None,
    is_causal: bool | None,
    needs_grad: bool,
    refusal: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the place of this call among all of them, which its backward pass states."""
    _refuse_capture(q)
    calls = OBJECT_CALLS.find(int(name))
    if block is not None:
        BLOCKS.find(int(block)).count_checkpoints(2)
    fault = None if refusal is None else MeshAttentionError(refusal)
    label = label_number if label_text is None else label_text
    return _forward(
        calls,
        (q, k, v),
        fault,
        sinks=sinks,
        documents=documents,
        label=label,
        softmax_scale=softmax_scale,
        is_causal=is_causal,
        needs_grad=needs_grad,
    )


@collective_call(of_calls)
def _forward(
    calls: ObjectCalls,
    tensors: tuple[Tensor, Tensor, Tensor],
    fault: MeshAttentionError | None,
    *,
    sinks: Tensor | None,
    documents: Tensor | None,
    label: str | int | None,
    softmax_scale: float | None,
    is_causal: bool | None,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    plans, fault = _plans(documents, fault)
    user = calls.user
    with outside_inference_mode(), outside_autocast():
        call = calls.prepare(
            *tensors,
            fault,
            needs_grad=needs_grad,
            sinks=sinks,
            documents=plans,
            softmax_scale=softmax_scale,
            is_causal=is_causal,
        )
        out, lse = forward_pass(user, call, needs_grad, label, tensors, sinks)
        return out, lse, torch.tensor([user.session.guard.place], device="cpu")


@custom_op("mesh_attention::attention_backward", mutates_args=(), tags=(_UNSAFE,))
def attention_backward_op(
    name: str,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    place: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    label_text: str | None,
    label_number: int | None,
    softmax_scale: float | None,
    sinks_need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sinks; the last has no elements where it is not needed."""
    _refuse_capture(q)
    calls = OBJECT_CALLS.find(int(name))
    label = label_number if label_text is None else label_text
    saved = (q, k, v, out, lse, sinks)
    grad_q, grad_k, grad_v, grad_sinks = _gradients(
        calls,
        saved,
        grad_out,
        grad_lse,
        documents,
        softmax_scale,
        label,
        int(place),
        sinks_need_grad=sinks_need_grad,
    )
    return grad_q, grad_k, grad_v, q.new_empty(0) if grad_sinks is None else grad_sinks


@collective_call(of_calls)
def _gradients(
    calls: ObjectCalls,
    saved: tuple[Any, ...],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    documents: Tensor | None,
    softmax_scale: float | None,
    label: str | int | None,
    place: int,
    *,
    sinks_need_grad: bool,
) -> tuple[Any, ...]:
    q, k, v, *_, sinks = saved
    plans, fault = _plans(documents, None)
    with outside_inference_mode(), outside_autocast():
        call = calls.prepare(
            q,
            k,
            v,
            fault,
            needs_grad=True,
            sinks=sinks,
            documents=plans,
            softmax_scale=softmax_scale,
        )
        return backward_pass(
            calls.user,
            call,
            label,
            place,
            lambda: saved,
            grad_out,
            grad_lse,
            needed=(True, True, True, sinks_need_grad),
        )


def _plans(
    documents: Tensor | None, fault: MeshAttentionError | None
) -> tuple[BatchPlans | None, MeshAttentionError | None]:
    """The plans of the documents that a tensor numbers, or the fault that they are gone."""
    if documents is None:
        return None, fault
    try:
        return BATCH_PLANS.find(int(documents)), fault
    except MeshAttentionError as gone:  # the others must not wait for us
        return None, fault or gone


def _refuse_capture(q: Tensor) -> None:
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise MeshAttentionError(
            "compiled attention cannot be part of a CUDA graph: those of mode='reduce-overhead' "
            "end before it and begin after it where torch._inductor.config.graph_partition is on"
        )


# What tracing needs to know of them.


@attention_op.register_fake
def _(name: str, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _partition_graphs()
    place = torch.empty(1, dtype=torch.int64, device="cpu")
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    if q.ndim != 4 or v.ndim != 4:  # refused by all ranks when it runs
        return torch.empty_like(q), torch.empty_like(q, dtype=statistics), place
    batch, slots, heads, _ = q.shape
    lse_SBH = q.new_empty((slots, batch, heads), dtype=statistics)
    return q.new_empty((batch, slots, heads, v.shape[3])), lse_SBH.permute(1, 2, 0), place


@attention_backward_op.register_fake
def _(
    name: str,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    place: Tensor,
    sinks: Tensor | None,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    grad_sinks = q.new_empty(0) if sinks is None or not args[-1] else sinks.new_empty(sinks.shape)
    return grads[0], grads[1], grads[2], grad_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    name, q, k, v, sinks, documents, _, label_text, label_number, softmax_scale, *_ = inputs
    out, lse, place = output
    ctx.name, ctx.constants = name, (label_text, label_number, softmax_scale)
    ctx.save_for_backward(q, k, v, out, lse, place, sinks, documents)
    ctx.set_materialize_grads(False)  # so that a loss on lse can be told from none


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    _keep_in_checkpoints()
    needs = ctx.needs_input_grad[1:5]
    grads = attention_backward_op(
        ctx.name, grad_out, grad_lse, *ctx.saved_tensors, *ctx.constants, needs[3]
    )
    wanted = [grad if needed else None for grad, needed in zip(grads, needs, strict=True)]
    return (None, *wanted, *[None] * 8)


attention_op.register_autograd(_backward, setup_context=_setup_context)
for _op in (attention_op, attention_backward_op):
    _op.register_effect(EffectType.ORDERED)


def _keep_in_checkpoints() -> None:
    """A checkpoint inside a compiled graph does not attend again: of ordered ops PyTorch keeps the
    results, unless the checkpoint says otherwise, and then fails for the order of the forward
    graph, which the backward graph does not have."""
    mode = get_proxy_mode()
    if mode is None:
        return
    ordered: Any = torch.ops.higher_order.with_effects
    for node in mode.tracer.graph.find_nodes(op="call_function", target=ordered):
        if node.args[1] is torch.ops.mesh_attention.attention.default:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _partition_graphs() -> None:
    """Inductor's CUDA graphs end before these ops and begin after them, and after their results are
    told apart: a graph that took all results of one as a tuple would not see their memory. It does
    not see the tag of an op that has an effect, but what stands around it has a name."""
    from torch._inductor import utils  # seconds, which whoever compiles has spent already

    effect = str(torch.ops.higher_order.with_effects)
    utils.FORBIDDEN_CUDAGRAPH_OPS |= {effect}  # a frozen set, made anew
