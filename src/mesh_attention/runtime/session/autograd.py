"""The differentiable attention: forward and backward programs as one autograd function.

Only q, k, v, out and lse are kept for the backward pass, the sinks where there are some, and the
call that it belongs to. Compiled code runs the same passes as ops of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.execute.binding import GRAD_LSE
from mesh_attention.runtime.execute.executor import CallShape
from mesh_attention.runtime.execute.sinks import add_sinks, gradient_of_sinks
from mesh_attention.runtime.session.collective_call import told_to_all
from mesh_attention.runtime.session.modes import outside_autocast, outside_inference_mode
from mesh_attention.runtime.session.plan_on_rank import PlanSource
from mesh_attention.runtime.session.prepared_call import CallOptions, PreparedCall
from mesh_attention.runtime.session.sharding import rows_first
from mesh_attention.runtime.session.share import Share


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        share: Share,
        call: PreparedCall,
        needs_grad: bool,
        label: str | int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward_pass(share, call, needs_grad, label, (q, k, v), sinks)
        ctx.share, ctx.call = share, call
        ctx.label, ctx.place = label, share.context.guard.place
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.set_materialize_grads(False)  # so that a loss on lse can be told from none
        return out, lse

    @staticmethod
    @told_to_all(lambda ctx, *_: (ctx.share.context, ctx.call.options))
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.share.refuse_if_closed()

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
            *(ctx.share, ctx.call, ctx.label, ctx.place, saved, grad_out, grad_lse),
            needed=ctx.needs_input_grad[4:],
        )
        return (None, None, None, None, *grads)


def forward_pass(
    share: Share,
    call: PreparedCall,
    needs_grad: bool,
    label: str | int | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse). Its place among all calls is that of the guard afterwards."""
    guard, q = share.context.guard, tensors[0]
    with guard.whole_or_broken():
        inputs = {name: rows_first(x) for name, x in zip("qkv", tensors, strict=True)}
    passed = (call.kinds[needs_grad], Direction.FORWARD, call.options, q.device, label)
    share.begin(*passed, sinks=sinks is not None)
    with guard.whole_or_broken():
        result = share.run(call, Direction.FORWARD, inputs)
        out = result["out"].transpose(0, 1).contiguous()
        # A view: backward wants rows first again.
        lse = result["lse"].squeeze(-1).permute(1, 2, 0)
        if sinks is not None:
            add_sinks(out, lse, sinks)
    return out, lse


def backward_pass(
    share: Share,
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
    context = share.context
    # In the caller's modes: a checkpoint computes them again, by a call.
    q, k, v, out, lse, sinks = saved()
    if not call.options.differentiable_lse:
        _refuse_gradient_of_lse(grad_lse)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    named = {"q": q, "k": k, "v": v, "out": out, "grad_out": grad_out}
    inputs = {name: rows_first(x) for name, x in named.items()}
    inputs["lse"] = _rows_of_statistics(lse)
    given = None
    if call.options.differentiable_lse:
        given = torch.zeros_like(lse) if grad_lse is None else grad_lse
        # Nothing depends on a row that sees nothing, whatever is made of its -inf; with a
        # sink it has a number, on which nothing may depend where the row is padding.
        given = given.masked_fill(lse == -torch.inf, 0.0)
        if sinks is not None:
            given.masked_fill_(call.padding(), 0.0)
        inputs[GRAD_LSE] = _rows_of_statistics(given)
    passed = (call.kinds[True], Direction.BACKWARD, call.options, q.device)
    share.begin(*passed, label, place, sinks=sinks is not None)
    with context.guard.whole_or_broken(), outside_autocast():
        result = share.run(call, Direction.BACKWARD, inputs)
        grad_sinks = None
        if sinks is not None and needed[3]:
            # As the program has them: fused kernels want whole rows, not any strides.
            out, grad_out = (inputs[name].transpose(0, 1) for name in ("out", "grad_out"))
            grad_sinks = gradient_of_sinks(out, grad_out, lse, sinks, given)
    grads = [
        result[name].transpose(0, 1).contiguous() if wanted else None
        for name, wanted in zip(("grad_q", "grad_k", "grad_v"), needed[:3], strict=True)
    ]
    return (*grads, grad_sinks)


def attention(
    share: Share,
    source: PlanSource | None,
    options: CallOptions,
    tensors: tuple[Tensor, Tensor, Tensor],
    error: Exception | None,
    label: str | int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's shards q, k, v; a gradient of lse is refused in backward, unless
    the options ask for it.

    `error`: what is wrong with this rank's arguments, for all ranks to raise.
    """
    leaves = tensors if sinks is None else (*tensors, sinks)
    needs_grad = error is None and torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    with outside_inference_mode(), outside_autocast():
        call = prepared(share, source, options, tensors[0], needs_grad, error)
        out, lse = _Attention.apply(share, call, needs_grad, label, *tensors, sinks)  # type: ignore[no-untyped-call]
    return out, lse


def prepared(
    share: Share,
    source: PlanSource | None,
    options: CallOptions,
    q: Any,
    needs_grad: bool,
    error: Exception | None,
) -> PreparedCall:
    """The call that all ranks are about to make; `error` is for all of them to raise."""
    share.refuse_if_closed()
    options = options.now()
    if error is not None:
        nothing = CallShape(0, torch.float32, torch.device("cpu"))
        share.context.prepare(source, options, nothing, False, error)
    call_shape = CallShape(q.shape[0], q.dtype, q.device)
    return share.context.prepare(source, options, call_shape, needs_grad)


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


def _rows_of_statistics(x_BHS: Tensor) -> Tensor:
    """(rows, batch, heads, 1), as programs hold them."""
    return x_BHS.permute(2, 0, 1).unsqueeze(-1).contiguous()
