"""A whole training step of one rank on the GPU at hand, beside its plan (docs/replay.md).

    python benchmarks/replay_step.py --model qwen3-8b --tokens 1M --ranks 8 --json result.json

A few layers run (`--layers`); the rest are counted by repetition of those in the middle, which is
said in the result. Their memory is counted by the policy: block inputs and results of attention of
layers that did not run are added where they would stay on the GPU. `replay/step.py` says what is
real and what stands in.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from one_rank import need_cuda
from script import provenance, save, script_parser

from mesh_attention import ContextParallel
from mesh_attention.cli.values import size
from mesh_attention.machine.load import load_cluster
from mesh_attention.step.costs import Keeps
from mesh_attention.step.splits import PlannedStep, plan_step

GB = 1e9


def chosen(
    steps: tuple[PlannedStep, ...], context: int, keeps: str | None, tile: int | None
) -> PlannedStep:
    """The best of a split, or that with a policy."""
    for step in steps:
        fits_keeps = keeps is None or step.policy.keeps == keeps
        if step.context == context and fits_keeps and tile in (None, step.policy.tile_tokens):
            return step
    raise SystemExit(f"no policy {keeps!r} with tiles of {tile} for {context} ranks")


def whole(measured: Any, step: PlannedStep) -> dict[str, float]:
    """The numbers of a step of all layers: those that did not run are like those in the middle."""
    layers = step.asked.model.layers
    forward = statistics.mean(measured.forward[1:])
    backward = statistics.mean(measured.backward[:-1])
    ran = len(measured.forward)
    others = (layers - ran) * (forward + backward)
    policy, memory = step.policy, step.memory
    missing = 0.0
    if policy.keeps is not Keeps.HOST:  # they stay on the GPU
        missing = (layers - ran) / layers * sum(memory[5:8])
    peak = measured.memory["peak_allocated_bytes"] + missing
    return {
        "seconds": measured.total + others,
        "forward_seconds_a_layer": forward,
        "backward_seconds_a_layer": backward,
        "peak_allocated_bytes": peak,
        "host_bytes": measured.memory["host_bytes"] * layers / ran,
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--tokens", type=size, default=1 << 20)
    parser.add_argument("--ranks", type=size, default=8)
    parser.add_argument("--cluster", default="hgx-h100")
    parser.add_argument("--layers", type=size, default=4, help="that run; default 4")
    parser.add_argument("--keeps", choices=[str(k) for k in Keeps], help="default: the best")
    parser.add_argument("--tile", type=int, help="tokens of a tile of the MLP, 0: none")
    parser.add_argument(
        "--steps", type=int, default=1, help="timed, after one that is not; 0: the first one is"
    )
    parser.add_argument("--cap-gb", type=float, default=80.0, help="memory of the GPU that it has")
    args = parser.parse_args()
    need_cuda()
    from replay.hold import Mode
    from replay.measure import with_kernels_here
    from replay.step import ReplayedStep

    there = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap_gb * GB / there))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    dist.init_process_group("gloo", rank=0, world_size=1)
    cluster = with_kernels_here(load_cluster(args.cluster))
    plan = plan_step(args.model, args.tokens, args.ranks, cluster=cluster)
    step = chosen(plan.steps, args.ranks, args.keeps, args.tile)
    print(f"{step.policy.text}: planned {step.seconds:.1f} s, {step.memory.peak[1] / GB:.1f} GB")
    with ContextParallel(None, causal=True) as cp:
        replayed = ReplayedStep(step, cluster, args.layers, cp)
        replayed.set_mode(Mode.HURRY if args.steps else Mode.KEEP_TIME)
        first = replayed.run()  # compiles kernels
        replayed.set_mode(Mode.KEEP_TIME)
        measured = [replayed.run() for _ in range(args.steps)] or [first]
    results = [whole(m, step) for m in measured]
    for m, total in zip(measured, results, strict=True):
        print(asdict(m))
        print({name: round(x, 3) for name, x in total.items()})
        print(
            f"replayed {total['seconds']:.1f} s, {total['peak_allocated_bytes'] / GB:.1f} GB; "
            f"planned is {step.seconds / total['seconds']:.3f} of the time, "
            f"{(step.memory.peak[1]) / total['peak_allocated_bytes']:.3f} of the memory"
        )
    result = provenance() | {
        "machine": torch.cuda.get_device_name(0),
        "compute": "measured",
        "network": "modelled",
        "layers_that_ran": args.layers,
        "warm": bool(args.steps),
        "kernels": replayed.attention.kernels,
        "rank": replayed.attention.rank,
        "planned": step.to_json(),
        "measured": [asdict(m) for m in measured],
        "whole_step": results,
    }
    save(args.json, result)


if __name__ == "__main__":
    main()
