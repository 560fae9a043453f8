"""Sizes of an object that was made without them, for `ObjectCalls`: from the mask, from the tensors
of a call, or, before the first call, usual sizes."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from mesh_attention.errors import MeshAttentionError, raise_fault
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.request.tensor_checks import AttentionCall, fault_of_kind
from mesh_attention.runtime.session.session import Session

USUAL_TOKENS = 1 << 20  # assumed while the length is unknown: short batches need no ranks
_HEADS = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")
SIZES = ("seq_len", "kv_seq_len", "dtype", *_HEADS)


def has_sizes(arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments say all sizes; otherwise the tensors of calls do."""
    if arguments.get("plan") is not None:
        return True
    return all(arguments.get(name) is not None for name in ("seq_len", "num_heads", "head_dim"))


def with_lengths(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with the length of the mask's documents if no length is given. The slices of a
    mask say no length: tokens that see nothing may follow them."""
    mask, lengths = arguments.get("mask"), {}
    if isinstance(mask, Mask) and mask.documents is not None and arguments.get("plan") is None:
        lengths["seq_len"] = mask.documents[-1]
        if mask.kv_documents is not None:
            lengths["kv_seq_len"] = mask.kv_documents[-1]
    return {**arguments, **{n: x for n, x in lengths.items() if arguments.get(n) is None}}


def fault_of_length(arguments: Mapping[str, Any]) -> MeshAttentionError:
    """The error for a question that needs a length, to an object without seq_len."""
    queries, keys = _reach(arguments.get("mask"))
    if not queries:
        return MeshAttentionError(
            "this object was made without seq_len: give it there, or the documents of the batch "
            "here; documents([0, tokens]) is a batch without any boundary"
        )
    way = f"give seq_len={max(queries, keys)} there, or more if tokens follow that see nothing"
    if queries != keys:
        way += f" (seq_len={queries}, kv_seq_len={keys} if queries and keys differ in number)"
    return MeshAttentionError(
        f"this object was made without seq_len, with a mask of slices that end at query {queries} "
        f"and key {keys}: {way}"
    )


def _reach(mask: Any) -> tuple[int, int]:
    """How many queries, and how many keys, the slices of a mask need."""
    slices = mask.slices if isinstance(mask, Mask) else None
    stops = [(q_stop, k_stop) for (_, q_stop), (_, k_stop), _ in slices or ()]
    return max((q for q, _ in stops), default=0), max((k for _, k in stops), default=0)


def usual_sizes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with usual sizes for missing sizes: enough to check all other arguments and to
    choose a layout before the first call."""
    usual, kv_heads = 32, arguments.get("num_kv_heads")
    if isinstance(kv_heads, Integral) and int(kv_heads) > 0:
        usual = int(kv_heads) * max(1, 32 // int(kv_heads))
    heads = arguments.get("num_heads") or usual
    kv_heads = kv_heads or (8 if arguments.get("num_heads") is None else heads)
    tokens = max(USUAL_TOKENS, *_reach(arguments.get("mask")))  # a mask that fits is not refused
    sizes = {"seq_len": tokens, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128}
    return {**arguments, **{n: x for n, x in sizes.items() if arguments.get(n) is None}}


def sizes_of(session: Session, arguments: Mapping[str, Any], call: AttentionCall) -> dict[str, Any]:
    """The sizes of a call, from the shapes of its tensors. Without seq_len every slot of a shard
    counts as a token. seq_len=0 counts as given: it is refused later."""
    q, k, v = call[:3]
    raise_fault(fault_of_kind(q=q, k=k, v=v))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise MeshAttentionError(
                f"{name} has {x.ndim} dimensions; expected (batch, local_seq, heads, head_dim)"
            )
    heads = dict(zip(_HEADS, (q.shape[2], k.shape[2], q.shape[3], v.shape[3]), strict=True))
    for name, actual in heads.items():
        wanted = arguments.get(name)
        if wanted is not None and wanted != actual:
            raise MeshAttentionError(f"{name}={wanted} was given, but the tensors have {actual}")
    if k.shape[2] and q.shape[2] % k.shape[2]:
        raise MeshAttentionError(
            f"q has {q.shape[2]} heads and k {k.shape[2]}: those of q must be a multiple of those "
            "of k"
        )
    num_ranks = len(session.groups.ranks)
    lengths = q.shape[1] * num_ranks, k.shape[1] * num_ranks
    queries, keys = arguments.get("seq_len"), arguments.get("kv_seq_len")
    if keys is None:
        keys = queries if queries is not None and lengths[0] == lengths[1] else lengths[1]
    return {
        "seq_len": lengths[0] if queries is None else queries,
        "kv_seq_len": keys,
        "dtype": q.dtype,
        **heads,
    }
