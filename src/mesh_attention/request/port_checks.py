"""Tensors that are not what a call takes them for, as a port of a program may hand them over.

Nothing would show it but wrong numbers. So calls are held against what this thread has cut on the
group, that no model has hundreds of heads, and that ranks with the same keys have not cut them.
Whoever says `seq_len` means it, unless the object itself has cut otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.request.tensor_checks import AttentionCall, fault_of_kind
from mesh_attention.runtime.session.session import Session

_MOST_HEADS = 256  # of models
_SAMPLED = 8  # rows, and numbers of each
_WITH_DOCUMENTS = (
    "call attention(..., documents=...) of a ContextParallel, with those that shard had or "
    "shard_batch returned"
)


def refuse_heads_first(session: Session, arguments: Mapping[str, Any], call: AttentionCall) -> None:
    """By shapes, where nothing else is known of the tensors."""
    if any(arguments.get(name) is not None for name in ("seq_len", "num_heads")):
        return
    q, k, cut = call.q, call.k, session.shardings
    (rows, heads), (keys, kv_heads) = q.shape[1:3], k.shape[1:3]
    is_grouped = heads == kv_heads and 0 < keys < rows < heads and rows % keys == 0
    is_cut = heads in cut.of and rows not in cut.of
    if is_grouped or is_cut or heads > max(rows, _MOST_HEADS):
        raise MeshAttentionError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}, which looks like (batch, heads, "
            "local_seq, head_dim), and expected is (batch, local_seq, heads, head_dim): give "
            f"x.transpose(1, 2) of each; if they have {heads} heads, say num_heads={heads}"
        )


def refuse_forgotten_documents(session: Session, by: str, plan: Plan, call: AttentionCall) -> None:
    """Of a call without any, before its shapes are compared with what they should be."""
    cut, layout, q, k = session.shardings, plan.shards[0], call.q, call.k
    is_plain = fault_of_kind(q=q, k=k) is None
    for slots in [x.shape[1] for x in (q, k) if x.ndim == 4] if is_plain else ():
        known = cut.of_slots(by, slots)
        if known is not None and known.is_packed:
            raise MeshAttentionError(
                f"tensors were cut by documents, and this call takes the {slots} slots of a rank "
                f"for {layout.num_tokens} tokens in the {layout.kind} layout: {_WITH_DOCUMENTS}. "
                "Tensors without documents are cut after the latest call, or by a ContextParallel "
                "of their own"
            )


def refuse_other_shards(
    session: Session,
    by: str,
    arguments: Mapping[str, Any],
    plan: Plan,
    k: Tensor,
    *,
    is_function: bool,
) -> Callable[[], str | None] | None:
    """Of tensors that fit the plan of a call without documents. Returns what samples them where
    ranks should compare whether they hold the same. `is_function`: the call takes sizes itself."""
    cut = session.shardings
    to = "" if is_function else " to ContextParallel(...)"
    has_length = any(arguments.get(name) is not None for name in ("plan", "seq_len"))
    for layout in dict.fromkeys(plan.shards) if plan.num_ranks > 1 else ():
        known = cut.of_slots(by, layout.slots)
        if known is not None and has_length:
            known = known if all(x.of_batch and x.by == by for x in known.all) else None
        alike = {} if known is None else known.plain
        how, way_out = "", _WITH_DOCUMENTS
        if alike and not any(_fits(x, layout, arguments, plan) for x in alike):
            x, of_batch = [*alike.items()][-1]
            padding = x.padded_tokens - x.num_tokens
            how = f"from {x.num_tokens} tokens in the {x.kind} layout, with {padding} of padding"
            if not of_batch:
                way_out = f"give seq_len={x.num_tokens} and layout={x.kind.value!r}{to}"
            way_out += "; if these are other tensors, "
            way_out += (
                "call a ContextParallel that cuts none by documents"
                if has_length
                else f"give seq_len={layout.num_tokens} alone{to}"
            )
        elif not has_length and not alike and layout.slots == cut.latest:
            how = f"from {cut.latest} tokens, so that a rank has fewer"
            way_out = "cut the whole by shard or shard_batch, or say that ranks hold parts of "
            way_out += f"{layout.num_tokens} tokens: ContextParallel(seq_len={layout.num_tokens})"
        if how:
            raise MeshAttentionError(
                f"tensors were cut {how}, and this call takes the {layout.slots} slots of a rank "
                f"for {layout.num_tokens} tokens in the {layout.kind} layout: {way_out}"
            )
    return None if has_length or plan.num_ranks == 1 else partial(_sample, k)


def _fits(x: Layout, layout: Layout, arguments: Mapping[str, Any], plan: Plan) -> bool:
    """Whether tensors in layout `x` give the same result where they are taken for `layout`."""
    if x.num_tokens == layout.num_tokens:  # who names a layout means it
        is_named = any(arguments.get(name) is not None for name in ("layout", "relayout"))
        has_no_order = plan.problem.mask.is_full and x.padded_tokens == x.num_tokens
        return x == layout or is_named or has_no_order
    # Padding lies behind all tokens, so that none of them sees it.
    same = (x.kind, x.block) == (layout.kind, layout.block) and x.kind is not LayoutKind.LISTED
    return same and plan.problem.mask.causal and len({*plan.shards}) == 1


def _sample(k: Tensor) -> str | None:
    """A digest of a few numbers; None where they say nothing, since all rows are alike."""
    if k.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    rows = k.detach()[0, :: max(1, k.shape[1] // _SAMPLED), 0, :_SAMPLED].contiguous().cpu()
    if not bool((rows != rows[:1]).any()):
        return None
    return blake2b(
        rows.resolve_neg().view(torch.uint8).numpy().tobytes(), digest_size=8
    ).hexdigest()
