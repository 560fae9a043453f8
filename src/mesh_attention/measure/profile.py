"""Makes a cluster's file from measurements on its own ranks: kernels, merges, links, and what they
lose beside each other. All ranks measure, and all of them get the result. `mesh-attention profile`
and benchmarks use it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from statistics import fmean

import torch

from mesh_attention.cost.detect_cluster import Machine, find_cluster, is_known_gpu
from mesh_attention.machine.cluster import Cluster, Disturbance, Gpu
from mesh_attention.machine.kernel_facts import KernelRates
from mesh_attention.machine.load import parse_cluster
from mesh_attention.measure.curve_fit import cluster_text, pass_notes, short
from mesh_attention.measure.kernel_rates import (
    KernelMeter,
    Sizes,
    kernels_of,
    matrix_product_tflops,
    merge_costs,
)
from mesh_attention.measure.links import LinkMeter
from mesh_attention.measure.ranks import MeasureError, Ranks
from mesh_attention.measure.transfers import Lost, done, lost_beside
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import CallKind
from mesh_attention.version import __version__

Progress = Callable[[int, int], None]
_USUAL_GAP = 4e-6  # between two kernels of a CUDA stream, as the shipped files have it


@dataclass(frozen=True)
class Profile:
    """`text` is the file, `cluster` what is read from it."""

    cluster: Cluster
    text: str


def profile_ranks(
    ranks: Ranks,
    *,
    name: str = "measured",
    sizes: Sizes | None = None,
    progress: Progress | None = None,
) -> Profile:
    """All ranks call it with the same arguments."""
    if ranks.size < 2:
        raise MeasureError("there is one rank, and nothing travels: start at least two")
    return _Profiling(ranks, name, sizes or Sizes.usual(ranks.device), progress).measure()


class _Profiling:
    """One profile. `_notes` are comments of the file, by the place that they explain."""

    def __init__(self, ranks: Ranks, name: str, sizes: Sizes, progress: Progress | None) -> None:
        self._ranks, self._name, self._sizes, self._progress = ranks, name, sizes, progress
        self._done = count(1)
        self._chosen = kernels_of(ranks, sizes)
        self._notes: dict[str, str | Sequence[str]] = {}
        passes = sum(map(len, self._chosen.values()))
        both = (ranks.per_node > 1) + 2 * (ranks.num_nodes > 1)
        # Steps, about: kernels, samples of links, disturbances, merges and products.
        self._steps = passes + both * 5 * len(sizes.transfers) + 4 + 2

    def _tell(self) -> None:
        at = next(self._done)
        if self._progress:
            self._progress(min(at, self._steps), self._steps)

    def measure(self) -> Profile:
        meter = LinkMeter(self._ranks, self._sizes.transfers, self._sizes.lasting / 2, self._tell)
        node, network = meter.measure()
        gpu = self._gpu()
        kernels = self._kernels(meter, gpu.gap_microseconds * 1e-6)
        disturbance = self._disturbance(meter)
        ranks = self._ranks
        nodes = f"{ranks.num_nodes} nodes of {ranks.per_node} rank{'s' * (ranks.per_node > 1)}"
        if ranks.num_nodes == 1:
            nodes = f"{ranks.size} ranks of one node"
        cluster = Cluster(
            self._name,
            f"{nodes}, measured with {ranks.backend}: {gpu.name}",
            ranks.num_nodes,
            gpu,
            kernels,
            node,
            network,
            disturbance,
            host_driven=True if ranks.backend == "gloo" else None,
        )
        best = max(map(cluster.best_tflops, Direction))
        if best > gpu.peak_tflops:  # an asymptote may be above all that was seen
            cluster = replace(cluster, gpu=replace(gpu, peak_tflops=best))
            self._notes["gpu.peak_tflops"] = "the curve of a kernel at its limit, see below"
        self._notes["host_driven"] = "gloo: a thread of the host begins transfers and computes"
        self._note_links(meter)
        text = cluster_text(cluster, self._notes, self._head())
        # From the text, so that every rank has what readers of the file will have.
        text = ranks.of_first(lambda: text)
        return Profile(parse_cluster(text, self._name), text)

    def _head(self) -> list[str]:
        ranks, sizes = self._ranks, self._sizes
        host = platform.node() or "an unnamed machine"
        when = datetime.now(UTC).isoformat(timespec="seconds")
        threads = f", {torch.get_num_threads()} threads a rank" if not ranks.is_cuda else ""
        return [
            f"Measured by mesh-attention {__version__} profile on {host}, {when}: {ranks.size} "
            f"ranks, {ranks.per_node} a node, {ranks.backend}, torch {torch.__version__}{threads}.",
            f"Kernels: {sizes.dtype}, heads of {sizes.head_dim}, all ranks at once; times are "
            "averaged over ranks, those of transfers until the last is done. Every rate is what "
            "one direction of one rank (or NIC) carries.",
            "Fields: docs/clusters.md. It can be edited: every number is used as it stands here.",
        ]

    def _gpu(self) -> Gpu:
        ranks, notes = self._ranks, self._notes
        gap, memory, lines = merge_costs(ranks, self._sizes)
        self._tell()
        notes["gpu"] = [f"Passes over memory, {self._sizes.heads} heads: {line}." for line in lines]
        notes["gpu.memory_gb_per_second"] = "fitted to these, a merge and a sum together"
        notes["gpu.gap_microseconds"] = "fitted to these"
        peak = matrix_product_tflops(ranks, self._sizes)
        self._tell()
        notes["gpu.peak_tflops"] = "measured: products of matrices, all ranks at once"
        notes["gpu.memory_gib"] = "of the machine, divided by its ranks"
        notes["gpu.sms"] = "cores of the processor"
        name, sms = platform.processor() or platform.machine() or "CPU", os.cpu_count() or 1
        memory_gib = _machine_gib() / ranks.per_node
        if ranks.is_cuda:
            device = torch.cuda.get_device_properties(ranks.device)
            name, sms = device.name, device.multi_processor_count
            memory_gib = device.total_memory / 2**30
            notes["gpu.memory_gib"] = notes["gpu.sms"] = "as the driver says"
            if is_known_gpu(name):
                known = find_cluster(Machine(name))[0].gpu
                notes["gpu.peak_tflops"] = (
                    f"that of {known.name}; products of matrices reach {peak:.4g}"
                )
                peak = max(known.peak_tflops, peak)
            if gap > _USUAL_GAP:
                notes["gpu.gap_microseconds"] = (
                    f"assumed; merges alone, each launched by the host, take {gap * 1e6:.3g}"
                )
                gap = _USUAL_GAP
        rates = (short(peak), short(memory_gib), short(memory * 1e-9))
        return Gpu(name, *rates, sms, short(gap * 1e6))

    def _kernels(self, meter: LinkMeter, gap: float) -> dict[str, KernelRates]:
        every = tuple(range(self._ranks.size))
        small = done(meter.transfers.collective("all-gather", every, 64 << 10))
        kernels: dict[str, KernelRates] = {}
        for direction, by_name in self._chosen.items():
            for name, (kernel, kinds) in by_name.items():
                timer = KernelMeter(self._ranks, self._sizes, direction, kernel, kinds)
                rates, points, done_at = timer.measured(gap, small)
                earlier = kernels.get(name, KernelRates())
                kernels[name] = replace(earlier, **{direction.value: rates})
                self._notes |= pass_notes(name, direction, rates, points, done_at)
                self._tell()
        return kernels

    def _disturbance(self, meter: LinkMeter) -> Disturbance:
        """What calls of both passes and transfers lose beside each other: gathers over all ranks,
        and a ring of them."""
        ranks, part = self._ranks, meter.largest
        ring = [((ranks.rank + 1) % ranks.size, True), ((ranks.rank - 1) % ranks.size, False)]
        begins = {
            "gather": meter.transfers.collective("all-gather", tuple(range(ranks.size)), part),
            "rotation": meter.transfers.messages(ring, part),
        }
        losses: dict[tuple[str, Direction], Lost] = {}
        lasting = self._sizes.lasting
        for what, begin in begins.items():
            moving = ranks.seconds(done(begin), lasting=lasting)
            for direction in Direction:
                call, takes = self._short_call(direction, moving)
                losses[what, direction] = lost_beside(
                    ranks, call, begin, call_seconds=takes, lasting=3 * lasting
                )
                self._tell()
        self._notes["disturbance"] = [
            f"{what} beside {direction} calls: computation loses {lost.computation:.3g} of its "
            f"speed, the {what} {lost.communication:.3g}"
            for (what, direction), lost in losses.items()
        ]
        return Disturbance(
            short(fmean(lost.computation for lost in losses.values())),
            short(fmean(losses["gather", d].communication for d in Direction)),
            *(losses["rotation", d].communication for d in Direction),
        )

    def _short_call(
        self, direction: Direction, moving: float
    ) -> tuple[Callable[[], object], float]:
        """A kernel call that takes an eighth of a transfer or less, and its seconds."""
        kernel, kinds = next(
            (kernel, kinds)
            for kernel, kinds in self._chosen[direction].values()
            if CallKind.FULL in kinds
        )
        meter = KernelMeter(self._ranks, self._sizes, direction, kernel, kinds)
        rows = self._sizes.first
        while True:
            work = meter.call(CallKind.FULL, rows, rows, self._sizes.heads).work(0)
            takes = self._ranks.seconds(work, lasting=self._sizes.lasting / 2)
            if takes < moving / 8 or rows <= 32:
                return work, takes
            rows //= 2

    def _note_links(self, meter: LinkMeter) -> None:
        for place, samples in meter.samples.items():
            self._notes[place] = [str(sample) for sample in samples]
        ranks = self._ranks
        if ranks.num_nodes == 1:
            self._notes["network"] = "Not measured, as there is one node: as inside the node."
        elif ranks.per_node == 1:
            self._notes["node"] = "Not measured, as a node has one rank: as between nodes."
        else:
            self._notes["network.nics"] = (
                "by what a rank loses when all ranks of its node use the network"
            )
        self._notes["nodes"] = "as measured; more may be written here to simulate more"


def _machine_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):  # not on every system
        return 16.0
