"""One rank's part of a case over real processes, and the whole from the parts of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention import ContextParallel, Plan, count
from mesh_attention.plan.methods.question import Question
from support.cases import Case
from support.reference import NAMES

__all__ = ["Part", "attend", "context", "count_plans", "expected_bytes", "handed_bytes", "whole"]

Bytes = dict[str, dict[str, tuple[int, int]]]  # direction -> kind -> (sent, received)


@dataclass(frozen=True)
class Part:
    rank: int
    positions: Tensor
    kv_positions: Tensor
    tensors: dict[str, Tensor]
    traffic: Bytes


def context(
    case: Case, group: dist.ProcessGroup | DeviceMesh | None = None, **changes: Any
) -> ContextParallel:
    """The object for a case, with buffers that begin as NaN."""
    arguments: dict[str, Any] = {
        "seq_len": case.q_tokens,
        "kv_seq_len": case.kv_tokens,
        "num_heads": case.heads[0],
        "num_kv_heads": case.heads[1],
        "head_dim": case.head_dims[0],
        "v_head_dim": case.head_dims[1],
        "causal": case.mask.causal,
        "mask": case.mask,
        "dtype": case.dtype,
        "method": "mesh",
        **case.options,
        **changes,
    }
    cp = ContextParallel(group, **arguments)
    cp._calls.session.transports.poison = True
    return cp


def count_plans() -> list[Question]:
    """Questions that are planned in this process from now on."""
    made: list[Question] = []
    plan = Question.plan

    def counting(self: Question) -> Plan:
        made.append(self)
        return plan(self)

    Question.plan = counting  # type: ignore[method-assign]
    return made


def attend(cp: ContextParallel, case: Case, device: str = "cpu") -> Part:
    """Forward and backward of this rank's shards; the results are brought to the CPU."""
    whole_q, whole_k, whole_v, whole_grad = (x.to(device) for x in case.tensors())
    q = cp.shard(whole_q, 1).requires_grad_()
    k = cp.shard(whole_k, 1, side="kv").requires_grad_()
    v = cp.shard(whole_v, 1, side="kv").requires_grad_()
    result = cp.attention(q, k, v, return_lse=True)
    assert isinstance(result, tuple)
    out, lse = result
    grads = torch.autograd.grad(out, (q, k, v), cp.shard(whole_grad, 1))
    results = (x.detach().cpu() for x in (out, lse, *grads))
    tensors = dict(zip(NAMES, results, strict=True))
    return Part(cp.rank, cp.positions(), cp.positions(side="kv"), tensors, handed_bytes(cp))


def handed_bytes(cp: ContextParallel) -> Bytes:
    return {
        direction: {kind: (t.sent_bytes, t.received_bytes) for kind, t in c.by_operation.items()}
        for direction, c in cp.traffic.items()
    }


def expected_bytes(case: Case) -> list[Bytes]:
    """What the plan says each logical rank moves."""
    plan = case.plan()
    passes = count(plan)
    return [
        {
            direction.value: {
                kind: (case.batch * t.sent_bytes, case.batch * t.received_bytes)
                for kind, t in counted.ranks[rank].by_operation.items()
            }
            for direction, counted in passes.items()
        }
        for rank in range(plan.num_ranks)
    ]


def whole(parts: list[Part], case: Case) -> dict[str, Tensor]:
    """The whole tensors, by the positions that the ranks say they own."""
    result = {}
    for name in NAMES:
        keys = name in ("grad_k", "grad_v")
        tokens = case.kv_tokens if keys else case.q_tokens
        first = parts[0].tensors[name]
        dim = 2 if name == "lse" else 1
        shape = [*first.shape]
        shape[dim] = tokens
        joined = first.new_full(shape, torch.nan)
        for part in parts:
            positions = part.kv_positions if keys else part.positions
            real = positions < tokens
            local = part.tensors[name].movedim(dim, 0)
            joined.movedim(dim, 0)[positions[real]] = local[real]
        result[name] = joined
    return result
