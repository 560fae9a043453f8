"""Kernels that take any mask, side by side on one GPU: packed documents, windows, prefixes, GQA.

    python benchmarks/kernels_on_masks.py --json result.json

TFLOP/s by the pairs that the mask shows, forward and backward, bf16, heads of 128: cuDNN Frontend's
interval kernel, our Triton kernels, compiled `flex_attention` of PyTorch, FlashAttention 3 varlen
(documents, forward only). And through the library: a plan for one rank, where one call is all there
is to do, beside the bare kernel it chose. All take turns, with calls that follow each other as
layers do. Kernels that are not installed are left out, and named.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from one_rank import (
    Work,
    bare_pass,
    executor_alone,
    in_turns,
    log_normal_pack,
    mask_of_the_call,
    need_cuda,
)
from script import provenance, save, script_parser
from torch import Tensor

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.kernels import Kernel, MaskKind, Request, RowRange
from mesh_attention.kernels.cudnn_ranges import CudnnRanges
from mesh_attention.kernels.triton_ranges import TritonRanges
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.execute.call_masks import row_range
from mesh_attention.runtime.execute.executor import CallShape, Executor, run_to_end

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
DIM = 128
Case = tuple[int, int, int, Mask]  # tokens, heads, KV heads
Passes = dict[Direction, Work]


def cases() -> dict[str, Case]:
    tokens = 16384
    named: dict[str, Case] = {
        "full": (tokens, 16, 16, Mask()),
        "causal": (tokens, 16, 16, Mask(causal=True)),
        "causal, 32:8 heads": (tokens, 32, 8, Mask(causal=True)),
        "window of 1,024": (tokens, 16, 16, Mask(causal=True, window=(1023, 0))),
        "window of 4,096, 32:8 heads": (32768, 32, 8, Mask(causal=True, window=(4095, 0))),
        "prefix of 4,096": (tokens, 16, 16, Mask(causal=True, prefix=4096)),
    }
    for mean in (8192, 2048, 512):
        mask = Mask(causal=True, documents=log_normal_pack(tokens, mean, seed=mean))
        named[f"documents of {mean:,}"] = (tokens, 16, 16, mask)
    return named


def rows_of(mask: Mask, tokens: int) -> RowRange:
    plan = make_plan(Problem(tokens, 1, DIM, mask=mask), 1, method="mesh")
    runs = tuple(plan.q_layout.runs(0, tokens))
    return row_range(plan.problem.rows, runs, runs, DEVICE)


@cache
def flex_bounds(tokens: int) -> tuple[Tensor, Tensor, Callable[..., Any], Callable[..., Any]]:
    """Bounds that all masks of a length are written into, so that one compilation serves them."""
    from torch.nn.attention.flex_attention import flex_attention

    lo, hi = torch.zeros(2, tokens, dtype=torch.int32, device=DEVICE)

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j >= lo[i]) & (j < hi[i])

    return lo, hi, visible, torch.compile(flex_attention, dynamic=False)


def by_flex(tensors: list[Tensor], mask: RowRange) -> Passes:
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
    return {
        Direction.FORWARD: forward,
        Direction.BACKWARD: lambda: torch.autograd.grad(
            out, (q, k, v), grad_out, retain_graph=True
        ),
    }


def by_varlen(tensors: list[Tensor], mask: Mask) -> Passes:
    import fa3_fwd._C  # type: ignore[import-not-found]  # noqa: F401  (registers the operator)

    q, k, v = (x[0] for x in tensors[:3])
    cuts = mask.documents or (0, q.shape[0])
    starts = torch.tensor(cuts, dtype=torch.int32, device=DEVICE)
    longest = max(b - a for a, b in pairwise(cuts))
    left = -1 if mask.window is None or mask.window[0] is None else mask.window[0]

    def forward() -> Any:
        return torch.ops.fa3_fwd.fwd(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=DIM**-0.5,
            is_causal=mask.causal,
            window_size_left=left,
            window_size_right=0 if mask.causal and left >= 0 else -1,
            num_splits=1,
        )

    return {Direction.FORWARD: forward}


def by_library(tensors: list[Tensor], mask: Mask) -> tuple[Passes, Passes, dict[str, Any]]:
    """A plan for one rank, what it does with no more than its kernel call, if that is one, and what
    was chosen."""
    q, k, v, grad_out = (x.transpose(0, 1).contiguous() for x in tensors)
    tokens, _, heads, _ = q.shape
    problem = Problem(tokens, heads, DIM, num_kv_heads=k.shape[2], mask=mask)
    plan = make_plan(problem, 1, method="mesh", chunks=(1, 1))
    inputs = {"q": q, "k": k, "v": v}
    library: Passes = {}
    bare: Passes = {}
    chosen: dict[str, Any] = {}
    for direction in Direction:
        executor = executor_alone(plan, direction, CallShape(1, DTYPE, DEVICE))

        def work(executor: Executor = executor, inputs: dict[str, Tensor] = inputs) -> Any:
            return run_to_end(executor.run(inputs))

        inputs = inputs | work() | {"grad_out": grad_out}
        library[direction] = work
        kernels = {choice.kernel.name: choice.kernel for choice in executor.choices.values()}
        chosen[direction.value] = {"kernels": sorted(kernels), "calls": executor.call_summary}
        call_mask = mask_of_the_call(executor)
        if call_mask is not None:
            (kernel,) = kernels.values()
            bare[direction] = bare_pass(kernel, direction, tensors, call_mask)
    return library, bare, chosen


def installed_kernels() -> list[Kernel]:
    capability = torch.cuda.get_device_capability()
    request = Request(
        Direction.BACKWARD, "cuda", capability, DTYPE, DIM, DIM, 32, 8, MaskKind.RANGE
    )
    kernels: list[Kernel] = []
    for kernel in (CudnnRanges(), TritonRanges()):
        refusal = kernel.refuses(request)
        print(f"{kernel.name}: {refusal or 'measured'}")
        kernels += [] if refusal else [kernel]
    return kernels


def measure(name: str, case: Case, kernels: list[Kernel], rounds: int, flex: bool) -> Any:
    tokens, heads, kv_heads, mask = case
    tensors = [
        torch.randn(1, tokens, h, DIM, device=DEVICE, dtype=DTYPE)
        for h in (heads, kv_heads, kv_heads, heads)
    ]
    visible = rows_of(mask, tokens)
    flops = 4.0 * DIM * heads * int((visible.hi - visible.lo).clamp(min=0).sum(dtype=torch.int64))

    def by_kernel(kernel: Kernel) -> Passes:
        return {d: bare_pass(kernel, d, tensors, visible) for d in Direction}

    makers: dict[str, Callable[[], Passes]] = {x.name: partial(by_kernel, x) for x in kernels}
    if flex:
        makers["flex_attention"] = partial(by_flex, tensors, visible)
    if not mask.prefix:
        makers["flash_attn3 varlen"] = partial(by_varlen, tensors, mask)
    library, bare, chosen = by_library(tensors, mask)
    ways = {"library": library, "its kernel": bare}
    row: dict[str, Any] = {"mask": name, "tokens": tokens, "heads": [heads, kv_heads]}
    row |= {"chosen": chosen, "failed": {}, **{d.value: {} for d in Direction}}
    for way, make in makers.items():
        try:
            ways[way] = make()
            for work in ways[way].values():
                work()
        except Exception as error:  # a kernel that is missing or fails must not end the table
            ways.pop(way, None)
            row["failed"][way] = f"{type(error).__name__}: {error}"[:200]
    for direction, factor in zip(Direction, (1.0, 2.5), strict=True):
        works = {way: passes[direction] for way, passes in ways.items() if direction in passes}
        for way, ms in in_turns(works, rounds).items():
            row[direction.value][way] = {"ms": ms, "tflops": factor * flops / ms / 1e9}
    return row


def line_of(row: dict[str, Any]) -> str:
    lines = [f"{row['mask']}:"]
    for direction in Direction:
        rates = (
            f"{way} {x['tflops']:.0f} ({x['ms']:.3f} ms)" for way, x in row[direction.value].items()
        )
        kernels = ", ".join(row["chosen"][direction.value]["kernels"])
        lines.append(f"  {direction}, TFLOP/s: {', '.join(rates)}; chosen {kernels}")
    return "\n".join([*lines, *(f"  {way}: {why}" for way, why in row["failed"].items())])


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--match", default="", help="only masks with this in their name")
    parser.add_argument("--rounds", type=int, default=7, help="of ten calls of each")
    parser.add_argument("--without-flex", action="store_true", help="it takes a minute to compile")
    args = parser.parse_args()
    need_cuda()
    kernels = installed_kernels()
    rows: list[dict[str, Any]] = []
    for name, case in cases().items():
        if args.match in name:
            rows.append(measure(name, case, kernels, args.rounds, not args.without_flex))
            print(line_of(rows[-1]), flush=True)
            result = provenance() | {
                "machine": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "what": "bf16, heads of 128, TFLOP/s by visible pairs; medians",
                "rows": rows,
            }
            save(args.json, result)


if __name__ == "__main__":
    main()
