"""The cross-entropy of a batch whose tokens are on many ranks, from logits, or from hidden states
and the matrix of the head, whose logits are then never there as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.operators import need_grad
from mesh_attention.request.tensor_checks import fault_of_kind
from mesh_attention.runtime.session.distributed_tensors import own_copies, own_weight
from mesh_attention.runtime.session.modes import as_under_autocast, outside_autocast
from mesh_attention.train.chunked_logits import Head
from mesh_attention.train.means import Means, TokenMean
from mesh_attention.train.token_losses import CrossEntropy, LogProbs, PerToken, Summed, Targets
from mesh_attention.train.whole_batch import index_of_64_bits


def cross_entropy(
    means: Means, logits: Tensor, targets: Any, ignore_index: int, label_smoothing: float
) -> TokenMean:
    """As `ContextParallel.cross_entropy` describes it."""
    groups = means.user.session.groups
    means.refuse_wrong()
    logits, targets = own_copies(groups.ranks, logits=logits, targets=targets)
    refuse_wrong_tensors("logits", logits, targets)
    ignore_index, numbers = plain_numbers(ignore_index, label_smoothing=label_smoothing)
    groups.check_device(logits.device)
    head, rule = Head(logits.dtype), CrossEntropy(**numbers)
    checked = checked_targets(targets, ignore_index, logits.shape[-1], head, rule)
    [losses] = per_token(logits, None, None, checked)
    return means.mean(
        losses.sum(dtype=torch.float64),
        (~checked.ignored).sum(dtype=torch.float64),
        losses.dtype,
        {"ignore_index": ignore_index} | numbers,
        {"shape": list(logits.shape), "dtype": str(logits.dtype)},
    )


def linear_cross_entropy(
    means: Means,
    hidden: Tensor,
    weight: Tensor,
    labels: Any,
    bias: Tensor | None,
    ignore_index: int,
    chunk_tokens: int | None,
    **numbers: Any,
) -> TokenMean:
    """As `ContextParallel.linear_cross_entropy` describes it; `numbers` are `label_smoothing`,
    `z_loss` and `softcap`."""
    groups = means.user.session.groups
    means.refuse_wrong()
    hidden, labels = own_copies(groups.ranks, hidden=hidden, labels=labels)
    weight, bias = own_weight(groups.ranks, weight=weight, bias=bias)
    refuse_wrong_tensors("hidden", hidden, labels, weight=weight, bias=bias)
    ignore_index, numbers = plain_numbers(ignore_index, chunk_tokens=chunk_tokens, **numbers)
    chunk_tokens = numbers.pop("chunk_tokens")
    groups.check_device(hidden.device)
    dtype = as_under_autocast(hidden[:0])[0].dtype
    head = Head(dtype, numbers["softcap"], chunk_tokens=chunk_tokens)
    rule = CrossEntropy(numbers["label_smoothing"], numbers["z_loss"])
    targets = checked_targets(labels, ignore_index, len(weight), head, rule)
    flat, needs_grad = hidden.flatten(0, -2), need_grad(hidden, weight, bias)
    with outside_autocast():
        total: Tensor = Summed.apply(flat, weight, bias, targets, needs_grad)  # type: ignore[no-untyped-call]
    shapes = {"shape": list(hidden.shape), "shape of the weight": list(weight.shape)}
    return means.mean(
        total,
        (~targets.ignored).sum(dtype=torch.float64),
        head.precise,
        {"ignore_index": ignore_index} | numbers,
        shapes | {"dtype": str(hidden.dtype)},
    )


def per_token(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Targets
) -> tuple[Tensor, ...]:
    """Results of a rule, each in the shape of the tokens."""
    with outside_autocast():
        results = PerToken.apply(x.flatten(0, -2), weight, bias, targets)  # type: ignore[no-untyped-call]
    return tuple([result.view(x.shape[:-1]) for result in results])


def checked_targets(
    tokens: Tensor, ignore_index: int, vocabulary: int, head: Head, rule: CrossEntropy | LogProbs
) -> Targets:
    """One outside the vocabulary is named where nobody waits for it: on CPU."""
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
    return Targets(flat, ignored, head, rule)


def refuse_wrong_tensors(name: str, x: Any, targets: Any, **head: Any) -> None:
    """`name` is that of logits, or of hidden states with a `head` of weight and bias."""
    if targets is None:
        raise MeshAttentionError("targets is None: give labels to shard_batch")
    if head.get("bias", 0) is None:
        del head["bias"]
    fault = fault_of_kind(**{name: x}, targets=targets, **head)
    if fault is not None:
        raise fault
    if not x.is_floating_point():
        raise MeshAttentionError(f"{name} is {x.dtype}: must be floating-point numbers")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise MeshAttentionError(f"targets are {targets.dtype}: must be whole numbers")
    if x.ndim < 2 or x.shape[:-1] != targets.shape:
        raise MeshAttentionError(
            f"{name} has shape {tuple(x.shape)} and targets {tuple(targets.shape)}; expected "
            f"(batch, local tokens, {'width' if head else 'vocabulary'}) and (batch, local "
            "tokens), both of this rank: shard_batch gives such targets as labels"
        )
    autocast = torch.is_autocast_enabled(x.device.type)
    for which, part in head.items():
        rows = head["weight"].shape[:1]
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
        fits, words = _LIMITS[name]
        if value is None and name in ("softcap", "chunk_tokens"):
            continue
        if isinstance(value, bool) or not isinstance(value, Integral | float | np.floating):
            raise MeshAttentionError(f"{name}={value!r}: must be a number")
        numbers[name] = value = int(value) if isinstance(value, Integral) else float(value)
        if not (isfinite(value) and fits(value)):
            raise MeshAttentionError(f"{name}={value!r}: must be {words}")
    return ignore_index, numbers


_LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    "label_smoothing": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "z_loss": (lambda value: value >= 0, "0 or more"),
    "softcap": (lambda value: value > 0, "above 0"),
    "temperature": (lambda value: value > 0, "above 0"),
    "chunk_tokens": (lambda value: type(value) is int and value > 0, "a whole number above 0"),
}
