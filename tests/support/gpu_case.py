"""Cases on ranks that share one GPU, over either transport, and how exact they must be.

gloo carries CUDA tensors, NCCL takes ranks that share a GPU for nodes on a network, and they can
share its memory too, so real plans run in real processes without a second GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.cases import Case
from support.gloo_case import Part, attend, context, expected_bytes, whole
from support.pool import WorkerPool
from support.reference import Attention, attention

__all__ = [
    "COMPILES_SECONDS",
    "SECONDS",
    "Ran",
    "check",
    "relative_errors",
    "run_cases",
    "warm_call",
]

SECONDS = 60.0  # processes on one GPU take turns
COMPILES_SECONDS = 4 * SECONDS  # where kernels are compiled first
LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}  # of the norm


@dataclass(frozen=True)
class Ran:
    part: Part
    transports: dict[str, tuple[str, str]]


def run_cases(
    rank: int,
    world_size: int,
    cases: list[Case],
    transport: str,
    options: dict[str, Any],
    backend: str,
    times: int,
) -> list[Ran]:
    results = []
    group = dist.new_group(backend=backend) if backend != "gloo" else None
    # Held open, so that what NCCL makes for one case serves the next.
    with context(cases[0], group, transport=transport, **options):
        for case in cases:
            with context(case, group, transport=transport, **options) as cp:
                for _ in range(times):
                    cp._calls.user.counters.clear()
                    part = attend(cp, case, "cuda")
                cp.check()
                results.append(Ran(part, cp.transports()))
    return results


def check(
    pool: WorkerPool,
    cases: list[Case],
    transport: str,
    *,
    backend: str = "gloo",
    times: int = 1,
    **options: Any,
) -> list[list[Ran]]:
    """Runs the cases, compares the last time with float64 and with the plan's bytes; results by
    rank."""
    question = (cases, transport, options, backend, times)
    seconds = COMPILES_SECONDS if "nccl" in backend else SECONDS
    by_rank: list[list[Ran]] = pool.run(run_cases, cases[0].ranks, *question, seconds=seconds)
    for number, case in enumerate(cases):
        ran = [results[number] for results in by_rank]
        parts = [replay.part for replay in ran]
        result = relative_errors(whole(parts, case), attention(*case.tensors(), case.mask))
        assert max(result.values()) <= LIMIT[case.dtype], (result, case)
        if options.get("cuda_graph"):
            continue  # a replay hands nothing to the transport
        expected = expected_bytes(case)
        assert [part.traffic for part in parts] == [expected[part.rank] for part in parts]
        if transport == "symmetric":
            chosen = {name for replay in ran for name, _ in replay.transports.values()}
            assert chosen == {"symmetric"}, ran
    return by_rank


def relative_errors(results: dict[str, Tensor], truth: Attention) -> dict[str, float]:
    """Norm of the difference over the norm of the truth; infinite where something is NaN."""
    result = {}
    for name, value in results.items():
        expected = truth.named()[name]
        error = float((value.double() - expected).norm() / expected.norm())
        result[name] = error if error == error else float("inf")
    return result


def warm_call(
    rank: int, world_size: int, case: Case, options: dict[str, Any], backend: str = "gloo"
) -> dict[str, tuple[str, str]]:
    """A warm call, forward and backward, while PyTorch raises if the host waits for the device."""
    group = dist.new_group(backend=backend) if backend != "gloo" else None
    with context(case, group, **options) as cp:
        tensors = [x.cuda() for x in case.tensors()]
        q, k, v, grad = (cp.shard(x, 1).requires_grad_(i < 3) for i, x in enumerate(tensors))
        for warm in (False, False, True):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if warm else "default")
            try:
                out = cp.attention(q, k, v)
                assert isinstance(out, torch.Tensor)
                torch.autograd.grad(out, (q, k, v), grad)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        return cp.transports()
