"""What one rank does in `predicted_against_measured.py`: steps of several plans, in turns.

Each plan is compared with float64 first; a wrong one ends the run. Then all plans take turns, round
by round, so that other load on the machine meets them alike. Forward and backward passes begin on
all ranks at once. What a rank has measured is its stdout, as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from namespaces import wire_bytes
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.text import parse_plan

LIMIT = 2e-6  # relative error in float32


@dataclass(frozen=True)
class Step:
    """Of one rank: seconds of each pass, CPU seconds of all its threads in both, and the bytes that
    its link sent, with the headers of packets."""

    way: str
    forward: float
    backward: float
    cpu: float
    wire_sent: int


class Way:
    """A plan on this rank, with its shards of tensors that are the same on all ranks."""

    def __init__(self, name: str, plan: Plan, whole: list[Tensor]) -> None:
        self.name = name
        self._cp = ContextParallel(plan=plan)
        *leaves, self._grad = (self._cp.shard(x, 1) for x in whole)
        self._leaves = [x.requires_grad_() for x in leaves]

    def step(self) -> tuple[Step, list[Tensor]]:
        dist.barrier()
        wire, cpu, begun = wire_bytes()[1], time.process_time(), time.perf_counter()
        out = self._cp.attention(*self._leaves)
        assert isinstance(out, Tensor)
        forward = time.perf_counter() - begun
        dist.barrier()
        begun = time.perf_counter()
        gradients = torch.autograd.grad(out, self._leaves, self._grad)
        backward = time.perf_counter() - begun
        cpu = time.process_time() - cpu
        dist.barrier()  # until then some bytes are in a queue of the link
        step = Step(self.name, forward, backward, cpu, wire_bytes()[1] - wire)
        return step, [out.detach(), *gradients]

    def error(self, wanted: list[Tensor]) -> float:
        """The largest relative difference of the output and the gradients of this rank."""
        found = self.step()[1]
        mine = [self._cp.shard(x, 1) for x in wanted]
        return max(
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, mine, strict=True)
        )


def tensors(problem: Problem) -> list[Tensor]:
    """q, k, v and the gradient of out: (1, tokens, heads, head_dim), the same on all ranks."""
    chance = torch.Generator().manual_seed(0)
    heads = (problem.num_heads, problem.kv_heads, problem.kv_heads, problem.num_heads)
    shapes = [(1, problem.q_tokens, number, problem.head_dim) for number in heads]
    return [torch.randn(shape, generator=chance) for shape in shapes]


def truth(whole: list[Tensor]) -> list[Tensor]:
    """Out and gradients in float64."""
    *leaves, grad = (x.double() for x in whole)
    leaves = [x.requires_grad_() for x in leaves]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where plans.json lies, plans by name")
    parser.add_argument("rounds", type=int)
    given = parser.parse_args()
    texts: dict[str, str] = json.loads((given.folder / "plans.json").read_text())
    plans = {name: parse_plan(text) for name, text in texts.items()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole = tensors(next(iter(plans.values())).problem)
    if dist.get_rank() == 0:
        torch.save(truth(whole), given.folder / "truth.pt")
    dist.barrier()
    wanted = torch.load(given.folder / "truth.pt")
    ways = [Way(name, plan, whole) for name, plan in plans.items()]
    errors = {}
    for way in ways:
        errors[way.name] = way.error(wanted)
        if not errors[way.name] < LIMIT:
            raise SystemExit(f"wrong: {way.name} differs from float64 by {errors[way.name]:.1e}")
        say(f"exact to {errors[way.name]:.0e}: {way.name}")
    steps = []
    for turn in range(given.rounds):
        mine = [way.step()[0] for way in ways]
        told = ", ".join(f"{x.way} {x.forward:.2f} + {x.backward:.2f}" for x in mine)
        say(f"round {turn + 1} of {given.rounds}, seconds: {told}")
        steps += mine
    dist.barrier()
    print(json.dumps({"errors": errors, "steps": [asdict(step) for step in steps]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
