"""Whether attention is exact on this machine: every method on ranks, every kernel on one block.

Both are held against softmax attention that is written out in float64, with gradients by autograd;
nothing of this library is in it. `mesh-attention selftest` asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.kernels.interface import (
    BackwardInputs,
    Block,
    BlockMask,
    Causal,
    Full,
    Kernel,
    Request,
    RowRange,
    kind_of,
)
from mesh_attention.kernels.registry import offers
from mesh_attention.machine.kernel_facts import library_facts
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.mask import Mask

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 203, 8, 4, 16  # an uneven length: shards have padding
_ROWS, _KERNEL_HEAD_DIM = 256, 64
# Of the largest number of a result; bfloat16 rounds by 0.4 % of each.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}


class Errors(NamedTuple):
    """The largest errors of the output and of the gradients, as parts of the largest number."""

    output: float
    gradients: float

    def are_within(self, tolerance: float) -> bool:
        return all(error <= tolerance for error in self)  # NaN is not

    @property
    def texts(self) -> tuple[str, str]:
        return f"{self.output:.1e}", f"{self.gradients:.1e}"

    def to_json(self) -> dict[str, float | None]:
        output, gradients = (None if math.isnan(x) else x for x in self)  # JSON has no NaN
        return {"output_error": output, "gradient_error": gradients}


class KernelCheck(NamedTuple):
    """`errors`: of all calls that the kernel takes here; None if it takes none, and `note` says
    why."""

    kernel: str
    device: str
    errors: Errors | None
    tolerance: float
    note: str
    install: str | None  # packages, where they are all that is missing

    @property
    def ok(self) -> bool:
        return self.errors is None or self.errors.are_within(self.tolerance)

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"ok": self.ok, "errors": self.errors and self.errors._asdict()}


class MethodRun(NamedTuple):
    """Units of the forward pass that all ranks together received, and that they receive by the
    plan; and the errors. The same on all ranks."""

    counted_units: float
    planned_units: float
    errors: Errors


def run_method(
    mask: Mask,
    options: dict[str, Any],
    *,
    tokens: int = TOKENS,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
) -> MethodRun:
    """Forward and backward, on all ranks of the default group."""
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, tokens, number, head_dim, dtype=torch.float64)
        for number in (heads, kv_heads, kv_heads, heads)
    )
    sizes: dict[str, Any] = {"seq_len": tokens, "num_heads": heads, "num_kv_heads": kv_heads}
    with ContextParallel(
        **sizes, head_dim=head_dim, mask=mask, dtype=torch.float64, **options
    ) as cp:
        local = [cp.shard(x, 1).requires_grad_() for x in (q, k, v)]
        out = cp.attention(*local)
        assert isinstance(out, Tensor)
        results = [out.detach(), *torch.autograd.grad(out, local, cp.shard(grad, 1))]
        planned = cp.volume()["forward"]
        units = cp.traffic["forward"].total.token_bytes / planned.unit_bytes
        whole = [cp.unshard(x, 1) for x in results]
    numbers = torch.tensor([units, 0.0, 0.0], dtype=torch.float64)
    if dist.get_rank() == 0:
        output, *gradients = map(_error, whole, _truth(q, k, v, grad, mask))
        numbers[1:] = torch.tensor([output, _largest(gradients)])
    dist.all_reduce(numbers)
    counted, output, gradient = numbers.tolist()
    return MethodRun(counted, float(planned.units_total), Errors(output, gradient))


def kernel_checks(device: str) -> list[KernelCheck]:
    """Every kernel of the table that knows such a device: `cpu` or `cuda`."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    shapes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    inputs = [
        torch.randn(1, _ROWS, heads, _KERNEL_HEAD_DIM, device=device).to(dtype) for heads in shapes
    ]
    rows = torch.arange(_ROWS, device=device, dtype=torch.int32)
    masks: list[tuple[BlockMask, Mask]] = [
        (Full(), Mask()),
        (Causal(), Mask(causal=True)),
        (
            RowRange(rows // 128 * 128, rows + 1, rows, ascending=True),
            Mask(causal=True, documents=(0, 128, _ROWS)),
        ),
    ]
    cases = [_KernelCase(*mask, *inputs) for mask in masks]
    checks = [_checked(kernel, cases, device, dtype) for kernel, _ in offers(cases[0].request())]
    return [check for check in checks if f"not on {device}" not in check.note]


class _KernelCase:
    """One block, and what kernels are to make of it."""

    def __init__(
        self, of_block: BlockMask, mask: Mask, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
    ) -> None:
        self.block = Block(q, k, v, of_block, q.shape[-1] ** -0.5)
        self.truth = _truth(q, k, v, grad, mask)
        scores = _scores(q, k, mask)
        out, lse = self.truth[0].to(q.dtype), torch.logsumexp(scores, -1).float()
        delta = (self.truth[0] * grad.double()).sum(-1).transpose(1, 2).float().contiguous()
        self.inputs = BackwardInputs(grad, out, lse, delta)

    def request(self, direction: Direction = Direction.FORWARD) -> Request:
        q = self.block.q
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
        sizes = (q.shape[-1], q.shape[-1], q.shape[2], self.block.k.shape[2])
        mask = kind_of(self.block.mask)
        return Request(direction, q.device.type, capability, q.dtype, *sizes, mask)


def _checked(
    kernel: Kernel, cases: Sequence[_KernelCase], device: str, dtype: torch.dtype
) -> KernelCheck:
    output, gradients, reasons, tolerance = [0.0], [0.0], [], _TOLERANCES[dtype]
    calls = []
    for case in cases:
        for direction in Direction:
            why_not = {k.name: why for k, why in offers(case.request(direction))}[kernel.name]
            if why_not is not None:
                reasons.append(why_not)
                continue
            calls.append(f"{kind_of(case.block.mask)} {direction}")
            try:
                if direction is Direction.FORWARD:
                    output.append(_error(kernel.forward(case.block)[0], case.truth[0]))
                else:
                    grads = kernel.backward(case.block, case.inputs)
                    gradients += map(_error, grads, case.truth[1:])
            except Exception as error:  # libraries fail in their own ways; the others go on
                output.append(math.nan)
                calls.append(f"{type(error).__name__}: {error}")
    facts = library_facts().get(kernel.name)
    is_missing = not calls and facts is not None and "is not installed" in " ".join(reasons)
    return KernelCheck(
        kernel.name,
        device,
        Errors(_largest(output), _largest(gradients)) if calls else None,
        tolerance,
        ", ".join(calls) or reasons[-1],
        facts.install if is_missing and facts is not None else None,
    )


def _visible(mask: Mask, tokens: int) -> Tensor:
    """(queries, keys), by the words of `Mask`."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    visible = (j <= i) if mask.causal else torch.ones(tokens, tokens, dtype=torch.bool)
    if mask.window is not None and mask.window[0] is not None:
        visible = visible & (j >= i - mask.window[0])
    if mask.documents is not None:
        document = torch.bucketize(j, torch.tensor(mask.documents), right=True)
        visible = visible & (document[:, None] == document)
    return visible


def _truth(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Mask) -> list[Tensor]:
    """out, dq, dk and dv, (batch, tokens, heads, head_dim) in float64."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    weights = _scores(leaves[0], leaves[1], mask).softmax(-1)
    values = leaves[2].repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhst,bthe->bshe", weights, values)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def _scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores: Tensor = torch.einsum("bshd,bthd->bhst", q.double(), keys) * q.shape[-1] ** -0.5
    return scores.masked_fill(~_visible(mask, q.shape[1]).to(q.device), -torch.inf)


def _error(result: Tensor, truth: Tensor) -> float:
    return float((result.double() - truth).abs().max() / truth.abs().max())


def _largest(errors: Sequence[float]) -> float:
    """NaN where one is: `max` may pass over it."""
    return float(torch.tensor(errors, dtype=torch.float64).max())
