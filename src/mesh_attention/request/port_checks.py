"""Tensors that are not what a call takes them for, as a port of a program may hand them over.

Nothing would show it but wrong numbers. So calls are held against what is known: what this thread
has cut on the group, that no model has hundreds of heads, and that ranks with the same keys have
not cut them. Whoever says `seq_len` means it.
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
from mesh_attention.request.tensor_checks import fault_of_kind
from mesh_attention.runtime.session.session import Session

_MOST_HEADS = 256  # of models
_SAMPLED = 8  # rows, and numbers of each
_WITH_DOCUMENTS = (
    "call attention(..., documents=...) of a ContextParallel, with those that shard had or "
    "shard_batch returned"
)


def refuse_heads_first(
    session: Session, arguments: Mapping[str, Any], q: Tensor, k: Tensor
) -> None:
    """By shapes, where nothing else is known of the tensors."""
    if any(arguments.get(name) is not None for name in ("seq_len", "num_heads")):
        return
    (rows, heads), (keys, kv_heads), cut = q.shape[1:3], k.shape[1:3], session.shardings
    is_grouped = heads == kv_heads and 0 < keys < rows < heads and rows % keys == 0
    is_cut = cut.has_slots(heads) and not cut.has_slots(rows)
    if is_grouped or is_cut or heads > max(rows, _MOST_HEADS):
        raise MeshAttentionError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}, which looks like (batch, heads, "
            "local_seq, head_dim), and expected is (batch, local_seq, heads, head_dim): give "
            f"x.transpose(1, 2) of each; if they have {heads} heads, say num_heads={heads}"
        )


def refuse_forgotten_documents(session: Session, plan: Plan, q: Any, k: Any) -> None:
    """Of a call without any, before its shapes are compared with what they should be."""
    cut, layout = session.shardings, plan.shards[0]
    is_plain = fault_of_kind(q=q, k=k) is None
    for slots in [x.shape[1] for x in (q, k) if x.ndim == 4] if is_plain else ():
        if cut.is_packed(slots):
            raise MeshAttentionError(
                f"tensors were cut by the documents of {cut.packed[slots]} tokens, and this call "
                f"takes the {slots} slots of a rank for {layout.num_tokens} tokens in the "
                f"{layout.kind} layout: {_WITH_DOCUMENTS}, or cut what has none by shard without "
                "documents"
            )


def refuse_other_shards(
    session: Session, arguments: Mapping[str, Any], plan: Plan, k: Tensor
) -> Callable[[], str | None] | None:
    """Of tensors that fit the plan of a call without documents. Returns what samples them where
    ranks should compare whether they hold the same."""
    cut = session.shardings
    has_length = any(arguments.get(name) is not None for name in ("plan", "seq_len"))
    for layout in dict.fromkeys(plan.shards) if plan.num_ranks > 1 else ():
        alike = [x for x in cut.plain if x.slots == layout.slots]
        how, way_out = "", _WITH_DOCUMENTS
        if not has_length and alike and not any(_fits(x, layout, arguments, plan) for x in alike):
            x = alike[-1]
            padding = x.padded_tokens - x.num_tokens
            how = f"from {x.num_tokens} tokens in the {x.kind} layout, with {padding} of padding"
            if not cut.plain[x]:
                way_out = f"give seq_len={x.num_tokens} and layout={x.kind.value!r}"
            way_out += f"; if these are other tensors, give seq_len={layout.num_tokens} alone"
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
        return x == layout or any(arguments.get(n) is not None for n in ("layout", "relayout"))
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
