"""`ContextParallel`: exact attention over a sequence that is split across a group of ranks.

    cp = ContextParallel(group, seq_len=65536, num_heads=32, head_dim=128, causal=True)
    x = cp.shard(tokens, dim=1)                 # this rank's tokens, in the plan's layout
    out = cp.attention(q, k, v)                 # (batch, local_seq, heads, head_dim)
    cp.close()

Every argument is used or refused by name, on all ranks, before anything moves. Here are its
arguments, `attention` and `close`; its bases `Batches`, `Training` and `Reports` have the other
methods. `ContextParallelAttention` is `attention` as an `nn.Module`.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Never, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
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
    AttentionCall,
    fault_of_flag,
    fault_of_label,
    fault_of_unsupported,
    read_label,
)
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.documents import Documents


class ContextParallel(Batches, Training, Reports):
    """Exact attention over a sequence that is split across a group of ranks.

        cp = ContextParallel(mesh["cp"], causal=True)
        batch = cp.shard_batch(input_ids=ids, labels=labels)  # this rank's tokens
        out = cp.attention(q, k, v, documents=batch.documents)  # in every layer

    All ranks of the group make the object with the same arguments. All are optional but the mask:
    `causal`, `mask` or a `plan`.

    group_or_mesh   a ProcessGroup or a 1-D DeviceMesh; None: the default group
    causal          True or False. If keys and queries differ in number, the last query sees the
                    last key, as in flash-attn
    mask            a `Mask` instead of causal: windows, packed documents, prefix-LM, slices
    window_size     (left, right) as in flash-attn; -1 is no limit
    seq_len         tokens of the whole sequence, any number; `kv_seq_len` if the keys differ. Left
                    out, sizes come with the tensors and batches, and plans are made when calls come
    num_heads       query heads; `num_kv_heads` if fewer. Left out: as the tensors have them
    head_dim        size of Q and K heads; `v_head_dim` if V heads differ. Left out: likewise
    softmax_scale   None: 1 / sqrt(head_dim)
    softcap         scores become softcap * tanh(scores / softcap), on kernels that have it
    differentiable_lse   needed if a loss depends on lse: only kernels that can do it are chosen
    relayout        True: shards are contiguous, and rank r holds shard r. Every call then exchanges
                    them for the layout of the method, and results back
    method, tile, layout, chunks, ...   options of plans: `mesh-attention plan --help-all` lists
                    them. Left out, they are chosen; `cp.choice` says how and why
    cluster         the name or file of the cluster to choose for; left out: found from the machine
    plan            run this plan, made by `make_plan` or in a file of `advise --output`. It says
                    sizes, mask and method: leave these out
    tuned           a file of `mesh-attention tune`, the same on all ranks: run the plan that was
                    measured for these sizes and options
    dtype           the dtype that `cp.plan` is made for, by default bfloat16; calls in other dtypes
                    get plans of their own
    kernel          the name of the attention kernel to use; None: the fastest that fits
    transport       "auto": shared (symmetric) memory inside a node where it works, else
                    torch.distributed; "distributed"; "symmetric": an error where it does not work
    cuda_graph      capture each kind of call as a CUDA graph and replay it; over NCCL only
    deterministic   the same bits in every run, in both passes: only kernels that promise it are
                    chosen. `torch.use_deterministic_algorithms` has the same effect
    same_bits       n ranks give the bits of one rank: Ulysses on contiguous shards with
                    deterministic kernels. Heads and KV heads must divide by the ranks; name
                    `kernel` where machines differ
    nvtx            name every operation for profilers
    timeout         how long ranks wait for each other; None: as long as the group does

    Objects on one group share process groups, memory and prepared calls.
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
        self._calls = ObjectCalls.of_object(group_or_mesh, arguments | options)

    @property
    def rank(self) -> int:
        """The logical rank (and so the partition) of this process."""
        calls = self._calls
        source = calls.fixed or calls.latest
        return dist.get_rank(calls.session.groups.parent) if source is None else source.first.rank

    # Attention.

    def __call__(self, *_: Any, **__: Any) -> Never:
        raise MeshAttentionError(
            "a ContextParallel is not called itself: call cp.attention(q, k, v), or make "
            "ContextParallelAttention(cp), which is a module"
        )

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
        """Attention of this rank's queries over all keys that the mask shows them, on any rank.

        q, k and v are (batch, local_seq, heads, head_dim), cut by `shard` or `shard_batch`; the
        result has the shape of q. Padding rows give 0.

        documents     the result of `documents()` or `shard_batch` for this batch, if batches differ
                      in their documents or length
        return_lse    also return the log-sum-exp, (batch, heads, local_seq), -inf in padding rows.
                      A loss may depend on it only with `differentiable_lse`
        sinks         (num_heads,), the same on all ranks: learnable logits that take weight and
                      have no value, as in gpt-oss. softcap does not touch them; lse includes them.
                      Their gradient is that of this rank's rows; DDP, FSDP or your all-reduce over
                      the group adds up all ranks' gradients, as for any parameter
        label         for instance the number of the layer. Ranks compare every call before they
                      use each other's data; labels distinguish calls that look alike
        dropout_p, alibi_slopes   refused, with what to use instead

        DTensors are taken if q, k and v are sharded evenly over heads on a mesh beside the group's,
        as tensor parallelism has them; the result is one too.
        """
        fault = None  # not raised here: `attend` tells the other ranks, and all of them raise it
        if return_lse is not True and return_lse is not False:
            fault = fault_of_flag("return_lse", return_lse)
        if type(dropout_p) is not float or dropout_p or alibi_slopes is not None:
            fault = fault or fault_of_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
        if elsewhere:
            fault = fault_of_keywords(elsewhere)
        if label is not None:
            label = read_label(label)
            fault = fault or fault_of_label(label)
        call = AttentionCall(q, k, v, sinks, documents, label, return_lse=return_lse is True)
        out, lse = attend(self._calls, call, fault)
        return (out, lse) if return_lse is True else out

    def check(self) -> None:
        """Raises if a call on this process group went wrong, here or on a rank that has reported it
        to the job's store. It never waits for a device.

        On a GPU calls return before their work is done. If ranks turn out to be at different calls,
        or one of them has ended, results are NaN; `check`, or the next call, says why.
        """
        self._calls.user.refuse_if_closed()
        self._calls.session.guard.hear()

    # End.

    def close(self) -> None:
        """Close this object. Closing the last object on a process group releases its memory and
        connections. Safe to call twice.

        Afterwards methods that communicate (`attention`, its backward pass, `unshard`) raise;
        methods that only read the plan (`shard`, `positions`, `padding`, `volume`, ...) still work.
        """
        self._calls.user.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MeshAttentionError(
            "a ContextParallel holds connections to other ranks and cannot be copied or pickled: "
            "use the same object, or make another with ContextParallel(...) on all ranks"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies of a model that holds an object use the same object."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ContextParallelAttention(nn.Module):
    """`cp.attention` as a module, without parameters and without state.

    Copies of it, as `copy.deepcopy` of a layer makes them, use the same `cp`. `label` is given to
    its calls: the number of the layer, for instance. Left out, modules of a `cp` are told apart by
    the order in which they were made, so make them alike on all ranks; not in compiled code, which
    would be compiled again for each."""

    def __init__(self, cp: ContextParallel, label: str | int | None = None) -> None:
        super().__init__()
        self.cp, self.label = cp, label
        self._made_as = f"module {next(cp._calls.modules)}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """(batch, local_seq, heads, head_dim), as `ContextParallel.attention` has them."""
        label = self.label
        if label is None and not is_dynamo_compiling():
            label = self._made_as
        out = self.cp.attention(q, k, v, documents=documents, label=label)
        assert isinstance(out, Tensor)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelAttention:
        copy = memo[id(self)] = ContextParallelAttention(self.cp, self.label)
        return copy.train(self.training)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MeshAttentionError(
            "ContextParallelAttention holds a process group and cannot be pickled; save the "
            "state_dict of the model, and make the module again where it is loaded"
        )
