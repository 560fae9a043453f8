"""`ContextParallel`: exact attention over a sequence that is split across a group of ranks.

    cp = ContextParallel(group, seq_len=65536, num_heads=32, head_dim=128, causal=True)
    x = cp.shard(tokens, dim=1)                 # this rank's tokens, in the plan's layout
    out = cp.attention(q, k, v)                 # (batch, local_seq, heads, head_dim)
    cp.close()

Every argument is used or refused by name, on all ranks, before anything moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.context_arguments import layer_of_batches, process_group, read_arguments
from mesh_attention.context_report import Reports
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.pack import Layer, Pack, Packer
from mesh_attention.plan.plan import Plan
from mesh_attention.runtime.ahead import Batch, prefetch
from mesh_attention.runtime.autograd import attention
from mesh_attention.runtime.context import context_of
from mesh_attention.runtime.documents import Documents
from mesh_attention.runtime.plan_on_rank import PlanOnRank, PlanSource
from mesh_attention.runtime.prepared_call import CallOptions
from mesh_attention.runtime.shards import Shards, Side
from mesh_attention.tensor_faults import (
    fault_of_label,
    fault_of_sinks,
    fault_of_tensors,
    fault_of_unsupported,
)


class ContextParallel(Reports):
    """
    group_or_mesh   a ProcessGroup or a 1-D DeviceMesh; None is the default group
    plan            any plan for as many ranks: made, searched or parsed from text. It says the
                    sizes, the mask and the method, which are then not given; without it they are:
    seq_len         tokens of the whole sequence (any number); kv_seq_len if the keys differ
    causal          aligned at the end when the keys differ in number, as in flash-attn
    mask            a `Mask` in place of causal: windows, packed documents, prefix-LM
    window_size     (left, right) as in flash-attn; -1 is no limit
    softcap         scores become softcap * tanh(scores / softcap), where a kernel has it
    differentiable_lse   a loss may depend on lse; only kernels whose backward pass takes delta
                    are chosen then
    method, tile, layout, chunks, ...   as `mesh-attention plan --help` lists them; None: chosen
    dtype           what `plan` is made for, bfloat16 unless given; other dtypes get a plan of their
                    own when they turn up
    kernel          force an attention kernel by name; None: chosen by capability
    transport       "auto": shared (symmetric) memory among the ranks of a node where it works, and
                    torch.distributed elsewhere; "distributed"; "symmetric": an error if impossible
    cuda_graph      capture each kind of call as a CUDA graph and replay it; NCCL only, and
                    never through shared memory
    nvtx            name every operation for profilers
    timeout         how long ranks wait for each other; None: that of the group

    Objects on one group share process groups, memory and the latest kinds of call.
    """

    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        plan: Plan | None = None,
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
        chunks: tuple[int, int] | str | None = None,
        dtype: torch.dtype | None = None,
        kernel: str | None = None,
        transport: Literal["auto", "distributed", "symmetric"] = "auto",
        cuda_graph: bool = False,
        nvtx: bool = False,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        named = locals()  # every argument by its name
        given = {n: x for n, x in named.items() if n not in ("self", "group_or_mesh", "options")}
        group = process_group(group_or_mesh)
        context = context_of(group)
        self._share = context.join()
        self._options = CallOptions()
        mine = error = None
        try:
            asked, self._options = read_arguments(group, given | options)
            self._source: PlanSource = context.source(asked)
            self._layer_of_batches = layer_of_batches(asked, given | options, self._options)
            mine = self._mine
        except Exception as found:  # whatever it is, the others must not wait for us
            error = found
        try:
            context.agree_on_plan(mine, self._options, error)
        except BaseException:
            self._share.close()
            raise

    # The plan.

    @property
    def _mine(self) -> PlanOnRank:
        return self._source.first

    @property
    def rank(self) -> int:
        """The logical rank (and so the partition) of this process."""
        return self._mine.rank

    # Attention.

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

        `dropout_p` and `alibi_slopes` are refused, with what to use instead.

        Ranks compare every call before they use each other's data. Calls of one kind on one object
        look alike: give a `label`, for instance the number of the layer, and ranks that are out of
        step by such a call are told apart too.
        """
        source = None
        options = self._options if documents is None else self._options.of_batch()
        fault = fault_of_unsupported(
            dropout_p=dropout_p, alibi_slopes=alibi_slopes
        ) or fault_of_label(label)
        try:
            source = self._source_of(documents)
            plan = source.first.plan
            fault = fault or fault_of_tensors(plan, q, k, v) or fault_of_sinks(plan, q, sinks)
        except MeshAttentionError as error:  # the others must not wait for us
            fault = fault or error
        out, lse = attention(self._share, source, options, (q, k, v), fault, label, sinks)
        return (out, lse) if return_lse else out

    # Documents that change with every batch.

    def documents(
        self,
        cu_seqlens: Any,
        *,
        kv_cu_seqlens: Any = None,
        also: Sequence[ContextParallel] = (),
    ) -> Documents:
        """What a batch brings: the boundaries of its documents, and with them its length.

        Made once a batch, and handed to every call on its tensors. `cu_seqlens` are cumulative
        starts (0, ..., tokens) as for `flash_attn_varlen_func`, on the CPU: a list, a tensor, or a
        list of lists, one for each row of the batch, which then is one pack of all rows; or the
        `Pack` that a `packer` made elsewhere. `also`: other objects on this group that are called
        with the same tensors, for instance with a window: the layout is chosen for all of them.

        Nothing is sent: a rank with other documents is named by the first call that uses them.
        """
        self._share.refuse_if_closed()
        pack = cu_seqlens
        if not isinstance(pack, Pack):
            pack = self.packer(also=also)(cu_seqlens, kv_cu_seqlens)
        return Documents(self._share.context, pack)

    def prefetch(
        self,
        loader: Iterable[Batch],
        cu_seqlens: Callable[[Batch], Any],
        *,
        also: Sequence[ContextParallel] = (),
    ) -> Iterator[tuple[Batch, Documents]]:
        """Every batch of a loader with its documents, made ready in a thread one batch ahead, for
        the calls that the batch before was used for. `cu_seqlens` takes them from a batch.

            for batch, docs in cp.prefetch(loader, lambda batch: batch["cu_seqlens"]):
        """
        return prefetch(loader, lambda batch: self.documents(cu_seqlens(batch), also=also))

    def packer(self, *, also: Sequence[ContextParallel] = ()) -> Packer:
        """`packer(cu_seqlens)` chooses for a batch what `documents` would. It needs neither torch
        nor other ranks, and can be pickled: a collate function in another process may call it."""
        layers = tuple(one._layer() for one in (self, *also))
        return Packer(layers, len(self._share.context.groups.ranks))

    def _layer(self) -> Layer:
        if isinstance(self._layer_of_batches, MeshAttentionError):
            raise self._layer_of_batches
        return self._layer_of_batches

    def _source_of(self, documents: Documents | None) -> PlanSource:
        if documents is None:
            return self._source
        return _handle(documents).source(self._share.context, self._layer())

    # Sharding.

    def shard(
        self, x: Tensor, dim: int, *, side: Side = "q", documents: Documents | None = None
    ) -> Tensor:
        """This rank's slots of a whole tensor along `dim`; padding slots are zero."""
        return self._shards(documents).shard(x, dim, side)

    def unshard(
        self, x: Tensor, dim: int, *, side: Side = "q", documents: Documents | None = None
    ) -> Tensor:
        """The whole tensor on every rank, in token order, without padding.

        Differentiable for a loss that every rank computes alike from the whole tensor: each rank
        passes on the gradient of its own slots.
        """
        return self._shards(documents).unshard(self._share, self._options, x, dim, side)

    def positions(
        self,
        *,
        side: Side = "q",
        device: torch.device | str | None = None,
        documents: Documents | None = None,
        restart: bool = False,
    ) -> Tensor:
        """Position in the sequence of each local slot (for RoPE); padding is `>= seq_len`.

        With `restart` counted from the start of each document, and padding is at 0.
        """
        return self._shards(documents).positions(side, device, restart=restart)

    def padding(
        self,
        *,
        side: Side = "q",
        device: torch.device | str | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """True where a local slot holds no token."""
        return self._shards(documents).padding(side, device)

    def _shards(self, documents: Documents | None) -> Shards:
        if documents is not None:
            return _handle(documents).shards
        plan, mask = self.plan, self.plan.problem.mask
        starts = mask.documents or (0, plan.problem.q_tokens)
        kv_starts = mask.kv_documents or mask.documents or (0, plan.problem.keys)
        mine = self._mine
        return Shards(
            *(plan.q_layout, plan.kv_layout, mine.rank, plan.devices, mine.words),
            starts=(starts, kv_starts),
        )

    def check(self) -> None:
        """Raises if a call on this process group went wrong. It never waits for a device.

        On a GPU calls return before they are made. If ranks turn out to be at different calls, or
        one of them has ended, the results are NaN, and this, or the next call, says why.
        """
        self._share.refuse_if_closed()

    # End.

    def close(self) -> None:
        """Give up this object's share; the last on a process group releases what they shared:
        process groups and workspace. Safe to call twice.

        Afterwards `attention`, its backward pass and `unshard`, which communicate, are refused;
        what only reads the plan (`shard`, `positions`, `padding`, `volume`, ...) still answers.
        """
        self._share.close()

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _handle(documents: Any) -> Documents:
    if not isinstance(documents, Documents):
        raise MeshAttentionError(
            f"documents={documents!r}: give what documents(cu_seqlens) returned for this batch"
        )
    return documents
