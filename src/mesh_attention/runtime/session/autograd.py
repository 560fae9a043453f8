"""The differentiable attention: forward and backward programs as one autograd function.

`request/` calls `attention` with tensors and a prepared call; compiled code runs the same passes as
ops of its own. Only q, k, v, out and lse are kept for the backward pass, the sinks where there are
some, and the call that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.execute.binding import GRAD_LSE
from mesh_attention.runtime.execute.sinks import add_sinks, gradient_of_sinks
from mesh_attention.runtime.session.collective_call import collective_call
from mesh_attention.runtime.session.modes import (
    outside_autocast,
    outside_inference_mode,
)
from mesh_attention.runtime.session.prepared_call import PreparedCall
from mesh_attention.runtime.session.session import User


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        user: User,
        call: PreparedCall,
        label: str | int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward_pass(user, call, True, label, (q, k, v), sinks)
        ctx.user, ctx.call = user, call
        ctx.label, ctx.place = label, user.session.guard.place
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.set_materialize_grads(False)  # so that a loss on lse can be told from none
        return out, lse

    @staticmethod
    @collective_call(lambda ctx, *_: (ctx.user.session, ctx.call.options))
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.user.refuse_if_closed()

        def saved() -> tuple[Any, ...]:
            # Gradients are recorded here only for create_graph=True. `once_differentiable` would
            # not do: torch.autograd.grad passes its error node by and returns a wrong derivative.
            if torch.is_grad_enabled():
                raise MeshAttentionError(
                    "second derivatives of attention are not supported; call with "
                    "create_graph=False"
                )
            return cast(tuple[Any, ...], ctx.saved_tensors)

        grads = backward_pass(
            ctx.user,
            ctx.call,
            ctx.label,
            ctx.place,
            saved,
            grad_out,
            grad_lse,
            needed=ctx.needs_input_grad[3:],
        )
        return (None, None, None, *grads)


def forward_pass(
    user: User,
    call: PreparedCall,
    needs_grad: bool,
    label: str | int | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse). Its place among all calls is that of the guard afterwards."""
    guard, device = user.session.guard, tensors[0].device
    with guard.whole_or_broken():
        inputs = {name: rows_first(x) for name, x in zip("qkv", tensors, strict=True)}
    kind, options = call.kind.agreed[needs_grad], call.options
    user.begin(kind, Direction.FORWARD, options, device, label, sinks=sinks is not None)
    with guard.whole_or_broken():
        result = user.run(call, Direction.FORWARD, inputs)
        out = result["out"].transpose(0, 1).contiguous()
        # A view: backward wants rows first again.
        lse = result["lse"].squeeze(-1).permute(1, 2, 0)
        if sinks is not None:
            add_sinks(out, lse, sinks)
    return out, lse


def backward_pass(
    user: User,
    call: PreparedCall,
    label: str | int | None,
    place: int,
    saved: Callable[[], tuple[Any, ...]],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    *,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and the sinks, where they are `needed`. `saved` gives those, and out and
    lse before the sinks."""
    # In the caller's modes: a checkpoint computes them again, by a call.
    q, k, v, out, lse, sinks = saved()
    if not call.options.differentiable_lse:
        _refuse_gradient_of_lse(grad_lse)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    named = {"q": q, "k": k, "v": v, "out": out, "grad_out": grad_out}
    inputs = {name: rows_first(x) for name, x in named.items()}
    inputs["lse"] = _rows_of_statistics(lse)
    grad_of_lse = None
    if call.options.differentiable_lse:
        grad_of_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        # Nothing depends on a row that sees nothing, whatever is made of its -inf; with a
        # sink it has a number, on which nothing may depend where the row is padding.
        grad_of_lse = grad_of_lse.masked_fill(lse == -torch.inf, 0.0)
        if sinks is not None:
            grad_of_lse.masked_fill_(call.padding(), 0.0)
        inputs[GRAD_LSE] = _rows_of_statistics(grad_of_lse)
    kind, options = call.kind.agreed[True], call.options
    user.begin(kind, Direction.BACKWARD, options, q.device, label, place, sinks=sinks is not None)
    with user.session.guard.whole_or_broken(), outside_autocast():
        result = user.run(call, Direction.BACKWARD, inputs)
        grad_sinks = None
        if sinks is not None and needed[3]:
            # As the program has them: fused kernels want whole rows, not any strides.
            out, grad_out = (inputs[name].transpose(0, 1) for name in ("out", "grad_out"))
            grad_sinks = gradient_of_sinks(out, grad_out, lse, sinks, grad_of_lse)
    grads = [
        result[name].transpose(0, 1).contiguous() if wanted else None
        for name, wanted in zip(("grad_q", "grad_k", "grad_v"), needed[:3], strict=True)
    ]
    return (*grads, grad_sinks)


def attention(
    user: User,
    call: PreparedCall,
    needs_grad: bool,
    label: str | int | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's shards q, k, v; a gradient of lse is refused in backward, unless
    the options of the call ask for it."""
    autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    if autocast or torch.is_inference_mode_enabled():
        with outside_inference_mode(), outside_autocast():
            return attention(user, call, needs_grad, label, tensors, sinks)
    if needs_grad:
        out, lse = _Attention.apply(user, call, label, *tensors, sinks)  # type: ignore[no-untyped-call]
        return out, lse
    return forward_pass(user, call, needs_grad, label, tensors, sinks)


def _refuse_gradient_of_lse(grad_lse: Tensor | None) -> None:
    """Zeros are no gradient: functions around the call that fill in what is missing pass them."""
    if grad_lse is None:
        return
    if grad_lse.is_cuda and torch.cuda.is_current_stream_capturing():
        nothing = False  # its values cannot be asked for
    else:
        nothing = not grad_lse.any()
    if not nothing:
        raise MeshAttentionError(
            "a loss depends on lse: without differentiable_lse=True, to ContextParallel or "
            "mesh_attention, the gradients of q and k would be wrong; or use lse.detach() in the "
            "loss"
        )


def rows_first(x_BSHD: Tensor) -> Tensor:
    """(rows, batch, heads, width), contiguous; no copy for a contiguous batch of one. Transports
    read memory, which in a negated view holds the opposite."""
    x = x_BSHD.resolve_neg() if x_BSHD.is_neg() else x_BSHD
    return x.transpose(0, 1).contiguous()


def _rows_of_statistics(x_BHS: Tensor) -> Tensor:
    """(rows, batch, heads, 1), as programs hold them."""
    return x_BHS.permute(2, 0, 1).unsqueeze(-1).contiguous()
