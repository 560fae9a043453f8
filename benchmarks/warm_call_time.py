"""Host time of a warm `cp.attention`: what a call costs before and besides its work.

    python benchmarks/warm_call_time.py --backend gloo --ranks 4 --json result.json
    python benchmarks/warm_call_time.py --backend nccl --ranks 8 --against before=OTHER/src

Small tensors (256 tokens, 8 heads of 16), a mesh that is not cut, so that work hardly counts. Over
NCCL all ranks share one GPU; the device is idle when a call begins, and the time is that until the
call returns to its caller. Over gloo the call includes its messages, and processes share the cores.
The CPU time of the caller's thread leaves out all waiting. `--against NAME=PATH` measures another
copy of the library in the same run, in turns; only public
names are used, so any version will do. Medians over calls, then the mean over ranks, in
microseconds; of the rounds the lowest is shown and all are written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from script import provenance, save, script_parser
from sockets import Sockets

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
    options: dict[str, Any] = {"seq_len": TOKENS, "num_heads": HEADS, "head_dim": DIM}
    options |= {"method": "ulysses"}
    if args.ranks > 3:
        options |= {"method": "mesh", "tile": (args.ranks // 2, 2), "chunks": (1, 1)}
    cp = ContextParallel(None, causal=False, **options)
    shape = (1, TOKENS // args.ranks, HEADS, DIM)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def wait() -> None:
        if nccl:
            torch.cuda.synchronize()
        dist.barrier()
        if nccl:
            torch.cuda.synchronize()

    def forward() -> None:
        cp.attention(q, k, v)

    def both() -> None:
        out = cp.attention(*leaves)
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, leaves, out)

    seconds: dict[str, float] = {}
    for name, call in (("forward", forward), ("forward and backward", both)):
        for _ in range(20):
            call()
        walls, threads = [], []
        for _ in range(args.calls):
            wait()
            wall, thread = time.perf_counter(), time.thread_time()
            call()
            walls.append(time.perf_counter() - wall)
            threads.append(time.thread_time() - thread)
        seconds[name] = statistics.median(walls) * 1e6
        seconds[f"{name}, CPU of the caller's thread"] = statistics.median(threads) * 1e6
    wait()
    cp.close()
    dist.destroy_process_group()
    return seconds


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", metavar="NAME=PATH", help="another copy of the library")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        print(json.dumps(measure(args)))
        return
    folder = Path(__file__).parent
    sources = {"now": str(folder.parent / "src")}
    if args.against:
        name, _, path = args.against.partition("=")
        sources[name] = str(Path(path).resolve())
    command = [sys.executable, __file__, "--rank", "--backend", args.backend]
    command += ["--ranks", str(args.ranks), "--calls", str(args.calls)]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    with Sockets(args.ranks, args.backend) as ranks:
        for _ in range(args.rounds):
            for name, source in sources.items():
                os.environ["PYTHONPATH"] = os.pathsep.join([source, str(folder)])
                outputs = ranks.run(command, seconds=300)
                by_rank = [json.loads(output.splitlines()[-1]) for output in outputs]
                rounds[name].append(
                    {what: statistics.mean(us[what] for us in by_rank) for what in by_rank[0]}
                )
    best = {
        name: {what: min(us[what] for us in several) for what in several[0]}
        for name, several in rounds.items()
    }
    for name, microseconds in best.items():
        print(name, ", ".join(f"{what} {us:.0f} us" for what, us in microseconds.items()))
    result = provenance() | {
        "backend": args.backend,
        "ranks": args.ranks,
        "calls": args.calls,
        "microseconds": best,
        "rounds": rounds,
    }
    save(args.json, result)


if __name__ == "__main__":
    main()
