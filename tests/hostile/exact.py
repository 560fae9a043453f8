"""Attention over gloo, held against a dense softmax in float64: output, log-sum-exp and all
gradients, from buffers that begin as NaN, twice each.

A rank compares its own rows, at the positions that it says it has; that positions of all ranks
together are the tokens, each once, is checked where all answers meet.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor

from hostile.campaign import Verdict
from hostile.exact_case import ExactCase, random_case
from hostile.mutants import mutate_for_good
from mesh_attention import ContextParallel, MeshAttentionError, mesh_attention
from support.dense_call import definition
from support.pool import WorkerError, WorkerPool

__all__ = ["Exact"]

OF_A_JOB = 4  # cases that the same ranks run one after the other
ALLOWED = {torch.float64: 1e-9, torch.float32: 5e-5}  # of the largest value, if that exceeds one
KEYS = ("grad_k", "grad_v")


@dataclass(frozen=True)
class Part:
    """One rank's answer to a case: how far each tensor is from the truth, or what was refused."""

    distances: dict[str, float]
    positions: list[int]
    kv_positions: list[int]
    grad_sinks: Tensor | None = None
    refused: str = ""


class Exact:
    def __init__(self, seed: int, mutant: str | None) -> None:
        self._seed = seed
        self._mutant = mutant
        self._pool = WorkerPool(modules=("hostile.exact",))

    def case(self, number: int) -> Verdict:
        draw = Random(f"exact {self._seed} {number}")
        ranks = draw.choice((1, 2, 2, 3, 4, 4, 5, 6, 6, 8))
        cases = [random_case(draw, ranks) for _ in range(OF_A_JOB)]
        try:
            by_rank = self._pool.run(run, ranks, cases, self._mutant, seconds=180.0)
        except WorkerError as error:
            return Verdict(Counter({"failed": 1}), (f"{error}\n  {cases}",))
        counts: Counter[str] = Counter()
        wrong: list[str] = []
        for at, case in enumerate(cases):
            parts = [of_rank[at] for of_rank in by_rank]
            outcome, words = _judge(case, parts)
            method = case.options.get("method", "chosen")
            counts += Counter({outcome: 1, f"{case.face}, {method}": 1})
            counts["comparisons"] += sum(len(part.distances) for part in parts)
            if words:
                wrong.append(f"{words}\n    {case}")
        return Verdict(counts, tuple(wrong))

    def close(self) -> None:
        self._pool.close()


def _judge(case: ExactCase, parts: list[Part]) -> tuple[str, str]:
    """An outcome to count, and what is wrong."""
    refused = {part.refused for part in parts}
    if refused != {""}:
        # What a kernel or a method cannot do is said by all ranks alike, and by name.
        if len(refused) == 1 and "softcap" in next(iter(refused)):
            return "refused: softcap", ""
        return "refused", f"refused: {refused}"
    allowed = ALLOWED[case.dtype]
    far = [(rank, part.distances) for rank, part in enumerate(parts) if _worst(part) > allowed]
    if far:
        return "wrong", f"rank {far[0][0]} of {len(parts)} is off by {far[0][1]}"
    for name, tokens in (("positions", case.problem.q_tokens), ("kv_positions", case.problem.keys)):
        owned = sorted(at for part in parts for at in getattr(part, name))
        if owned != [*range(tokens)]:
            return "wrong", f"{name} of all ranks are {owned}, of {tokens} tokens"
    if case.has_sinks:
        grads = [part.grad_sinks.double() for part in parts if part.grad_sinks is not None]
        truth = truth_of(case)["grad_sinks"]
        distance = (torch.stack(grads).sum(0) - truth).abs().max() / truth.abs().max().clamp(min=1)
        if not distance <= allowed:
            return "wrong", f"the gradient of sinks is off by {distance}"
    return "right", ""


def _worst(part: Part) -> float:
    """NaN is as far as can be."""
    return max((x if x == x else torch.inf for x in part.distances.values()), default=0.0)


