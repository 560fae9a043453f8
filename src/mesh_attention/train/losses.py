"""The loss of a batch whose tokens are on many ranks: the mean over all of them, on each of them.

A mean that every rank takes over its own tokens, averaged by the framework, is another number
whenever ranks have different numbers of targets. So targets are counted over all ranks, and each
rank divides by that count.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.tensor_checks import fault_of_kind
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.distributed_tensors import own_copies
from mesh_attention.runtime.session.session import User, process_group
from mesh_attention.runtime.transport.distributed import CommunicationError

Reduce = Literal["ddp", "fsdp", "sum"]


@dataclass(frozen=True, eq=False)
class TokenMean:
    """
    loss         to call `backward` on; scaled for what becomes of gradients, so not for people
    value        the mean over all targets of all ranks, the same on each of them, without a graph
    num_targets  how many there are
    """

    loss: Tensor
    value: Tensor
    num_targets: Tensor


def cross_entropy(
    user: User,
    options: CallOptions,
    logits: Tensor,
    targets: Tensor | None,
    *,
    reduce: Reduce,
    data_parallel: dist.ProcessGroup | DeviceMesh | None,
    num_targets: int | Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> TokenMean:
    """As `ContextParallel.cross_entropy` describes it."""
    user.refuse_if_closed()
    session = user.session
    logits, targets = own_copies(session.groups.ranks, logits=logits, targets=targets)
    _refuse_wrong(logits, targets, reduce)
    assert targets is not None
    _refuse_wrong_numbers(num_targets, ignore_index, label_smoothing)
    ignore_index, label_smoothing = int(ignore_index), float(label_smoothing)
    if isinstance(num_targets, Tensor):
        num_targets = num_targets.detach().reshape(())
    session.groups.check_device(logits.device)
    ranks = _Ranks.of(session.groups.ranks, data_parallel)
    losses = _losses(logits, targets, ignore_index, label_smoothing)
    own = losses.sum(dtype=torch.float64)
    counted = (targets != ignore_index).sum(dtype=torch.float64)
    said = _Said(num_targets, (reduce, ignore_index, label_smoothing), logits.device)
    sums = torch.cat([torch.stack([own.detach(), counted]), said.sums])
    kind = session.calls.agree_on(
        {
            "cross_entropy": reduce,
            "shape": list(logits.shape),
            "dtype": str(logits.dtype),
            "device": logits.device.type,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "data parallel ranks": ranks.number // len(session.groups.ranks),
        },
        options,
        ahead=True,
    )
    user.begin(kind, "cross_entropy", options, logits.device)
    with session.guard.whole_or_broken():
        if ranks.within and len(session.groups.ranks) > 1:
            _add_up(sums, session.groups.everybody())
        session.guard.settle((sums,))
    if ranks.group is not None:
        _add_up(sums, ranks.group, "of data-parallel ranks, one of which may have failed, ")
    total, count = sums[:2].unbind()
    try:
        wrong = said.is_wrong(sums[2:], count, ranks.number)
    except MeshAttentionError as error:  # of the sums, so on all ranks
        raise session.guard.known(error) from None
    # Where nothing is counted sums are 0, and so is the loss, by whichever number.
    divisor = (count if num_targets is None else torch.zeros_like(count) + num_targets) + (
        count == 0
    )
    divisor = divisor.masked_fill(wrong, torch.nan)
    scale = 1 if reduce == "sum" else ranks.number
    return TokenMean((own * scale / divisor).to(losses.dtype), total / divisor, count.long())


@dataclass(frozen=True)
class _Ranks:
    """
    number   of those that have a part of the batch
    group    over which sums of a context-parallel group are added up, if there are others
    within   whether they must be added up in the group before
    """

    number: int
    group: dist.ProcessGroup | None
    within: bool

    @staticmethod
    def of(own: tuple[int, ...], data_parallel: dist.ProcessGroup | DeviceMesh | None) -> _Ranks:
        if data_parallel is None:
            return _Ranks(len(own), None, True)
        group = process_group(data_parallel)
        others = dist.get_process_group_ranks(group)
        if {*own} == {*others} and len(own) < dist.get_world_size():
            raise MeshAttentionError(
                f"data_parallel has the ranks {others} of the context-parallel group itself: give "
                "the group of the ranks that hold the same tokens of other batches, as in "
                "mesh['dp'], or leave it out"
            )
        if {*own} <= {*others}:
            return _Ranks(len(others), group, False)
        if {*own} & {*others} == {dist.get_rank()}:
            return _Ranks(len(own) * len(others), group, True)
        raise MeshAttentionError(
            f"data_parallel has the ranks {others}, and the context-parallel group {list(own)}: "
            "give the group of the ranks that hold the same tokens of other batches, as in "
            "mesh['dp'], or one of all ranks"
        )


def _refuse_wrong(logits: Any, targets: Any, reduce: Any) -> None:
    if reduce not in get_args(Reduce):
        raise MeshAttentionError(f"reduce={reduce!r}: must be one of {', '.join(get_args(Reduce))}")
    if targets is None:
        raise MeshAttentionError("targets is None: give labels to shard_batch")
    fault = fault_of_kind(logits=logits, targets=targets)
    if fault is not None:
        raise fault
    if not logits.is_floating_point():
        raise MeshAttentionError(f"logits are {logits.dtype}: must be floating-point numbers")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise MeshAttentionError(f"targets are {targets.dtype}: must be whole numbers")
    if logits.ndim < 2 or logits.shape[:-1] != targets.shape:
        raise MeshAttentionError(
            f"logits have shape {tuple(logits.shape)} and targets {tuple(targets.shape)}; expected "
            "(batch, local tokens, vocabulary) and (batch, local tokens), both of this rank: "
            "shard_batch gives such targets as labels"
        )


def _refuse_wrong_numbers(num_targets: Any, ignore_index: Any, label_smoothing: Any) -> None:
    if isinstance(num_targets, Tensor):
        fits = num_targets.numel() == 1 and num_targets.dtype != torch.bool
    else:
        whole = isinstance(num_targets, Integral) and not isinstance(num_targets, bool)
        fits = num_targets is None or (whole and num_targets >= 0)
    if not fits:
        raise MeshAttentionError(
            f"num_targets={num_targets!r}: give how many targets all ranks have in all batches "
            "whose gradients are accumulated, one number, or leave it out"
        )
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, Integral):
        raise MeshAttentionError(f"ignore_index={ignore_index!r}: must be a whole number")
    if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, Real):
        raise MeshAttentionError(f"label_smoothing={label_smoothing!r}: must be a number")
    if not 0 <= float(label_smoothing) <= 1:  # NaN neither
        raise MeshAttentionError(f"label_smoothing={label_smoothing!r}: must be from 0 to 1")


class _Said:
    """What all ranks must say alike, those of other replicas too. It travels with the sums of the
    losses: numbers below 4,093 and their squares, which are exact when added up, and of which the
    mean of the squares is the square of the mean only where all are equal."""

    def __init__(
        self, num_targets: int | Tensor | None, how: tuple[object, ...], device: torch.device
    ) -> None:
        self._num_targets = num_targets
        number = int.from_bytes(blake2b(repr(how).encode(), digest_size=3).digest(), "big")
        count = torch.as_tensor(-1 if num_targets is None else num_targets, device=device)
        settings = torch.tensor(number, device=device)
        both = torch.stack([count.round().long(), settings])
        values = torch.stack([both % modulus for modulus in _MODULI], 1).flatten().double()
        self.sums = torch.cat([values, values**2])

    def is_wrong(self, sums: Tensor, count: Tensor, num_ranks: int) -> Tensor:
        """Whether results must be NaN: on the CPU, where nobody waits for it, an error on all."""
        total, squares = sums.chunk(2)
        numbers, settings = (total**2 != num_ranks * squares).view(2, -1).any(1)
        few = count > (count if self._num_targets is None else self._num_targets)
        if sums.device.type == "cpu":
            if bool(settings):
                raise MeshAttentionError(
                    "replicas call cross_entropy with another reduce, ignore_index or "
                    "label_smoothing"
                )
            if bool(numbers):
                raise MeshAttentionError(
                    f"num_targets is {_number(self._num_targets)} here and another number on other "
                    "ranks: it is the number of all ranks' targets, data-parallel ranks included, "
                    "in all batches whose gradients are accumulated"
                )
            if bool(few):
                raise MeshAttentionError(
                    f"num_targets is {_number(self._num_targets)}, fewer than the {int(count)} "
                    "targets of this batch"
                )
        wrong: Tensor = numbers | settings | few
        return wrong


_MODULI = (4093, 4091)


def _number(value: int | Tensor | None) -> float | None:
    return value.item() if isinstance(value, Tensor) else value


def _losses(logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """Of each target. One outside the vocabulary is named here where PyTorch finds it: on CPU."""
    try:
        return functional.cross_entropy(
            _precise(logits).flatten(0, -2),
            targets.flatten().long(),
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    except IndexError as error:
        vocabulary = logits.shape[-1]
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
        if not bool(wrong.any()):
            raise
        raise MeshAttentionError(
            f"targets hold {targets[wrong][0].item()}, which is neither in the vocabulary of "
            f"{vocabulary} nor ignore_index ({ignore_index}): give cross_entropy the ignore_index "
            "that shard_batch was given"
        ) from error


def _precise(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _add_up(x: Tensor, group: dist.ProcessGroup, whose: str = "") -> None:
    try:
        dist.all_reduce(x, group=group)
    except (RuntimeError, dist.DistBackendError) as error:
        first_line = str(error).splitlines()[0]
        raise CommunicationError(
            f"the losses {whose}could not be added up ({first_line})"
        ) from error
