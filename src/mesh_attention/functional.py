"""`mesh_attention(q, k, v, ...)`: one function in the dialect of flash-attn.

A `ContextParallel` is made for each kind of call and kept with its process group; `release` closes
them. For more than a single call, `ContextParallel` itself is the better tool: it also shards.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.context_arguments import process_group
from mesh_attention.context_parallel import ContextParallel
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.mask import Mask
from mesh_attention.runtime.transport.make_group import is_registered

__all__ = ["mesh_attention", "release"]

# A cache, not a setting: it never changes a result. Entries of destroyed groups are dropped.
_KEPT: dict[dist.ProcessGroup, dict[Any, ContextParallel]] = {}


def mesh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    seq_len: int | None = None,
    kv_seq_len: int | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] | None = None,
    mask: Mask | None = None,
    layout: str | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's shards (batch, local_seq, heads, head_dim) over the whole sequence.

    The shards lie in `layout`: by default zigzag for a causal mask and contiguous without one, as
    `ContextParallel.shard` cuts them. `seq_len` is needed only if the last shard holds padding;
    otherwise it is local_seq times the number of ranks.
    """
    members = process_group(group)
    size = dist.get_world_size(members)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise MeshAttentionError(f"{name} is {type(x).__name__}; it must be a torch.Tensor")
        if x.ndim != 4:
            raise MeshAttentionError(
                f"{name} has {x.ndim} dimensions; expected (batch, local_seq, heads, head_dim)"
            )
    same_length = seq_len if k.shape[1] == q.shape[1] else None
    fixed: dict[str, Any] = {
        "seq_len": _given(seq_len, q.shape[1] * size),
        "kv_seq_len": _given(kv_seq_len, _given(same_length, k.shape[1] * size)),
        "num_heads": q.shape[2],
        "num_kv_heads": k.shape[2],
        "head_dim": q.shape[3],
        "v_head_dim": v.shape[3],
        "causal": causal,
        "mask": mask,
        "window_size": window_size,
        "softmax_scale": softmax_scale,
        "layout": layout,
        "dtype": q.dtype,
        **options,
    }
    kept = _KEPT.setdefault(members, {})
    key = tuple(sorted((name, repr(value)) for name, value in fixed.items()))
    if key not in kept:
        _drop_destroyed()
        kept[key] = ContextParallel(members, **fixed)
    return kept[key].attention(q, k, v, return_lse=return_lse)


def _given(length: int | None, otherwise: int) -> int:
    """A length of 0 was given too, and is refused where the plan is made."""
    return otherwise if length is None else length


def _drop_destroyed() -> None:
    for group in [group for group in _KEPT if not is_registered(group)]:
        for kept in _KEPT.pop(group).values():
            kept.close()


def release(group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Close everything that `mesh_attention` keeps for a group."""
    for kept in _KEPT.pop(process_group(group), {}).values():
        kept.close()
