"""Host time that comparing calls adds to a warm call over NCCL: at most 30 us are wanted.

    PYTHONPATH=src python benchmarks/identity_host_time.py --json result.json

Two NCCL ranks on one GPU (torch's own NCCL takes them for two nodes). Timed on the host, in calls
that never wait for the device: the comparison at the begin of a pass and what settles its results,
both, and the whole pass; medians over warm calls, forward and backward, eager and as a CUDA graph.

Two processes on one GPU hold up each other's CUDA calls, so the comparison is also timed by itself
in a process that has the GPU alone, as on a cluster, with a group of one rank: all that a call does
on the host for it is the same there, but for the launch of NCCL's kernel, which one rank does not
need (`identity_parts.py` has two ranks under MPS). An addition to one number is timed beside it:
hosts differ by a factor of three, and PyTorch's own calls with them. `--alone` leaves out all but
this part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device_times import need_cuda
from provenance import taken
from torch.multiprocessing.spawn import spawn

from mesh_attention import ContextParallel
from mesh_attention.runtime.agreement.guard import Guard
from mesh_attention.runtime.agreement.identity import AgreedKind, DeviceComparison, Identity
from mesh_attention.runtime.agreement.watch import Watch

RANKS, TOKENS, HEADS, HEAD_DIM = 2, 4096, 16, 128
CALLS = 100
LIMIT = timedelta(seconds=60)
Times = dict[str, list[float]]


def timed(name: str, function: Callable[..., Any], times: Times) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            times.setdefault(name, []).append(time.perf_counter() - begun)

    return call


def join_ranks(rank: int, ranks: int, port: int) -> torch.device:
    """On one GPU, each as a node of its own."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        NCCL_HOSTID=f"node{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
    )
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, timeout=LIMIT, device_id=device)
    return device


def measure(rank: int, port: int, path: str) -> None:
    device = join_ranks(rank, RANKS, port)
    rows = []
    guard = {name: getattr(Guard, name) for name in ("begin", "settle")}
    for graph in (False, True):
        times: Times = {}
        for name, function in guard.items():
            setattr(Guard, name, timed(name, function, times))
        with ContextParallel(
            None,
            seq_len=TOKENS,
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            causal=True,
            method="mesh",
            transport="distributed",
            cuda_graph=graph,
        ) as cp:
            shape = (1, cp.plan.q_layout.slots, HEADS, HEAD_DIM)
            q, k, v = (
                torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            for number in range(CALLS + 10):
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda.synchronize()
                if number == 10:
                    times.clear()
                out = timed("forward pass", cp.attention, times)(q, k, v)
                assert isinstance(out, torch.Tensor)
                torch.cuda.synchronize()
                begun = time.perf_counter()
                torch.autograd.grad(out, (q, k, v), out)
                times.setdefault("backward pass", []).append(time.perf_counter() - begun)
            cp.check()
        half = {name: times[name] for name in ("begin", "settle")}
        medians = {
            "forward pass": statistics.median(times["forward pass"]),
            "backward pass": statistics.median(times["backward pass"]),
        }
        for at, direction in enumerate(("forward", "backward")):
            for name, found in half.items():
                medians[f"{direction} {name}"] = statistics.median(found[at::2])
        rows.append(
            {"cuda_graph": graph} | {name: round(1e6 * x, 1) for name, x in medians.items()}
        )
    if rank == 0:
        Path(path).write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure_alone(_rank: int, port: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    group = dist.new_group([0])
    comparison = DeviceComparison(group, device, torch.cuda.Stream())  # type: ignore[no-untyped-call]
    nobody = Nobody()
    watch = Watch(comparison, nobody.find_difference, nobody.find_fault)
    identity = Identity(AgreedKind({"what": "a benchmark"}), "forward", 1)
    results = [torch.randn(1, TOKENS, HEADS, HEAD_DIM, device=device) for _ in range(3)]
    found: Times = {}
    number = torch.zeros((), device=device)
    for place in range(1, CALLS + 21):
        torch.cuda.synchronize()
        timed("one addition", number.add_, found)(1)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        watch.begin(identity, place, timedelta(seconds=60))
        middle = time.perf_counter()
        watch.settle(results[: 1 + 2 * (place % 2)], place)  # as forward and backward in turn
        ended = time.perf_counter()
        if place > 20:
            found.setdefault("begin", []).append(middle - begun)
            found.setdefault("settle", []).append(ended - middle)
            found.setdefault("both", []).append(ended - begun)
    watch.stop()
    medians = {name: round(1e6 * statistics.median(x), 1) for name, x in found.items()}
    Path(path).write_text(json.dumps(medians))
    dist.destroy_process_group()


class Nobody:
    """Who would be told of faults."""

    def find_difference(self, place: int, identity: Identity) -> None:
        raise AssertionError("one rank differs from itself")

    def find_fault(self, identity: Identity, timeout: timedelta, waited: float) -> bool:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--port", type=int, default=29655)
    parser.add_argument("--alone", action="store_true", help="one process on the GPU only")
    given = parser.parse_args()
    need_cuda()
    rows_path = Path(given.json or "identity_host_time.json").with_suffix(".rows")
    rows = []
    if not given.alone:
        spawn(measure, (given.port, str(rows_path)), RANKS)  # type: ignore[no-untyped-call]
        rows = json.loads(rows_path.read_text())
    spawn(measure_alone, (given.port + 1, str(rows_path)), 1)  # type: ignore[no-untyped-call]
    alone = json.loads(rows_path.read_text())
    rows_path.unlink()
    result = taken() | {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ranks": RANKS,
        "tokens": TOKENS,
        "heads": HEADS,
        "microseconds": rows,
        "microseconds, one process on the GPU": alone,
    }
    print(
        f"one process on the GPU: {alone['both']} us ({alone['begin']} begin, "
        f"{alone['settle']} settle), one addition {alone['one addition']} us"
    )
    for row in rows:
        for direction in ("forward", "backward"):
            both = row[f"{direction} begin"] + row[f"{direction} settle"]
            print(
                f"{'graph' if row['cuda_graph'] else 'eager'} {direction}: {both:.1f} us "
                f"({row[f'{direction} begin']} begin, {row[f'{direction} settle']} settle) "
                f"of {row[f'{direction} pass']} us host time of the pass"
            )
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
