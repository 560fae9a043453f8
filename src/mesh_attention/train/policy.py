"""What policy losses (PPO, GRPO, DPO) need of a batch whose tokens are on many ranks:
log-probabilities and entropies of this rank's tokens, and means over tokens or over sequences,
which may lie on several ranks. `ContextParallel.log_probs` and `token_mean` call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.errors import MeshAttentionError, raise_fault
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.request.tensor_checks import fault_of_kind, fault_of_label
from mesh_attention.runtime.agreement.identity import Statement
from mesh_attention.runtime.session.collective_call import collective_call, of_calls
from mesh_attention.runtime.session.distributed_tensors import own_copies
from mesh_attention.runtime.session.layouts import same_rows
from mesh_attention.runtime.session.modes import outside_autocast
from mesh_attention.runtime.session.sharding import Shards
from mesh_attention.train.chunked_logits import (
    Factors,
    Gradients,
    Targets,
    add_at,
    refuse_second_derivatives,
)
from mesh_attention.train.losses import plain_numbers, targets_of, whole_inputs
from mesh_attention.train.means import LossCall, Means, TokenMean, refuse_reduce
from mesh_attention.train.sharded_weight import count_gathering
from mesh_attention.train.target_checks import layout_of

Per = Literal["token", "sequence"]
_LEAST = -1e4  # bounds log-probabilities: p * log p is 0 far above it, and never 0 * inf

# What else is known of each token, from logits, log-probabilities and tokens; without gradients.
STATISTICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "is_top1": lambda _, log_probs, tokens: log_probs.argmax(-1) == tokens,
    "mean_logits": lambda logits, log_probs, _: logits.mean(-1, dtype=log_probs.dtype),
    "log_sum_sq_probs": lambda _, log_probs, __: (2 * log_probs).logsumexp(-1),
}


def log_probs(
    call: LossCall,
    x: Tensor,
    tokens: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    ignore_index: int,
    statistics: Sequence[str],
    **numbers: Any,
) -> tuple[Tensor, ...]:
    """As `ContextParallel.log_probs` describes it. `numbers` are fields of `Head`."""
    count_gathering(call, (weight, bias))
    if weight is None and bias is not None:
        raise MeshAttentionError("bias without a weight: logits have it already")
    raise_fault(fault_of_label(call.label))
    if call.reduce is not None:
        refuse_reduce(call.reduce)
    names = [*STATISTICS]
    if not isinstance(statistics, list | tuple) or any(name not in names for name in statistics):
        raise MeshAttentionError(f"statistics={statistics!r}: give a list of {', '.join(names)}")
    head, name = None if weight is None else (weight, bias, None), "hidden_or_logits"
    factors, tokens = whole_inputs(call, name, x, tokens, head)
    ignore_index, numbers = plain_numbers(ignore_index, **numbers)
    targets = targets_of(factors, tokens, ignore_index, **numbers)
    with outside_autocast():
        results = LogProbs.apply(targets, statistics, *factors)  # type: ignore[no-untyped-call]
    return tuple([result.view(tokens.shape) for result in results])


log_probs_together = collective_call(lambda call, *_, **__: of_calls(call.calls))(log_probs)


class LogProbs(torch.autograd.Function):
    """Log-probability, entropy and `statistics` of each token, 0 where it has no target. `parts`
    are those of `Factors`.

    Logits are computed again in the backward pass: only there it is known what each result weighs.
    """

    @staticmethod
    def forward(
        ctx: Any, targets: Targets, statistics: Sequence[str], *parts: Tensor | None
    ) -> tuple[Tensor, ...]:
        factors, (tokens, ignored, head) = Factors(*parts), targets  # type: ignore[arg-type]
        log_probs, entropies = (
            torch.empty(len(tokens), dtype=head.precise, device=tokens.device) for _ in range(2)
        )
        dtypes = [torch.bool if name == "is_top1" else head.precise for name in statistics]
        others = [torch.empty_like(tokens, dtype=dtype) for dtype in dtypes]
        for rows, of_rows in head.chunks(factors):
            logits, of_vocabulary, capped = head.chunk(of_rows)
            for name, result in zip(statistics, others, strict=True):
                result[rows] = STATISTICS[name](logits, of_vocabulary, tokens[rows])
            del logits, capped
            log_probs[rows] = of_vocabulary.gather(-1, tokens[rows, None]).squeeze(-1)
            of_vocabulary.clamp_(min=_LEAST)
            entropies[rows] = of_vocabulary.exp().mul_(of_vocabulary).sum(-1).neg_()
            del of_vocabulary  # before the next
        for result in (log_probs, entropies, *others):
            result.masked_fill_(ignored, 0)
        ctx.targets = targets
        ctx.save_for_backward(entropies, *parts)
        ctx.mark_non_differentiable(*others)
        return log_probs, entropies, *others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        entropies, *parts = ctx.saved_tensors
        factors, (tokens, ignored, head) = Factors(*parts), ctx.targets
        gradients = Gradients(head, factors, ctx.needs_input_grad[2:])
        grad, of_entropy = (x.masked_fill(ignored, 0)[:, None] for x in grads[:2])
        for rows, of_rows in head.chunks(factors):
            logits, of_logits, capped = head.chunk(of_rows)
            del logits
            probs = of_logits.clamp_(min=_LEAST).exp()
            # -p (grad + of_entropy (log p + H)), and grad where the token is
            of_logits.add_(entropies[rows, None]).mul_(-of_entropy[rows])
            of_logits.sub_(grad[rows]).mul_(probs)
            del probs
            add_at(of_logits, tokens[rows], grad[rows, 0])
            gradients.add(rows, of_rows, head.before_softcap(capped, of_logits))
            del of_logits, capped
        return (None, None, *gradients.parts)


def token_mean(
    means: Means, values: Tensor, mask: Tensor, *, per: Per, shards: Shards | None
) -> TokenMean:
    """As `ContextParallel.token_mean` describes it. `shards` of the batch, if they are known: then
    slots without a token do not count."""
    groups = means.user.session.groups
    means.refuse_wrong()
    values, mask = own_copies(groups.ranks, values=values, mask=mask)
    _refuse_wrong_values(values, mask, per)
    groups.check_device(values.device)
    statement: Statement = {"dtype": str(values.dtype)}
    dtype = torch.promote_types(values.dtype, torch.float32)
    if shards is not None:  # slots without a token do not count
        means = replace(means, batch=means.batch or shards.batch)
        if shards.of_batch or per == "sequence":
            statement["plan"] = shards.words
            _refuse_other_layout(layout_of(mask, means), shards.q_layout)
        sequences, number = _sequences(shards, values)
        mask = mask & (sequences < number)
    # Where the mask is false nothing is multiplied: values there may be anything, NaN too.
    kept = torch.where(mask, values, 0).double()
    if per == "token":
        counted = mask.sum(dtype=torch.float64)
        return means.mean(kept.sum(), counted, dtype, {"per": per}, statement)
    assert shards is not None
    lengths = torch.zeros(number + 1, dtype=torch.float64, device=values.device)
    lengths.index_add_(0, sequences.flatten(), mask.flatten().double())
    means.add_up(statement | {"sequences": number}, lengths)
    own = (kept / lengths[sequences].clamp(min=1)).sum()
    counted = (lengths[:number] > 0).sum(dtype=torch.float64)
    if dist.get_rank(groups.parent) != 0:  # of a group that all see, counted once
        counted.zero_()
    return means.mean(own, counted, dtype, {"per": per}, statement)


def _sequences(shards: Shards, values: Tensor) -> tuple[Tensor, int]:
    """The number of the sequence of each slot, in the shape of the values, and how many sequences
    there are. Slots without a token get the number after the last."""
    slots = shards.q_layout.slots
    if values.ndim != 2 or values.shape[1] != slots:
        raise MeshAttentionError(
            f"values have shape {tuple(values.shape)}: expected (batch, {slots}), the local tokens "
            "of these documents"
        )
    own, number = torch.from_numpy(shards.documents("q")), len(shards.starts[0]) - 1
    rows = torch.arange(len(values))[:, None] * number
    everywhere = torch.where(own < number, own + rows, len(values) * number)
    return everywhere.to(values.device, non_blocking=True), len(values) * number


def _refuse_other_layout(cut: Layout | None, layout: Layout) -> None:
    """`cut`: how the mask lies, if that is known."""
    if cut is not None and cut.slots == layout.slots and not same_rows(cut, layout):
        raise MeshAttentionError(
            f"mask lies in the {cut.kind} layout of {cut.num_tokens} tokens, and the values in the "
            f"{layout.kind} layout of {layout.num_tokens}: give shard and token_mean the same "
            "documents="
        )


def _refuse_wrong_values(values: Any, mask: Any, per: Any) -> None:
    if per not in get_args(Per):
        raise MeshAttentionError(f"per={per!r}: must be one of {', '.join(get_args(Per))}")
    raise_fault(fault_of_kind(values=values, mask=mask))
    if not values.is_floating_point():
        raise MeshAttentionError(f"values are {values.dtype}: must be floating-point numbers")
    if mask.dtype != torch.bool or mask.shape != values.shape or mask.device != values.device:
        raise MeshAttentionError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)} on {mask.device}: expected bool of "
            f"{tuple(values.shape)} on {values.device}, as values have it, such as labels != -100; "
            "multiply weights into the values"
        )
