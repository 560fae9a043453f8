"""A batch of training code, made ready for this rank: labels shifted before anything is cut.

What goes wrong in silence by hand is done here: the target of a shard's last token is on another
rank, padding must not count in the loss, positions are not 0, 1, 2, ..., and a padding mask must
reach attention, as documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mesh_attention.choose.pack import Pack
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.arguments import flag, number
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.runtime.session.sharding import Shards
from mesh_attention.train.whole_batch import IGNORED, MARK, Rows, WholeBatch, checked_tensors

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class ShardedBatch(Mapping[str, Any]):
    """This rank's part of a batch: tensors of (rows, local tokens). Also a mapping, by name, of
    those that there are.

    labels        targets: what each token is to predict, `ignore_index` where nothing; with `ahead`
                  of (rows, local tokens, ahead)
    position_ids  as given, or counted in each document
    padding       true where a slot holds no token, or one that the mask says is padding
    documents     to hand to `attention` and `unshard`; None where the object knows them
    others        tensors that were given by other names: `batch.name` as well as `batch["name"]`
    num_targets   of the whole batch, on all ranks of the group: a tensor, for which nobody waits;
                  with `ahead` a number for each distance
    of_model      names of the arguments of a model, where a `ModelContextParallel` knows it
    whole         only of a Trainer: the batch as data_collator made it, labels not shifted

    If rows have different documents, they became one pack, and `rows` is 1 here.
    """

    input_ids: Tensor | None
    labels: Tensor | None
    position_ids: Tensor
    padding: Tensor
    documents: Documents | None
    num_targets: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    of_model: frozenset[str] | None = None
    whole: Mapping[str, Any] = field(default_factory=dict)

    def model_inputs(self) -> dict[str, Any]:
        """Arguments for a model: without labels, since models that take some shift them once more,
        and of `others` only those `of_model`."""
        names = self.others if self.of_model is None else self.of_model
        others = {name: x for name, x in self.others.items() if name in names}
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids, **others}
        inputs["documents"] = self.documents  # type: ignore[assignment]
        return {name: x for name, x in inputs.items() if x is not None}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ShardedBatch:
        def moved(x: Tensor | None) -> Any:
            if x is None:
                return None
            there = x.to(device, non_blocking=non_blocking)
            for name in (MARK, IGNORED):
                setattr(there, name, getattr(x, name, None))
            return there

        names = ("input_ids", "labels", "position_ids", "padding", "num_targets")
        tensors: dict[str, Any] = {name: moved(getattr(self, name)) for name in names}
        return replace(self, **tensors, others={n: moved(x) for n, x in self.others.items()})

    def _named(self) -> dict[str, Any]:
        own = {"labels": self.labels, "padding": self.padding, "num_targets": self.num_targets}
        own = {name: x for name, x in own.items() if x is not None}
        return self.model_inputs() | {**self.others} | own

    def __getattr__(self, name: str) -> Any:
        others = vars(self).get("others")
        if others is None or name.startswith("_"):  # of one that is being made
            raise AttributeError(name)
        if name not in others:
            raise AttributeError(f"the batch has no {name}; it has {', '.join(self)}")
        return others[name]

    def __getitem__(self, name: str) -> Any:
        return self._named()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named())

    def __len__(self) -> int:
        return len(self._named())


def shard_batch(
    calls: ObjectCalls,
    tensors: Mapping[str, Any],
    *,
    cu_seqlens: Any,
    documents: Documents | None,
    also: Sequence[Any],
    shift_labels: bool,
    ahead: int | None,
    ignore_index: int,
    check: bool | None,
) -> ShardedBatch:
    """As `ContextParallel.shard_batch` describes it."""
    batches = calls.session.batches
    place = batches.begin()  # first: a batch that turns out to be wrong counts too
    if check is not None:
        flag("check", check)
    whole = WholeBatch(checked_tensors(tensors), cu_seqlens, documents, check)
    if documents is not None:
        calls.shards(documents)  # refuses what is none
    if not isinstance(shift_labels, bool):
        raise MeshAttentionError(
            "shift_labels is True or False: give labels that are targets already as labels, with "
            "shift_labels=False"
        )
    if ahead is not None:
        ahead = number("ahead", ahead)
        if "labels" not in whole.tensors:
            raise MeshAttentionError(f"ahead={ahead}: give labels, of which it makes targets")
        if ahead > (tokens := whole.tensors["labels"].shape[1]):
            raise MeshAttentionError(f"ahead={ahead}: the rows of the batch have {tokens} tokens")
    ignore_index = number("ignore_index", ignore_index, least=None)
    if not whole.says_documents:
        _refuse_local_length(calls, whole)
    # What ranks share out, and compare.
    handle, shards, rows = _sharing(calls, whole, also)
    contents = whole.contents(shift_labels=shift_labels, ahead=ahead, ignore_index=ignore_index)
    batch = batches.holds(place, contents)
    # Labels become targets in whole rows, then all is cut.
    tensors, num_targets = {**whole.tensors}, None
    if "labels" in tensors:
        tensors["labels"] = _targets(whole, rows, shift_labels, ahead, ignore_index)
        num_targets = (tensors["labels"] != ignore_index).sum((0, 1))
    device = next(iter(tensors.values())).device  # what else was kept on the CPU goes there too
    local = {
        name: shards.shard(x, 1, "q").to(device, non_blocking=True) for name, x in tensors.items()
    }
    # Slots without a token, and what was not given.
    empty = shards.padding("q", device)
    size = next(iter(local.values())).shape[:2]
    if "labels" in local:
        local["labels"].masked_fill_(empty if ahead is None else empty[:, None], ignore_index)
    real = local.pop("attention_mask", None)
    padding = empty.expand(size) if real is None else ~real.bool()
    if handle is not None:
        handle = handle.of_batch(batch)
        handle.position_ids, handle.padding = local.get("position_ids"), padding
    if "position_ids" not in local:
        local["position_ids"] = shards.positions("q", device, restart=True).expand(size)
    for name, x in local.items():  # plain, for torch.save
        setattr(x, MARK, (batch.number, batch.contents))
        setattr(x, IGNORED, ignore_index if name == "labels" else None)
    return ShardedBatch(
        local.pop("input_ids", None),
        local.pop("labels", None),
        local.pop("position_ids"),
        padding=padding,
        documents=handle,
        num_targets=num_targets,
        others=local,
    )


def _refuse_local_length(calls: ObjectCalls, whole: WholeBatch) -> None:
    """Raises if a batch looks like the shard of one. Contents on a device are not compared among
    ranks, so there only the length tells."""
    if all(x.device.type == "cpu" for x in whole.tensors.values()):
        return
    try:
        layout = calls.shards(None, is_asked=False).q_layout
    except MeshAttentionError:
        return  # the length comes with batches
    if whole.shape[1] == layout.slots != layout.num_tokens:
        raise MeshAttentionError(
            f"the batch has {layout.slots} tokens, as a shard of {layout.num_tokens} has, and "
            f"looks sharded already; if it is whole, give cu_seqlens=(0, {layout.slots})"
        )


def _sharing(
    calls: ObjectCalls, whole: WholeBatch, also: Sequence[Any]
) -> tuple[Documents | None, Shards, Rows]:
    """How the batch is cut, and the documents of each row. The handle is None where the object is
    for one length and mask, and these are the batch's."""
    handle = whole.documents
    rows = whole.rows()
    if handle is None:
        same = all(row == rows[0] for row in rows)
        try:
            calls.layer()
        except MeshAttentionError:
            shards = calls.shards(None)
            own = shards.starts[0]
            if not same or rows[0] not in (own, (0, own[-1])):
                raise
            return None, calls.cut(None), [own] * len(rows)
        made = whole.cu_seqlens
        if not isinstance(made, Pack):
            made = rows[0] if same else rows
        handle = calls.documents(made, also)
    return handle, calls.cut(handle), rows


