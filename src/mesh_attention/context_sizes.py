"""Sizes that come with the tensors of calls, where an object was made without them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.context import Context
from mesh_attention.tensor_faults import fault_of_kind

USUAL_TOKENS = 1 << 20  # of batches whose length is not known yet: long, as others need no ranks
_HEADS = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")
SIZES = ("seq_len", "kv_seq_len", "dtype", *_HEADS)


def has_sizes(given: Mapping[str, Any]) -> bool:
    """Whether all that must be known of tensors is said; otherwise they say it themselves."""
    if given.get("plan") is not None:
        return True
    return all(given.get(name) is not None for name in ("seq_len", "num_heads", "head_dim"))


def usual_sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """With sizes of many models where none are said: enough to check all other arguments, and to
    choose a layout before the first call."""
    usual, kv_heads = 32, given.get("num_kv_heads")
    if isinstance(kv_heads, Integral) and int(kv_heads) > 0:
        usual = int(kv_heads) * max(1, 32 // int(kv_heads))
    heads = given.get("num_heads") or usual
    kv_heads = kv_heads or (8 if given.get("num_heads") is None else heads)
    found = {"seq_len": USUAL_TOKENS, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128}
    return {**given, **{n: x for n, x in found.items() if given.get(n) is None}}


def sizes_of(
    context: Context, given: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Any]:
    """What the shapes of the shards say: without a length every slot is a token. A length of 0 was
    given too, and is refused later."""
    fault = fault_of_kind(q=q, k=k, v=v)
    if fault is not None:
        raise fault
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise MeshAttentionError(
                f"{name} has {x.ndim} dimensions; expected (batch, local_seq, heads, head_dim)"
            )
    heads = dict(zip(_HEADS, (q.shape[2], k.shape[2], q.shape[3], v.shape[3]), strict=True))
    for name, found in heads.items():
        wanted = given.get(name)
        if wanted is not None and wanted != found:
            raise MeshAttentionError(f"{name}={wanted} was given, but the tensors have {found}")
    size = len(context.groups.ranks)
    lengths = q.shape[1] * size, k.shape[1] * size
    queries, keys = given.get("seq_len"), given.get("kv_seq_len")
    if keys is None:
        keys = queries if queries is not None and lengths[0] == lengths[1] else lengths[1]
    return {
        "seq_len": lengths[0] if queries is None else queries,
        "kv_seq_len": keys,
        "dtype": q.dtype,
        **heads,
    }
