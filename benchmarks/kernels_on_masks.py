"""Kernels that take any mask, side by side on one GPU: packed documents, windows, prefixes, GQA.

    python benchmarks/kernels_on_masks.py --json result.json

TFLOP/s by the pairs that the mask shows, forward and backward, bf16, heads of 128: cuDNN Frontend's
interval kernel, our Triton kernels, compiled `flex_attention` of PyTorch, FlashAttention 3 varlen
(documents, forward only). And through the library: a plan for one rank, where one call is all there
is to do, in milliseconds beside the bare kernel it chose: one call at a time, which holds the
host's launch, and in turns with calls that follow each other, as layers do. What is not installed
is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from device_times import Pass, in_turns, milliseconds, need_cuda
from provenance import taken
from torch import Tensor

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.kernels import (
    BackwardInputs,
    Block,
    BlockMask,
    Kernel,
    MaskKind,
    Request,
    RowRange,
)
from mesh_attention.kernels.cudnn_ranges import CudnnRanges
from mesh_attention.kernels.rows import delta
from mesh_attention.kernels.triton_ranges import TritonRanges
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.call_masks import row_range
from mesh_attention.runtime.execute.executor import CallShape, Executor, run_to_end
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.transport.local import AloneTransport

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
DIM = 128
SCALE = DIM**-0.5


def log_normal_pack(tokens: int, mean: int, seed: int) -> tuple[int, ...]:
    """Cumulative starts of documents whose lengths have this mean."""
    chance = random.Random(seed)
    cuts = [0]
    while cuts[-1] < tokens:
        length = max(1, round(chance.lognormvariate(0.0, 1.0) * mean / 1.6487))
        cuts.append(min(tokens, cuts[-1] + length))
    return tuple(cuts)


def cases() -> dict[str, tuple[int, int, int, Mask]]:
    """Tokens, heads, KV heads, mask."""
    found: dict[str, tuple[int, int, int, Mask]] = {
        "full": (16384, 16, 16, Mask()),
        "causal": (16384, 16, 16, Mask(causal=True)),
        "causal, 32:8 heads": (16384, 32, 8, Mask(causal=True)),
        "window of 1,024": (16384, 16, 16, Mask(causal=True, window=(1023, 0))),
        "window of 4,096, 32:8 heads": (32768, 32, 8, Mask(causal=True, window=(4095, 0))),
        "prefix of 4,096": (16384, 16, 16, Mask(causal=True, prefix=4096)),
    }
    for mean in (8192, 2048, 512):
        cuts = log_normal_pack(16384, mean, seed=mean)
        mask = Mask(causal=True, documents=cuts)
        found[f"documents of {mean:,}"] = (16384, 16, 16, mask)
    return found


def rows_of(mask: Mask, tokens: int) -> RowRange:
    plan = make_plan(Problem(tokens, 1, DIM, mask=mask), 1, method="mesh")
    runs = tuple(plan.q_layout.runs(0, tokens))
    return row_range(plan.problem.rows, runs, runs, DEVICE)


def by_kernel(kernel: Kernel, tensors: list[Tensor], mask: RowRange) -> tuple[Pass, Pass]:
    return bare_forward(kernel, tensors, mask), bare_backward(kernel, tensors, mask)


def bare_forward(kernel: Kernel, tensors: list[Tensor], mask: BlockMask) -> Pass:
    q, k, v, _ = tensors
    block = Block(q, k, v, mask, SCALE)
    return lambda: kernel.forward(block)


def bare_backward(kernel: Kernel, tensors: list[Tensor], mask: BlockMask) -> Pass:
    q, k, v, grad_out = tensors
    block = Block(q, k, v, mask, SCALE)
    out, lse = kernel.forward(block)
    needs = kernel.backward_needs
    # What takes `out` makes row sums of it, as a call of its own library does.
    sums = delta(out, grad_out) if needs is not None and needs.delta else None
    given = BackwardInputs(grad_out, None if sums is not None else out, lse, sums)
    return lambda: kernel.backward(block, given)


@cache
def flex_bounds(tokens: int) -> tuple[Tensor, Tensor, Callable[..., Any], Callable[..., Any]]:
    """Bounds that all masks of a length are written into, so that one compilation serves them."""
    from torch.nn.attention.flex_attention import flex_attention

    lo, hi = torch.zeros(2, tokens, dtype=torch.int32, device=DEVICE)

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j >= lo[i]) & (j < hi[i])

    return lo, hi, visible, torch.compile(flex_attention, dynamic=False)


def by_flex(tensors: list[Tensor], mask: RowRange) -> tuple[Pass, Pass]:
    from torch.nn.attention.flex_attention import create_block_mask

    tokens = tensors[0].shape[1]
    lo, hi, visible, compiled = flex_bounds(tokens)
    lo.copy_(mask.lo)
    hi.copy_(mask.hi)
    block_mask = create_block_mask(visible, None, None, tokens, tokens, device=str(DEVICE))
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in tensors[:3])
    grad_out = tensors[3].transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]

    def forward() -> Any:
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped)

    out = forward()
    return forward, lambda: torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)


def by_varlen(tensors: list[Tensor], mask: Mask) -> tuple[Pass, None]:
    import fa3_fwd._C  # type: ignore[import-not-found]  # noqa: F401  (registers the operator)

    q, k, v = (x[0] for x in tensors[:3])
    cuts = mask.documents or (0, q.shape[0])
    starts = torch.tensor(cuts, dtype=torch.int32, device=DEVICE)
    longest = max(b - a for a, b in pairwise(cuts))
    left = -1 if mask.window is None or mask.window[0] is None else mask.window[0]
    return (
        lambda: torch.ops.fa3_fwd.fwd(
            *(q, k, v),
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=SCALE,
            is_causal=mask.causal,
            window_size_left=left,
            window_size_right=0 if mask.causal and left >= 0 else -1,
            num_splits=1,
        )
    ), None


def only_mask(executor: Executor) -> BlockMask | None:
    """Of its call, where one is all there is."""
    masks = [mask for of_call in executor._compute.masks.values() for mask in of_call]
    return masks[0] if len(masks) == 1 else None


def by_library(
    tensors: list[Tensor], mask: Mask, repeats: int, any_mask: Sequence[tuple[Kernel, RowRange]]
) -> dict[str, Any]:
    """A plan for one rank: what everything around the kernel costs. And one call of the first
    kernel for `any_mask` where another was chosen: whether that was right."""
    q, k, v, grad_out = (x.transpose(0, 1).contiguous() for x in tensors)
    tokens, _, heads, _ = q.shape
    problem = Problem(tokens, heads, DIM, num_kv_heads=k.shape[2], mask=mask)
    plan = make_plan(problem, 1, method="mesh", chunks=(1, 1))
    found: dict[str, Any] = {}
    inputs = {"q": q, "k": k, "v": v}
    for direction in Direction:
        one = plan.direction(direction)
        executor = make_executor(
            *(plan, one, 0, AloneTransport(one.programs[0]), Workspace()),
            CallShape(1, DTYPE, DEVICE),
            softmax_scale=SCALE,
        )

        def work(executor: Executor = executor) -> Any:
            return run_to_end(executor.run(inputs))

        made = work()
        found[direction.value] = milliseconds(work, repeats)
        kernels = {choice.kernel.name: choice.kernel for choice in executor.choices.values()}
        found[f"{direction.value} kernels"] = sorted(kernels)
        works: dict[str, Pass] = {"library": work}
        bare = bare_forward if direction is Direction.FORWARD else bare_backward
        of_call = only_mask(executor)
        if of_call is not None:
            # What the executor's kernel keeps with a mask, strides of its tensors say, stays there.
            own = replace(of_call, kept={}) if isinstance(of_call, RowRange) else of_call
            (kernel,) = kernels.values()
            works["bare"] = bare(kernel, tensors, own)
        for kernel, seen in any_mask[:1]:
            if kernel.name not in kernels:
                works[f"{kernel.name} in its place"] = bare(kernel, tensors, seen)
        found[f"{direction.value}, in turns"] = in_turns(works)
        found[f"{direction.value} calls"] = executor.calls
        inputs.update(made | {"grad_out": grad_out})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--match", default="", help="only masks with this in their name")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--without-flex", action="store_true", help="it takes a minute to compile")
    given = parser.parse_args()
    need_cuda()
    capability = torch.cuda.get_device_capability()
    request = Request(
        *(Direction.BACKWARD, "cuda", capability, DTYPE, DIM, DIM, 32, 8, MaskKind.RANGE)
    )
    kernels: list[Kernel] = []
    for kernel in (CudnnRanges(), TritonRanges()):
        why_not = kernel.refuses(request)
        print(f"{kernel.name}: {why_not or 'measured'}")
        kernels += [] if why_not else [kernel]
    rows: list[dict[str, Any]] = []
    for name, (tokens, heads, kv_heads, mask) in cases().items():
        if given.match not in name:
            continue
        tensors = [
            torch.randn(1, tokens, h, DIM, device=DEVICE, dtype=DTYPE)
            for h in (heads, kv_heads, kv_heads, heads)
        ]
        seen = rows_of(mask, tokens)
        flops = 4.0 * DIM * heads * int((seen.hi - seen.lo).clamp(min=0).sum(dtype=torch.int64))
        ways: dict[str, Callable[[], tuple[Pass, Pass | None]]] = {
            k.name: lambda k=k: by_kernel(k, tensors, seen)  # type: ignore[misc]  # noqa: B023
            for k in kernels
        }
        if not given.without_flex:
            ways["flex_attention"] = lambda: by_flex(tensors, seen)  # noqa: B023
        if not mask.prefix:
            ways["flash_attn3 varlen"] = lambda: by_varlen(tensors, mask)  # noqa: B023
        row: dict[str, Any] = {"mask": name, "tokens": tokens, "heads": [heads, kv_heads]}
        for way, make in ways.items():
            try:
                forward, backward = make()
                times = {"forward": milliseconds(forward, given.repeats)}
                if backward is not None:
                    times["backward"] = milliseconds(backward, given.repeats)
            except Exception as error:  # one that is missing, or fails, must not end the table
                row[way] = {"failed": f"{type(error).__name__}: {error}"[:200]}
                continue
            factor = {"forward": 1.0, "backward": 2.5}
            row[way] = {
                direction: {"ms": ms, "tflops": factor[direction] * flops / ms / 1e9}
                for direction, ms in times.items()
            }
        row["through the library, ms"] = by_library(
            *(tensors, mask, given.repeats, [(kernel, seen) for kernel in kernels])
        )
        rows.append(row)
        print(_line(row), flush=True)
        if given.json:
            report = taken() | {
                "machine": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "what": "bf16, heads of 128, TFLOP/s by visible pairs; medians",
                "rows": rows,
            }
            given.json.write_text(json.dumps(report, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    words = [f"{row['mask']}:"]
    for way, found in row.items():
        if isinstance(found, dict) and "failed" in found:
            words.append(f"{way} failed ({found['failed'][:60]});")
        elif isinstance(found, dict) and isinstance(found.get("forward"), dict):
            rates = " / ".join(f"{one['tflops']:.0f}" for one in found.values())
            times = " / ".join(f"{one['ms']:.3f}" for one in found.values())
            words.append(f"{way} {rates} ({times} ms);")
    library = row["through the library, ms"]
    words.append(f"library {library['forward']:.3f} / {library['backward']:.3f} ms by")
    words.append(f"{library['forward kernels']} / {library['backward kernels']}, in turns")
    for direction in Direction:
        words += [f"{k} {v:.3f}" for k, v in library[f"{direction.value}, in turns"].items()]
    return " ".join(words)


if __name__ == "__main__":
    main()
