"""Faults among NCCL ranks: nothing wrong is handed out, every rank ends with an error, in time.

The host waits for nothing in a call, so the error comes with the next call, or with `check`.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
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


KERNEL = Failing()


def call(cp: ContextParallel, inputs: list[Tensor], **options: Any) -> Tensor:
    out = cp.attention(*inputs, **options)
    assert isinstance(out, Tensor)
    return out


def make_call(
    cp: ContextParallel, other: ContextParallel, inputs: list[Tensor], fault: str, odd: bool
) -> Tensor:
    """What this rank does when the fault comes; `odd` is the rank that is at fault."""
    match fault:
        case "shape":
            return call(cp, twice(inputs) if odd else inputs, label=0)
        case "label":
            return call(cp, inputs, label=2 if odd else 1)
        case "object":
            return call(other if odd else cp, inputs)
        case "exception":
            KERNEL.armed = odd
            return call(other, inputs)
        case "killed" if odd:
            os.kill(os.getpid(), signal.SIGKILL)
        case "user code" if odd:
            os._exit(1)
    return call(cp, inputs, label=0)


def twice(inputs: list[Tensor]) -> list[Tensor]:
    return [x.repeat(2, 1, 1, 1) for x in inputs]


def suffer(rank: int, fault: str, options: dict[str, Any]) -> tuple[float, bool, str]:
    """(seconds until this rank was told, whether it was handed numbers, what it was told)"""
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    cp = context(CASE, group, transport="distributed", **options)
    other = context(CASE, group, transport="distributed", kernel="failing")
    tensors = [cp.shard(x.cuda(), 1) for x in CASE.tensors()[:3]]
    KERNEL.armed = False
    for each in (tensors, twice(tensors), tensors):
        call(cp, each, label=0)
    call(other, tensors)
    torch.cuda.synchronize()
    begun = time.monotonic()
    finite = False
    try:
        out = make_call(cp, other, tensors, fault, rank == ODD)
        torch.cuda.synchronize()
        finite = bool(out.isfinite().all())
        while time.monotonic() - begun < TIMEOUT_SECONDS + 5:
            cp.check()
            time.sleep(0.05)
    except (MeshAttentionError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
        return time.monotonic() - begun, finite, message
    return time.monotonic() - begun, finite, ""


def suffer_all(
    rank: int, world_size: int, faults: list[str], options: dict[str, Any], folder: str
) -> None:
    """Ends the process: what is left of NCCL's after faults should not meet another test."""
    register_kernel(KERNEL)
    for fault in faults:
        seconds, finite, message = suffer(rank, fault, options)
        Path(folder, f"{rank} {fault}").write_text(f"{seconds}\n{finite}\n{message}")
        dist.barrier() if fault in WORDS else time.sleep(2)
    os._exit(0)


ODD_ONE = f"rank {ODD} of the group [0, 1, 2, 3] disagrees: "
WORDS = {
    "shape": f"{ODD_ONE}batch is 2 there, 1 elsewhere",
    "label": f"{ODD_ONE}label is '2' there, '1' elsewhere",
    "object": "number of the object is 2 there, 1 elsewhere",
    "exception": f"rank {ODD} broke off a call: RuntimeError: say, out of memory",
}
GRAPHS = {"cuda_graph": True}


@pytest.mark.parametrize(
    ("faults", "options"),
    [
        ([*WORDS], {}),
        ([*WORDS], GRAPHS),
        (["killed"], {}),
        (["killed"], GRAPHS),
        (["user code"], {}),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, list) else "graph" if each else "eager",
)
def test_every_rank_ends_with_an_error_that_names_the_odd_one(
    gpu_pool_in_turns: WorkerPool, tmp_path: Path, faults: list[str], options: dict[str, Any]
) -> None:
    """After a fault a new process group serves the next one."""
    everyone = tuple(range(RANKS))
    gpu_pool_in_turns.run(
        *(suffer_all, RANKS, faults, options, str(tmp_path)), seconds=75, may_end=everyone
    )
    for fault in faults:
        for rank in everyone:
            if rank == ODD and fault not in WORDS:
                continue
            seconds, finite, message = (tmp_path / f"{rank} {fault}").read_text().split("\n", 2)
            assert float(seconds) < TIMEOUT_SECONDS + 5, message
            assert finite == "False", message  # nothing wrong was handed out
            if rank == ODD and fault == "exception":
                assert message == "RuntimeError: say, out of memory"
            else:
                assert WORDS.get(fault, f"rank {ODD} has ended") in message
                assert f"rank {ODD}" in message
