"""`ContextParallel`: exact attention over a sequence that is split across a group of ranks.

    cp = ContextParallel(group, seq_len=65536, num_heads=32, head_dim=128, causal=True)
    x = cp.shard(tokens, dim=1)                 # this rank's tokens, in the plan's layout
    out = cp.attention(q, k, v)                 # (batch, local_seq, heads, head_dim)
    cp.close()

Every argument is used or refused by name, on all ranks, before anything moves.
"""

from __future__ import annotations

from datetime import timedelta
from inspect import signature
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.context_arguments import (
    argument_fault,
    checked_device,
    checked_dim,
    graph_fault,
    name_fault,
    process_group,
)
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.arguments import number
from mesh_attention.plan.count import PassCount, count
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.table import DEFAULT_METHOD
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import ask, attention_mask
from mesh_attention.plan.verify import verify
from mesh_attention.runtime.autograd import attend
from mesh_attention.runtime.engine import Engine
from mesh_attention.runtime.executor import CallShape
from mesh_attention.runtime.gather_shards import unshard
from mesh_attention.runtime.sharding import take_shard
from mesh_attention.runtime.transport.interface import Counters
from mesh_attention.runtime.transports import TransportName

__all__ = ["ContextParallel"]

Side = Literal["q", "kv"]


class ContextParallel:
    """
    group_or_mesh   a ProcessGroup or a 1-D DeviceMesh; None is the default group
    seq_len         tokens of the whole sequence (any number); kv_seq_len if the keys differ
    causal          aligned at the end when the keys differ in number, as in flash-attn
    mask            a `Mask` in place of causal: windows, packed documents, prefix-LM
    window_size     (left, right) as in flash-attn; -1 is no limit
    method, tile, layout, chunks, ...   as `mesh-attention plan --help` lists them; None: chosen
    dtype           what `plan` is made for; other dtypes get a plan of their own when they turn up
    kernel          force an attention kernel by name; None: chosen by capability
    transport       "auto": shared (symmetric) memory among the ranks of a node where it works, and
                    torch.distributed elsewhere; "distributed"; "symmetric": an error if impossible
    cuda_graph      capture each kind of call as a CUDA graph and replay it; NCCL only, and
                    never through shared memory
    nvtx            name every operation for profilers
    """

    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        seq_len: int,
        num_heads: int,
        head_dim: int,
        causal: bool,
        num_kv_heads: int | None = None,
        v_head_dim: int | None = None,
        kv_seq_len: int | None = None,
        mask: Mask | None = None,
        window_size: tuple[int, int] | None = None,
        softmax_scale: float | None = None,
        method: str = DEFAULT_METHOD,
        tile: tuple[int, int] | str | None = None,
        layout: str | None = None,
        chunks: tuple[int, int] | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kernel: str | None = None,
        transport: Literal["auto", "distributed", "symmetric"] = "auto",
        cuda_graph: bool = False,
        nvtx: bool = False,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        group = process_group(group_or_mesh)
        size = dist.get_world_size(group)

        def make_plan(element_bytes: int) -> Plan:
            problem = Problem(
                q_tokens=number("seq_len", seq_len),
                kv_tokens=None if kv_seq_len is None else number("kv_seq_len", kv_seq_len),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                element_bytes=element_bytes,
                mask=attention_mask(causal=causal, mask=mask, window_size=window_size),
            )
            given = {"tile": tile, "layout": layout, "chunks": chunks, **options}
            return ask(problem, size, method=method, **given).plan()

        error = name_fault(method, options, signature(ContextParallel).parameters)
        error = error or argument_fault(softmax_scale, dtype, kernel, transport, timeout)
        error = error or graph_fault(group, transport, cuda_graph, nvtx)
        self._dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        self._engine = Engine(
            group,
            make_plan,
            softmax_scale=softmax_scale,
            kernel=kernel,
            transport=TransportName(transport if transport in list(TransportName) else "auto"),
            timeout=timeout if isinstance(timeout, timedelta) else None,
            cuda_graph=cuda_graph is True,
            nvtx=nvtx is True,
        )
        self._engine.agree_on_plan(self._dtype.itemsize, error)

    # The plan.

    @property
    def plan(self) -> Plan:
        """The plan for the dtype given at the start."""
        return self._engine.plan(self._dtype.itemsize)

    @property
    def rank(self) -> int:
        """The logical rank (and so the partition) of this process."""
        return self._engine.rank(self.plan)

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
        return {direction.value: c for direction, c in self._engine.counters.items()}

    def kernels(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """For each kind of call made so far: which kernels were asked, and why one was chosen."""
        return self._engine.kernel_choices()

    def transports(self) -> dict[str, tuple[str, str]]:
        """For each group of ranks in the calls made so far: its transport, and why that one."""
        return self._engine.transport_choices()

    # Attention.

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention of this rank's queries over all keys that the mask shows them.

        Shapes (batch, local_seq, heads, head_dim), sharded by `shard`. With `return_lse` also the
        log-sum-exp, (batch, heads, local_seq), which is not differentiable. Padding rows give 0
        and -inf.
        """
        fault = self._fault(q, k, v)
        if fault is not None:
            nothing = CallShape(0, torch.float32, torch.device("cpu"))
            self._engine.prepare(nothing, False, fault)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        call_shape = CallShape(q.shape[0], q.dtype, q.device)
        self._engine.prepare(call_shape, needs_grad, None)
        out, lse = attend(self._engine, call_shape, q, k, v)
        return (out, lse) if return_lse else out

    def _fault(self, q: Tensor, k: Tensor, v: Tensor) -> MeshAttentionError | None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.layout is not torch.strided:
                kind = f"a {x.layout} tensor" if isinstance(x, Tensor) else type(x).__name__
                return MeshAttentionError(f"{name} is {kind}; it must be a dense torch.Tensor")
        plan, p = self.plan, self.plan.problem
        batch = q.shape[0] if q.ndim == 4 else 1
        slots, kv_slots = plan.q_layout.slots, plan.kv_layout.slots
        wanted = {
            "q": (q, (batch, slots, p.num_heads, p.head_dim)),
            "k": (k, (batch, kv_slots, p.kv_heads, p.head_dim)),
            "v": (v, (batch, kv_slots, p.kv_heads, p.v_dim)),
        }
        for name, (x, shape) in wanted.items():
            if tuple(x.shape) != shape:
                return MeshAttentionError(
                    f"{name} has shape {tuple(x.shape)}, expected {shape} = (batch, local_seq, "
                    f"heads, head_dim); shard whole tensors with ContextParallel.shard(x, dim)"
                )
            if x.dtype != q.dtype or x.device != q.device:
                return MeshAttentionError(
                    f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}"
                )
        if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return MeshAttentionError(f"dtype {q.dtype} is not a floating-point type of attention")
        return None

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
        self._engine.refuse_if_closed()
        layout = self._layout(side)
        dim = checked_dim(x, dim)
        if x.shape[dim] != layout.slots:
            raise MeshAttentionError(
                f"unshard wants {layout.slots} slots along dim {dim}, but it has {x.shape[dim]}"
            )
        return unshard(x, layout, self.plan.devices, self.rank, self._engine.groups.parent, dim)

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
        """Release the process groups and the workspace. Safe to call twice.

        Afterwards `attention`, its backward pass and `unshard`, which communicate, are refused;
        what only reads the plan (`shard`, `positions`, `padding`, `volume`, ...) still answers.
        """
        self._engine.close()

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
