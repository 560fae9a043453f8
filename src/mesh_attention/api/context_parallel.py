"""`ContextParallel`: exact attention over a sequence that is split across a group of ranks.

    cp = ContextParallel(group, seq_len=65536, num_heads=32, head_dim=128, causal=True)
    x = cp.shard(tokens, dim=1)                 # this rank's tokens, in the plan's layout
    out = cp.attention(q, k, v)                 # (batch, local_seq, heads, head_dim)
    cp.close()

Every argument is used or refused by name, on all ranks, before anything moves.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Never, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.api.batches import Batches
from mesh_attention.api.report import Reports
from mesh_attention.api.training import Training
from mesh_attention.errors import MeshAttentionError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.request.arguments import fault_of_keywords
from mesh_attention.request.attend import attend
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.request.tensor_checks import (
    fault_of_flag,
    fault_of_label,
    fault_of_unsupported,
    read_label,
)
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.documents import Documents


class ContextParallel(Batches, Training, Reports):
    """
    group_or_mesh   a ProcessGroup or a 1-D DeviceMesh; None is the default group
    plan            any plan for as many ranks: made, searched or parsed from text. It says the
                    sizes, the mask and the method, which are then not given; without it they are:
    seq_len         tokens of the whole sequence (any number); kv_seq_len if the keys differ. What
                    is left out of seq_len, num_heads and head_dim comes with the tensors: then
                    plans are made when calls come, and without seq_len or `documents` every slot of
                    a shard is a token
    causal          aligned at the end when the keys differ in number, as in flash-attn
    mask            a `Mask` in place of causal: windows, packed documents, prefix-LM
    window_size     (left, right) as in flash-attn; -1 is no limit
    softcap         scores become softcap * tanh(scores / softcap), where a kernel has it
    differentiable_lse   a loss may depend on lse; only kernels whose backward pass takes delta
                    are chosen then
    relayout        tensors come and go in contiguous shards, rank r with the r-th, and are
                    exchanged for the layout that the method works in, and back; otherwise they lie
                    in that layout
    method, tile, layout, chunks, ...   as `mesh-attention plan --help-all` lists; None: chosen, at
                    once and by closed forms ("auto"), or as it was searched before
    cluster         where the method is chosen: the name or the file of the cluster to choose for;
                    left out, it is found from the machine (`cp.choice` says so)
    tuned           a file of `mesh-attention tune`, the same on all ranks: the plan that was
                    measured for these sizes and options, or an error
    dtype           what `plan` is made for, bfloat16 unless given; other dtypes get a plan of their
                    own when they turn up
    kernel          force an attention kernel by name; None: chosen by capability
    transport       "auto": shared (symmetric) memory among the ranks of a node where it works, and
                    torch.distributed elsewhere; "distributed"; "symmetric": an error if impossible
    cuda_graph      capture each kind of call as a CUDA graph and replay it; NCCL only, and
                    never through shared memory
    deterministic   the same bits in every run, in both passes: only kernels that promise them are
                    chosen, and one forced by `kernel` that does not is an error; otherwise as
                    `torch.use_deterministic_algorithms` asks
    same_bits       n ranks give the bits of one rank, in both passes: by Ulysses on contiguous
                    shards, each head whole on one rank, with kernels as for `deterministic`. Heads
                    and KV heads must divide by the ranks; name `kernel` where machines differ
    nvtx            name every operation for profilers
    timeout         how long ranks wait for each other; None: that of the group

    Objects on one group share process groups, memory and the latest kinds of call.
    """

    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        plan: Plan | str | Path | None = None,
        seq_len: int | None = None,
        num_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool | None = None,
        num_kv_heads: int | None = None,
        v_head_dim: int | None = None,
        kv_seq_len: int | None = None,
        mask: Mask | None = None,
        window_size: tuple[int, int] | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        differentiable_lse: bool = False,
        method: str | None = None,
        tile: tuple[int, int] | str | None = None,
        layout: str | None = None,
        relayout: bool | None = None,
        chunks: tuple[int, int] | str | None = None,
        cluster: Cluster | str | Path | None = None,
        tuned: str | Path | None = None,
        dtype: torch.dtype | None = None,
        kernel: str | None = None,
        transport: Literal["auto", "distributed", "symmetric"] = "auto",
        cuda_graph: bool = False,
        deterministic: bool = False,
        same_bits: bool = False,
        nvtx: bool = False,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        arguments = {
            "plan": plan,
            "seq_len": seq_len,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "causal": causal,
            "num_kv_heads": num_kv_heads,
            "v_head_dim": v_head_dim,
            "kv_seq_len": kv_seq_len,
            "mask": mask,
            "window_size": window_size,
            "softmax_scale": softmax_scale,
            "softcap": softcap,
            "differentiable_lse": differentiable_lse,
            "method": method,
            "tile": tile,
            "layout": layout,
            "relayout": relayout,
            "chunks": chunks,
            "cluster": cluster,
            "tuned": tuned,
            "dtype": dtype,
            "kernel": kernel,
            "transport": transport,
            "cuda_graph": cuda_graph,
            "deterministic": deterministic,
            "same_bits": same_bits,
            "nvtx": nvtx,
            "timeout": timeout,
        }
        self._calls = ObjectCalls(group_or_mesh, arguments | options)

    @property
    def rank(self) -> int:
        """The logical rank (and so the partition) of this process."""
        calls = self._calls
        source = calls.fixed or calls.latest
        return dist.get_rank(calls.session.groups.parent) if source is None else source.first.rank

    # Attention.

    @collective_call(of_object)
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        documents: Documents | None = None,
        label: str | int | None = None,
        dropout_p: float = 0.0,
        alibi_slopes: Tensor | None = None,
        **elsewhere: Never,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention of this rank's queries over all keys that the mask shows them.

        Shapes (batch, local_seq, heads, head_dim), sharded by `shard`. With `return_lse` also the
        log-sum-exp, (batch, heads, local_seq), through which backward is refused without
        `differentiable_lse`. Padding rows give 0 and -inf. `documents`: what `documents()` made of
        this batch, if its documents or its length are not those of every batch.

        `sinks` (num_heads,), the same on all ranks, are learnable logits that take weight and have
        no value, as in gpt-oss; softcap does not touch them. The log-sum-exp holds them too, and is
        theirs in rows that see nothing. Their gradient is that of this rank's rows: as for any
        parameter that all ranks hold, the sum over the group is the whole one, which DDP or FSDP
        over the group makes (they divide by its size, as they do for all others).

        DTensors are taken where q, k and v are sharded evenly over heads on a mesh beside the
        group's, as tensor parallelism has them; the result is one too. Others are refused.

        `dropout_p` and `alibi_slopes` are refused, with what to use instead.

        Ranks compare every call, and the batch it is made on, before they use each other's data.
        Calls of one kind on one batch look alike: give a `label`, for instance the number of the
        layer, and ranks that are out of step by such a call are told apart too.
        """
        fault = None
        if return_lse is not True and return_lse is not False:
            fault = fault_of_flag("return_lse", return_lse)
        if type(dropout_p) is not float or dropout_p or alibi_slopes is not None:
            fault = fault or fault_of_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
        if elsewhere:
            fault = fault_of_keywords(elsewhere)
        if label is not None:
            label = read_label(label)
            fault = fault or fault_of_label(label)
        out, lse = attend(
            self._calls,
            q,
            k,
            v,
            fault,
            sinks=sinks,
            documents=documents,
            label=label,
            return_lse=return_lse is True,
        )
        return (out, lse) if return_lse is True else out

    def check(self) -> None:
        """Raises if a call on this process group went wrong. It never waits for a device.

        On a GPU calls return before they are made. If ranks turn out to be at different calls, or
        one of them has ended, the results are NaN, and this, or the next call, says why.
        """
        self._calls.user.refuse_if_closed()

    # End.

    def close(self) -> None:
        """Give up this object's share; the last on a process group releases what they shared:
        process groups and workspace. Safe to call twice.

        Afterwards `attention`, its backward pass and `unshard`, which communicate, are refused;
        what only reads the plan (`shard`, `positions`, `padding`, `volume`, ...) still answers.
        """
        self._calls.user.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MeshAttentionError(
            "a ContextParallel holds connections to other ranks and cannot be copied or pickled: "
            "use the same object, or make another with ContextParallel(...) on all ranks"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
