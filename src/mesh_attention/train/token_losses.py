"""What becomes of logits, token by token: losses, or log-probabilities and entropies. Derivatives
of a chunk are written by hand, so that no more than a chunk is ever there.

`LogProbs` computes logits again in its backward pass, in which alone it learns what each result
weighs. `CrossEntropy` makes gradients in its forward pass, with the logits that it has there: of a
sum they are known but for a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.train.chunked_logits import Factors, Gradients, Head, LogitsChunk

_LEAST = -1e4  # of log-probabilities in sums with their probability, which is 0 far above it


class Targets(NamedTuple):
    """Of N tokens, 0 where there is none, and where that is; and how their logits are made."""

    tokens: Tensor
    ignored: Tensor
    head: Head


@dataclass(frozen=True)
class Loss:
    """The cross-entropy of each token of a chunk, by PyTorch's operators."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def logit_bytes(self, head: Head) -> int | None:
        """What a chunk holds for each of its logits, as in `Head.chunks`."""
        return None

    def of_chunk(
        self, head: Head, rows: Factors, tokens: Tensor, ignored: Tensor, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """With the gradient that their sum has for what the matrix gave."""
        chunk = head.chunk(rows)
        losses = self._losses(chunk, tokens).masked_fill_(ignored, 0)
        if not needs_grad:
            return losses, None
        of_logits = self._gradient(chunk, tokens, (~ignored).to(head.precise))
        return losses, head.before_head(chunk, of_logits)

    def _losses(self, chunk: LogitsChunk, tokens: Tensor) -> Tensor:
        losses = chunk.log_probs.gather(-1, tokens[:, None]).squeeze(-1).neg_()
        if self.label_smoothing:
            losses.mul_(1 - self.label_smoothing)
            losses.sub_(chunk.log_probs.mean(-1), alpha=self.label_smoothing)
        if self.z_loss:
            losses.add_(chunk.log_sum_exp().square_(), alpha=self.z_loss)
        return losses

    def _gradient(self, chunk: LogitsChunk, tokens: Tensor, grad: Tensor) -> Tensor:
        """Of the logits, from that of the losses; it uses up the chunk."""
        of_softmax = grad
        if self.z_loss:
            of_softmax = grad * (1 + 2 * self.z_loss * chunk.log_sum_exp())
        chunk.logits = None
        of_logits = chunk.log_probs.exp_().mul_(of_softmax[:, None])
        if self.label_smoothing:
            of_logits.sub_(grad[:, None] * (self.label_smoothing / of_logits.shape[-1]))
        _add_at(of_logits, tokens, grad * (self.label_smoothing - 1))
        return of_logits


class CrossEntropy(torch.autograd.Function):
    """The sum of the losses of all targets, in float64."""

    @staticmethod
    def forward(
        ctx: Any, targets: Targets, loss: Loss, needs_grad: bool, *parts: Tensor | None
    ) -> Tensor:
        """`parts`: of `Factors`."""
        factors = Factors(*parts)  # type: ignore[arg-type]
        head, tokens, ignored = targets.head, targets.tokens, targets.ignored
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
        _refuse_second_derivatives()
        parts = ctx.gradients
        assert parts is not None  # PyTorch refuses a second pass before, at the division
        if torch._C._autograd._get_current_graph_task_keep_graph():
            scaled = [None if x is None else x * grad for x in parts]
        else:  # nobody else has them: no copies, and the first to accumulate may keep them
            ctx.gradients = None
            scaled = [None if x is None else x.mul_(grad) for x in parts]
        del parts
        return (None, None, None, *scaled)


# Of each token, besides its log-probability and entropy; without gradients.
STATISTICS: dict[str, Callable[[LogitsChunk, Tensor], Tensor]] = {
    "is_top1": lambda chunk, tokens: chunk.log_probs.argmax(-1) == tokens,
    "mean_logits": lambda chunk, _: chunk.whole_logits.mean(-1, dtype=chunk.log_probs.dtype),
    "log_sum_sq_probs": lambda chunk, _: (2 * chunk.log_probs).logsumexp(-1),
}


class LogProbs(torch.autograd.Function):
    """Log-probability, entropy and `statistics` of each token, 0 where it has no target."""

    @staticmethod
    def forward(
        ctx: Any, targets: Targets, statistics: Sequence[str], *parts: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`parts`: of `Factors`."""
        factors, (tokens, ignored, head) = Factors(*parts), targets  # type: ignore[arg-type]
        log_probs, entropies = (
            torch.empty(len(tokens), dtype=head.precise, device=tokens.device) for _ in range(2)
        )
        dtypes = [torch.bool if name == "is_top1" else head.precise for name in statistics]
        others = [torch.empty_like(tokens, dtype=dtype) for dtype in dtypes]
        for rows, of_rows in head.chunks(factors):
            chunk = head.chunk(of_rows)
            for name, result in zip(statistics, others, strict=True):
                result[rows] = STATISTICS[name](chunk, tokens[rows])
            chunk.logits = None
            log_probs[rows] = chunk.log_probs.gather(-1, tokens[rows, None]).squeeze(-1)
            bounded = chunk.log_probs.clamp_(min=_LEAST)
            entropies[rows] = bounded.exp().mul_(bounded).sum(-1).neg_()
            del chunk, bounded  # before the next
        for result in (log_probs, entropies, *others):
            result.masked_fill_(ignored, 0)
        ctx.targets = targets
        ctx.save_for_backward(entropies, *parts)
        ctx.mark_non_differentiable(*others)
        return log_probs, entropies, *others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        entropies, *parts = ctx.saved_tensors
        factors, (tokens, ignored, head) = Factors(*parts), ctx.targets
        gradients = Gradients(head, factors, ctx.needs_input_grad[2:])
        grad, of_entropy = (x.masked_fill(ignored, 0)[:, None] for x in grads[:2])
        for rows, of_rows in head.chunks(factors):
            chunk = head.chunk(of_rows)
            chunk.logits = None
            bounded = chunk.log_probs.clamp_(min=_LEAST)
            probs = bounded.exp()
            # -p (grad + of_entropy (log p + H)), and grad where the token is
            of_logits = bounded.add_(entropies[rows, None]).mul_(-of_entropy[rows])
            of_logits.sub_(grad[rows]).mul_(probs)
            del probs
            _add_at(of_logits, tokens[rows], grad[rows, 0])
            gradients.add(rows, of_rows, head.before_head(chunk, of_logits))
            del chunk, bounded, of_logits
        return (None, None, *gradients.parts)


def _add_at(x_NV: Tensor, tokens: Tensor, values: Tensor) -> None:
    """By an assignment: `scatter_add_` is refused where algorithms must be deterministic."""
    rows = torch.arange(len(tokens), device=tokens.device)
    x_NV[rows, tokens] = x_NV[rows, tokens] + values


def _refuse_second_derivatives() -> None:
    """Gradients are recorded in a backward pass only for create_graph=True."""
    if torch.is_grad_enabled():
        raise MeshAttentionError(
            "second derivatives of chunked losses are not supported; call with create_graph=False, "
            "or take torch.nn.functional.cross_entropy of whole logits"
        )
