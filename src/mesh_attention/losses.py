"""The loss of a batch whose tokens are on many ranks: the mean over all of them, on each of them.

A mean that every rank takes over its own tokens, averaged by the framework, is another number
whenever ranks have different numbers of targets. So targets are counted over all ranks, and each
rank divides by that count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from mesh_attention.context_arguments import process_group
from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.distributed_tensors import own_copies
from mesh_attention.runtime.prepared_call import CallOptions
from mesh_attention.runtime.share import Share
from mesh_attention.runtime.transport.distributed import CommunicationError
from mesh_attention.tensor_faults import fault_of_kind

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
    share: Share,
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
    share.refuse_if_closed()
    context = share.context
    try:
        logits, targets = own_copies(context.groups.ranks, logits=logits, targets=targets)
        _refuse_wrong(logits, targets, reduce)
        assert targets is not None
        context.groups.check_device(logits.device)
        ranks = _Ranks.of(context.groups.ranks, data_parallel)
        losses = _losses(logits, targets, ignore_index, label_smoothing)
    except Exception as error:  # whatever it is, the others must not wait for us
        context.agree_on({}, options, error)
        raise
    own = losses.sum(dtype=torch.float64)
    counted = (targets != ignore_index).sum(dtype=torch.float64)
    both = torch.stack([own.detach(), counted])
    kind = context.agree_on(
        {
            "cross_entropy": reduce,
            "shape": list(logits.shape),
            "dtype": str(logits.dtype),
            "device": logits.device.type,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "data parallel ranks": ranks.number // len(context.groups.ranks),
        },
        options,
        ahead=True,
    )
    share.begin(kind, "cross_entropy", options, logits.device)
    with context.guard.whole_or_broken():
        if ranks.within and len(context.groups.ranks) > 1:
            _add_up(both, context.groups.everybody(options.timeout))
        context.guard.settle((both,))
    if ranks.group is not None:
        dist.all_reduce(both, group=ranks.group)
    total, count = both.unbind()
    # Where nothing is counted sums are 0, and so is the loss, by whichever number.
    divisor = (count if num_targets is None else num_targets) + (count == 0)
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
    if logits.ndim < 2 or logits.shape[:-1] != targets.shape:
        raise MeshAttentionError(
            f"logits have shape {tuple(logits.shape)} and targets {tuple(targets.shape)}; expected "
            "(batch, local tokens, vocabulary) and (batch, local tokens), both of this rank: "
            "shard_batch gives such targets as labels"
        )


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


def _add_up(x: Tensor, group: dist.ProcessGroup) -> None:
    try:
        dist.all_reduce(x, group=group)
    except (RuntimeError, dist.DistBackendError) as error:
        told = str(error).splitlines()[0]
        raise CommunicationError(f"the losses could not be added up ({told})") from error
