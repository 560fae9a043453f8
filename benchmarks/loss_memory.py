"""Memory and time of losses on one GPU: of whole logits by PyTorch, and of the two of the library.

    python benchmarks/loss_memory.py --json results.json

Forward and backward of `F.cross_entropy(hidden @ weight.T)`, of `cp.cross_entropy` on the same
logits and of `cp.linear_cross_entropy` with several sizes of chunks, by PyTorch's operators and,
where liger-kernel is installed, by its kernel, and of its own fused loss, in bfloat16. Peaks leave
out hidden states and weight; `share` is the peak by what a loss may take: 2.5 times the logits for
`cross_entropy`, and for the linear one the gradient of the hidden states, that of the weight in
float32 and two chunks of float32 logits. All losses and gradients are compared before anything is
timed; `ideal_ms` is that of the products at the highest rate that a product of this size reaches.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from script import provenance, save, script_parser
from torch import Tensor
from torch.nn import functional

from mesh_attention import ContextParallel
from mesh_attention.cli.values import size

TOLERANCE = 0.02  # of gradients in bfloat16, by their largest element
CHUNKS = {"plain": (None, 4096), "liger": (None, 1024)}
DEFAULT_BYTES = 2**30  # of two chunks of float32 logits
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ weight.T, labels)


def of_logits(
    cp: ContextParallel, kernel: Any, hidden: Tensor, weight: Tensor, labels: Tensor
) -> Tensor:
    logits = (hidden @ weight.T)[None]
    return cp.cross_entropy(logits, labels[None], reduce="sum", kernel=kernel).loss


def linear(
    cp: ContextParallel,
    kernel: Any,
    chunk: int | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
) -> Tensor:
    return cp.linear_cross_entropy(
        hidden[None], weight, labels[None], reduce="sum", chunk_tokens=chunk, kernel=kernel
    ).loss


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    more = (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)
    loss: Tensor = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, *more)[0]
    return loss


def tensors(tokens: int, vocabulary: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=dtype) / width**0.5
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    labels[::7] = -100
    return [hidden, weight.requires_grad_(), labels]


def compare(losses: dict[str, Loss], tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    """The largest error of each loss and its gradients, against float64."""
    hidden, weight, labels = tensors(tokens, vocabulary, width, torch.bfloat16)
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = whole_logits(doubles[0], doubles[1], labels)
    true = torch.autograd.grad(wanted, doubles)
    errors = {}
    for name, loss in losses.items():
        value = loss(hidden, weight, labels)
        grads = torch.autograd.grad(value, [hidden, weight])
        off = [(value - wanted).abs().item()]
        for a, b in zip(grads, true, strict=True):
            off.append(((a - b).abs().max() / b.abs().max()).item())
        errors[name] = max(off)
        if not errors[name] < TOLERANCE:
            raise SystemExit(f"{name} is off by {off}: nothing is timed")
    return errors


def measure(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, rounds: int) -> Any:
    """Peak bytes beyond what is there, and milliseconds of both passes."""
    times, peak = [], 0
    for _ in range(rounds + 2):
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begin, end = events()
        begin.record()
        loss(hidden, weight, labels).backward()  # type: ignore[no-untyped-call]
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
        peak = torch.cuda.max_memory_allocated() - before
    hidden.grad = weight.grad = None
    return {"peak_bytes": peak, "ms": median(times[2:])}


def events() -> tuple[Any, Any]:
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def ideal_ms(hidden: Tensor, weight: Tensor) -> float:
    """Of the three products, at the best rate of one with 4,096 tokens."""
    part, best = hidden.detach()[:4096], float("inf")
    for _ in range(10):
        begin, end = events()
        begin.record()
        part @ weight.detach().T
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return 3 * best * len(hidden) / len(part)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--tokens", type=size, default=32768)
    parser.add_argument("--vocabulary", type=size, default=131072)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("nccl", init_method=meeting, rank=0, world_size=1)
        with ContextParallel(causal=True) as cp:
            result = run(cp, args)
        dist.destroy_process_group()
    save(args.json, result)
    print(json.dumps(result))


def run(cp: ContextParallel, args: Any) -> dict[str, Any]:
    losses: dict[str, Loss] = {"whole logits": whole_logits}
    has_liger = find_spec("liger_kernel") is not None
    for kernel in CHUNKS if has_liger else ["plain"]:
        losses[f"{kernel} logits"] = partial(of_logits, cp, kernel)
        for chunk in CHUNKS[kernel]:
            losses[f"{kernel} {chunk or 'default'}"] = partial(linear, cp, kernel, chunk)
    if has_liger:
        losses["liger's own"] = liger
    errors = compare(losses, 4096, min(args.vocabulary, 16384), min(args.width, 1024))
    hidden, weight, labels = tensors(args.tokens, args.vocabulary, args.width, torch.bfloat16)
    logits_bytes = 2 * args.tokens * args.vocabulary
    rows = []
    for name, loss in losses.items():
        row = {"loss": name, "error": errors[name]} | measure(
            loss, hidden, weight, labels, args.rounds
        )
        if "logits" in name:
            row["logits"] = row["peak_bytes"] / logits_bytes
            row["share"] = row["logits"] / 2.5
        else:
            chosen = name.split()[-1]
            chunks = DEFAULT_BYTES
            if chosen.isdigit():
                chunks = 8 * min(int(chosen), args.tokens) * args.vocabulary
            row["share"] = row["peak_bytes"] / (hidden.nbytes + 2 * weight.nbytes + chunks)
        rows.append(row)
        print(json.dumps(row), flush=True)
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    sizes = {name: getattr(args, name) for name in ("tokens", "vocabulary", "width")}
    ideal = {"ideal_ms": ideal_ms(hidden, weight)}
    return provenance() | where | sizes | ideal | {"logits_bytes": logits_bytes, "rows": rows}


if __name__ == "__main__":
    main()
