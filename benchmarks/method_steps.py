"""What one rank does in `predicted_against_measured.py`: steps of several plans, in turns.

Each plan is compared with float64 first; a wrong result ends the run. Then all plans take turns,
round by round, so that other load on the machine meets them alike. Forward and backward passes
begin on all ranks at once, and end on a GPU when all that was launched is done. A rank writes what
it measured to stdout, in lines of JSON: errors, and then every step as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel
from mesh_attention.measure.ranks import Ranks, ranks_of_launcher
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.text import parse_plan
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes of an element
LIMIT = {torch.bfloat16: 1e-2, torch.float32: 2e-6}  # of relative errors
CAUSAL = Mask(causal=True)
_BLOCK_PAIRS = 1 << 27  # of queries and keys of all heads: so much is compared at once


@dataclass(frozen=True)
class Step:
    """Of one rank: seconds of each pass, and CPU seconds of all its threads in both."""

    way: str
    forward: float
    backward: float
    cpu: float


class TimedPlan:
    """A plan on this rank, with its shards of tensors that are the same on all ranks."""

    def __init__(self, name: str, plan: Plan, whole: list[Tensor], ranks: Ranks) -> None:
        self.name = name
        self._ranks = ranks
        self._cp = ContextParallel(plan=plan, transport="distributed")
        *leaves, self._grad = (self._cp.shard(x, 1) for x in whole)
        self._leaves = [x.requires_grad_() for x in leaves]

    def step(self) -> tuple[Step, list[Tensor]]:
        self._ranks.wait_for_all()
        cpu, begun = time.process_time(), time.perf_counter()
        out = self._cp.attention(*self._leaves)
        assert isinstance(out, Tensor)
        finish(self._ranks)
        forward = time.perf_counter() - begun
        self._ranks.wait_for_all()
        begun = time.perf_counter()
        gradients = torch.autograd.grad(out, self._leaves, self._grad)
        finish(self._ranks)
        backward = time.perf_counter() - begun
        step = Step(self.name, forward, backward, time.process_time() - cpu)
        return step, [out.detach(), *gradients]

    def error(self, wanted: list[Tensor]) -> float:
        """The largest relative difference of the output and the gradients, on any rank."""
        results = self.step()[1]
        self._cp.check()
        return largest_error(self._ranks, results, [self._cp.shard(x, 1) for x in wanted])


def finish(ranks: Ranks) -> None:
    """Waits for the GPU asleep: ranks that share a machine need its cores for their transfers."""
    if ranks.is_cuda:
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()


def largest_error(ranks: Ranks, results: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative difference of all results, on any rank."""
    errors = [
        float((a.double() - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True)
    ]
    return ranks.longest(max(x if x == x else float("inf") for x in errors))


def tensors(problem: Problem, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of out: (1, tokens, heads, head_dim), the same on all ranks."""
    chance = torch.Generator(device).manual_seed(0)
    heads = (problem.num_heads, problem.kv_heads, problem.kv_heads, problem.num_heads)
    shapes = [(1, problem.q_tokens, number, problem.head_dim) for number in heads]
    dtype = DTYPES[problem.element_bytes]
    return [torch.randn(shape, generator=chance, device=device).to(dtype) for shape in shapes]


def truth(
    whole: list[Tensor],
    *,
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.float64,
    pairs: int | None = None,
) -> list[Tensor]:
    """Out and gradients, a block of queries at a time: not all pairs may fit. `pairs`: of queries
    and keys of all heads in a block."""
    q, k, v, grad = (x.to(dtype).transpose(1, 2) for x in whole)
    tokens = q.shape[2]
    rows = max(1, (pairs or _BLOCK_PAIRS) // (q.shape[1] * tokens))
    outs, q_grads, kv_grads = [], [], [torch.zeros_like(x) for x in (k, v)]
    for first in range(0, tokens, rows):
        end = min(first + rows, tokens)
        last = end if mask.causal else tokens  # of the keys that they see
        visible = (q[:, :, first:end], k[:, :, :last], v[:, :, :last])
        leaves = [x.detach().requires_grad_() for x in visible]
        queries, keys, values = leaves
        seen = keys_seen(mask, torch.arange(tokens, device=q.device), first, end, last)
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, grad[:, :, first:end])
        outs.append(out.detach())
        q_grads.append(grads[0])
        for total, part in zip(kv_grads, grads[1:], strict=True):
            total[:, :, :last] += part
    results = [torch.cat(outs, 2), torch.cat(q_grads, 2), *kv_grads]
    return [x.transpose(1, 2) for x in results]


def keys_seen(mask: Mask, at: Tensor, first: int, end: int, last: int) -> Tensor | None:
    """Which of the first keys the queries from `first` to `end` see; None: all."""
    rows, columns = at[first:end, None], at[:last]
    seen = columns <= rows if mask.causal else None
    if mask.window is not None and seen is not None:
        seen = seen & (columns >= rows - (mask.window[0] or 0))
    if mask.documents is not None:
        cuts = torch.tensor(mask.documents, device=at.device)
        document = torch.bucketize(at, cuts, right=True)
        same = document[first:end, None] == document[:last]
        seen = same if seen is None else seen & same
    return seen


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where plans.json lies, plans by name")
    parser.add_argument("rounds", type=int)
    args = parser.parse_args()
    texts: dict[str, str] = json.loads((args.folder / "plans.json").read_text())
    plans = {name: parse_plan(text) for name, text in texts.items()}
    torch.set_num_threads(1)
    with ranks_of_launcher(None, command="") as ranks:
        try:
            run(plans, args.folder / "truth.pt", args.rounds, ranks)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # leaving the group would wait for ranks that wait for this one


def run(plans: dict[str, Plan], file: Path, rounds: int, ranks: Ranks) -> None:
    problem = next(iter(plans.values())).problem
    whole = tensors(problem, ranks.device)
    limit = LIMIT[whole[0].dtype]
    if ranks.rank == 0:
        # Where the limit is far above it, float32 is as good as float64, and half as large.
        kept = torch.float64 if limit < 1e-4 else torch.float32
        torch.save([x.to(kept).cpu() for x in truth(whole)], file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
        if ranks.is_cuda:
            torch.cuda.empty_cache()  # ranks share the GPU
    while not file.exists():  # who waits for a rank over NCCL keeps the GPU busy
        time.sleep(0.05)
    ranks.wait_for_all()
    wanted = [x.to(ranks.device) for x in torch.load(file)]
    timed_plans = [TimedPlan(name, plan, whole, ranks) for name, plan in plans.items()]
    errors = {}
    for plan in timed_plans:
        errors[plan.name] = plan.error(wanted)
        if not errors[plan.name] < limit:
            raise SystemExit(f"wrong: {plan.name} differs from float64 by {errors[plan.name]:.1e}")
        say(f"exact to {errors[plan.name]:.0e}: {plan.name}")
    print(json.dumps({"errors": errors}), flush=True)
    for turn in range(rounds):
        steps = []
        for plan in timed_plans:
            steps.append(plan.step()[0])
            print(json.dumps(asdict(steps[-1])), flush=True)
        seconds = ", ".join(f"{x.way} {x.forward:.3g} + {x.backward:.3g}" for x in steps)
        say(f"round {turn + 1} of {rounds}, seconds: {seconds}")
    ranks.wait_for_all()


if __name__ == "__main__":
    main()
