"""`ContextParallel`: exact attention over a sequence that is split across a group of ranks.

    cp = ContextParallel(group, seq_len=65536, num_heads=32, head_dim=128, causal=True)
    x = cp.shard(tokens, dim=1)                 # this rank's tokens, in the plan's layout
    out = cp.attention(q, k, v)                 # (batch, local_seq, heads, head_dim)
    cp.close()

Every argument is used or refused by name, on all ranks, before anything moves.
"""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.context_arguments import (
    checked_device,
    checked_dim,
    fault_of_label,
    fault_of_sinks,
    fault_of_tensors,
    fault_of_unsupported,
    process_group,
    read_arguments,
)
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.count import PassCount, count
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.verify import verify
from mesh_attention.runtime.autograd import attention
from mesh_attention.runtime.context import context_of
from mesh_attention.runtime.plan_on_rank import PlanOnRank, PlanSource
from mesh_attention.runtime.prepared_call import CallOptions, PreparedCall
from mesh_attention.runtime.sharding import take_shard, unshard
from mesh_attention.runtime.transport.interface import Counters

Side = Literal["q", "kv"]


class ContextParallel:
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
    def plan(self) -> Plan:
        """The plan that was given, or that for the dtype given at the start."""
        return self._mine.plan

    @property
    def rank(self) -> int:
        """The logical rank (and so the partition) of this process."""
        return self._mine.rank

    def verify(self) -> None:
        """Prove the plan; raises if anything is wrong with it."""
        findings = verify(self.plan)
        if findings:
            raise MeshAttentionError(f"the plan is wrong: {findings[0]}")

    def volume(self) -> dict[str, PassCount]:
        """Bytes that the plan moves and holds, counted from its programs."""
        return {direction.value: counted for direction, counted in count(self.plan).items()}

    @property
    def traffic(self) -> dict[str, Counters]:
        """Bytes this rank has really handed to its transport so far, by direction."""
        return {direction.value: c for direction, c in self._share.counters.items()}

    def kernels(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """For each kind of call made lately: which kernels were asked, and why one was chosen."""
        found = {}
        for call in self._calls():
            for direction, executor in call.executors.items():
                for kind, choice in executor.choices.items():
                    found[f"{direction} {kind}"] = choice.reasons
                found[f"{direction} calls"] = (("predicted", str(executor.faster)),)
                found[f"{direction} rows"] = executor.row_choice.reasons
        return found

    def transports(self) -> dict[str, tuple[str, str]]:
        """For each group of ranks in the calls made lately: its transport, and why that one."""
        found: dict[str, tuple[str, str]] = {}
        for call in self._calls():
            found |= call.transport.choices(call.directions)
        return found

    def _calls(self) -> list[PreparedCall]:
        return self._share.context.calls(self._source.plans(), self._options)

    # Attention.

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        label: str | int | None = None,
        dropout_p: float = 0.0,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention of this rank's queries over all keys that the mask shows them.

        Shapes (batch, local_seq, heads, head_dim), sharded by `shard`. With `return_lse` also the
        log-sum-exp, (batch, heads, local_seq), through which backward is refused without
        `differentiable_lse`. Padding rows give 0 and -inf.

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
        fault = (
            fault_of_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
            or fault_of_tensors(self.plan, q, k, v)
            or fault_of_sinks(self.plan, q, sinks)
            or fault_of_label(label)
        )
        tensors, options = (q, k, v), self._options
        out, lse = attention(self._share, self._source, options, tensors, fault, label, sinks)
        return (out, lse) if return_lse else out

    # Sharding.

    def shard(self, x: Tensor, dim: int, *, side: Side = "q") -> Tensor:
        """This rank's slots of a whole tensor along `dim`; padding slots are zero."""
        layout = self._layout(side)
        dim = checked_dim(x, dim)
        length = x.shape[dim]
        if length != layout.num_tokens:
            again = length == layout.slots
            raise MeshAttentionError(
                f"shard wants all {layout.num_tokens} tokens along dim {dim}, but it has {length}"
                + ("; it looks sharded already" if again else "")
            )
        return take_shard(x, layout, self.rank, dim)

    def unshard(self, x: Tensor, dim: int, *, side: Side = "q") -> Tensor:
        """The whole tensor on every rank, in token order, without padding.

        Differentiable for a loss that every rank computes alike from the whole tensor: each rank
        passes on the gradient of its own slots.
        """
        self._share.refuse_if_closed()
        try:
            layout = self._layout(side)
            dim = checked_dim(x, dim)
            if x.shape[dim] != layout.slots:
                raise MeshAttentionError(
                    f"unshard wants {layout.slots} slots along dim {dim}, but it has {x.shape[dim]}"
                )
            self._share.context.groups.check_device(x.device)
        except MeshAttentionError as error:  # the others must not wait for us
            self._share.context.agree_on({}, self._options, error)
            raise
        return unshard(self._share, self._mine, self._options, x, layout, dim)

    def check(self) -> None:
        """Raises if a call on this process group went wrong. It never waits for a device.

        On a GPU calls return before they are made. If ranks turn out to be at different calls, or
        one of them has ended, the results are NaN, and this, or the next call, says why.
        """
        self._share.refuse_if_closed()

    def positions(self, *, side: Side = "q", device: torch.device | str | None = None) -> Tensor:
        """Position in the sequence of each local slot (for RoPE); padding is `>= seq_len`."""
        positions = torch.from_numpy(self._layout(side).positions(self.rank))
        return positions if device is None else positions.to(checked_device(device))

    def padding(self, *, side: Side = "q", device: torch.device | str | None = None) -> Tensor:
        """True where a local slot holds no token."""
        return self.positions(side=side, device=device) >= self._layout(side).num_tokens

    def _layout(self, side: Side) -> Layout:
        if side not in ("q", "kv"):
            raise MeshAttentionError(f"side={side!r}: must be 'q' or 'kv'")
        return self.plan.q_layout if side == "q" else self.plan.kv_layout

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
