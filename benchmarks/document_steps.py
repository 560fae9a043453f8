"""What one rank does in `documents_over_links.py`: steps with new documents, in several ways.

A step is all that a new batch costs: documents, plan, cutting the tensors, forward and backward.
Every way is compared with float64 on two batches first; a wrong one ends the run. What a rank has
measured is its stdout, as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from document_ways import (
    TORCH,
    LibraryWay,
    Sizes,
    Starts,
    Tensors,
    TorchWay,
    Way,
    what_flex_attention_says,
)
from namespaces import wire_bytes
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import register_kernel
from mesh_attention.kernels.blockwise import Blockwise

LIMIT = 2e-6  # relative error in float32


class SmallBlocks(Blockwise):
    """Skips what is hidden in blocks as small as a GPU's kernels have. With the library's own, made
    for few large calls, a ring would compute nearly all pairs, and not its links would be
    measured."""

    name = "small_blocks"

    def __init__(self) -> None:
        super().__init__(query_block=128, key_block=128)


@dataclass
class Step:
    """`plan` until the call could begin, `seconds` all of it; `cpu`: of all threads of the process,
    `plan_cpu` of planning alone. Bytes: of the tensors that it handed to the transport (None where
    that is not ours), and of all that its link carried."""

    way: str
    batch: int
    seconds: float
    plan: float
    plan_cpu: float
    cpu: float
    sent: int | None
    wire_received: int
    wire_sent: int


def truth(starts: Starts, whole: Tensors) -> list[Tensor]:
    """Out and gradients in float64, document after document."""
    *leaves, grad = (x.double() for x in whole)
    leaves = [x.requires_grad_() for x in leaves]
    outs = []
    for a, b in pairwise(starts):
        q, k, v = (x[:, a:b].transpose(1, 2) for x in leaves)
        outs.append(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    out = torch.cat(outs, 2).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def gate(way: Way, packs: Sequence[Starts], whole: Tensors, folder: Path) -> tuple[float, str]:
    """The largest relative error on this rank, and what was chosen; raises if it is too large."""
    worst, reason = 0.0, ""
    for pack, batch in zip(packs, way.batches(packs), strict=True):
        wanted = torch.load(folder / f"{hash(pack)}.pt")
        for a, b in zip(way.run(batch, whole), wanted, strict=True):
            mine = way.cut(batch, b)
            worst = max(worst, float((a.double() - mine).norm() / mine.norm()))
        reason = way.reason(batch)
    if not worst < LIMIT:
        raise SystemExit(f"wrong: {way.name} differs from float64 by {worst:.1e}, relatively")
    return worst, reason


def measure(way: Way, first: int, packs: Sequence[Starts], whole: Tensors) -> list[Step]:
    found = []
    batches = way.batches(packs)
    for number in range(first, first + len(packs)):
        dist.barrier()
        sent, wire, cpu = way.sent(), wire_bytes(), time.process_time()
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        batch = next(batches)
        planned, planned_cpu = time.perf_counter(), time.thread_time()
        way.run(batch, whole)
        ended, ended_cpu, after = time.perf_counter(), time.process_time(), way.sent()
        dist.barrier()  # until then some bytes are in a queue of the link
        wire_after = wire_bytes()
        found.append(
            Step(
                *(way.name, number, ended - begun, planned - begun, planned_cpu - begun_cpu),
                cpu=ended_cpu - cpu,
                sent=None if after is None or sent is None else after - sent,
                wire_received=wire_after[0] - wire[0],
                wire_sent=wire_after[1] - wire[1],
            )
        )
    batches.close()
    return found


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("given", type=json.loads)
    given: dict[str, Any] = parser.parse_args().given
    sizes, folder = Sizes(**given["sizes"]), Path(given["folder"])
    rounds, steps = given["rounds"], given["steps"]
    torch.set_num_threads(1)
    register_kernel(SmallBlocks(), before=Blockwise.name)
    dist.init_process_group("gloo")
    whole = sizes.tensors()
    checked = [sizes.starts(-1), sizes.starts(-2)]
    if dist.get_rank() == 0:
        say("float64 truth of two batches")
        for pack in checked:
            torch.save(truth(pack, whole), folder / f"{hash(pack)}.pt")
    dist.barrier()
    ways = [
        TorchWay(name) if name == TORCH else LibraryWay(name, sizes, given["ranks_per_node"])
        for name in given["ways"]
    ]
    errors, reasons = {}, {}
    for way in ways:
        errors[way.name], reasons[way.name] = gate(way, checked, whole, folder)
        say(f"exact to {errors[way.name]:.0e}: {way.name}  {reasons[way.name]}")
    flex = what_flex_attention_says()
    found: list[Step] = []
    for turn in range(rounds):
        packs = [sizes.starts(number) for number in range(turn * steps, (turn + 1) * steps)]
        for way in ways:
            mine = measure(way, turn * steps, packs, whole)
            typical = sorted(step.seconds for step in mine)[steps // 2]
            say(f"round {turn + 1} of {rounds}  {way.name}: about {typical * 1e3:.0f} ms a step")
            found += mine
    dist.barrier()
    told = {"errors": errors, "reasons": reasons, "flex": flex}
    print(json.dumps(told | {"steps": [asdict(step) for step in found]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
