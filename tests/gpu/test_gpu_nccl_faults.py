"""Faults among NCCL ranks: nothing wrong is handed out, every rank ends with an error, in time.

The host waits for nothing in a call, so the error comes with the next call, or with `check`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention import ContextParallel, Mask, MeshAttentionError, register_kernel
from mesh_attention.kernels import Block
from mesh_attention.kernels.reference import Reference
from support.cases import Case
from support.gloo_case import context
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

RANKS, ODD = 4, 2
TIMEOUT_SECONDS = 10.0
CASE = Case(
    RANKS, 512, 512, heads=(4, 4), head_dims=(64, 64), mask=Mask(causal=True), dtype=torch.bfloat16
)


class Failing(Reference):
    name = "failing"
    armed = False

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        if self.armed:
            raise RuntimeError("say, out of memory")
        return super().forward(block)


def call(cp: ContextParallel, given: list[Tensor], **options: Any) -> Tensor:
    out = cp.attention(*given, **options)
    assert isinstance(out, Tensor)
    return out


def suffer(rank: int, world_size: int, fault: str, graph: bool, folder: str) -> None:
    """Ends the process: what is left of NCCL's after a fault should not meet another test."""
    kernel = Failing()
    register_kernel(kernel)
    options: dict[str, Any] = {"cuda_graph": True} if graph else {}
    group = dist.new_group(backend="nccl")
    cp = context(CASE, group, transport="distributed", **options)
    other = context(CASE, group, transport="distributed", kernel="failing")
    given = [cp.shard(x.cuda(), 1) for x in CASE.tensors()[:3]]
    small = [x[:, :, :, :].repeat(2, 1, 1, 1) for x in given]
    for one in (given, small, given):
        call(cp, one, label=0)
    call(other, given)
    torch.cuda.synchronize()
    odd = rank == ODD
    begun = time.monotonic()
    told, finite = "", True
    try:
        if fault == "killed" and odd:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "shape":
            out = call(cp, small if odd else given, label=0)
        elif fault == "label":
            out = call(cp, given, label=2 if odd else 1)
        elif fault == "object":
            out = call(other if odd else cp, given, label=None)
        elif fault == "exception":
            kernel.armed = odd
            out = call(other, given)
        elif fault == "user code" and odd:
            raise ValueError("in the loader")
        else:
            out = call(cp, given, label=0)
        torch.cuda.synchronize()
        finite = bool(out.isfinite().all())
        while time.monotonic() - begun < TIMEOUT_SECONDS + 5:
            cp.check()
            time.sleep(0.1)
    except (MeshAttentionError, RuntimeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    Path(folder, str(rank)).write_text(f"{seconds}\n{finite}\n{told}")
    if not (fault == "user code" and odd):
        time.sleep(3)
    os._exit(0)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("shape", f"rank {ODD} of the group [0, 1, 2, 3] disagrees: batch is 2 there, 1 elsewhere"),
        ("label", f"rank {ODD} of the group [0, 1, 2, 3] disagrees: label is '2' there"),
        ("object", f"rank {ODD} of the group [0, 1, 2, 3] disagrees"),
        ("exception", f"rank {ODD} broke off a call: RuntimeError: say, out of memory"),
        ("killed", f"rank {ODD} has ended"),
        ("user code", f"rank {ODD} has ended"),
    ],
)
def test_every_rank_ends_with_an_error_that_names_the_odd_one(
    gpu_pool: WorkerPool, tmp_path: Path, fault: str, words: str, graph: bool
) -> None:
    everyone = tuple(range(RANKS))
    gpu_pool.run(
        *(suffer, RANKS, fault, graph, str(tmp_path)),
        seconds=120,
        group_seconds=TIMEOUT_SECONDS,
        may_end=everyone,
    )
    for rank in everyone:
        if rank == ODD and fault in ("killed", "user code"):
            continue
        seconds, finite, *told = (tmp_path / str(rank)).read_text().split("\n")
        assert float(seconds) < TIMEOUT_SECONDS + 5, told
        assert told[0], f"rank {rank} was told nothing"
        if rank == ODD and fault == "exception":
            assert "say, out of memory" in told[0]
        else:
            assert words in "\n".join(told)
            assert finite == "False" or "CommunicationError" in told[0], told
