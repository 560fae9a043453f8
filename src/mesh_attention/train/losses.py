"""The cross-entropy of a batch whose tokens are on many ranks, from logits, or from hidden states
and the matrix of the head, whose logits are then never there as a whole.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.operators import need_grad
from mesh_attention.request.tensor_checks import fault_of_kind
from mesh_attention.runtime.session.distributed_tensors import own_copies, own_weight
from mesh_attention.runtime.session.modes import as_under_autocast, outside_autocast
from mesh_attention.train.chunked_logits import Head
from mesh_attention.train.means import Means, TokenMean
from mesh_attention.train.token_losses import CrossEntropy, PerToken, Summed


def cross_entropy(
    means: Means,
    logits: Tensor,
    targets: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
) -> TokenMean:
    """As `ContextParallel.cross_entropy` describes it."""
    ranks = means.user.session.groups.ranks
    means.refuse_wrong()
    logits, targets = own_copies(ranks, logits=logits, targets=targets)
    refuse_wrong_tensors(targets, logits=logits)
    refuse_wrong_numbers(ignore_index, label_smoothing=label_smoothing)
    assert targets is not None
    means.user.session.groups.check_device(logits.device)
    losses, *_ = per_token(
        logits,
        None,
        None,
        targets,
        ignore_index,
        Head(logits.dtype),
        CrossEntropy(label_smoothing),
    )
    return means.mean(
        losses.sum(dtype=torch.float64),
        (targets != ignore_index).sum(dtype=torch.float64),
        losses.dtype,
        {"ignore_index": ignore_index, "label_smoothing": label_smoothing},
        {"shape": list(logits.shape), "dtype": str(logits.dtype)},
    )


def linear_cross_entropy(
    means: Means,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    *,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    chunk_tokens: int | None,
) -> TokenMean:
    """As `ContextParallel.linear_cross_entropy` describes it."""
    ranks = means.user.session.groups.ranks
    means.refuse_wrong()
    hidden, labels = own_copies(ranks, hidden=hidden, labels=labels)
    weight, bias = own_weight(ranks, weight=weight, bias=bias)
    refuse_wrong_tensors(labels, hidden=hidden, weight=weight, bias=bias)
    refuse_wrong_numbers(
        ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
    )
    assert labels is not None
    means.user.session.groups.check_device(hidden.device)
    head = Head(as_under_autocast(hidden[:0])[0].dtype, softcap, chunk_tokens=chunk_tokens)
    rule = CrossEntropy(label_smoothing, z_loss)
    targets, ignored = safe_targets(labels, ignore_index, len(weight))
    needs_grad = need_grad(hidden, weight, bias)
    with outside_autocast():
        total: Tensor = Summed.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), weight, bias, targets, ignored, head, rule, needs_grad
        )
    alike = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap}
    return means.mean(
        total,
        (~ignored).sum(dtype=torch.float64),
        head.precise,
        {"ignore_index": ignore_index} | alike,
        {
            "shape": list(hidden.shape),
            "shape of the weight": list(weight.shape),
            "dtype": str(hidden.dtype),
        },
    )


def per_token(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    head: Head,
    rule: Any,
) -> tuple[Tensor, ...]:
    """Results of a rule, each in the shape of the targets."""
    vocabulary = x.shape[-1] if weight is None else len(weight)
    flat, ignored = safe_targets(targets, ignore_index, vocabulary)
    with outside_autocast():
        results = PerToken.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2), weight, bias, flat, ignored, head, rule
        )
    return tuple([result.view(targets.shape) for result in results])


def safe_targets(targets: Tensor, ignore_index: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Flat, 0 where there is none; and where that is. One outside the vocabulary is named where
    nobody waits for it: on CPU."""
    ignored = (targets == ignore_index).flatten()
    flat = targets.flatten().long().masked_fill(ignored, 0)
    if flat.device.type == "cpu":
        wrong = (flat < 0) | (flat >= vocabulary)
        if bool(wrong.any()):
            raise MeshAttentionError(
                f"targets hold {flat[wrong][0].item()}, which is neither in the vocabulary of "
                f"{vocabulary} nor ignore_index ({ignore_index}): give the loss the ignore_index "
                "that shard_batch was given"
            )
    return flat, ignored


def refuse_wrong_tensors(
    targets: Any, weight: Any = None, bias: Any = None, **tensors: Any
) -> None:
    """`tensors` has the logits, or the hidden states, by that name."""
    [(name, x)] = tensors.items()
    if targets is None:
        raise MeshAttentionError("targets is None: give labels to shard_batch")
    others = {"weight": weight, "bias": bias}
    parts = {which: part for which, part in others.items() if part is not None}
    fault = fault_of_kind(**{name: x}, targets=targets, **parts)
    if fault is not None:
        raise fault
    for which, part in {name: x, **parts}.items():
        if not part.is_floating_point():
            raise MeshAttentionError(f"{which} is {part.dtype}: must be floating-point numbers")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise MeshAttentionError(f"targets are {targets.dtype}: must be whole numbers")
    if x.ndim < 2 or x.shape[:-1] != targets.shape:
        last = "vocabulary" if name == "logits" else "width"
        raise MeshAttentionError(
            f"{name} has shape {tuple(x.shape)} and targets {tuple(targets.shape)}; expected "
            f"(batch, local tokens, {last}) and (batch, local tokens), both of this rank: "
            "shard_batch gives such targets as labels"
        )
    if weight is not None:
        _refuse_wrong_head(name, x, weight, bias)


def _refuse_wrong_head(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise MeshAttentionError(
            f"weight has shape {tuple(weight.shape)} and {name} {tuple(x.shape)}: expected "
            f"(vocabulary, {x.shape[-1]}), as nn.Linear has it"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise MeshAttentionError(
            f"bias has shape {tuple(bias.shape)}: expected ({len(weight)},), as weight has rows"
        )
    autocast = torch.is_autocast_enabled(x.device.type)
    for which, part in (("weight", weight), ("bias", bias)):
        if part is not None and (
            part.device != x.device or (part.dtype != x.dtype and not autocast)
        ):
            raise MeshAttentionError(
                f"{which} is {part.dtype} on {part.device} and {name} {x.dtype} on {x.device}: "
                "give both alike, or call under torch.autocast"
            )


def refuse_wrong_numbers(ignore_index: Any, **numbers: Any) -> None:
    """Those of `label_smoothing`, `z_loss`, `softcap`, `temperature` and `chunk_tokens` that there
    are."""
    if type(ignore_index) is not int:
        raise MeshAttentionError(f"ignore_index={ignore_index!r}: must be a whole number")
    for name, value in numbers.items():
        if value is None and name in ("softcap", "chunk_tokens"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MeshAttentionError(f"{name}={value!r}: must be a number")
        if name == "label_smoothing":
            fits, words = 0 <= value <= 1, "from 0 to 1"  # NaN neither
        elif name == "chunk_tokens":
            fits, words = type(value) is int and value > 0, "a whole number above 0"
        elif name == "z_loss":
            fits, words = isfinite(value) and value >= 0, "0 or more"
        else:
            fits, words = isfinite(value) and value > 0, "above 0"
        if not fits:
            raise MeshAttentionError(f"{name}={value!r}: must be {words}")
