"""Runs a plan on whole tensors with all ranks in one process, for tests and for study.

result = run_local(plan, q, k, v, grad_out=dout)
result.out, result.lse, result.grad_q, result.traffic["forward"][3].total.received_bytes
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError, raise_fault
from mesh_attention.plan.language.plan import Direction, Plan, a_plan
from mesh_attention.plan.problem.arguments import real
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.read.count import recalled
from mesh_attention.request.operators import rows_first
from mesh_attention.request.tensor_checks import fault_of_kind, fault_of_sinks
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.binding import GRAD_LSE
from mesh_attention.runtime.execute.executor import CallShape
from mesh_attention.runtime.execute.sinks import (
    add_sinks,
    add_sinks_to_kept,
    gradient_of_sinks,
)
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.layouts import join_shards, take_shard
from mesh_attention.runtime.session.modes import outside_autocast
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.transport.interface import Counters
from mesh_attention.runtime.transport.local import LocalTransport, Meetings

__all__ = ["LocalResult", "run_local"]

_MOST_TURNS = 10_000  # of each rank: more mean a deadlock


@dataclass(frozen=True)
class LocalResult:
    """Whole tensors: out (B, S, H, E), lse (B, H, S), gradients like their inputs.

    `traffic[direction][rank]` holds the bytes each logical rank handed to its transport.
    """

    out: Tensor
    lse: Tensor
    grad_q: Tensor | None = None
    grad_k: Tensor | None = None
    grad_v: Tensor | None = None
    traffic: dict[str, list[Counters]] = field(default_factory=dict)
    grad_sinks: Tensor | None = None


def run_local(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    grad_lse: Tensor | None = None,
    kernel: str | None = None,
    poison: bool = True,
) -> LocalResult:
    """Attention of whole, unsharded (batch, tokens, heads, head_dim) tensors by a plan.

    `sinks` (heads,) as `ContextParallel.attention` has them; `grad_sinks` is summed over all ranks.
    `grad_lse` (batch, heads, tokens) is the gradient of lse, beside `grad_out`.
    With `poison` workspaces and outputs begin as NaN, so nothing can be read before it is written.
    """
    _check(plan, q, k, v, grad_out, sinks)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else real("softmax_scale", softmax_scale)
    if grad_lse is not None and (
        grad_out is None or grad_lse.shape != (q.shape[0], q.shape[2], q.shape[1])
    ):
        raise MeshAttentionError("grad_lse needs grad_out, and has shape (batch, heads, tokens)")
    cap = 0.0 if softcap is None else real("softcap", softcap)
    options = CallOptions(softmax_scale=scale, softcap=cap, kernel=kernel)
    run = _Run(plan, CallShape(q.shape[0], q.dtype, q.device), options, poison)
    inputs = [
        {name: run.shard(name, x, rank) for name, x in (("q", q), ("k", k), ("v", v))}
        for rank in range(plan.num_ranks)
    ]
    forward = run.all_ranks(Direction.FORWARD, inputs)
    traffic = {"forward": run.counters}
    if sinks is not None:
        for rank, result in enumerate(forward):
            add_sinks(result["out"].transpose(0, 1), _statistics(result["lse"]), sinks)
            if grad_out is not None:
                kept = recalled(plan.program(rank, Direction.BACKWARD))
                add_sinks_to_kept(kept, [result[buffer.name] for buffer in kept], sinks)
    out, lse = run.join("out", forward), run.join("lse", forward).squeeze(-1).transpose(1, 2)
    if grad_out is None:
        return LocalResult(out, lse, traffic=traffic)
    for rank, local in enumerate(inputs):
        local |= forward[rank] | {"grad_out": run.shard("grad_out", grad_out, rank)}
        if grad_lse is not None:
            rows = grad_lse.to(lse.dtype).transpose(1, 2).unsqueeze(-1)
            local[GRAD_LSE] = run.shard(GRAD_LSE, rows, rank)
    run.options = replace(options, differentiable_lse=grad_lse is not None)
    backward = run.all_ranks(Direction.BACKWARD, inputs)
    traffic["backward"] = run.counters
    dq, dk, dv = (run.join(name, backward) for name in ("grad_q", "grad_k", "grad_v"))
    grad_sinks = None
    if sinks is not None:
        parts = [
            gradient_of_sinks(
                local["out"].transpose(0, 1),
                local["grad_out"].transpose(0, 1),
                _statistics(local["lse"]),
                sinks,
                None if grad_lse is None else _statistics(local[GRAD_LSE]),
            )
            for local in inputs
        ]
        grad_sinks = torch.stack(parts).sum(0)
    return LocalResult(out, lse, dq, dk, dv, traffic, grad_sinks)


def _statistics(rows: Tensor) -> Tensor:
    """(batch, heads, rows)"""
    return rows.squeeze(-1).permute(1, 2, 0)


@dataclass
class _Run:
    """What both passes of one call share; `counters` are those of the latest pass."""

    plan: Plan
    call_shape: CallShape
    options: CallOptions
    poison: bool
    counters: list[Counters] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workspaces = [Workspace(poison=self.poison) for _ in range(self.plan.num_ranks)]

    def layout(self, name: str) -> Layout:
        keys = name in ("k", "v", "grad_k", "grad_v")
        return self.plan.shards[keys]

    def shard(self, name: str, whole: Tensor, rank: int) -> Tensor:
        return rows_first(take_shard(whole, self.layout(name), self.plan.devices[rank], 1))

    def join(self, name: str, results: list[dict[str, Tensor]]) -> Tensor:
        ranks = sorted(range(len(results)), key=self.plan.devices.__getitem__)
        shards = [results[rank][name].transpose(0, 1) for rank in ranks]
        return join_shards(shards, self.layout(name), 1)

    def all_ranks(
        self, direction: Direction, inputs: list[dict[str, Tensor]]
    ) -> list[dict[str, Tensor]]:
        """Runs a pass: the results of each rank, by name."""
        pass_ = self.plan.direction(direction)
        meetings: Meetings = {}
        executors = [
            make_executor(
                self.plan,
                pass_,
                rank,
                LocalTransport(pass_, rank, meetings),
                self.workspaces[rank],
                self.call_shape,
                self.options,
            )
            for rank in range(self.plan.num_ranks)
        ]
        self.counters = [executor.counters for executor in executors]
        runs = {rank: executor.run(inputs[rank]) for rank, executor in enumerate(executors)}
        with outside_autocast():
            return _in_turns(runs)


def _in_turns(runs: dict[int, Generator[None, None, dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """Runs all ranks in turns, each until it must wait for another."""
    results: dict[int, dict[str, Tensor]] = {}
    for _ in range(_MOST_TURNS * len(runs)):
        for rank, run in runs.items():
            if rank not in results:
                try:
                    next(run)
                except StopIteration as end:
                    results[rank] = end.value
        if len(results) == len(runs):
            return [results[rank] for rank in range(len(runs))]
    raise MeshAttentionError("the ranks deadlock; verify the plan")


def _check(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None, sinks: Tensor | None
) -> None:
    p = a_plan(plan).problem
    tensors = {"q": q, "k": k, "v": v} | ({} if grad_out is None else {"grad_out": grad_out})
    raise_fault(fault_of_kind(**tensors))
    batch = q.shape[0] if q.ndim else 0
    shapes = {
        "q": (batch, p.q_tokens, p.num_heads, p.head_dim),
        "k": (batch, p.keys, p.kv_heads, p.head_dim),
        "v": (batch, p.keys, p.kv_heads, p.v_dim),
        "grad_out": (batch, p.q_tokens, p.num_heads, p.v_dim),
    }
    if grad_out is not None:
        plan.direction(Direction.BACKWARD)  # a plan without one is refused before anything runs
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise MeshAttentionError(
                f"{name} has shape {tuple(tensor.shape)}, the plan is for whole tensors "
                f"{shapes[name]}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise MeshAttentionError(f"{name} differs from q in dtype or device")
    raise_fault(fault_of_sinks(plan, q, sinks))
    inputs = [*tensors.values(), *([] if sinks is None else [sinks])]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise MeshAttentionError(
            "run_local is not differentiable; give grad_out to get gradients, or detach the inputs"
        )
