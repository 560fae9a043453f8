"""The cross-entropy of a batch whose tokens are on many ranks: from logits, or from hidden states
and the weight of the head, without ever holding all logits.

`ContextParallel` calls `cross_entropy`. It checks the arguments, sums the losses of this rank by
`loss_kernels.py`, and returns the mean over all ranks by `means.py`. `policy.py` shares the checks.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError, raise_fault
from mesh_attention.plan.problem.arguments import number, real
from mesh_attention.request.operators import need_grad
from mesh_attention.request.tensor_checks import fault_of_kind
from mesh_attention.runtime.session.distributed_tensors import own_copies
from mesh_attention.runtime.session.modes import as_under_autocast, outside_autocast
from mesh_attention.train.chunked_logits import Factors, Head, Targets
from mesh_attention.train.loss_kernels import CrossEntropy, LossKernel, choose_loss
from mesh_attention.train.means import LossCall, Means, TokenMean
from mesh_attention.train.sharded_weight import count_gathering, own_weights
from mesh_attention.train.target_checks import refuse_other_tokens
from mesh_attention.train.whole_batch import note_on

Weights = tuple[Any, Any, Any]  # of a head: weight, bias and low_rank


def cross_entropy(
    means: Means,
    x: Tensor,
    tokens: Any,
    head: Weights | None,
    kernel: LossKernel | None,
    ignore_index: int,
    **numbers: Any,
) -> TokenMean:
    """The mean loss for `ContextParallel.cross_entropy`, where `x` holds logits and `head` is None,
    or for `linear_cross_entropy`, where `x` holds hidden states. `numbers` are `label_smoothing`
    and, with a head, `z_loss`, `softcap` and `chunk_tokens`."""
    count_gathering(means, head)
    means.refuse_wrong()
    name = "logits" if head is None else "hidden"
    factors, tokens = whole_inputs(means, name, x, tokens, head)
    ignore_index, numbers = plain_numbers(ignore_index, **numbers)
    chunk_tokens, softcap = numbers.pop("chunk_tokens", None), numbers.get("softcap")
    targets = targets_of(factors, tokens, ignore_index, softcap=softcap, chunk_tokens=chunk_tokens)
    means.user.session.groups.check_device(tokens.device)
    smoothing, z_loss = numbers["label_smoothing"], numbers.get("z_loss", 0.0)
    loss, reasons = choose_loss(kernel, targets.head, factors, smoothing, z_loss)
    means.user.loss_kernels[means.name] = reasons
    needs_grad = need_grad(*factors)
    with outside_autocast():
        total: Tensor = CrossEntropy.apply(targets, loss, needs_grad, *factors)  # type: ignore[no-untyped-call]
    statement = {  # what ranks compare; each may have selected another number of its tokens
        "width" if head else "vocabulary": factors.x.shape[1],
        "dtype": str(factors.x.dtype),
        "kernel": reasons[-1][0],
    }
    names = {"weight": "weight", "bias": "bias", "few_weight": "second matrix of low_rank"}
    for field, text in names.items():
        if (factor := getattr(factors, field)) is not None:
            statement[f"shape of the {text}"] = list(factor.shape)
    return means.mean(
        total,
        (~targets.ignored).sum(dtype=torch.float64),
        targets.head.precise,
        {"ignore_index": ignore_index} | numbers,
        statement,
    )


def whole_inputs(
    call: LossCall, name: str, x: Any, tokens: Any, head: Weights | None
) -> tuple[Factors, Tensor]:
    """Checks logits or hidden states (`x`, called `name` in errors), weights and targets, and
    returns them whole: DTensors become this rank's tensors, sharded weights are gathered."""
    ranks = call.user.session.groups.ranks
    x, tokens = own_copies(ranks, **{name: x}, targets=tokens)
    _refuse_wrong_tensors(name, x, tokens, "vocabulary" if head is None else "width")
    refuse_other_tokens(name, x, tokens, call)
    if head is None:
        return Factors(x.flatten(0, -2)), tokens
    weight, bias, low_rank = head
    few, few_weight = (None, None) if low_rank is None else _pair(low_rank)  # of few columns
    weights = {"weight": weight, "bias": bias, "low_rank[1]": few_weight}
    weight, bias, few_weight = own_weights(call, x, **weights)
    _refuse_wrong_head(name, x, weight, bias)
    if few is not None:
        [few] = own_copies(ranks, **{"low_rank[0]": few})
        _refuse_wrong_pair(x, weight, few, few_weight)
        few = few.flatten(0, -2)
    return Factors(x.flatten(0, -2), weight, bias, few, few_weight), tokens


def targets_of(factors: Factors, tokens: Tensor, ignore_index: int, **of_head: Any) -> Targets:
    """Checks target tokens and returns them as `Targets`; `of_head` are fields of `Head`. A target
    outside the vocabulary raises on the CPU only: on a GPU the host would wait for the check."""
    x, weight, filled_with = factors.x, factors.weight, note_on(tokens).ignore_index
    if filled_with not in (None, ignore_index):
        raise MeshAttentionError(
            f"ignore_index={ignore_index}, and shard_batch filled these labels with {filled_with}: "
            "give both the same"
        )
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
    if targets is None:
        raise MeshAttentionError("targets is None: give labels to shard_batch")
    raise_fault(fault_of_kind(**{name: x}, targets=targets))
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
    head = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    raise_fault(fault_of_kind(**head))
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


def _pair(low_rank: Any) -> tuple[Any, Any]:
    if not isinstance(low_rank, tuple | list) or len(low_rank) != 2:
        raise MeshAttentionError(
            f"low_rank is {type(low_rank).__name__}: give a pair, of (batch, local tokens, few) "
            "and (vocabulary, few)"
        )
    return low_rank[0], low_rank[1]


def _refuse_wrong_pair(hidden: Tensor, weight: Tensor, few: Any, few_weight: Any) -> None:
    raise_fault(fault_of_kind(**{"low_rank[0]": few, "low_rank[1]": few_weight}))
    columns = few.shape[-1:]
    for which, x, wanted in (
        ("low_rank[0]", few, (*hidden.shape[:-1], *columns)),
        ("low_rank[1]", few_weight, (len(weight), *columns)),
    ):
        if x.shape != wanted or x.device != hidden.device or not x.is_floating_point():
            raise MeshAttentionError(
                f"{which} is {x.dtype} of shape {tuple(x.shape)} on {x.device}: expected floating-"
                f"point numbers of {tuple(wanted)} on {hidden.device}"
            )


def plain_numbers(ignore_index: Any, **numbers: Any) -> tuple[int, dict[str, Any]]:
    """Checks the numbers of a loss or of log-probabilities, and converts numpy's to Python's, since
    ranks compare numbers as they print."""
    ignore_index = number("ignore_index", ignore_index, least=None)
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
