"""The cross-entropy of a batch whose tokens are on many ranks, from logits, or from hidden states
and the matrix of the head, whose logits are then never there as a whole.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.arguments import number, real
from mesh_attention.request.operators import need_grad
from mesh_attention.request.tensor_checks import fault_of_kind
from mesh_attention.runtime.session.distributed_tensors import own_copies
from mesh_attention.runtime.session.modes import as_under_autocast, outside_autocast
from mesh_attention.train.chunked_logits import Head
from mesh_attention.train.means import Means, Reduce, TokenMean
from mesh_attention.train.sharded_weight import own_weights
from mesh_attention.train.token_losses import CrossEntropy, Loss, Targets
from mesh_attention.train.whole_batch import index_of_64_bits


def cross_entropy(
    means: Means,
    x: Tensor,
    tokens: Any,
    head: tuple[Any, Any] | None,
    ignore_index: int,
    **numbers: Any,
) -> TokenMean:
    """As `ContextParallel.cross_entropy` and `linear_cross_entropy` describe it: of logits, or of
    hidden states with a `head` of weight and bias. `numbers` are `label_smoothing` and, with a
    head, `z_loss`, `softcap` and `chunk_tokens`."""
    groups = means.user.session.groups
    means.refuse_wrong()
    name, reduce = "logits" if head is None else "hidden", means.reduce
    x, tokens, weight, bias = whole_inputs(groups.ranks, name, x, tokens, head, reduce, means)
    ignore_index, numbers = plain_numbers(ignore_index, **numbers)
    loss = Loss(numbers["label_smoothing"], numbers.get("z_loss", 0.0))
    how = {"softcap": numbers.get("softcap"), "chunk_tokens": numbers.pop("chunk_tokens", None)}
    targets = targets_of(x, weight, tokens, ignore_index, **how)
    groups.check_device(x.device)
    flat, needs_grad = x.flatten(0, -2), need_grad(x, weight, bias)
    with outside_autocast():
        total: Tensor = CrossEntropy.apply(flat, weight, bias, targets, loss, needs_grad)  # type: ignore[no-untyped-call]
    statement = {"shape": list(x.shape), "dtype": str(x.dtype)}
    if weight is not None:
        statement["shape of the weight"] = list(weight.shape)
    return means.mean(
        total,
        (~targets.ignored).sum(dtype=torch.float64),
        targets.head.precise,
        {"ignore_index": ignore_index} | numbers,
        statement,
    )


def whole_inputs(
    ranks: tuple[int, ...],
    name: str,
    x: Any,
    tokens: Any,
    head: tuple[Any, Any] | None,
    reduce: Reduce | None,
    means: Means | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Logits or hidden states, by their `name`, targets, weight and bias, whole on this rank and
    checked; `reduce` and `means` as in `own_weights`."""
    x, tokens = own_copies(ranks, **{name: x}, targets=tokens)
    _refuse_wrong_tensors(name, x, tokens, "vocabulary" if head is None else "width")
    if head is None:
        return x, tokens, None, None
    weight, bias = own_weights(ranks, x, reduce, means, weight=head[0], bias=head[1])
    _refuse_wrong_head(name, x, weight, bias)
    return x, tokens, weight, bias


def targets_of(
    x: Tensor, weight: Tensor | None, tokens: Tensor, ignore_index: int, **of_head: Any
) -> Targets:
    """One outside the vocabulary is named where nobody waits for it: on CPU. `of_head` are fields
    of `Head`."""
    dtype, vocabulary = x.dtype, x.shape[-1]
    if weight is not None:
        dtype, vocabulary = as_under_autocast(x[:0])[0].dtype, len(weight)
    ignored = (tokens == ignore_index).flatten()
    flat = tokens.flatten().long().masked_fill(ignored, 0)
    if flat.device.type == "cpu":
        wrong = (flat < 0) | (flat >= vocabulary)
        if bool(wrong.any()):
            raise MeshAttentionError(
                f"targets hold {flat[wrong][0].item()}, which is neither in the vocabulary of "
                f"{vocabulary} nor ignore_index ({ignore_index}): give the loss the ignore_index "
                "that shard_batch was given"
            )
    return Targets(flat, ignored, Head(dtype, **of_head))


def _refuse_wrong_tensors(name: str, x: Any, targets: Any, last_dim: str) -> None:
    """`name` is that of logits or of hidden states."""
    if targets is None:
        raise MeshAttentionError("targets is None: give labels to shard_batch")
    fault = fault_of_kind(**{name: x}, targets=targets)
    if fault is not None:
        raise fault
    if not x.is_floating_point():
        raise MeshAttentionError(f"{name} is {x.dtype}: must be floating-point numbers")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise MeshAttentionError(f"targets are {targets.dtype}: must be whole numbers")
    if x.ndim < 2 or x.shape[:-1] != targets.shape:
        raise MeshAttentionError(
            f"{name} has shape {tuple(x.shape)} and targets {tuple(targets.shape)}; expected "
            f"(batch, local tokens, {last_dim}) and (batch, local tokens), both of this rank: "
            "shard_batch gives such targets as labels"
        )


def _refuse_wrong_head(name: str, x: Tensor, weight: Any, bias: Any) -> None:
    """`name` is that of hidden states."""
    head = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    fault = fault_of_kind(**head)
    if fault is not None:
        raise fault
    autocast = torch.is_autocast_enabled(x.device.type)
    rows = weight.shape[:1]
    for which, part in head.items():
        if part.shape != (rows if which == "bias" else (*rows, x.shape[-1])):
            raise MeshAttentionError(
                f"{which} has shape {tuple(part.shape)} and {name} {tuple(x.shape)}: expected a "
                f"weight of (vocabulary, {x.shape[-1]}), as nn.Linear has it"
                + (f", and a bias of (vocabulary,), here {tuple(rows)}" if "bias" in head else "")
            )
        if part.device != x.device or (part.dtype != x.dtype and not autocast):
            raise MeshAttentionError(
                f"{which} is {part.dtype} on {part.device} and {name} {x.dtype} on {x.device}: "
                "give both alike, or call under torch.autocast"
            )


def plain_numbers(ignore_index: Any, **numbers: Any) -> tuple[int, dict[str, Any]]:
    """Those of a loss or of log-probabilities, checked by their names; numpy's become Python's,
    since ranks compare them as they are written."""
    ignore_index = index_of_64_bits(ignore_index)
    for name, value in numbers.items():
        may_be_zero = name in ("label_smoothing", "z_loss") and not isinstance(value, bool)
        if value is None and name in ("softcap", "chunk_tokens"):
            continue
        if name == "chunk_tokens":
            numbers[name] = number(name, value)
        elif may_be_zero and isinstance(value, Real) and value == 0:
            numbers[name] = 0.0
        else:
            numbers[name] = real(name, value)
    if numbers.get("label_smoothing", 0) > 1:
        raise MeshAttentionError(f"label_smoothing={numbers['label_smoothing']}: must be at most 1")
    return ignore_index, numbers
