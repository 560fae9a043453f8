"""Runs one rank of a plan on the GPU at hand and measures it.

The program runs in turns with stand-ins in place of its communications, and alone: the same
kernels in the same order with silent communications, which no network could beat. A run that is
timed is queued behind one that is not: the host is ahead of it, and the clock is that of a busy
GPU, as where layers follow each other.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import KernelRefusedError, MaskKind, Request, choose
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.executor import CallShape, run_to_end
from mesh_attention.runtime.session.prepare import make_executor
from replay.rank import RankToReplay, Replayed
from replay.stand_in_data import inputs_of
from replay.transport import ReplayTransport

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def check_device(sms: int) -> torch.device:
    """The CUDA device, or an error that says what would do."""
    if not torch.cuda.is_available():
        raise MeshAttentionError(
            f"a replay needs a CUDA GPU, and torch {torch.__version__} finds none; "
            "mesh-attention simulate models the same plan without one"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    there = torch.cuda.get_device_properties(device).multi_processor_count
    if sms >= there:
        raise MeshAttentionError(
            f"sms={sms}: the GPU has {there} SMs, and computation needs some of them"
        )
    return device


def with_kernels_here(cluster: Cluster) -> Cluster:
    """The cluster as if its ranks had the kernels of this GPU, and no others: what is simulated is
    what can be replayed."""
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    here = set()
    for direction in Direction:
        for kind in MaskKind:
            sizes = torch.bfloat16, 128, 128, 64, 64
            with suppress(KernelRefusedError):
                asked = Request(direction, device.type, capability, *sizes, kind)
                here.add(choose(asked).kernel.name)
    kernels = {name: rates for name, rates in cluster.kernels.items() if name in here}
    return replace(cluster, kernels=kernels)


def measure(
    given: RankToReplay,
    *,
    sms: int,
    repeats: int,
    high_priority: bool = True,
    limit_seconds: float | None = None,
    kernel: str | None = None,
) -> Replayed:
    """`kernel` forces one by name; `limit_seconds` ends repetitions early, after at least one."""
    device = check_device(sms)
    from replay.hold import CudaHolder, Mode  # Triton comes with CUDA builds only

    gc.collect()
    torch.cuda.empty_cache()
    there_before = torch.cuda.memory_allocated(device)  # libraries keep workspaces of their own
    call_shape = CallShape(1, _DTYPES[given.plan.problem.element_bytes], device)
    holder = CudaHolder(device, sms, high_priority=high_priority)
    inputs = inputs_of(given.program, given.plan, call_shape)
    executor = make_executor(
        given.plan,
        given.one,
        0,  # there is one program, whatever its rank is
        ReplayTransport(given.program, given.seconds, holder),
        Workspace(),
        call_shape,
        softmax_scale=float(given.plan.problem.head_dim) ** -0.5,
        kernel=kernel,
        links=load_cluster(given.predicted["cluster"]).links,
    )

    def seconds(mode: Mode) -> float:
        holder.mode = mode
        return _seconds(lambda: run_to_end(executor.run(inputs)), device)

    seconds(Mode.HURRY)  # compiles kernels, and leaves random data in the workspace
    seconds(Mode.SILENT)
    replayed: list[float] = []
    alone: list[float] = []
    peak_bytes = 0
    begin = time.monotonic()
    while len(replayed) < repeats:
        alone.append(seconds(Mode.SILENT))
        torch.cuda.reset_peak_memory_stats(device)
        replayed.append(seconds(Mode.KEEP_TIME))
        peak_bytes = max(peak_bytes, torch.cuda.max_memory_allocated(device))
        if limit_seconds is not None and time.monotonic() - begin > limit_seconds:
            break
    return Replayed(
        machine=torch.cuda.get_device_name(device),
        given=given,
        sms=sms,
        high_priority=high_priority,
        seconds=statistics.median(replayed),
        all_seconds=tuple(replayed),
        compute_seconds=statistics.median(alone),
        peak_bytes=peak_bytes - there_before,
        workspace_bytes=executor.workspace_bytes,
        planned_scratch_bytes=executor.scratch_bytes,
        mask_bytes=executor.memory.mask_bytes,
        stand_in_bytes=holder.num_bytes,
        kernels=tuple(sorted({choice.kernel.name for choice in executor.choices.values()})),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    work()
    events[0].record()
    work()
    events[1].record()
    torch.cuda.synchronize(device)
    return float(events[0].elapsed_time(events[1])) * 1e-3
