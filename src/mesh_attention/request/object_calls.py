"""The plans and prepared calls of one `ContextParallel`: what its arguments ask for, read once.

`ContextParallel` and the functions of `train/` hold one and ask it for plans, shards and calls.
Where the arguments do not say the sizes, calls do, and plans are made when they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.choose.pack import Layer, Pack, Packer
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.methods.question import attention_mask
from mesh_attention.plan.problem.arguments import real
from mesh_attention.request.arguments import (
    AskedPlan,
    kept_source,
    layer_of_batches,
    read_arguments,
)
from mesh_attention.request.auto import AutoChoice, how_calls_choose
from mesh_attention.request.port_checks import (
    refuse_added_tokens,
    refuse_forgotten_documents,
    refuse_heads_first,
    refuse_other_documents,
    refuse_other_shards,
)
from mesh_attention.request.sizes import (
    SIZES,
    USUAL_TOKENS,
    fault_of_length,
    has_sizes,
    sizes_of,
    usual_sizes,
    with_lengths,
)
from mesh_attention.request.tensor_checks import AttentionCall, fault_of_call
from mesh_attention.runtime.execute.binding import CallShape
from mesh_attention.runtime.session.caches import PlanSource, WeakRegistry
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.documents import BatchPlans, Documents, checked_documents
from mesh_attention.runtime.session.layouts import Cut
from mesh_attention.runtime.session.modes import OUTSIDE_BACKWARD
from mesh_attention.runtime.session.prepared_call import PreparedCall
from mesh_attention.runtime.session.session import User, process_group, session_of
from mesh_attention.runtime.session.sharding import Shards


class ObjectCalls:
    """
    arguments   of the object, or of the function, by name
    name        in compiled code; the function is told from no other of its calls
    fixed       plans where the sizes are known from the start
    latest      plans of the latest call, where calls say the sizes, without documents
    batch       plan, pack and layer of the latest call, if it has documents
    chosen_by   how method and setting were chosen, if they were chosen here
    is_asked    whether the caller has asked how tensors without documents lie
    companions  other objects whose layers go through the batches of this one
    warm        prepared calls by what their checks depend on (`attend.py`)
    modules     numbers for those that are made on the object
    """

    def __init__(self, user: User, arguments: Mapping[str, Any]) -> None:
        self.session, self.user, self.arguments = user.session, user, dict(arguments)
        self.name = "0" if self.is_function else str(OBJECT_CALLS.add(self))
        self.options = CallOptions()
        self.fixed: PlanSource | None = None
        self.latest: PlanSource | None = None
        self.batch: tuple[Plan, Pack, Layer] | None = None
        self.chosen_by: str | None = None
        self.warm: dict[Any, Any] = {}
        self.is_asked = False
        self.companions: list[ObjectCalls] = []
        self.modules = count()
        self._layers: dict[tuple[Any, ...], Layer] = {}

    @staticmethod
    def of_object(
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None, arguments: Mapping[str, Any]
    ) -> ObjectCalls:
        """Of a new object: ranks agree on its plan, if that is known already."""
        calls = ObjectCalls(session_of(process_group(group_or_mesh)).join(), arguments)
        try:
            calls._agree_on_plan()
        except BaseException:
            calls.user.close()
            raise
        return calls

    def _agree_on_plan(self) -> None:
        """Reads the arguments and, where sizes are known, makes the plan, which ranks compare. If
        they chose different methods, all follow the first rank and compare again."""
        group, error, choice, plan = self.session.groups.parent, None, None, None
        try:
            self.arguments = with_lengths(self.arguments)
            known = has_sizes(self.arguments)
            sizes = self.arguments if known else usual_sizes(self.arguments)
            asked, self.options = read_arguments(group, sizes)
            if not known:
                self.chosen_by = how_calls_choose(self.arguments)
            elif isinstance(asked, Plan):
                self.fixed = self.session.source(asked)
            else:
                choice = asked.choose(group)
                self._fix(asked, choice)
            plan = None if self.fixed is None else self.fixed.first
        except Exception as raised:  # whatever it is, the others must not wait for us
            error = raised
        except BaseException as ended:  # nor for what is no mistake: Ctrl-C, say
            self.session.tell_of(ended, self.options)
            raise
        agree = self.session.calls.agree_on_plan
        followed = agree(plan, self.options, error, None if choice is None else choice.text)
        if followed is not None and choice is not None and isinstance(asked, AskedPlan):
            try:
                self._fix(asked, choice.follow(followed))
                plan = self.source.first
            except Exception as raised:
                error = raised
            agree(plan, self.options, error)

    def _fix(self, asked: AskedPlan, choice: AutoChoice | None) -> None:
        self.fixed = self.session.source(asked.question(choice))
        self.chosen_by = None if choice is None else choice.line

    @property
    def source(self) -> PlanSource:
        source = self.fixed or self.latest
        if source is None:
            raise MeshAttentionError(
                "this object was made without sizes, and no call has said them yet: there is no "
                "plan; give seq_len, num_heads and head_dim, or make a call first"
            )
        return source

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.session.groups.ranks

    # Calls.

    def prepare(
        self,
        call: AttentionCall,
        fault: MeshAttentionError | None,
        *,
        needs_grad: bool,
        keeps: bool,
        in_backward: bool = False,
    ) -> PreparedCall:
        """The call that all ranks are about to make, who all raise what is wrong with it. `keeps`
        False: no rows of the forward pass stay for the backward pass, unless a plan that was given
        keeps some. `in_backward`: tensors are stand-ins, and were looked at in the forward pass."""
        options, sample, arguments = self.options, None, self.arguments
        is_again = in_backward or torch._C._current_graph_task_id() != OUTSIDE_BACKWARD
        looks = call.documents is None and not is_again
        try:
            source, options = self._source_for(call, keeps)
            plan = source.first.plan
            # Who calls the function with a length means it.
            if looks and not (self.is_function and arguments["seq_len"] is not None):
                refuse_forgotten_documents(self.session, self.name, plan, call)
            if not (looks or is_again or _plans(call.documents).is_asked):
                refuse_other_documents(self.session, source.first, is_named=self._names_layout)
            fault = fault or fault_of_call(plan, call)
            if fault is None and looks:
                if arguments.get("seq_len") is None and not self._names_layout:
                    refuse_added_tokens(self.session, self.name, plan)
                sample = refuse_other_shards(
                    self.session,
                    self.name,
                    arguments,
                    plan,
                    call.k,
                    is_function=self.is_function,
                    is_trusted=self.is_trusted,
                )
            if call.softmax_scale is not None:
                options = replace(options, softmax_scale=real("scale", call.softmax_scale))
            if source.first.keeps_lse:  # otherwise it costs nothing
                options = options.for_lse(call.return_lse, call.sinks)
        except MeshAttentionError as error:  # the others must not wait for us
            fault = fault or error
        self.user.refuse_if_closed()
        options = options.now()
        if fault is not None:
            self.session.calls.agree({}, options, fault)  # raises it
        shape = CallShape(call.q.shape[0], call.q.dtype, call.q.device)
        return self.session.calls.prepare(source, options, shape, needs_grad, sample)

    def _source_for(self, call: AttentionCall, keeps: bool) -> tuple[PlanSource, CallOptions]:
        """Plans for a call, and its options."""
        session, arguments, documents = self.session, self.arguments, call.documents
        sizes = {} if self.fixed is not None else sizes_of(session, arguments, call)
        if documents is None:
            if self.fixed is None:
                refuse_heads_first(session, arguments, call)
                self.latest, options = kept_source(session, arguments | sizes)
                if self.is_function:
                    self.options = options
            self.batch = None
            return self.source if keeps else self.source.of_shards, self.options
        if sizes:
            sizes |= {"seq_len": USUAL_TOKENS, "kv_seq_len": USUAL_TOKENS}
        layer = self.layer(sizes)
        plans = _plans(documents)
        source = plans.source(session, layer, keeps)
        self.batch = source.first.plan, plans.pack, layer
        return source, self.options.of_batch

    @property
    def is_causal(self) -> bool:
        if self.fixed is not None:
            return self.fixed.first.plan.problem.mask.causal
        names = ("causal", "mask", "window_size")
        return attention_mask(**{name: self.arguments.get(name) for name in names}).causal

    @property
    def _names_layout(self) -> bool:
        """Whether the caller says how tensors lie, so that nothing else does."""
        names = ("layout", "relayout", "plan")
        return any(self.arguments.get(name) is not None for name in names)

    @property
    def is_trusted(self) -> bool:
        """Whether what only other objects have cut says nothing of tensors without documents."""
        return self.is_asked or self._names_layout

    @property
    def is_function(self) -> bool:
        """`mesh_attention()`, whose arguments are read when it is called."""
        return self.user is self.session.function

    # Batches and shards.

    def layer(self, sizes: Mapping[str, Any] | None = None) -> Layer:
        """What the object asks of batches that bring their own documents and length. `sizes`: of
        a call, where the arguments do not say them."""
        arguments = self.arguments | dict(sizes or {})
        if self.fixed is None and not has_sizes(arguments):
            # Not those of the last call: a batch may be made ready before it, on some ranks.
            arguments = usual_sizes(arguments)
        key = tuple(arguments.get(name) for name in SIZES)
        if key not in self._layers:
            asked, options = read_arguments(self.session.groups.parent, arguments)
            self._layers[key] = layer_of_batches(asked, arguments, options)
        return self._layers[key]

    def packer(self, also: Any) -> Packer:
        """`also`: other objects on this group that are called with the same tensors."""
        objects = list(also) if isinstance(also, Sequence) else [also]
        others = [getattr(other, "_calls", None) for other in objects]
        calls = [other for other in others if isinstance(other, ObjectCalls)]
        if len(calls) < len(others) or any(c.session is not self.session for c in calls):
            raise MeshAttentionError(
                f"also={also!r}: give a list of ContextParallel objects on the same group"
            )
        layers = tuple(each.layer() for each in (self, *self.companions, *calls))
        wanted = dict.fromkeys(layer.layout for layer in layers if layer.layout)
        if len(wanted) > 1:
            raise MeshAttentionError(
                f"objects that share a batch want different layouts: {', '.join(wanted)}; the "
                "tensors of a batch have one"
            )
        if len({layer.relayout for layer in layers}) > 1:
            raise MeshAttentionError(
                "objects that share a batch differ in relayout, but share its layout: set "
                "relayout=True in all of them, or in none"
            )
        return Packer(layers, len(self.ranks))

    def documents(self, cu_seqlens: Any, also: Any = ()) -> Documents:
        return self.of_pack(self.packer(also)(cu_seqlens, None))

    def of_pack(self, pack: Pack) -> Documents:
        """Not in a process of a loader, whose queue would wait for what cannot be pickled."""
        if self.session.is_copy:
            raise MeshAttentionError(
                "documents, and so shard_batch, belong to the process that communicates, and this "
                "one was forked from it: let the loader call packer = cp.packer() on cu_seqlens, "
                "and give documents(pack) to shard_batch in the training loop"
            )
        return Documents(self.session, pack)

    def shards(self, documents: Documents | None, *, is_asked: bool = True) -> Shards:
        """How the tensors of a batch, or of every batch, lie on the ranks. `is_asked`: the caller
        of the library is told."""
        if documents is not None:
            shards, plans = checked_documents(documents).shards, documents.plans
            plans.is_asked = plans.is_asked or is_asked
        else:
            self.is_asked = self.is_asked or is_asked
            source = self.fixed
            if source is None:
                if self.arguments.get("seq_len") is None:
                    raise fault_of_length(self.arguments)
                # For heads of the usual size: it lays out tokens as any other of this length.
                usual = usual_sizes(self.arguments)
                source, _ = kept_source(self.session, usual, chosen=False)
            shards = Shards.of(source.first)
        if is_asked:
            shards.note(self.session)
        return shards

    def cut(self, documents: Documents | None) -> Shards:
        """The same as `shards`, for a caller that cuts tensors by them. The session remembers how
        they were cut, and calls are compared with it (`port_checks.py`)."""
        shards, cut = self.shards(documents), self.session.shardings
        is_packed = shards.of_batch and max(map(len, shards.starts)) > 2
        for layout in (shards.q_layout, shards.kv_layout):
            self.session.cut_slots.keep(layout.slots, None)
            what = Cut(None if is_packed else layout, shards.of_batch, self.name)
            cut.keep(layout, what, self.session.calls.num_begun)
        return shards


OBJECT_CALLS: WeakRegistry[ObjectCalls] = WeakRegistry(
    "the ContextParallel of this compiled call is gone; hold it for as long as the compiled code "
    "and its backward passes may run"
)


def _plans(documents: Any) -> BatchPlans:
    return documents if isinstance(documents, BatchPlans) else checked_documents(documents).plans
