"""Measures a kernel on the GPU at hand and prints its sections of a cluster's file.

    python benchmarks/kernel_curves.py --kernel cudnn_ranges
    python benchmarks/kernel_curves.py --kernel flash_attn3 --pass forward --lasting 1

`mesh-attention profile` measures the kernels that would be chosen; this measures any kernel by its
name, in the same way: calls without a mask and causal ones at several sizes, the host's time for a
call, and whether a transfer can begin in the middle of a long call, with a margin of SMs where
calls heed it. The transfer is a stand-in of a replay on 16 SMs. Short measurements flatter a GPU:
with `--lasting 1` long calls follow each other until the power limit has brought the clock down,
by a tenth on an H200. The shipped facts were measured so. The last line has all points as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache

import torch
import torch.distributed as dist
from script import host, provenance, save, script_parser

from mesh_attention.kernels.registry import choose, kernel_names
from mesh_attention.machine.kernel_facts import PassRates
from mesh_attention.measure.curve_fit import Point, add_table, comment, pass_notes
from mesh_attention.measure.kernel_rates import MARGIN, KernelMeter, Sizes, request
from mesh_attention.measure.ranks import ranks_of_group
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import CallKind
from mesh_attention.runtime.transport.interface import Start


def pass_section(
    name: str,
    direction: Direction,
    rates: PassRates,
    points: Mapping[CallKind, Sequence[Point]],
    *,
    source: str,
    done_at: str,
) -> str:
    """The sections of a cluster's file about one pass of a kernel. `source` says where it was
    measured."""
    lines: list[str] = []
    table = {"kernels": {name: {direction.value: asdict(rates)}}}
    add_table(lines, table, (), pass_notes(name, direction, rates, points, done_at))
    return "\n".join([comment(source), *lines])


@cache
def start_of_transfer() -> Start:
    from replay.hold import CudaHolder  # Triton comes with CUDA builds only

    device = torch.device("cuda", torch.cuda.current_device())
    return CudaHolder(device, MARGIN).prepare((), 0.0)


def stand_in() -> None:
    """A transfer of no bytes on 16 SMs, which the current stream waits for."""
    start_of_transfer()(()).wait()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--kernel", required=True, metavar="NAME", help=", ".join(kernel_names()))
    parser.add_argument("--pass", dest="direction", choices=[*Direction], help="default: both")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--lasting", type=float, default=0.2, help="seconds of a measurement")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    ranks = ranks_of_group(None, device)
    sizes = Sizes.usual(device, heads=args.heads, head_dim=args.head_dim)
    sizes = replace(sizes, lasting=args.lasting)
    asked = request(ranks, sizes, Direction.FORWARD, CallKind.FULL)
    kernel = choose(asked, force=args.kernel).kernel
    machine = torch.cuda.get_device_name(device) if ranks.is_cuda else host()
    result = provenance() | {"machine": machine, "kernel": kernel.name, "torch": torch.__version__}
    source = f"measured on {machine}, {result['date'][:10]}"
    for direction in Direction if args.direction is None else [Direction(args.direction)]:
        kinds = {
            kind
            for kind in CallKind
            if kernel.refuses(request(ranks, sizes, direction, kind)) is None
        }
        if not kinds or (direction is Direction.BACKWARD and kernel.backward_needs is None):
            print(f"# {kernel.name} has no {direction} pass here")
            continue
        meter = KernelMeter(ranks, sizes, direction, kernel, kinds)
        rates, points, done_at = meter.measured(0.0, stand_in)
        print(pass_section(kernel.name, direction, rates, points, source=source, done_at=done_at))
        result[direction.value] = {
            "rates": asdict(rates),
            "done_at": done_at,
            "points": {kind: [asdict(point) for point in points[kind]] for kind in points},
        }
    dist.destroy_process_group()
    save(args.json, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
