"""Checks for mistakes of ported programs that only wrong numbers would show: tensors in another
order of dimensions, or cut in another way than the call or the positions for RoPE assume.

`ObjectCalls` checks each new kind of call with the `refuse_*` functions. They compare it with the
tensors that this thread has cut on the process group (`Shardings`); more heads than tokens mean
another order of dimensions; equal keys on all ranks have not been cut. An explicit layout is
trusted, and so is an explicit `seq_len` of an object that was asked how tensors lie, unless it has
cut batches in another way. `ContextParallel.check_positions` and models of transformers compare
positions, by `fault_of_positions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.request.tensor_checks import AttentionCall, fault_of_kind
from mesh_attention.runtime.session.layouts import (
    KNOWN_LAYOUTS,
    Known,
    in_documents,
    same_rows,
)
from mesh_attention.runtime.session.rank_plan import RankPlan
from mesh_attention.runtime.session.session import Session
from mesh_attention.runtime.session.sharding import Shards, Side

Positions = NDArray[np.int64]
_MOST_HEADS = 256  # no model has more
_SAMPLED = 8  # rows, and numbers of each row
_WITH_DOCUMENTS = (
    "call attention(..., documents=...) of a ContextParallel, with those that shard had or "
    "shard_batch returned"
)


def refuse_heads_first(session: Session, arguments: Mapping[str, Any], call: AttentionCall) -> None:
    """Raises if shapes look like (batch, heads, local_seq, head_dim), unless sizes were given."""
    if any(arguments.get(name) is not None for name in ("seq_len", "num_heads")):
        return
    q, k, cuts = call.q, call.k, session.shardings.of
    (rows, heads), (keys, kv_heads) = q.shape[1:3], k.shape[1:3]
    # Taken as (batch, heads, tokens, head_dim): more query heads than KV heads, and more tokens.
    is_grouped = heads == kv_heads and 0 < keys < rows < heads and rows % keys == 0
    is_cut = heads in cuts and rows not in cuts
    if is_grouped or is_cut or heads > max(rows, _MOST_HEADS):
        raise MeshAttentionError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}, which looks like (batch, heads, "
            "local_seq, head_dim), and expected is (batch, local_seq, heads, head_dim): give "
            f"x.transpose(1, 2) of each; if they have {heads} heads, say num_heads={heads}"
        )


def refuse_forgotten_documents(session: Session, by: str, plan: Plan, call: AttentionCall) -> None:
    """Raises if tensors that were cut by documents are in a call without documents. Shapes need not
    fit the plan. `by`: the object that is called."""
    layout, q, k = plan.shards[0], call.q, call.k
    is_plain = fault_of_kind(q=q, k=k) is None
    for slots in [x.shape[1] for x in (q, k) if x.ndim == 4] if is_plain else ():
        cuts = session.shardings.of_slots(by, slots)
        if cuts is not None and cuts.is_packed:
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
    is_trusted: bool,
) -> Callable[[], str | None] | None:
    """Raises if the tensors of a call without documents fit the plan in shape, but were cut for
    another layout. If no length was given, returns a function that samples keys for ranks to
    compare. `is_function`: the call itself takes sizes; `is_trusted`: a length that was given means
    that this object, and no other, has cut the tensors."""
    shardings = session.shardings
    to = "" if is_function else " to ContextParallel(...)"
    has_length = any(arguments.get(name) is not None for name in ("plan", "seq_len"))
    for layout in dict.fromkeys(plan.shards) if plan.num_ranks > 1 else ():
        cuts = shardings.of_slots(by, layout.slots)
        if cuts is not None and has_length and is_trusted:
            cuts = cuts if all(cut.of_batch and cut.by == by for cut in cuts.all) else None
        known = {} if cuts is None else cuts.plain
        how, way_out = "", _WITH_DOCUMENTS
        if known and not any(_fits(cut, layout, arguments, plan) for cut in known):
            cut, of_batch = [*known.items()][-1]
            how = f"from {cut.num_tokens} tokens in the {cut.kind} layout, with "
            how += f"{cut.padded_tokens - cut.num_tokens} of padding"
            if not of_batch:
                way_out = f"give seq_len={cut.num_tokens} and layout={cut.kind.value!r}{to}"
            other = f"give seq_len={layout.num_tokens} alone{to}"
            if has_length:
                other = "call a ContextParallel that cuts none by documents"
            way_out += f"; if these are other tensors, {other}"
        elif not has_length and not known and layout.slots == shardings.latest:
            how = f"from {shardings.latest} tokens, so that a rank has fewer"
            way_out = "cut the whole by shard or shard_batch, or say that ranks hold parts of "
            way_out += f"{layout.num_tokens} tokens: ContextParallel(seq_len={layout.num_tokens})"
        if how:
            raise MeshAttentionError(
                f"tensors were cut {how}, and this call takes the {layout.slots} slots of a rank "
                f"for {layout.num_tokens} tokens in the {layout.kind} layout: {way_out}"
            )
    return None if has_length or plan.num_ranks == 1 else partial(_sample, k)


def refuse_added_tokens(session: Session, by: str, plan: Plan) -> None:
    """Raises if a call without a length has somewhat more slots than tensors that its object has
    cut, and nobody has cut as many, as where each rank adds a token of its own."""
    known, keys = session.cut_slots, session.shardings.of
    own = [key[1] for key in keys if isinstance(key, tuple) and key[0] == by]
    for slots in {layout.slots for layout in plan.shards if layout.num_ranks > 1}:
        is_known = slots in known or known.is_full  # of what was dropped nothing is said
        cut = next((cut for cut in own if cut < slots < 2 * cut), None)
        if cut is not None and not is_known:
            raise MeshAttentionError(
                f"tensors were cut to {cut} slots of a rank, and this call has {slots}: tokens "
                "that each rank adds would lie between those of other ranks. Add them to the "
                "whole before it is cut; if these are other tensors, give seq_len= to "
                "ContextParallel(...), or documents= to the call"
            )


def refuse_other_documents(session: Session, rank_plan: RankPlan, *, is_named: bool) -> None:
    """Raises if tensors were cut in another layout by the same documents as those of a call, which
    nobody has asked how they lie: each object chooses its own. So it does if they were cut without
    documents, unless the object names the layout (`is_named`)."""
    mask, asked = rank_plan.plan.problem.mask, session.asked_layouts
    if _has_no_order(mask):
        return
    starts = mask.documents, mask.kv_documents or mask.documents
    for layout, of_side in zip(rank_plan.shards, starts, strict=True):
        plain = (0, layout.num_tokens)
        ways = [way for way in (of_side or plain, plain) if way != plain or not is_named]
        cuts = next(filter(None, map(asked.find, ways)), ())
        if cuts and not any(same_rows(cut, layout) for cut in cuts):
            raise MeshAttentionError(
                f"tensors of {layout.num_tokens} tokens were cut in the {cuts[-1].kind} layout, "
                f"and the documents of this call want the {layout.kind} layout: give the call and "
                "shard the same documents=, made once a batch with also=[the other objects], or "
                "take those that shard_batch(..., also=) returns"
            )


def refuse_other_join(
    session: Session, by: str, x: Tensor, layout: Layout, *, is_trusted: bool
) -> None:
    """Raises if a computed tensor is to be joined without documents, and whatever was cut to as
    many slots lies in another layout. `is_trusted` as in `refuse_other_shards`."""
    cuts = session.shardings.of_slots(by, layout.slots)
    if cuts is None or (is_trusted and cuts.all[0].by != by):
        return
    if layout.slots not in getattr(x, "shape", ()) or KNOWN_LAYOUTS.of(x) is not None:
        return  # which `unshard` looks at
    packed = session.shardings.packed
    lie = [cut.layout or packed.get((cut.by, layout.slots)) or layout for cut in cuts.all]
    if not any(same_rows(cut, layout) for cut in lie):
        raise MeshAttentionError(
            f"tensors were cut from {lie[-1].num_tokens} tokens in the {lie[-1].kind} layout, and "
            f"unshard joins {layout.num_tokens} in the {layout.kind} layout: call unshard of the "
            "object that cut them, with the documents= that shard had or shard_batch returned"
        )


def layout_of_output(
    session: Session,
    rank_plan: RankPlan,
    tensors: Sequence[Tensor] = (),
    known: Sequence[Known | None] = (),
) -> Layout | None:
    """How the output of a call lies; None if that is not known. `known`: how q, k and v lie, as far
    as that is. Raises if a tensor of the call was cut along another dimension, or in another layout
    than the plan assumes, whatever sizes and layout the caller names."""
    of_q, of_kv = rank_plan.shards
    lie = [None if cut is None or cut[1] != session.groups.ranks else cut for cut in known]
    for name, x, lies, layout in zip("qkv", tensors, lie, (of_q, of_kv, of_kv), strict=False):
        if lies is None or lies[0].slots != x.shape[1]:
            continue
        cut, _, stride = lies
        if stride != x.stride(1):
            raise MeshAttentionError(
                f"{name} has shape {tuple(x.shape)} and was cut along another dimension than the "
                "second: expected is (batch, local_seq, heads, head_dim)"
            )
        if _fits(cut, layout, {}, rank_plan.plan):
            continue
        if cut.num_tokens != layout.num_tokens or not same_rows(cut, layout):
            raise MeshAttentionError(
                f"{name} lies in the {cut.kind} layout of {cut.num_tokens} tokens, and this call "
                f"takes it for a shard of {layout.num_tokens} tokens in the {layout.kind} layout: "
                "cut it by the object that is called, and give shard and attention the same "
                "documents="
            )
    if lie and lie[0] is not None and lie[0][0].slots == tensors[0].shape[1]:
        return lie[0][0]
    return None if _has_no_order(rank_plan.plan.problem.mask) else of_q


def _fits(cut: Layout, layout: Layout, arguments: Mapping[str, Any], plan: Plan) -> bool:
    """Whether tensors in layout `cut` give the right result in a call that assumes `layout`."""
    is_named = any(arguments.get(name) is not None for name in ("layout", "relayout"))
    if is_named and cut.kind is not layout.kind:
        return True  # it is trusted: what was cut are other tensors
    if cut.num_tokens == layout.num_tokens:
        has_no_order = _has_no_order(plan.problem.mask) and cut.padded_tokens == cut.num_tokens
        return cut == layout or is_named or has_no_order
    # Padding lies behind all tokens, so that under a causal mask no token sees it.
    same = (cut.kind, cut.block) == (layout.kind, layout.block)
    same = same and cut.kind is not LayoutKind.LISTED
    return same and plan.problem.mask.causal and len({*plan.shards}) == 1


def _has_no_order(mask: Mask) -> bool:
    """Whether all tokens see all tokens, so that any order of them is right."""
    if mask.causal or mask.window is not None or mask.slices is not None:
        return False
    return all(starts is None or len(starts) == 2 for starts in (mask.documents, mask.kv_documents))


def _sample(k: Tensor) -> str | None:
    """A digest of a few numbers of the keys; None if all rows are equal, which says nothing."""
    if k.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    rows = k.detach()[0, :: max(1, k.shape[1] // _SAMPLED), 0, :_SAMPLED].contiguous().cpu()
    if not bool((rows != rows[:1]).any()):
        return None
    data = rows.resolve_neg().view(torch.uint8).numpy().tobytes()
    return blake2b(data, digest_size=8).hexdigest()


def fault_of_positions(
    shards: Shards, side: Side, position_ids: Any, own: Tensor | None = None
) -> MeshAttentionError | None:
    """The error for positions that are not those of this rank's shard; it names the layout that
    they belong to. `own`: positions that the caller gave to `shard_batch`, which are right too."""
    layout, starts = shards.layout(side), shards.starts[side == "kv"]
    if not isinstance(position_ids, Tensor) or position_ids.shape[-1:] != (layout.slots,):
        return MeshAttentionError(
            f"position_ids: give a tensor of (..., {layout.slots}), with a position for each slot "
            "of this rank, as positions() has them"
        )
    rows = position_ids.detach().cpu()
    if own is not None and torch.equal(own.cpu(), rows):
        return None
    right = layout.positions(shards.rank)
    real = right < layout.num_tokens

    def equal(row: Positions, positions: Positions) -> bool:
        """Positions may count in the whole or in each document; those of padding do not matter."""
        ways = positions, in_documents(positions, starts, layout.num_tokens)
        return any(np.array_equal(row[real], way[real]) for way in ways)

    for row in rows.reshape(-1, layout.slots).numpy():
        if not equal(row, right):
            others = other_ways(layout, starts, shards.rank)
            name = next((name for name, x in others if equal(row, x)), "of no layout known here")
            return MeshAttentionError(
                f"position_ids are {name}, and shards lie in the {layout.kind} layout: cut tensors "
                "by shard or shard_batch and take positions() of the same object and documents; "
                "where shards must stay as they are, say layout= or relayout=True to the object"
            )
    return None


def other_ways(
    layout: Layout, starts: tuple[int, ...], rank: int
) -> Iterator[tuple[str, Positions]]:
    """Names of usual ways to cut tensors, and this rank's positions under each."""
    size, slots = layout.num_ranks, layout.slots
    for kind in (LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG, LayoutKind.STRIPED):
        other = Layout(kind, size * slots, size)
        if other.slots == slots:
            yield kind.value, other.positions(rank)
    yield "counted from 0 on each rank", np.arange(slots)
    if starts[-1] == size * slots and not any((b - a) % (2 * size) for a, b in pairwise(starts)):
        pieces = [np.arange(a, b).reshape(2 * size, -1) for a, b in pairwise(starts)]
        rows = [of_each[at] for of_each in pieces for at in (rank, -1 - rank)]
        yield "zigzag of each document, as ring-flash-attention cuts them", np.concatenate(rows)
