"""What becomes of logits, token by token: losses, or log-probabilities and entropies. Derivatives
of a chunk are written by hand, so that no more than a chunk is ever there.

`PerToken` computes logits again in its backward pass, in which alone it learns what each result
weighs. `Summed` makes gradients in its forward pass, with the logits that it has there: of a sum
they are known but for a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.train.chunked_logits import Gradients, Head, LogitsChunk

_LEAST = -1e4  # of log-probabilities in sums with their probability, which is 0 far above it


@dataclass(frozen=True)
class CrossEntropy:
    """A rule: `results` of each token of a chunk, and from their gradients the `gradient` of the
    logits, which uses up the chunk."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    num_results = 1

    def results(self, chunk: LogitsChunk, targets: Tensor) -> tuple[Tensor, ...]:
        losses = chunk.log_probs.gather(-1, targets[:, None]).squeeze(-1).neg_()
        if self.label_smoothing:
            losses.mul_(1 - self.label_smoothing)
            losses.sub_(chunk.log_probs.mean(-1), alpha=self.label_smoothing)
        if self.z_loss:
            losses.add_(chunk.log_sum_exp().square_(), alpha=self.z_loss)
        return (losses,)

    def gradient(
        self, chunk: LogitsChunk, targets: Tensor, results: list[Tensor], grads: list[Tensor]
    ) -> Tensor:
        [grad] = grads
        of_softmax = grad
        if self.z_loss:
            of_softmax = grad * (1 + 2 * self.z_loss * chunk.log_sum_exp())
        chunk.logits = None
        of_logits = chunk.log_probs.exp_().mul_(of_softmax[:, None])
        if self.label_smoothing:
            of_logits.sub_(grad[:, None] * (self.label_smoothing / of_logits.shape[-1]))
        _add_at(of_logits, targets, grad * (self.label_smoothing - 1))
        return of_logits


@dataclass(frozen=True)
class LogProbs:
    """A rule too: log-probability of the token and entropy."""

    num_results = 2

    def results(self, chunk: LogitsChunk, targets: Tensor) -> tuple[Tensor, ...]:
        chunk.logits = None
        log_probs = chunk.log_probs.gather(-1, targets[:, None]).squeeze(-1)
        bounded = chunk.log_probs.clamp_(min=_LEAST)
        return log_probs, bounded.exp().mul_(bounded).sum(-1).neg_()

    def gradient(
        self, chunk: LogitsChunk, targets: Tensor, results: list[Tensor], grads: list[Tensor]
    ) -> Tensor:
        chunk.logits = None
        grad, of_entropy = grads
        log_probs = chunk.log_probs.clamp_(min=_LEAST)
        probs = log_probs.exp()
        # -p (grad + of_entropy (log p + H)), and grad where the token is
        of_logits = log_probs.add_(results[1][:, None]).mul_(-of_entropy[:, None])
        of_logits.sub_(grad[:, None]).mul_(probs)
        _add_at(of_logits, targets, grad)
        return of_logits


def _add_at(x_NV: Tensor, targets: Tensor, values: Tensor) -> None:
    """By an assignment: `scatter_add_` is refused where algorithms must be deterministic."""
    rows = torch.arange(len(targets), device=targets.device)
    x_NV[rows, targets] = x_NV[rows, targets] + values


@dataclass(frozen=True)
class Targets:
    """Of N tokens, 0 where there is none, and where that is; and what is made of logits there."""

    tokens: Tensor
    ignored: Tensor
    head: Head
    rule: CrossEntropy | LogProbs


class PerToken(torch.autograd.Function):
    """Results of each token, 0 where it has no target."""

    @staticmethod
    def forward(
        ctx: Any, x_NH: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Targets
    ) -> tuple[Tensor, ...]:
        head, rule = targets.head, targets.rule
        results = [x_NH.new_empty(len(x_NH), dtype=head.precise) for _ in range(rule.num_results)]
        low = None if weight is None else weight.to(head.dtype)
        for rows in head.chunks(x_NH, weight):
            chunk = head.chunk(x_NH[rows], low, bias)
            for whole, part in zip(results, rule.results(chunk, targets.tokens[rows]), strict=True):
                whole[rows] = part.masked_fill_(targets.ignored[rows], 0)
            del chunk, part
        ctx.targets = targets
        ctx.save_for_backward(x_NH, weight, bias, *results)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        x_NH, weight, bias, *results = ctx.saved_tensors
        targets, head = ctx.targets, ctx.targets.head
        gradients = Gradients(head, (x_NH, weight, bias), ctx.needs_input_grad)
        low = None if weight is None else weight.to(head.dtype)
        grads = tuple([grad.masked_fill(targets.ignored, 0) for grad in grads])
        for rows in head.chunks(x_NH, weight):
            chunk = head.chunk(x_NH[rows], low, bias)
            parts = [x[rows] for x in results], [x[rows] for x in grads]
            of_logits = targets.rule.gradient(chunk, targets.tokens[rows], *parts)
            gradients.add(rows, x_NH[rows], low, head.before_head(chunk, of_logits))
            del chunk, of_logits
        return (*gradients.parts(), None)


class Summed(torch.autograd.Function):
    """The sum of the losses of all targets, in float64."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        needs_grad: bool,
    ) -> Tensor:
        head, rule = targets.head, targets.rule
        total = torch.zeros((), dtype=torch.float64, device=x_NH.device)
        needed = [needs_grad and x for x in ctx.needs_input_grad[:3]]
        gradients = Gradients(head, (x_NH, weight, bias), needed)
        low, grad = weight.to(head.dtype), (~targets.ignored).to(head.precise)
        for rows in head.chunks(x_NH, weight):
            chunk = head.chunk(x_NH[rows], low, bias)
            [losses] = rule.results(chunk, targets.tokens[rows])
            total += losses.masked_fill_(targets.ignored[rows], 0).sum(dtype=torch.float64)
            if any(needed):
                of_logits = rule.gradient(chunk, targets.tokens[rows], [losses], [grad[rows]])
                gradients.add(rows, x_NH[rows], low, head.before_head(chunk, of_logits))
                del of_logits
            del chunk
        ctx.gradients = gradients.parts()
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
        return (*scaled, None, None)


def _refuse_second_derivatives() -> None:
    """Gradients are recorded in a backward pass only for create_graph=True."""
    if torch.is_grad_enabled():
        raise MeshAttentionError(
            "second derivatives of chunked losses are not supported; call with create_graph=False, "
            "or take torch.nn.functional.cross_entropy of whole logits"
        )
