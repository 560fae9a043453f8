"""What operators know of their call, in eager code and in code that `torch.compile` traces, and how
the call of a graph is prepared when it runs.

An eager call names its prepared call by a number, by which all else is known. A graph holds tensors
and constants. So in a graph an operator knows its `ContextParallel` by a name, which is its number
in `OBJECT_CALLS`, and the documents of a batch by a tensor that holds their number: a number as a
constant would compile the graph again for each batch. Nothing else is kept for a backward pass that
may never come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.object_calls import OBJECT_CALLS, ObjectCalls
from mesh_attention.request.port_checks import layout_of_output
from mesh_attention.request.tensor_checks import AttentionCall
from mesh_attention.runtime.execute.executor import CallShape
from mesh_attention.runtime.session.caches import WeakRegistry
from mesh_attention.runtime.session.collective_call import (
    SessionAndOptions,
    collective_call,
    of_calls,
)
from mesh_attention.runtime.session.documents import BATCH_PLANS, BatchPlans
from mesh_attention.runtime.session.modes import outside_autocast, outside_inference_mode
from mesh_attention.runtime.session.prepared_call import PreparedCall
from mesh_attention.runtime.session.rank_plan import RankPlan
from mesh_attention.runtime.session.session import User

Result = TypeVar("Result")


class OfCall(NamedTuple):
    """The constants of both operators, last of their inputs.

    name      of the object
    call      the number of the prepared call in `USER_CALLS`; None in a graph
    keeps     in a graph: whether the forward pass may leave rows to the backward pass
    refusal   what is wrong already, for all ranks to raise
    """

    name: str
    call: int | None
    keeps: bool
    return_lse: bool
    needs_grad: bool
    label_text: str | None
    label_number: int | None
    softmax_scale: float | None
    is_causal: bool | None = None
    refusal: str | None = None


class OfBackward(NamedTuple):
    """The inputs of the backward operator, before the constants. `place`: of the forward call;
    `kept`: rows that it left, without which q, k, v and lse are there; `needed`: which gradients,
    of q, k, v and the sinks."""

    grad_out: Tensor | None
    grad_lse: Tensor | None
    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    out: Tensor
    lse: Any
    sinks: Tensor | None
    kept: list[Tensor]
    place: Tensor
    documents: Tensor | None
    k_shape: Sequence[int]
    needed: Sequence[bool]


class UserCall:
    """A prepared call of a user, which operators name by a number. Whoever may need it later, such
    as an autograd graph, holds it. When it runs again, `latest` and `batch` become those of the
    object.

    of_call   the constants of the forward operator, but for the label
    layout    of its output, where nothing is known of its inputs
    """

    def __init__(
        self, calls: ObjectCalls, call: PreparedCall, *, keeps: bool, needs_grad: bool
    ) -> None:
        self.user, self.call = calls.user, call
        self.latest, self.batch = calls.latest, calls.batch
        self.layout = layout_of_output(calls.session, call.rank_plan)
        number, options = USER_CALLS.add(self), call.options
        self.of_call = OfCall(
            calls.name,
            number,
            keeps,
            options.return_lse,
            needs_grad,
            label_text=None,
            label_number=None,
            softmax_scale=options.softmax_scale,
        )


USER_CALLS: WeakRegistry[UserCall] = WeakRegistry("the prepared call of this number is gone")
# Blocks of code in which PyTorch's attention is replaced (`train/replaced_attention.py`).
BLOCKS: WeakRegistry[Any] = WeakRegistry("the block of context_parallel around this call is over")


def _session_of(of_call: OfCall, _: Any, tensors: Any, *__: Any, **___: Any) -> SessionAndOptions:
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise MeshAttentionError(
            "compiled attention cannot be part of a CUDA graph: those of mode='reduce-overhead' "
            "end before it and begin after it where torch._inductor.config.graph_partition is on"
        )
    return of_calls(OBJECT_CALLS.find(of_call.name))


@collective_call(_session_of)
def prepared_in_graph(
    of_call: OfCall,
    run: Callable[[User, PreparedCall], Result],
    tensors: Sequence[Any],
    documents: Tensor | None,
    *,
    in_backward: bool = False,
) -> Result:
    """Prepares the call of a graph and returns what `run` makes of it. `tensors`: q, k, v and the
    sinks."""
    calls = OBJECT_CALLS.find(of_call.name)
    fault = None if of_call.refusal is None else MeshAttentionError(of_call.refusal)
    plans: BatchPlans | None = None
    if documents is not None:
        try:
            plans = BATCH_PLANS.find(int(documents))
        except MeshAttentionError as gone:  # the others must not wait for us
            fault = fault or gone
    q, k, v, sinks = tensors
    of_tensors = AttentionCall(q, k, v, sinks, plans, return_lse=of_call.return_lse)
    call = of_tensors._replace(softmax_scale=of_call.softmax_scale, is_causal=of_call.is_causal)
    how = {"needs_grad": of_call.needs_grad, "keeps": of_call.keeps, "in_backward": in_backward}
    with outside_inference_mode(), outside_autocast():
        return run(calls.user, calls.prepare(call, fault, **how))


def stand_ins(out: Tensor, k_shape: Sequence[int]) -> list[Tensor]:
    """Tensors like q, k and v, which need not be there any more, without memory of their own."""
    return [out.new_empty(()).expand(shape) for shape in _shapes(out, k_shape)]


def _shapes(out: Tensor, k_shape: Sequence[int]) -> list[Sequence[int]]:
    """Of q, k and v."""
    return [(*out.shape[:3], k_shape[3]), k_shape, (*k_shape[:3], out.shape[3])]


# What tracing needs to know of the operators: the shapes of their results, and what may be done
# to their nodes.


def plan_of_graph(name: str, q: Tensor) -> RankPlan:
    """The plan of an object that has one for all calls: then a graph knows what is kept."""
    fixed = OBJECT_CALLS.find(name).fixed
    assert fixed is not None, "graphs of other objects keep nothing"
    return fixed.of(q.dtype.itemsize)


def fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    block: Tensor | None,
    *constants: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """What the operator will return, without data, for tracing."""
    _partition_graphs()
    of_call = OfCall(*constants)
    place = torch.empty(1, dtype=torch.int64, device="cpu")
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    if q.ndim != 4 or v.ndim != 4:  # refused by all ranks when it runs
        return torch.empty_like(q), torch.empty_like(q, dtype=statistics), place, []
    batch, slots, heads, _ = q.shape
    lse = q.new_empty((slots, batch, heads), dtype=statistics).permute(1, 2, 0)
    out = q.new_empty((batch, slots, heads, v.shape[3]))
    if not of_call.keeps:
        return out, lse, place, []
    plan = plan_of_graph(of_call.name, q)
    options = OBJECT_CALLS.find(of_call.name).options.for_lse(of_call.return_lse, sinks)
    if not options.return_lse and plan.keeps_lse:
        lse = lse.new_empty((batch, heads, 0))
    if not of_call.needs_grad:
        return out, lse, place, []
    problem, shape = plan.plan.problem, CallShape(1, q.dtype, q.device)
    rows = [
        q.new_empty(
            (b.num_rows, batch, b.num_heads, b.kind.width(problem)), dtype=shape.dtype_of(b)
        )
        for b in plan.recalled
    ]
    return out, lse, place, rows


def fake_attention_backward(*inputs: Any) -> list[Tensor]:
    """What the backward operator will return."""
    backward = OfBackward(*inputs[: len(OfBackward._fields)])
    shapes = zip(_shapes(backward.out, backward.k_shape), backward.needed[:3], strict=True)
    grads = [backward.out.new_empty(shape) for shape, needs in shapes if needs]
    if backward.sinks is not None and backward.needed[3]:
        grads.append(backward.sinks.new_empty(backward.sinks.shape))
    return grads


def keep_in_checkpoints() -> None:
    """A checkpoint inside a compiled graph does not attend again: of ordered ops PyTorch keeps the
    results, unless the checkpoint says otherwise, and then fails for the order of the forward
    graph, which the backward graph does not have. A list among the results is a node of its own."""
    mode = get_proxy_mode()
    if mode is None:
        return
    ordered: Any = torch.ops.higher_order.with_effects
    for node in mode.tracer.graph.find_nodes(op="call_function", target=ordered):
        if node.args[1] is torch.ops.mesh_attention.attention.default:
            lists = [user for user in node.users if isinstance(user.meta.get("val"), list)]
            for kept in (node, *lists):
                kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _partition_graphs() -> None:
    """Inductor's CUDA graphs end before these ops and begin after them, and after their results are
    told apart: a graph that took all results of one as a tuple would not see their memory. It does
    not see the tag of an op that has an effect, but what stands around it has a name."""
    from torch._inductor import utils  # seconds, which whoever compiles has spent already

    effect = str(torch.ops.higher_order.with_effects)
    utils.FORBIDDEN_CUDAGRAPH_OPS |= {effect}  # a frozen set, made anew
