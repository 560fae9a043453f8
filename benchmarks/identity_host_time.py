"""Host time that comparing calls adds to a warm call over NCCL: at most 30 us are wanted.

    PYTHONPATH=src python benchmarks/identity_host_time.py --json result.json

Timed on the host, in calls that never wait for the device; medians in microseconds.

First whole passes of two NCCL ranks on one GPU (torch's own NCCL takes them for two nodes): the
comparison at the begin of a pass, what settles its results, and the pass, forward and backward,
eager and as a CUDA graph. Two processes on one GPU hold up each other's CUDA calls, so the
comparison is then timed by itself, part by part, in rows of calls and one at a time after a pause:
in a process that has the GPU alone, as on a cluster, with a group of one rank, for which NCCL
launches nothing; and with two ranks under CUDA's multi-process service. An addition to one number
is timed beside it: hosts differ by a factor of three, and PyTorch's own calls with them. `--alone`
leaves out all but the one rank.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mps import MpsDaemon
from one_rank import Work, need_cuda
from script import provenance, save, script_parser
from sockets import free_port
from torch.multiprocessing.spawn import spawn

from mesh_attention import ContextParallel
from mesh_attention.runtime.agreement.guard import Guard
from mesh_attention.runtime.agreement.identity import (
    AgreedKind,
    DeviceComparison,
    Identity,
    current_stream,
)
from mesh_attention.runtime.agreement.watch import Watch

TOKENS, HEADS, HEAD_DIM = 4096, 16, 128
CALLS, WARM_CALLS, ROWS_OF_CALLS = 100, 10, 10
CALLS_IN_A_ROW = 50
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


def median_us(seconds: list[float]) -> float:
    return round(1e6 * statistics.median(seconds), 1)


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


def wait_for_all() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def measure_passes(rank: int, ranks: int, port: int, path: str) -> None:
    device = join_ranks(rank, ranks, port)
    rows = []
    methods = {name: getattr(Guard, name) for name in ("begin", "settle")}
    for graph in (False, True):
        times: Times = {}
        for name, function in methods.items():
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
            for number in range(CALLS + WARM_CALLS):
                wait_for_all()
                if number == WARM_CALLS:
                    times.clear()
                out = timed("forward pass", cp.attention, times)(q, k, v)
                assert isinstance(out, torch.Tensor)
                torch.cuda.synchronize()
                timed("backward pass", torch.autograd.grad, times)(out, (q, k, v), out)
            cp.check()
        row: dict[str, Any] = {"cuda_graph": graph}
        for at, direction in enumerate(("forward", "backward")):
            row[f"{direction} pass"] = median_us(times[f"{direction} pass"])
            for name in methods:
                row[f"{direction} {name}"] = median_us(times[name][at::2])
        rows.append(row)
    if rank == 0:
        Path(path).write_text(json.dumps(rows))
    dist.destroy_process_group()


def parts_of(comparison: DeviceComparison, watch: Watch, device: torch.device) -> dict[str, Work]:
    identity = Identity(AgreedKind({"what": "a benchmark"}), "forward", 1)
    results = [torch.randn(1, TOKENS, HEADS, HEAD_DIM, device=device)]
    number = torch.zeros((), device=device)
    pair = torch.zeros(2, dtype=torch.int64, device=device)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    place = 0

    def begin() -> None:
        nonlocal place
        place += 1
        watch.begin(identity, place, LIMIT)

    def both() -> None:
        begin()
        watch.settle(results, place)

    return {
        "one addition": lambda: number.add_(1),
        "number of the call": lambda: identity.number,
        "all-reduce": lambda: comparison._backend.allreduce([pair], comparison._options),
        "event recorded": event.record,
        "event waited for": lambda: current_stream(device).wait_event(event),
        "begin": begin,
        "settle": lambda: watch.settle(results, place),
        "both": both,
    }


def measure_parts(rank: int, ranks: int, port: int, path: str) -> None:
    device = join_ranks(rank, ranks, port)
    group, stream = dist.new_group(range(ranks)), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    assert group is not None
    comparison = DeviceComparison(group, device, stream)
    watch = Watch(comparison, find_difference, find_fault)
    parts = {}
    for name, work in parts_of(comparison, watch, device).items():
        for _ in range(20):
            work()
        times: Times = {}
        for _ in range(ROWS_OF_CALLS):
            wait_for_all()
            begun = time.perf_counter()
            for _ in range(CALLS_IN_A_ROW):
                work()
            times.setdefault("in a row", []).append((time.perf_counter() - begun) / CALLS_IN_A_ROW)
        for _ in range(CALLS_IN_A_ROW):
            torch.cuda.synchronize()
            timed("after a pause", work, times)()
        parts[name] = {how: median_us(seconds) for how, seconds in times.items()}
    watch.stop()
    if rank == 0:
        Path(path).write_text(json.dumps(parts))
    dist.destroy_process_group()


def find_difference(place: int, identity: Identity) -> None:
    raise AssertionError("ranks of this benchmark make the same calls")


def find_fault(identity: Identity, timeout: timedelta, waited: float) -> bool:
    return False


def on_ranks(function: Callable[..., None], ranks: int) -> Any:
    """What rank 0 has written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        spawn(function, (ranks, free_port(), str(path)), ranks)  # type: ignore[no-untyped-call]
        return json.loads(path.read_text())


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--alone", action="store_true", help="one process on the GPU only")
    args = parser.parse_args()
    need_cuda()
    rows = [] if args.alone else on_ranks(measure_passes, 2)
    parts = {"one process on the GPU": on_ranks(measure_parts, 1)}
    if not args.alone:
        daemon = MpsDaemon()
        print(f"multi-process service: {daemon.why_not or 'runs'}")
        os.environ.update(daemon.environment)
        try:
            parts["two ranks under MPS"] = on_ranks(measure_parts, 2)
        finally:
            daemon.close()
    for who, times in parts.items():
        print(f"{who}: in a row (after a pause), us")
        for name, us in times.items():
            print(f"  {name:20} {us['in a row']:7} ({us['after a pause']})")
    for row in rows:
        for direction in ("forward", "backward"):
            begin, settle = row[f"{direction} begin"], row[f"{direction} settle"]
            print(
                f"{'graph' if row['cuda_graph'] else 'eager'} {direction}: {begin + settle:.1f} us "
                f"({begin} begin, {settle} settle) of {row[f'{direction} pass']} us host time of "
                "the pass"
            )
    result = provenance() | {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tokens": TOKENS,
        "heads": HEADS,
        "microseconds": rows,
        **{f"microseconds, {who}": times for who, times in parts.items()},
    }
    save(args.json, result)


if __name__ == "__main__":
    main()
