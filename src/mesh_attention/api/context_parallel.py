"""`ContextParallel`: exact attention over a sequence that is split across a group of ranks.

    cp = ContextParallel(group, seq_len=65536, num_heads=32, head_dim=128, causal=True)
    x = cp.shard(tokens, dim=1)                 # this rank's tokens, in the plan's layout
    out = cp.attention(q, k, v)                 # (batch, local_seq, heads, head_dim)
    cp.close()

Every argument is used or refused by name, on all ranks, before anything moves.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.api.arguments import AskedPlan, read_arguments
from mesh_attention.api.auto import AutoChoice, told_of_calls
from mesh_attention.api.batches import Batches
from mesh_attention.api.sizes import has_sizes, usual_sizes, with_lengths
from mesh_attention.api.training import Training
from mesh_attention.errors import MeshAttentionError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.problem.arguments import real
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.runtime.session.autograd import attention
from mesh_attention.runtime.session.collective_call import of_object, told_to_all
from mesh_attention.runtime.session.context import context_of, process_group
from mesh_attention.runtime.session.distributed_tensors import own_heads
from mesh_attention.runtime.session.documents import BatchPlans, Documents
from mesh_attention.runtime.session.modes import as_under_autocast
from mesh_attention.runtime.session.plan_on_rank import PlanSource
from mesh_attention.runtime.session.prepared_call import CallOptions
from mesh_attention.runtime.session.tensor_checks import (
    fault_of_causal,
    fault_of_label,
    fault_of_sinks,
    fault_of_tensors,
    fault_of_unsupported,
)
from mesh_attention.train.compiled_attention import CONTEXT_PARALLELS, traced_attention


class ContextParallel(Batches, Training):
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
    method, tile, layout, chunks, ...   as `mesh-attention plan --help` lists them; None: chosen, at
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
        nvtx: bool = False,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        named = locals()  # every argument by its name
        given = {n: x for n, x in named.items() if n not in ("self", "group_or_mesh", "options")}
        Batches.__init__(self)  # not by `super`, which would be among the locals
        group = process_group(group_or_mesh)
        context = context_of(group)
        self._share = context.join()
        self._name = str(CONTEXT_PARALLELS.add(self))  # in compiled code
        self._options = CallOptions()
        mine = error = choice = None
        try:
            self._given = with_lengths(given | options)
            known = has_sizes(self._given)
            sizes = self._given if known else usual_sizes(self._given)
            asked, self._options = read_arguments(group, sizes)
            if known:
                if isinstance(asked, Plan):
                    self._fixed = context.source(asked)
                else:
                    choice = asked.choose(group)
                    self._fix(asked, choice)
                mine = self._mine
            else:
                self._chosen_by = told_of_calls(self._given)
        except Exception as found:  # whatever it is, the others must not wait for us
            error = found
        try:
            by = None if choice is None else choice.text
            followed = context.agree_on_plan(mine, self._options, error, by)
            if followed is not None and choice is not None and isinstance(asked, AskedPlan):
                try:
                    self._fix(asked, choice.follow(followed))
                except Exception as found:
                    error = found
                context.agree_on_plan(self._mine, self._options, error)
        except BaseException:
            self._share.close()
            raise

    def _fix(self, asked: AskedPlan, choice: AutoChoice | None) -> None:
        """One plan for all calls."""
        self._fixed = self._share.context.source(asked.question(choice))
        self._chosen_by = None if choice is None else choice.line

    @property
    def rank(self) -> int:
        """The logical rank (and so the partition) of this process."""
        known = self._fixed or self._latest
        return (
            dist.get_rank(self._share.context.groups.parent) if known is None else known.first.rank
        )

    # Attention.

    @told_to_all(of_object)
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

        DTensors are taken where q, k and v are sharded evenly over heads on a mesh beside the
        group's, as tensor parallelism has them; the result is one too. Others are refused.

        `dropout_p` and `alibi_slopes` are refused, with what to use instead.

        Ranks compare every call before they use each other's data. Calls of one kind on one object
        look alike: give a `label`, for instance the number of the layer, and ranks that are out of
        step by such a call are told apart too.
        """
        fault = fault_of_unsupported(
            dropout_p=dropout_p, alibi_slopes=alibi_slopes
        ) or fault_of_label(label)
        out, lse = self._attend(q, k, v, fault, sinks=sinks, documents=documents, label=label)
        return (out, lse) if return_lse else out

    @told_to_all(of_object)
    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        fault: MeshAttentionError | None,
        *,
        sinks: Tensor | None = None,
        documents: Documents | None = None,
        label: str | int | None = None,
        softmax_scale: float | None = None,
        is_causal: bool | None = None,
        block: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`fault`: what is wrong already. A scale is of this call; `is_causal`: what the caller
        takes the mask for; `block`: the number of a block that replaces PyTorch's attention."""
        ranks = self._share.context.groups.ranks
        (q, k, v), sinks, spread = own_heads(ranks, 2, sinks, q=q, k=k, v=v)
        fault = fault or spread.fault
        if torch.compiler.is_dynamo_compiling():
            out, lse = traced_attention(
                *(self, q, k, v, fault),
                sinks=sinks,
                documents=documents,
                label=label,
                softmax_scale=softmax_scale,
                is_causal=is_causal,
                block=block,
            )
            return spread.whole(out), spread.whole(lse, 1)
        q, k, v = as_under_autocast(q, k, v)
        source, options, fault = self._asked(
            *(q, k, v, fault),
            sinks=sinks,
            documents=documents,
            softmax_scale=softmax_scale,
            is_causal=is_causal,
        )
        out, lse = attention(self._share, source, options, (q, k, v), fault, label, sinks)
        return spread.whole(out), spread.whole(lse, 1)

    def _asked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        fault: MeshAttentionError | None,
        *,
        sinks: Tensor | None = None,
        documents: Documents | BatchPlans | None = None,
        softmax_scale: float | None = None,
        is_causal: bool | None = None,
    ) -> tuple[PlanSource | None, CallOptions, MeshAttentionError | None]:
        """Plans for a call, its options, and what is wrong with it."""
        source, options = None, self._options
        try:
            source, options = self._source_for(q, k, v, documents)
            plan = source.first.plan
            fault = (
                fault
                or fault_of_tensors(plan, q, k, v)
                or fault_of_sinks(plan, q, sinks)
                or fault_of_causal(plan, is_causal)
            )
            if softmax_scale is not None:
                options = replace(options, softmax_scale=real("scale", softmax_scale))
        except MeshAttentionError as error:  # the others must not wait for us
            fault = fault or error
        return source, options, fault

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
