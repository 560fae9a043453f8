"""Attention as two operators of PyTorch, forward and backward, which eager and compiled code call.

So dispatch modes, checkpoint policies and tracing see each call as a whole. An eager call names its
prepared call by a number; a graph names its `ContextParallel`, and the call is prepared when the
graph runs (`compiled_attention.py`). Other ranks wait for every call, so compilers must not drop,
merge or reorder calls: the operators have what PyTorch calls an ordered effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.library import Library, _register_effectful_op, register_fake

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.request.compiled_attention import (
    BLOCKS,
    USER_CALLS,
    OfBackward,
    OfCall,
    fake_attention,
    fake_attention_backward,
    prepared_in_graph,
    stand_ins,
)
from mesh_attention.request.kept_calls import THREAD, Results
from mesh_attention.runtime.agreement.identity import OF_FORWARD_CALL, BatchIdentity
from mesh_attention.runtime.execute.binding import GRAD_LSE
from mesh_attention.runtime.execute.sinks import add_sinks, add_sinks_to_kept, gradient_of_sinks
from mesh_attention.runtime.session.documents import BATCH_PLANS
from mesh_attention.runtime.session.modes import outside_autocast
from mesh_attention.runtime.session.prepared_call import PreparedCall
from mesh_attention.runtime.session.session import User
from mesh_attention.runtime.session.sharding import Shards

LIBRARY: Any = Library("mesh_attention", "DEF")  # type: ignore[no-untyped-call]
_TRACKS_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_OF_CALL = (  # see `OfCall`
    "str name, int? call, bool keeps, bool return_lse, bool needs_grad, str? label_text, "
    "SymInt? label_number, float? softmax_scale, bool? is_causal, str? refusal"
)
# `place`: the number of the call, which its backward pass states. `kept`: rows that the forward
# pass leaves to the backward pass, which then needs fewer of q, k, v and lse.
LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? documents, Tensor? block, "
    f"{_OF_CALL}) -> (Tensor out, Tensor lse, Tensor place, Tensor[] kept)",
    tags=_TAGS,
)
# The gradients of q, k, v and the sinks that are `needed`.
LIBRARY.define(
    "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor? q, Tensor? k, Tensor? v, "
    "Tensor out, Tensor? lse, Tensor? sinks, Tensor[] kept, Tensor place, Tensor? documents, "
    f"SymInt[] k_shape, bool[] needed, {_OF_CALL}) -> Tensor[]",
    tags=_TAGS,
)
attention_op = torch.ops.mesh_attention.attention.default
attention_backward_op = torch.ops.mesh_attention.attention_backward.default


def _attention(*inputs: Any) -> Results:
    """Attends now, or leaves it to the innermost context, which may have the results already."""
    context = THREAD.innermost
    if context is None:
        return _attention_over_ranks(*inputs)
    return context.attend(_attention_over_ranks, inputs)


def _attention_over_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    block: Tensor | None,
    *constants: Any,
) -> Results:
    """By the prepared call that the inputs name. In a graph they name none: it is prepared now."""
    of_call = OfCall(*constants)
    batch = None
    if documents is not None and (plans := BATCH_PLANS.get(int(documents))) is not None:
        batch = plans.batch
    arguments = (of_call, (q, k, v), sinks, batch)
    prepared = None if of_call.call is None else USER_CALLS.get(of_call.call)
    if prepared is not None and prepared.call.is_warm(of_call.needs_grad):
        return _forward_pass(prepared.user, prepared.call, *arguments)
    if block is not None:
        BLOCKS.find(int(block)).note_checkpoints()
    return prepared_in_graph(
        of_call,
        lambda user, call: _forward_pass(user, call, *arguments),
        (q, k, v, sinks),
        documents,
    )


def _attention_backward(*inputs: Any) -> list[Tensor]:
    """Likewise for the backward pass. Tensors of a graph may be gone: stand-ins have the shapes."""
    backward = OfBackward(*inputs[: len(OfBackward._fields)])
    of_call = OfCall(*inputs[len(backward) :])._replace(needs_grad=True, refusal=None)
    if need_grad(*backward[:5]):  # if autograd made this call, it has refused already
        raise fault_of_second_derivative()
    prepared = None if of_call.call is None else USER_CALLS.get(of_call.call)
    if prepared is not None:
        return _backward_pass(prepared.user, prepared.call, of_call, backward)
    return prepared_in_graph(
        of_call,
        lambda user, call: _backward_pass(user, call, of_call, backward),
        (*stand_ins(backward.out, backward.k_shape), backward.sinks),
        backward.documents,
        in_backward=True,
    )


def need_grad(*tensors: object) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in tensors
    )


def fault_of_second_derivative() -> MeshAttentionError:
    return MeshAttentionError(
        "second derivatives of attention are not supported; call with create_graph=False"
    )


def _begin(
    user: User,
    call: PreparedCall,
    of_call: OfCall,
    direction: Direction,
    device: torch.device,
    sinks: Tensor | None,
    batch: BatchIdentity | None,
    place: int = 0,
) -> None:
    """All ranks are about to make this pass of the call, or none gets a result."""
    kind, options = call.kind.agreed[of_call.needs_grad], call.options
    label = of_call.label_number if of_call.label_text is None else of_call.label_text
    with_sinks = sinks is not None
    user.begin(kind, direction, options, device, label, place, sinks=with_sinks, batch=batch)


def _forward_pass(
    user: User,
    call: PreparedCall,
    of_call: OfCall,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    batch: BatchIdentity | None,
) -> Results:
    """Begins the call, which ranks compare, runs the program and adds sinks to its results."""
    guard, device = user.session.guard, tensors[0].device
    with guard.whole_or_broken():
        inputs = {name: rows_first(x) for name, x in zip("qkv", tensors, strict=True)}
    _begin(user, call, of_call, Direction.FORWARD, device, sinks, batch)
    with guard.whole_or_broken():
        user.reports |= call.reports
        result = call.run(Direction.FORWARD, inputs, user.counters[Direction.FORWARD])
        out, lse = result["out"], result.get("lse")
        # Not what is kept: a backward pass after a wrong call is wrong as a whole.
        guard.settle([x for x in (out, lse) if x is not None])
        # Not marked as views of other tensors, so that callers may change results in place.
        with torch._C._ExcludeDispatchKeyGuard(_TRACKS_VIEWS):
            out = out.transpose(0, 1).contiguous()
            if lse is not None:  # not copied: the backward pass takes rows first
                lse = lse.squeeze(-1).permute(1, 2, 0)
        if lse is None:  # not asked for
            dtype = torch.promote_types(out.dtype, torch.float32)
            lse = out.new_empty((out.shape[0], out.shape[2], 0), dtype=dtype)
        kept = [result[b.name] for b in call.rank_plan.recalled] if of_call.needs_grad else []
        if sinks is not None:
            add_sinks(out, lse, sinks)
            if kept:
                add_sinks_to_kept(call.rank_plan.recalled, kept, sinks)
    place = torch.full((1,), guard.place, dtype=torch.int64, device="cpu")
    return out, lse, place, kept


_GRADIENTS = ("grad_q", "grad_k", "grad_v")


def _backward_pass(
    user: User,
    call: PreparedCall,
    of_call: OfCall,
    backward: OfBackward,
) -> list[Tensor]:
    """The `needed` gradients among those of q, k, v and the sinks."""
    grad_out, grad_lse, q, k, v, out, lse, sinks, kept, *_ = backward
    if not call.options.differentiable_lse:
        _refuse_gradient_of_lse(grad_lse)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    named = {"q": q, "k": k, "v": v, "out": out, "grad_out": grad_out}
    inputs = {name: rows_first(x) for name, x in named.items() if x is not None}
    # Hooks of saved tensors may hand back other strides than they were given.
    recalled = [x.contiguous() for x in kept]
    inputs |= zip([buffer.name for buffer in call.rank_plan.recalled], recalled, strict=True)
    if lse is not None:
        inputs["lse"] = _rows_of_statistics(lse)
    grad_of_lse = None
    if call.options.differentiable_lse:
        grad_of_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        # The gradient of a row that sees nothing is 0, whatever the loss makes of its -inf. With a
        # sink lse is a number in every row; then the gradients of padding rows are set to 0.
        grad_of_lse = grad_of_lse.masked_fill(lse == -torch.inf, 0.0)
        if sinks is not None:
            padding = Shards.of(call.rank_plan).padding("q", grad_of_lse.device)
            grad_of_lse.masked_fill_(padding, 0.0)
        inputs[GRAD_LSE] = _rows_of_statistics(grad_of_lse)
    place, batch = int(backward.place), OF_FORWARD_CALL
    _begin(user, call, of_call, Direction.BACKWARD, out.device, sinks, batch, place)
    guard = user.session.guard
    with guard.whole_or_broken(), outside_autocast():
        user.reports |= call.reports
        result = call.run(Direction.BACKWARD, inputs, user.counters[Direction.BACKWARD])
        guard.settle(result.values())
        grads = [
            result[name].transpose(0, 1).contiguous()
            for name, wanted in zip(_GRADIENTS, backward.needed[:3], strict=True)
            if wanted
        ]
        if sinks is not None and backward.needed[3]:
            # In the program's order: fused kernels want whole rows, not any strides.
            out, grad_out = (inputs[name].transpose(0, 1) for name in ("out", "grad_out"))
            grads.append(gradient_of_sinks(out, grad_out, lse, sinks, grad_of_lse))
    return grads


def _refuse_gradient_of_lse(grad_lse: Tensor | None) -> None:
    """Zeros are allowed: functions around the call pass zeros in place of a missing gradient."""
    if grad_lse is None:
        return
    # During a capture values cannot be read.
    captures = grad_lse.is_cuda and torch.cuda.is_current_stream_capturing()
    if captures or bool(grad_lse.any()):
        raise MeshAttentionError(
            "a loss depends on lse: without differentiable_lse=True, to ContextParallel or "
            "mesh_attention, the gradients of q and k would be wrong; or use lse.detach() in the "
            "loss"
        )


def rows_first(x_BSHD: Tensor) -> Tensor:
    """(rows, batch, heads, width), contiguous; no copy for a contiguous batch of one. Views with
    the negative bit are resolved, since transports read memory."""
    x = x_BSHD.resolve_neg() if x_BSHD.is_neg() else x_BSHD
    return x.transpose(0, 1).contiguous()


def _rows_of_statistics(x_BHS: Tensor) -> Tensor:
    """(rows, batch, heads, 1), as programs hold them."""
    return x_BHS.permute(2, 0, 1).unsqueeze(-1).contiguous()


for _op, _implementation, _fake in (
    (attention_op, _attention, fake_attention),
    (attention_backward_op, _attention_backward, fake_attention_backward),
):
    LIBRARY.impl(_op, _implementation, "CompositeExplicitAutograd")
    register_fake(_op, _fake, lib=LIBRARY)
    _register_effectful_op(_op, EffectType.ORDERED, lib=LIBRARY)
