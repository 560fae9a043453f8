"""The derivative of attention, by PyTorch's autograd: its backward pass is the other operator.

Saved are out, sinks, what the forward pass keeps, as much of q, k, v and lse as the backward pass
takes besides, and the prepared call, since the session may have dropped that kind of call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import fallthrough_kernel

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.compiled_attention import (
    USER_CALLS,
    OfCall,
    keep_in_checkpoints,
    plan_of_graph,
)
from mesh_attention.request.object_calls import OBJECT_CALLS
from mesh_attention.request.operators import (
    LIBRARY,
    attention_backward_op,
    attention_op,
    fault_of_second_derivative,
    need_grad,
)
from mesh_attention.runtime.session.collective_call import collective_call


class Attention(torch.autograd.Function):
    """The operator and its derivative. It takes the operator's inputs, the constants as one."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        documents: Tensor | None,
        block: Tensor | None,
        of_call: OfCall,
    ) -> tuple[Tensor, ...]:
        out, lse, place, kept = below_autograd(q, k, v, sinks, documents, block, *of_call)
        # The graph holds its call, and whoever holds one can run it.
        ctx.prepared = None if of_call.call is None else USER_CALLS.get(of_call.call)
        ctx.place, ctx.documents, ctx.k_shape, ctx.of_call = place, documents, k.shape, of_call
        retaken: tuple[str, ...] = ("q", "k", "v", "lse")
        if kept:
            calls, name = ctx.prepared and ctx.prepared.call, of_call.name
            retaken = (calls.rank_plan if calls else plan_of_graph(name, q)).retaken
            options = calls.options if calls else OBJECT_CALLS.find(name).options
            if sinks is not None or options.differentiable_lse:
                retaken += ("lse",)
            ctx.mark_non_differentiable(place, *kept)
        named = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        again = [x if name == "out" or name in retaken else None for name, x in named.items()]
        saved = (*again, sinks, *kept)
        ctx.save_for_backward(*saved)
        if ctx.prepared is not None:
            ctx.shapes = _shapes(*saved)
        ctx.set_materialize_grads(False)  # so that a loss on lse can be told from none
        return (out, lse, place, *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.prepared is None:
            keep_in_checkpoints()
        call = _call_backward if ctx.prepared is None else _call_backward_together
        made = iter(call(ctx, *grads[:2]))
        return tuple([next(made) if needed else None for needed in ctx.needs_input_grad])


def _with_autograd(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    if need_grad(*inputs[:4]):
        out, lse, place, *kept = Attention.apply(*inputs[:6], OfCall(*inputs[6:]))  # type: ignore[no-untyped-call]
        return out, lse, place, kept
    return below_autograd(*inputs)


def below_autograd(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    with torch._C._AutoDispatchBelowAutograd():
        return attention_op(*inputs)  # type: ignore[no-any-return]


@collective_call(lambda ctx, *_: (ctx.prepared.user.session, ctx.prepared.call.options))
def _call_backward_together(ctx: Any, *grads: Tensor | None) -> list[Tensor]:
    """In eager code: other ranks are told of an error. In a graph the operator itself does so."""
    ctx.prepared.user.refuse_if_closed()
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in grads):
        raise MeshAttentionError(
            "is_grads_batched=True is not supported: call torch.autograd.grad for one gradient of "
            "the outputs after the other, with retain_graph=True"
        )
    return _call_backward(ctx, *grads)


def _call_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> list[Tensor]:
    # Gradients are recorded here only for create_graph=True. `once_differentiable` would not do:
    # torch.autograd.grad passes its error node by and returns a wrong derivative.
    if torch.is_grad_enabled():
        raise fault_of_second_derivative()
    # In the caller's modes: a checkpoint computes them again, by a call.
    saved = ctx.saved_tensors
    if ctx.prepared is not None and _shapes(*saved) != ctx.shapes:
        raise MeshAttentionError(
            "a checkpoint without a determinism_check has computed other tensors for the backward "
            "pass of this call than its forward pass saved; if the call was made in a block of "
            "context_parallel, call backward in the block"
        )
    return attention_backward_op(  # type: ignore[no-any-return]
        grad_out,
        grad_lse,
        *saved[:6],
        [*saved[6:]],
        ctx.place,
        ctx.documents,
        ctx.k_shape,
        ctx.needs_input_grad[:4],
        *ctx.of_call,
    )


def _shapes(*tensors: Tensor | None) -> list[torch.Size | None]:
    return [None if x is None else x.shape for x in tensors]


LIBRARY.impl(attention_op, _with_autograd, "Autograd")
LIBRARY.impl(attention_backward_op, fallthrough_kernel, "Autograd")