def _targets(
    whole: WholeBatch, rows: Rows, shift_labels: bool, ahead: int | None, ignore_index: int
) -> Tensor:
    """What each token of the whole batch is to predict: nothing behind the end of its document.
    With `ahead`, (rows, tokens, ahead): the next token, that after it, and so on."""
    labels = whole.tensors["labels"]
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise MeshAttentionError(f"labels are {labels.dtype}: must be whole numbers")
    if not torch.iinfo(labels.dtype).min <= ignore_index <= torch.iinfo(labels.dtype).max:
        labels = labels.long()  # bytes would take `ignore_index` for another token
    if shift_labels:
        whole.refuse_next_tokens(ignore_index)
    tokens, device = labels.shape[1], labels.device
    starts = torch.tensor([s for row in rows for s in row[:-1]], device=device)
    ends = torch.tensor([s for row in rows for s in row[1:]], device=device)
    lengths, size = ends - starts, labels.numel()
    ends = torch.repeat_interleave(ends, lengths, output_size=size).view(labels.shape)
    at = torch.arange(tokens, device=device)
    mask, targets = whole.tensors.get("attention_mask"), []
    for distance in range(shift_labels, shift_labels + (ahead or 1)):
        shifted = labels.roll(-distance, 1)
        # Labels that are targets already may stand at the end of a document.
        shifted = shifted.masked_fill(at + distance >= ends, ignore_index)
        if mask is not None:
            shifted = shifted.masked_fill((mask == 0).to(device), ignore_index)
        targets.append(shifted)
    return targets[0] if ahead is None else torch.stack(targets, -1)
