"""Runs one rank of a plan on the GPU at hand and measures it.

The program runs in turns with stand-ins in place of its communications, and alone: the same
kernels in the same order with silent communications, which no network could beat. Each timed run is
queued behind a run that is not timed: the host is ahead of it, and the clock is that of a busy GPU,
as where layers follow each other. `replay_rank.py` and `replay_tables.py` use it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

import torch
from one_rank import timing_events

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import KernelRefusedError, MaskKind, Request, choose
from mesh_attention.machine.cluster import Cluster, Links
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Communication, Program, writes
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.executor import CallShape, Executor, run_to_end
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.transport.interface import Start, View
from replay.rank import RankToReplay, Replayed
from replay.stand_in_data import Holder, inputs_of

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class ReplayTransport:
    """Keeps time in place of a network: every communication begins after its marks, on a stream of
    its own, and what it would receive is written into its target pieces."""

    in_order = True
    own_stream = True
    shows_workspace = False

    def __init__(self, program: Program, seconds: Sequence[float], holder: Holder) -> None:
        self._seconds = dict(zip(program.operations, seconds, strict=True))
        self._table = program.buffer_table()
        self._holder = holder

    def prepare(self, op: Communication, view: View) -> Start:
        landings = [(self._table[piece.buffer], view(piece)) for piece in writes(op)]
        return self._holder.prepare(landings, self._seconds[op])


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
    """The cluster with the kernels of this GPU only, so that what is simulated can be replayed."""
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    here = set()
    for direction, kind in product(Direction, MaskKind):
        sizes = torch.bfloat16, 128, 128, 64, 64
        with suppress(KernelRefusedError):
            request = Request(direction, device.type, capability, *sizes, kind)
            here.add(choose(request).kernel.name)
    kernels = {name: rates for name, rates in cluster.kernels.items() if name in here}
    return replace(cluster, kernels=kernels)


def executor_of(
    part: RankToReplay,
    links: Links,
    holder: Holder,
    workspace: Workspace,
    device: torch.device,
    kernel: str | None = None,
) -> Executor:
    return make_executor(
        part.plan,
        part.pass_,
        0,  # there is one program, whatever its rank is
        ReplayTransport(part.program, part.seconds, holder),
        workspace,
        CallShape(1, _DTYPES[part.plan.problem.element_bytes], device),
        CallOptions(kernel=kernel, links=links),
    )


def measure(
    part: RankToReplay,
    *,
    sms: int,
    repeats: int,
    high_priority: bool = True,
    limit_seconds: float | None = None,
    kernel: str | None = None,
) -> Replayed:
    """`kernel` forces a kernel; `limit_seconds` ends repetitions early, after at least one."""
    device = check_device(sms)
    from replay.hold import CudaHolder, Mode  # Triton comes with CUDA builds only

    gc.collect()
    torch.cuda.empty_cache()
    there_before = torch.cuda.memory_allocated(device)  # libraries keep workspaces of their own
    holder = CudaHolder(device, sms, high_priority=high_priority)
    links = load_cluster(part.predicted["cluster"]).links
    executor = executor_of(part, links, holder, Workspace(), device, kernel)
    inputs = inputs_of(part.program, part.plan, executor.call_shape)

    def seconds(mode: Mode) -> float:
        holder.mode = mode
        begin, end = timing_events()
        torch.cuda.synchronize(device)
        run_to_end(executor.run(inputs))
        begin.record()
        run_to_end(executor.run(inputs))
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) * 1e-3

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
        part=part,
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
