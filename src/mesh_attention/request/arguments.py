"""Reads the arguments of `ContextParallel` and `mesh_attention`, for `ObjectCalls`.

They become the question that a plan answers (`AskedPlan`; or the plan itself, if it is among them)
and the options of calls (`CallOptions`). Each rank reads its own arguments, so the caller must tell
the other ranks of an error that is raised here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mesh_attention.choose.pack import Layer
from mesh_attention.choose.plan_file import read_plan
from mesh_attention.choose.tuned import Tuned
from mesh_attention.errors import MeshAttentionError, raise_fault
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Plan, Programs, a_plan
from mesh_attention.plan.methods.question import Question, ask, attention_mask
from mesh_attention.plan.methods.table import AUTO, METHODS, methods_with
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify
from mesh_attention.request.auto import AutoChoice, choose, is_auto, take_chosen_by
from mesh_attention.request.call_arguments import (
    CALL_ARGUMENTS,
    call_options,
    check_same_bits,
    wants_same_bits,
    with_same_bits,
)
from mesh_attention.request.tensor_checks import UNSUPPORTED, fault_of_unsupported
from mesh_attention.runtime.session.caches import PlanSource
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.session import Session
from mesh_attention.runtime.session.transports import TransportName

_NEEDED = ("seq_len", "num_heads", "head_dim", "causal")
_PROBLEM = (
    *_NEEDED, "kv_seq_len", "num_kv_heads", "v_head_dim", "mask", "window_size", "dtype",
)  # fmt: skip
_OWN = (
    *_PROBLEM, *CALL_ARGUMENTS, "plan", "method", "tile", "layout", "chunks", "relayout", "cluster",
    "tuned",
)  # fmt: skip
_DOCUMENTS = "documents=cp.documents(cu_seqlens), once a batch"
_MASK = "ContextParallel(..., mask=Mask(...)), once for all calls, as a rule and not a tensor"
_PLACES = {  # where arguments go that flash-attn and PyTorch take in the call
    "scale": "ContextParallel(..., softmax_scale=...), once for all calls",
    "is_causal": "ContextParallel(..., causal=...), once for all calls",
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "key_padding_mask": _DOCUMENTS,
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), _DOCUMENTS),
    "enable_gqa": "nothing: fewer heads of k and v say it",
}


def read_arguments(
    group: dist.ProcessGroup, arguments: Mapping[str, Any]
) -> tuple[AskedPlan | Plan, CallOptions]:
    """`arguments`: by name; None means left out. Names that are not known here are options of the
    method."""
    raise_fault(fault_of_unsupported(**arguments))
    same_bits = wants_same_bits(arguments)
    arguments = with_same_bits(
        {n: x for n, x in arguments.items() if x is not None and n not in UNSUPPORTED}
    )
    chosen = {name: arguments.pop(name) for name in CALL_ARGUMENTS if name in arguments}
    options = {
        name: arguments.pop(name) for name in [*arguments] if name not in (*_PROBLEM, "plan")
    }
    cluster, tuned = take_chosen_by(options)
    _refuse_near_names(options)
    calls = call_options(group, chosen)
    if cluster is not None:
        calls = replace(calls, links=cluster.links)
    if tuned is not None:
        calls = replace(calls, tuned=tuned.digest)
    if "plan" in arguments:
        plan = arguments.pop("plan")
        if arguments or options or tuned:
            names = ", ".join((*arguments, *options, *(["tuned"] if tuned else [])))
            raise MeshAttentionError(
                f"{names}: the plan defines this already; leave it out, or leave plan out"
            )
        if isinstance(plan, str | Path):
            plan = read_plan(plan, dist.get_world_size(group))
        # Tests prove the plans of methods. A plan that was parsed or put together by hand may be
        # wrong, and would silently give wrong results.
        if not all(isinstance(pass_.programs, Programs) for pass_ in a_plan(plan).passes):
            refuse_if_wrong(plan)
        return plan, calls
    missing = [
        n for n in _NEEDED if n not in arguments and not (n == "causal" and "mask" in arguments)
    ]
    if missing:
        ways = ["causal=True or False, or a mask" if n == "causal" else n for n in missing]
        raise MeshAttentionError(
            f"{', '.join(missing)}: missing; give {', '.join(ways)}, or a plan"
        )
    asked = AskedPlan(_problem(**arguments), dist.get_world_size(group), options, cluster, tuned)
    if same_bits:
        check_same_bits(asked.problem, asked.num_ranks)
    asked.any_question  # noqa: B018  (refuses unknown methods and options)
    return asked, calls


@dataclass(frozen=True)
class AskedPlan:
    """A question without its method, which `choose` may choose."""

    problem: Problem
    num_ranks: int
    options: dict[str, Any]  # a method may be among them
    cluster: Cluster | None = None
    tuned: Tuned | None = None

    @property
    def is_auto(self) -> bool:
        return is_auto(self.options)

    @property
    def _others(self) -> dict[str, Any]:
        return {name: x for name, x in self.options.items() if name != "method"}

    @cached_property
    def any_question(self) -> Question:
        """A question with the named method, or with the first method that has all the options:
        layout and nodes are the same with all such methods."""
        method = methods_with(self._others)[0] if self.is_auto else self.options["method"]
        return ask(self.problem, self.num_ranks, method=method, **self._others)

    def choose(self, group: dist.ProcessGroup) -> AutoChoice | None:
        """A choice by a file of `tune`, or by a search; None if the method is named."""
        if not self.is_auto:
            return None
        if self.tuned is not None:
            return AutoChoice.tuned(self.tuned, self.problem, self.num_ranks, self._others)
        return choose(group, self.problem, self.cluster, self._others)

    def question(self, choice: AutoChoice | None) -> Question:
        if choice is None:
            return self.any_question
        return choice.question(self.problem, self.num_ranks)


def layer_of_batches(
    asked: AskedPlan | Plan, arguments: Mapping[str, Any], options: CallOptions
) -> Layer:
    """What an object asks of batches that bring their own documents and length, for a `Packer`.
    Raises for arguments that fit a single length or mask only."""
    if wants_same_bits(arguments):
        raise MeshAttentionError(
            "same_bits=True: documents that change with every batch are packed by the number of "
            "ranks; give them in the mask, Mask(causal=True, documents=...), with an object each"
        )
    if isinstance(asked, Plan):
        raise MeshAttentionError(
            "this object was made with a plan, which is for one mask and one length; give the "
            "sizes in place of the plan, and documents can change with every batch"
        )
    if asked.problem.mask.documents is not None:
        raise MeshAttentionError(
            "the mask of this object has documents already; leave them out there, and every batch "
            "can bring its own"
        )
    if asked.problem.mask.slices is not None:
        raise MeshAttentionError(
            "the mask of this object is made of slices and cannot take documents; make an object "
            "with the slices and the seq_len of each batch: on one group a new mask costs a plan "
            "and nothing else"
        )
    if options.cuda_graph:
        raise MeshAttentionError(
            "cuda_graph=True replays the documents that it was captured with; leave it out where "
            "they change with every batch"
        )
    if options.transport is TransportName.SYMMETRIC:
        raise MeshAttentionError(
            "transport='symmetric' is not supported with documents that change with every batch; "
            "leave it out"
        )
    of_any_method = {"layout", "ranks_per_node", "relayout"}
    if is_auto(arguments):
        of_any_method.add("method")
    # An option of some methods only fixes the method; else each batch chooses among all methods.
    is_fixed = any(arguments.get(name) is not None for name in _method_options() - of_any_method)
    question = asked.any_question
    setting = question.setting
    if setting.stripe_block > 1:
        raise MeshAttentionError(
            f"stripe_block={setting.stripe_block} is not supported with documents and lengths that "
            "come with batches, which are dealt token by token: leave it out, or cut tensors of "
            "one length by shard"
        )
    layout = None if arguments.get("layout") is None else setting.layout  # None: not named
    return Layer(
        asked.problem,
        question if is_fixed else None,
        layout,
        setting.ranks_per_node,
        relayout=setting.relayout,
    )


def kept_source(
    session: Session, arguments: dict[str, Any], *, chosen: bool = True
) -> tuple[PlanSource, CallOptions]:
    """The plans and options that arguments ask for; the session keeps those of the latest
    arguments. With `chosen=False` no method is chosen: enough for the layout of shards, which is
    the same with all methods that take the arguments."""
    mask = arguments["mask"]
    rest = repr([(name, x) for name, x in arguments.items() if name != "mask"])
    key = (mask if isinstance(mask, Mask) else repr(mask), rest, chosen)
    known = session.asked.find(key)
    if known is None:
        asked, calls = read_arguments(session.groups.parent, arguments)
        if isinstance(asked, Plan):
            source = session.source(asked)
        else:
            choice = asked.choose(session.groups.parent) if chosen else None
            source = session.source(asked.question(choice))
        known = session.asked.keep(key, (source, calls))
    return known


def refuse_if_wrong(plan: Plan) -> None:
    findings = verify(plan)
    if findings:
        raise MeshAttentionError(f"the plan is wrong: {findings[0]}")


def _problem(
    *,
    seq_len: Any,
    causal: Any = None,
    kv_seq_len: Any = None,
    mask: Any = None,
    window_size: Any = None,
    dtype: Any = torch.bfloat16,
    **heads: Any,
) -> Problem:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise MeshAttentionError(f"dtype={dtype!r}: must be a floating-point torch.dtype")
    return Problem(
        q_tokens=number("seq_len", seq_len),
        kv_tokens=None if kv_seq_len is None else number("kv_seq_len", kv_seq_len),
        element_bytes=dtype.itemsize,
        mask=attention_mask(causal=causal, mask=mask, window_size=window_size),
        **heads,
    )


@cache
def _method_options() -> frozenset[str]:
    options = (option for method in METHODS.values() for option in method.options())
    return frozenset({"method", *options})


def fault_of_keywords(keywords: Mapping[str, Any]) -> MeshAttentionError | None:
    """The error for keywords that `ContextParallel.attention` does not take, with the place where
    they belong."""
    for name in keywords:
        place = f"ContextParallel(..., {name}=...), once for all calls" if name in _OWN else None
        place = place or _PLACES.get(name)
        if place is None:
            return MeshAttentionError(f"attention has no argument {name!r}")
        return MeshAttentionError(f"attention has no argument {name!r}: it goes into {place}")
    return None


def _refuse_near_names(options: Mapping[str, Any]) -> None:
    """Raises if the name of an option is close to the name of an argument."""
    for name in sorted(options.keys() - _method_options()):
        close = [argument for argument in _OWN if name in argument]
        close += get_close_matches(name, _OWN, n=1, cutoff=0.7)
        if close:
            method = options.get("method", AUTO)
            whose = "no method has an" if method == AUTO else f"method {method} has no"
            raise MeshAttentionError(
                f"{whose} option {name!r}; did you mean the argument {close[0]}?"
            )
