"""What the comparison of calls over NCCL is made of, in host time: one rank, and two under MPS.

    PYTHONPATH=src python benchmarks/identity_parts.py --json result.json

Each part is timed in rows of calls that never wait for the device, and one at a time after it was
idle; medians, in microseconds. For a group of one rank NCCL launches nothing. The two ranks share
a GPU under CUDA's multi-process service, as two nodes on the loopback interface.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from device_times import need_cuda
from identity_host_time import LIMIT, Nobody, join_ranks
from mps import MpsDaemon
from provenance import taken
from torch.multiprocessing.spawn import spawn

from mesh_attention.runtime.agreement.identity import (
    AgreedKind,
    DeviceComparison,
    Identity,
    current_stream,
)
from mesh_attention.runtime.agreement.watch import Watch

ROWS, CALLS = 10, 50
Parts = dict[str, Callable[[], object]]


def parts_of(comparison: DeviceComparison, watch: Watch, device: torch.device) -> Parts:
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


def measure(rank: int, ranks: int, port: int, path: str) -> None:
    device = join_ranks(rank, ranks, port)
    group, stream = dist.new_group(range(ranks)), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    assert group is not None
    comparison, nobody = DeviceComparison(group, device, stream), Nobody()
    watch = Watch(comparison, nobody.find_difference, nobody.find_fault)
    found = {}
    for name, work in parts_of(comparison, watch, device).items():
        for _ in range(20):
            work()
        rows, alone = [], []
        for _ in range(ROWS):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(CALLS):
                work()
            rows.append((time.perf_counter() - begun) / CALLS)
        for _ in range(CALLS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            work()
            alone.append(time.perf_counter() - begun)
        found[name] = {
            "in a row": round(1e6 * statistics.median(rows), 1),
            "after a pause": round(1e6 * statistics.median(alone), 1),
        }
    watch.stop()
    if rank == 0:
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--port", type=int, default=29675)
    given = parser.parse_args()
    need_cuda()
    path = Path(given.json or "identity_parts.json").with_suffix(".part")
    report = taken() | {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    daemon = MpsDaemon()
    print(f"multi-process service: {daemon.why_not or 'runs'}")
    os.environ.update(daemon.environment)
    try:
        for ranks in (1, 2):
            spawn(measure, (ranks, given.port + ranks, str(path)), ranks)  # type: ignore[no-untyped-call]
            report[f"microseconds, ranks {ranks}"] = found = json.loads(path.read_text())
            print(f"ranks {ranks}: in a row (after a pause), us")
            for name, us in found.items():
                print(f"  {name:20} {us['in a row']:7} ({us['after a pause']})")
    finally:
        path.unlink(missing_ok=True)
        daemon.close()
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
