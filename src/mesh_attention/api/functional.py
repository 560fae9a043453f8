"""`mesh_attention(q, k, v, ...)`: one function in the dialect of flash-attn.

Plans, executors and process groups are kept by the session of the process group, the latest kinds
of call only; `release` gives them up. For more than a single call, `ContextParallel` itself is the
better tool: it also shards.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.plan.problem.mask import Mask
from mesh_attention.request.attend import attend
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.request.sizes import with_lengths
from mesh_attention.request.tensor_checks import (
    AttentionCall,
    fault_of_flag,
    fault_of_label,
    fault_of_unsupported,
    read_label,
)
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.collective_call import collective_call
from mesh_attention.runtime.session.modes import outside_compile
from mesh_attention.runtime.session.session import Session, process_group, session_of


def _session_of(*_: Any, group: Any = None, **__: Any) -> tuple[Session, CallOptions]:
    return session_of(process_group(group)), CallOptions()


@outside_compile
@collective_call(_session_of)
def mesh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    seq_len: int | None = None,
    kv_seq_len: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    differentiable_lse: bool = False,
    window_size: tuple[int, int] | None = None,
    mask: Mask | None = None,
    layout: str | None = None,
    return_lse: bool = False,
    label: str | int | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's shards (batch, local_seq, heads, head_dim) over the whole sequence.

    For a single call; in a model use `ContextParallel`, which also cuts batches. Arguments are
    those of `ContextParallel` and its `attention`.

    layout    how the shards lie: by default zigzag under a mask and contiguous without one, as
              `ContextParallel.shard` cuts them; with `relayout=True` contiguous
    seq_len   needed only if the last shard holds padding and the mask has no documents; otherwise
              it is local_seq times the number of ranks
    """
    session = session_of(process_group(group))
    arguments = {
        "seq_len": seq_len,
        "kv_seq_len": kv_seq_len,
        "causal": causal,
        "mask": mask,
        "window_size": window_size,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "differentiable_lse": differentiable_lse,
        "layout": layout,
        **options,
    }
    label = read_label(label)
    fault = (
        fault_of_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
        or fault_of_flag("return_lse", return_lse)
        or fault_of_label(label)
    )
    calls = ObjectCalls(session.user_of_function(), with_lengths(arguments))
    call = AttentionCall(q, k, v, sinks, label=label, return_lse=return_lse is True)
    out, lse = attend(calls, call, fault)
    return (out, lse) if return_lse else out


def release(group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Release what `mesh_attention` keeps for a group: process groups, memory and plans."""
    session_of(process_group(group)).release_function()
