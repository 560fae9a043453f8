"""Host time that comparing calls adds to a warm call over NCCL: at most 30 us are wanted.

    PYTHONPATH=src python benchmarks/identity_host_time.py --json result.json

The comparison at the begin of a pass, what settles its results, both, and their parts are timed on
the host, in rows of calls that never wait for the device, and one at a time after a pause; medians
in microseconds. First in a process that has the GPU alone, as on a cluster, with a group of one
rank, for which NCCL launches nothing. Then on two ranks that share the GPU under CUDA's
multi-process service, as two nodes on the loopback interface; without the service two processes
hold up each other's CUDA calls. An addition to one number is timed beside it: hosts differ by a
factor of three, and PyTorch's own calls with them. `--alone` leaves out the two ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from one_rank import Work, need_cuda
from script import provenance, save, script_parser
from sockets import MpsDaemon, free_port, socket_environment
from torch.multiprocessing.spawn import spawn

from mesh_attention.runtime.agreement.identity import (
    AgreedKind,
    DeviceComparison,
    Identity,
    current_stream,
)
from mesh_attention.runtime.agreement.watch import Watch

LIMIT = timedelta(seconds=60)


def join_ranks(rank: int, ranks: int, port: int) -> torch.device:
    """On one GPU, each as a node of its own."""
    os.environ.update(socket_environment(rank, ranks, "nccl", port))
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, timeout=LIMIT, device_id=device)
    return device


def parts_of(comparison: DeviceComparison, watch: Watch, device: torch.device) -> dict[str, Work]:
    identity = Identity(AgreedKind({"what": "a benchmark"}), "forward", 1)
    results = [torch.randn(1, 4096, 16, 128, device=device)]
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
        watch.comparison.settle(results, place)

    return {
        "one addition": lambda: number.add_(1),
        "number of the call": lambda: identity.number,
        "all-reduce": lambda: comparison._backend.allreduce([pair], comparison._options),
        "event recorded": event.record,
        "event waited for": lambda: current_stream(device).wait_event(event),
        "begin": begin,
        "settle": lambda: watch.comparison.settle(results, place),
        "both": both,
    }


def measure_parts(rank: int, ranks: int, port: int, path: str) -> None:
    device = join_ranks(rank, ranks, port)
    group = dist.new_group(range(ranks))
    assert group is not None
    comparison = DeviceComparison(group, device)
    watch = Watch(comparison, find_difference, find_fault)
    parts: dict[str, dict[str, float]] = {}
    for name, work in parts_of(comparison, watch, device).items():
        for _ in range(20):
            work()
        parts[name] = {}
        for how, repeats, calls in (("in a row", 10, 50), ("after a pause", 50, 1)):
            times = []
            for _ in range(repeats):
                torch.cuda.synchronize()
                if calls > 1:
                    dist.barrier()
                    torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(calls):
                    work()
                times.append((time.perf_counter() - begun) / calls)
            parts[name][how] = round(1e6 * statistics.median(times), 1)
    watch.stop()
    if rank == 0:
        Path(path).write_text(json.dumps(parts))
    dist.destroy_process_group()


def find_difference(place: int, identity: Identity) -> None:
    raise AssertionError("ranks of this benchmark make the same calls")


def find_fault(identity: Identity, timeout: timedelta, waited: float) -> bool:
    return False


def parts_on(ranks: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parts.json"
        spawn(measure_parts, (ranks, free_port(), str(path)), ranks)  # type: ignore[no-untyped-call]
        parts: dict[str, dict[str, float]] = json.loads(path.read_text())
    return parts


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--alone", action="store_true", help="one process on the GPU only")
    args = parser.parse_args()
    need_cuda()
    results = {"one process on the GPU": parts_on(1)}
    if not args.alone:
        daemon = MpsDaemon()
        print(f"multi-process service: {daemon.why_not or 'runs'}")
        os.environ.update(daemon.environment)
        try:
            results["two ranks under MPS"] = parts_on(2)
        finally:
            daemon.close()
    for who, parts in results.items():
        print(f"{who}: in a row (after a pause), us")
        for name, us in parts.items():
            print(f"  {name:20} {us['in a row']:7} ({us['after a pause']})")
    result = provenance() | {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **{f"microseconds, {who}": parts for who, parts in results.items()},
    }
    save(args.json, result)


if __name__ == "__main__":
    main()
