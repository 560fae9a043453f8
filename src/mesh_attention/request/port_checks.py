"""Tensors that are not what a call takes them for, as a port of a program may hand them over.

The numbers would be wrong and nothing else: so what can be known is looked at, in the first call of
a kind. It is known what this thread has cut on the group, that no model has hundreds of heads, and
that ranks with the same keys have not cut them. Whoever says `seq_len` means it.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.runtime.session.session import Session

_MOST_HEADS = 256  # of models
_WITH_DOCUMENTS = (
    "call attention(..., documents=...) of a ContextParallel, with those that shard had or "
    "shard_batch returned"
)
_SAMPLED = 8  # rows, and numbers of each


def says_length(arguments: Mapping[str, Any]) -> bool:
    return any(arguments.get(name) is not None for name in ("plan", "seq_len"))


def refuse_heads_first(
    session: Session, arguments: Mapping[str, Any], q: Tensor, k: Tensor
) -> None:
    """Tensors of which nothing is known but their shapes."""
    if says_length(arguments) or arguments.get("num_heads") is not None:
        return
    (rows, heads), (keys, kv_heads) = q.shape[1:3], k.shape[1:3]
    is_grouped = heads == kv_heads and keys < rows < heads and keys > 0 and rows % keys == 0
    is_cut = session.shardings.has_slots(heads) and not session.shardings.has_slots(rows)
    if is_grouped or is_cut or heads > max(rows, _MOST_HEADS):
        raise MeshAttentionError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}, which looks like (batch, heads, "
            "local_seq, head_dim), and expected is (batch, local_seq, heads, head_dim): give "
            f"x.transpose(1, 2) of each; if they have {heads} heads, say num_heads={heads}"
        )


def fault_of_shards(
    session: Session, arguments: Mapping[str, Any], plan: Plan
) -> MeshAttentionError | None:
    """Of tensors without documents that fit the plan: what this thread has cut of that length."""
    known, said = session.shardings, says_length(arguments)
    if plan.num_ranks == 1:
        return None
    for layout in dict.fromkeys(plan.shards):
        alike = [x for x in known.plain if x.slots == layout.slots]
        if not alike and layout.slots in known.packed:
            return MeshAttentionError(
                f"shards of {layout.slots} slots were cut by the documents of a batch of "
                f"{known.packed[layout.slots]} tokens, and this call names none: "
                f"{_WITH_DOCUMENTS}. Others of that length are known when shard cuts them, without "
                "documents"
            )
        if not said and alike and not any(_is_read(x, layout, arguments, plan) for x in alike):
            x = alike[-1]
            kind = "" if x.kind == layout.kind else f" and layout={x.kind.value!r}"
            way_out = f"give seq_len={x.num_tokens}{kind}, or call the object that cut them"
            if known.plain[x]:
                way_out = _WITH_DOCUMENTS
            return MeshAttentionError(
                f"shards of {x.slots} slots were cut from {x.num_tokens} tokens in the {x.kind} "
                f"layout, {x.padded_tokens - x.num_tokens} slots of all are padding, and this call "
                f"takes them for {layout.num_tokens} tokens in the {layout.kind} one: {way_out}"
            )
    whole, slots = known.latest, plan.shards[0].slots
    if said or whole is None or whole.num_tokens != slots or known.has_slots(slots):
        return None
    return MeshAttentionError(
        f"q has {slots} tokens, as the whole sequence that was cut last, of which a rank has "
        f"{whole.slots}: cut it by shard or shard_batch; if it is the shard of a longer one, say "
        f"seq_len={slots * plan.num_ranks}"
    )


def _is_read(x: Layout, layout: Layout, arguments: Mapping[str, Any], plan: Plan) -> bool:
    """Whether tensors in layout `x` give the same result where they are taken for `layout`."""
    if x == layout:
        return True
    if x.num_tokens == layout.num_tokens:  # then who names a layout means it
        return any(arguments.get(name) is not None for name in ("layout", "relayout"))
    # Padding lies behind all tokens, so that none of them sees it.
    same = (x.kind, x.block) == (layout.kind, layout.block) and x.kind is not LayoutKind.LISTED
    return same and plan.problem.mask.causal and len({*plan.shards}) == 1


def sample_of_keys(k: Tensor) -> str | None:
    """A digest of a few numbers, the same on ranks that hold the same keys; None where these say
    nothing, since all rows are alike."""
    if k.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    step = max(1, k.shape[1] // _SAMPLED)
    rows = k.detach()[0, ::step, 0, :_SAMPLED].contiguous().cpu()
    if not bool((rows != rows[:1]).any()):
        return None
    return blake2b(rows.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
