"""Host time of a warm `cp.attention`: what a call costs before and besides its work.

    python benchmarks/warm_call_time.py --backend gloo --ranks 4 --json result.json
    python benchmarks/warm_call_time.py --backend nccl --ranks 8 --against before=OTHER/src

Small tensors (256 tokens, 8 heads of 16), a mesh that is not cut, so that work hardly counts. Over
NCCL all ranks share one GPU; the device is idle when a call begins, and the time is that until the
call returns to its caller. Over gloo the call includes its messages, and processes share the cores.
`--against NAME=PATH` measures another copy of the library in the same run, in turns; only public
names are used, so any version will do. Medians over calls, then the mean over ranks, in
microseconds; of the rounds the lowest is shown and all are written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mps import MpsDaemon
from sockets import socket_environment

TOKENS, HEADS, DIM = 256, 8, 16


def measure(args: argparse.Namespace) -> dict[str, float]:
    """On one rank."""
    import torch
    import torch.distributed as dist

    from mesh_attention import ContextParallel

    torch.set_num_threads(1)
    nccl = args.backend == "nccl"
    device = torch.device("cuda", 0) if nccl else torch.device("cpu")
    dtype = torch.bfloat16 if nccl else torch.float32
    dist.init_process_group(args.backend)
    how: dict[str, Any] = {"method": "ulysses"}
    if args.ranks > 3:
        how = {"method": "mesh", "tile": (args.ranks // 2, 2), "chunks": (1, 1)}
    cp = ContextParallel(
        None,
        seq_len=TOKENS,
        num_heads=HEADS,
        head_dim=DIM,
        causal=False,
        **how,
    )
    shape = (1, TOKENS // args.ranks, HEADS, DIM)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def wait() -> None:
        if nccl:
            torch.cuda.synchronize()
        dist.barrier()
        if nccl:
            torch.cuda.synchronize()

    def forward() -> float:
        begun = time.perf_counter()
        cp.attention(q, k, v)
        return time.perf_counter() - begun

    def both() -> float:
        begun = time.perf_counter()
        out = cp.attention(*leaves)
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, leaves, out)
        return time.perf_counter() - begun

    seconds: dict[str, float] = {}
    for name, call in (("forward", forward), ("forward and backward", both)):
        for _ in range(20):
            call()
        times = []
        for _ in range(args.calls):
            wait()
            times.append(call())
        seconds[name] = statistics.median(times) * 1e6
    wait()
    cp.close()
    dist.destroy_process_group()
    return seconds


def run_ranks(args: argparse.Namespace, source: str, mps: dict[str, str]) -> dict[str, float]:
    """The mean over all ranks of their medians, with the library at `source`."""
    port = 20000 + os.getpid() % 20000 + int(time.monotonic() * 10) % 1000
    folder = str(Path(__file__).parent)
    command = [sys.executable, __file__, "--rank", "--backend", args.backend]
    command += ["--ranks", str(args.ranks), "--calls", str(args.calls)]
    with tempfile.TemporaryDirectory():
        started = []
        for rank in range(args.ranks):
            own = socket_environment(rank, args.ranks, args.backend, port) | mps
            path = os.pathsep.join([source, folder])
            environment = {**os.environ, **own, "PYTHONPATH": path}
            started.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            )
        said = [process.communicate(timeout=300)[0] for process in started]
    assert all(process.returncode == 0 for process in started), said
    by_rank = [json.loads(text.splitlines()[-1]) for text in said]
    return {name: statistics.mean(one[name] for one in by_rank) for name in by_rank[0]}


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", metavar="NAME=PATH", help="another copy of the library")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        print(json.dumps(measure(args)))
        return
    sources = {"now": str(Path(__file__).parent.parent / "src")}
    if args.against:
        name, _, path = args.against.partition("=")
        sources[name] = str(Path(path).resolve())
    mps = MpsDaemon() if args.backend == "nccl" else None
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    try:
        for _ in range(args.rounds):
            for name, source in sources.items():
                rounds[name].append(run_ranks(args, source, mps.environment if mps else {}))
    finally:
        if mps is not None:
            mps.close()
    best = {
        name: {what: min(one[what] for one in several) for what in several[0]}
        for name, several in rounds.items()
    }
    for name, microseconds in best.items():
        print(name, ", ".join(f"{what} {us:.0f} us" for what, us in microseconds.items()))
    if args.json is not None:
        result: dict[str, Any] = {
            "backend": args.backend,
            "ranks": args.ranks,
            "calls": args.calls,
            "microseconds": best,
            "rounds": rounds,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
