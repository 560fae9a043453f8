"""The cross-entropy of tokens, a chunk of logits at a time, and the kernel that computes a chunk:
Liger's (the extra `liger`) where it is installed and can, otherwise PyTorch's operators.

`CrossEntropy` computes gradients in the forward pass, while it has the logits: the gradient of a
sum is known but for the factor that the backward pass brings. Derivatives of a chunk are written by
hand, so that no tensor beside the chunk's own is ever there.

Only Liger's kernel for a chunk is used. It writes gradients over logits in the dtype of products,
so chunks have four times the tokens in the same memory. Liger's function for a whole head is not
used: it waits for the host, and scales saved gradients in place, so that a second backward pass is
wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.ready_made import PackageFunction
from mesh_attention.kernels.registry import KernelRefusedError
from mesh_attention.train.chunked_logits import (
    Factors,
    Gradients,
    Head,
    Targets,
    add_at,
    refuse_second_derivatives,
)

LossKernel = Literal["liger", "plain"]
Reasons = tuple[tuple[str, str], ...]  # (name, why not, or "chosen"), in the order asked

_IGNORED = -1
# Sums are divided by nothing, and only losses are returned.
_ALWAYS = {
    "ce_weight": None,
    "ignore_index": _IGNORED,
    "reduction": "sum",
    "n_non_ignore": 1,
    "sum_non_ignore_weight": 1.0,
    "weight_sum": 0.0,
    "return_z_loss": False,
    "return_token_accuracy": False,
    "return_predicted_tokens": False,
}
_OF_CHUNK = ("logits_chunk", "target_chunk", "lse_square_scale", "label_smoothing", "softcap")
_LIGER = PackageFunction(
    "liger_kernel.ops.backends._triton.cross_entropy",
    "cross_entropy_loss_and_grad_triton",
    (*_OF_CHUNK, "has_gradients", *_ALWAYS),
)


@dataclass(frozen=True)
class Loss:
    """The cross-entropy of each token of a chunk, by PyTorch's operators."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def logit_bytes(self, head: Head) -> int | None:
        """The memory that a chunk takes for each of its logits, as `Head.chunks` wants it."""
        return None

    def of_chunk(
        self, head: Head, rows: Factors, tokens: Tensor, ignored: Tensor, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Losses of the rows, 0 where `ignored`. With `needs_grad` also the gradient of their sum
        with respect to `Head.products`."""
        logits, log_probs, capped = head.chunk(rows)
        losses = log_probs.gather(-1, tokens[:, None]).squeeze(-1).neg_()
        if self.label_smoothing:
            losses.mul_(1 - self.label_smoothing)
            losses.sub_(log_probs.mean(-1), alpha=self.label_smoothing)
        grad = of_softmax = (~ignored).to(head.precise)
        if self.z_loss:
            log_sum_exp = logits.amax(-1).to(log_probs.dtype) - log_probs.amax(-1)
            of_softmax = grad * (1 + 2 * self.z_loss * log_sum_exp)
            losses.add_(log_sum_exp.square_(), alpha=self.z_loss)
        losses.masked_fill_(ignored, 0)
        if not needs_grad:
            return losses, None
        del logits
        of_logits = log_probs.exp_().mul_(of_softmax[:, None])
        if self.label_smoothing:
            of_logits.sub_(grad[:, None] * (self.label_smoothing / of_logits.shape[-1]))
        add_at(of_logits, tokens, grad * (self.label_smoothing - 1))
        return losses, head.before_softcap(capped, of_logits)


class LigerLoss(Loss):
    """The same by Liger's kernel."""

    def logit_bytes(self, head: Head) -> int:
        return head.dtype.itemsize

    def of_chunk(
        self, head: Head, rows: Factors, tokens: Tensor, ignored: Tensor, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits = head.products(rows, head.dtype)
        if rows.weight is None:  # the caller's
            logits = logits.clone(memory_format=torch.contiguous_format)
        logits.gather(-1, tokens[:, None])  # refuses what is no token: the kernel would write there
        targets = tokens.masked_fill(ignored, _IGNORED)
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            settings = self.z_loss, self.label_smoothing, head.softcap
            results = _LIGER(logits, targets, *settings, needs_grad, *_ALWAYS.values())
        return results[0], results[-1] if needs_grad else None


class CrossEntropy(torch.autograd.Function):
    """The sum of the losses of all targets, in float64. `parts` are those of `Factors`."""

    @staticmethod
    def forward(
        ctx: Any, targets: Targets, loss: Loss, needs_grad: bool, *parts: Tensor | None
    ) -> Tensor:
        factors = Factors(*parts)  # type: ignore[arg-type]
        tokens, ignored, head = targets
        total = torch.zeros((), dtype=torch.float64, device=ignored.device)
        needed = [needs_grad and x for x in ctx.needs_input_grad[3:]]
        gradients = Gradients(head, factors, needed)
        for rows, of_rows in head.chunks(factors, loss.logit_bytes(head)):
            losses, of_logits = loss.of_chunk(
                head, of_rows, tokens[rows], ignored[rows], any(needed)
            )
            total += losses.sum(dtype=torch.float64)
            if of_logits is not None:
                gradients.add(rows, of_rows, of_logits)
            del of_logits  # before the next
        ctx.gradients = gradients.parts
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        parts = ctx.gradients
        assert parts is not None  # PyTorch refuses a second pass before, at the division
        if torch._C._autograd._get_current_graph_task_keep_graph():
            scaled = [None if x is None else x * grad for x in parts]
        else:  # nobody else has them: no copies, and the first to accumulate may keep them
            ctx.gradients = None
            scaled = [None if x is None else x.mul_(grad) for x in parts]
        del parts
        return (None, None, None, *scaled)


def choose_loss(
    kernel: LossKernel | None, head: Head, factors: Factors, label_smoothing: float, z_loss: float
) -> tuple[Loss, Reasons]:
    """The loss by the kernel of that name (None: the first that can), and the reasons, which
    `kernels()` of the object reports."""
    names = get_args(LossKernel)
    if kernel is not None and kernel not in names:
        raise MeshAttentionError(f"kernel={kernel!r}: must be {' or '.join(names)}, or None")
    if kernel == "plain":
        return Loss(label_smoothing, z_loss), (("plain", "chosen"),)
    device, low_rank = factors.x.device, factors.few is not None
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    why_not = why_not_liger(device.type, capability, head.dtype, low_rank)
    if why_not is None:
        return LigerLoss(label_smoothing, z_loss), (("liger", "chosen"),)
    if kernel is not None:
        raise KernelRefusedError(f"kernel='liger' cannot make this loss: {why_not}")
    return Loss(label_smoothing, z_loss), (("liger", why_not), ("plain", "chosen"))


def why_not_liger(
    device_type: str, capability: tuple[int, int] | None, dtype: torch.dtype, low_rank: bool
) -> str | None:
    """None if it can; `capability` of a CUDA device, `dtype` of products."""
    if device_type != "cuda" or capability is None:
        return f"runs on cuda, not on {device_type}"
    if capability < (8, 0):
        return f"needs compute capability 8.0, found {capability}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes float32, bfloat16 and float16, not {dtype}"
    if low_rank and dtype != torch.float32:
        return f"takes logits in {dtype}, where the product of low_rank is added in float32"
    return _why_not_installed()


@cache
def _why_not_installed() -> str | None:
    return _LIGER.why_unusable()