def truth_of(case: ExactCase) -> dict[str, Tensor]:
    truth = definition(case.tensors(), case.shown, case.softmax_scale, case.softcap)
    return truth | {"lse": truth["lse"].transpose(1, 2)}  # tokens second, as in the others


def run(rank: int, world_size: int, cases: list[ExactCase], mutant: str | None) -> list[Part]:
    mutate_for_good(mutant)
    return [_run(case) for case in cases]


def _run(case: ExactCase) -> Part:
    p = case.problem
    numbers: dict[str, Any] = {"softmax_scale": case.softmax_scale, "softcap": case.softcap}
    numbers |= {"differentiable_lse": case.has_grad_lse}
    sizes: dict[str, Any] = {
        "seq_len": p.q_tokens,
        "kv_seq_len": p.kv_tokens,
        "num_heads": p.num_heads,
        "num_kv_heads": p.kv_heads,
        "head_dim": p.head_dim,
        "v_head_dim": p.v_dim,
        "dtype": case.dtype,
    }
    if case.face == "documents":
        sizes = {}
    try:
        with ContextParallel(mask=p.mask, **sizes, **numbers, **case.options) as cp:
            cp._calls.session.transports.poison = True
            handle = cp.documents(case.starts) if case.face == "documents" else None
            return _compared(cp, case, handle, numbers)
    except MeshAttentionError as error:
        return Part({}, [], [], refused=f"{type(error).__name__}: {error}")


def _compared(cp: ContextParallel, case: ExactCase, handle: Any, numbers: dict[str, Any]) -> Part:
    whole = {name: x.to(case.dtype) for name, x in case.tensors().items()}

    def shard(name: str, dim: int = 1) -> Tensor:
        side: Literal["q", "kv"] = "kv" if name in ("k", "v") else "q"
        return cp.shard(whole[name], dim, side=side, documents=handle)

    leaves = [shard(name).requires_grad_() for name in ("q", "k", "v")]
    sinks = whole["sinks"].clone().requires_grad_() if case.has_sinks else None
    grads_of = [*leaves] if sinks is None else [*leaves, sinks]
    positions, kv_positions = (cp.positions(side=s, documents=handle) for s in ("q", "kv"))
    truth, worst = truth_of(case), dict[str, float]()
    grad_sinks = None
    for _ in range(2):  # the second call finds what the first one left
        options: dict[str, Any] = {"sinks": sinks, "return_lse": True}
        if case.face == "function":
            options |= {"mask": case.problem.mask, **numbers, **case.options}
            out, lse = mesh_attention(*leaves, **options)
        else:
            out, lse = cp.attention(*leaves, documents=handle, **options)
        results, grad_outs = [out], [shard("grad_out")]
        if case.has_grad_lse:
            results.append(lse.masked_fill(lse == -torch.inf, 0.0))
            grad_outs.append(shard("grad_lse", 2))
        grads = torch.autograd.grad(results, grads_of, grad_outs)
        named = dict(zip(("grad_q", "grad_k", "grad_v"), grads[:3], strict=True))
        grad_sinks = grads[3] if sinks is not None else None
        for name, own in {"out": out, "lse": lse.transpose(1, 2), **named}.items():
            at = kv_positions if name in KEYS else positions
            distance = _distance(own.detach(), truth[name], at)
            worst[name] = max(worst.get(name, 0.0), distance)
    real = [at[at < size].tolist() for at, size in (
        (positions, case.problem.q_tokens), (kv_positions, case.problem.keys),
    )]  # fmt: skip
    return Part(worst, real[0], real[1], grad_sinks)


def _distance(own: Tensor, whole: Tensor, positions: Tensor) -> float:
    real = positions < whole.shape[1]
    wanted, results = whole[:, positions[real]], own[:, real].double()
    finite = wanted != -torch.inf
    if not torch.equal(results != -torch.inf, finite) or results[finite].isnan().any():
        return torch.inf
    if not finite.any():
        return 0.0
    scale = max(1.0, whole[whole != -torch.inf].abs().max().item())
    return (results - wanted)[finite].abs().max().item() / scale
