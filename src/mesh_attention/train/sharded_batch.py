"""`shard_batch` cuts this rank's part of a batch of training code (`ContextParallel.shard_batch`).

By hand this goes wrong in silence. The target of a shard's last token is on another rank, so labels
are shifted before anything is cut. Padding gets no target, positions are those of the whole batch,
and a padding mask reaches attention as documents. The caller's tensors are not changed; the session
counts the batch and remembers how it was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from mesh_attention.choose.pack import Pack
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.arguments import flag, number
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.runtime.agreement.identity import BatchIdentity
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.runtime.session.layouts import KNOWN_LAYOUTS
from mesh_attention.runtime.session.session import Session
from mesh_attention.runtime.session.sharding import Shards
from mesh_attention.train.whole_batch import (
    MARK,
    Rows,
    WholeBatch,
    checked_tensors,
    note,
    note_on,
)

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class ShardedBatch(Mapping[str, Any]):
    """This rank's part of a batch: tensors of (rows, local tokens). It is also a mapping, by name,
    of those that are not None.

    labels        the target of each token, `ignore_index` where it has none; with `ahead` of
                  (rows, local tokens, ahead)
    position_ids  as given, or counted in each document
    padding       true where a slot holds no token, or a token that is padding by `attention_mask`
    documents     an argument for `attention` and `unshard`; None if the object has them already
    others        tensors with other names: `batch.name` as well as `batch["name"]`
    num_targets   the number of targets in the whole batch, on all ranks: a tensor, so that the
                  host waits for no device; with `ahead` a number for each distance
    of_model      the names that the model of a `ModelContextParallel` takes; None: any name
    whole         set by the Trainer only: the batch as data_collator made it, labels not shifted

    Rows with different documents are packed into one row: then `rows` is 1 here.
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
        """Arguments for a model: no labels, since models would shift them once more, and of
        `others` only the names in `of_model`."""
        names = self.others if self.of_model is None else self.of_model
        others = {name: x for name, x in self.others.items() if name in names}
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids, **others}
        inputs["documents"] = self.documents  # type: ignore[assignment]
        return {name: x for name, x in inputs.items() if x is not None}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ShardedBatch:
        def move(x: Tensor | None) -> Any:
            if x is None:
                return None
            moved = x.to(device, non_blocking=non_blocking)
            setattr(moved, MARK, getattr(x, MARK, None))
            note(moved, *note_on(x))
            return moved

        names = ("input_ids", "labels", "position_ids", "padding", "num_targets")
        tensors: dict[str, Any] = {name: move(getattr(self, name)) for name in names}
        return replace(self, **tensors, others={n: move(x) for n, x in self.others.items()})

    def _named(self) -> dict[str, Any]:
        own = {"labels": self.labels, "padding": self.padding, "num_targets": self.num_targets}
        own = {name: x for name, x in own.items() if x is not None}
        return self.model_inputs() | {**self.others} | own

    def __getattr__(self, name: str) -> Any:
        others = vars(self).get("others")
        if others is None or name.startswith("_"):  # `copy` and `pickle` ask before fields are set
            raise AttributeError(name)
        if name not in others:
            raise AttributeError(
                f"the batch has no {name}; it has {', '.join(self)}, and dict(batch) can be changed"
            )
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
    """This rank's part of the whole batch `tensors`. `ContextParallel.shard_batch` describes the
    arguments; `calls` are those of its object."""
    batches = calls.session.batches
    place = batches.begin()  # first, so that a batch that is then refused is counted too
    if check is not None:
        flag("check", check)
    whole = WholeBatch(checked_tensors(tensors), cu_seqlens, documents, check)
    if documents is not None:
        calls.shards(documents)  # raises if it is no `Documents`
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
    # How the batch is cut, and what ranks compare of it.
    documents, shards, rows = _documents_and_shards(calls, whole, also)
    contents = whole.contents(shift_labels=shift_labels, ahead=ahead, ignore_index=ignore_index)
    batch = batches.holds(place, contents)
    # Labels become targets while rows are whole; then all tensors are cut.
    tensors, num_targets = {**whole.tensors}, None
    if "labels" in tensors:
        whole.refuse_wrong_shift(shift_labels, ignore_index, causal=calls.is_causal)
        tensors["labels"] = _targets(whole, rows, shift_labels, ahead, ignore_index)
        num_targets = (tensors["labels"] != ignore_index).sum((0, 1))
    device = next(iter(tensors.values())).device  # to which others, such as a mask, move
    local = {
        name: shards.shard(x, 1, "q").to(device, non_blocking=True) for name, x in tensors.items()
    }
    # Slots without a token are padding and have no target; positions may have to be counted.
    empty = shards.padding("q", device)
    size = next(iter(local.values())).shape[:2]
    if "labels" in local:
        local["labels"].masked_fill_(empty if ahead is None else empty[:, None], ignore_index)
    real = local.pop("attention_mask", None)
    padding = empty.expand(size) if real is None else ~real.bool()
    if documents is not None:
        documents = documents.of_batch(batch)
        documents.position_ids, documents.padding = local.get("position_ids"), padding
    if "position_ids" not in local:
        local["position_ids"] = shards.positions("q", device, restart=True).expand(size)
    _note(calls.session, local, batch, shards.q_layout, ignore_index)
    return ShardedBatch(
        local.pop("input_ids", None),
        local.pop("labels", None),
        local.pop("position_ids"),
        padding=padding,
        documents=documents,
        num_targets=num_targets,
        others=local,
    )


def _note(
    session: Session,
    local: Mapping[str, Tensor],
    batch: BatchIdentity,
    layout: Layout,
    ignore_index: int,
) -> None:
    """Notes what the tensors of a shard are, for checks of calls that come."""
    for name, x in local.items():
        setattr(x, MARK, (batch.number, batch.contents))
        note(x, name, ignore_index if name == "labels" else None)
        KNOWN_LAYOUTS.keep(x, layout, session.groups.ranks, 1)
    if "labels" in local:
        session.labels.append(ref(local["labels"]))


def _refuse_local_length(calls: ObjectCalls, whole: WholeBatch) -> None:
    """Raise if a batch has the length of a shard. Ranks compare the contents of tensors on the CPU,
    which shows the same mistake; of tensors on a device only the length shows it."""
    if all(x.device.type == "cpu" for x in whole.tensors.values()):
        return
    try:
        layout = calls.shards(None, is_asked=False).q_layout
    except MeshAttentionError:
        return  # the object has no length of its own
    if whole.shape[1] == layout.slots != layout.num_tokens:
        raise MeshAttentionError(
            f"the batch has {layout.slots} tokens, as a shard of {layout.num_tokens} has, and "
            f"looks sharded already; if it is whole, give cu_seqlens=(0, {layout.slots})"
        )


def _documents_and_shards(
    calls: ObjectCalls, whole: WholeBatch, also: Sequence[Any]
) -> tuple[Documents | None, Shards, Rows]:
    """The documents for attention, how the batch is cut, and the starts of each row's documents.
    The first is None if the object is for a single length and mask, which this batch has too."""
    documents = whole.documents
    rows = whole.rows()
    if documents is None:
        same = all(row == rows[0] for row in rows)
        try:
            calls.layer()
        except MeshAttentionError:
            shards = calls.shards(None)
            own = shards.starts[0]
            if not same or rows[0] not in (own, (0, own[-1])):
                raise
            return None, calls.cut(None), [own] * len(rows)
        cu_seqlens = whole.cu_seqlens
        if not isinstance(cu_seqlens, Pack):
            cu_seqlens = rows[0] if same else rows
        documents = calls.documents(cu_seqlens, also)
    return documents, calls.cut(documents), rows


def _targets(
    whole: WholeBatch, rows: Rows, shift_labels: bool, ahead: int | None, ignore_index: int
) -> Tensor:
    """The target of each token of the whole batch; `ignore_index` for padding, and where the target
    would lie behind the end of the token's document. With `ahead`, (rows, tokens, ahead): the next
    token, the one after it, and so on."""
    labels = whole.tensors["labels"]
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise MeshAttentionError(f"labels are {labels.dtype}: must be whole numbers")
    if not torch.iinfo(labels.dtype).min <= ignore_index <= torch.iinfo(labels.dtype).max:
        labels = labels.long()  # bytes, for example, cannot hold `ignore_index`
    tokens, device = labels.shape[1], labels.device
    starts = torch.tensor([s for row in rows for s in row[:-1]], device=device)
    ends = torch.tensor([s for row in rows for s in row[1:]], device=device)
    lengths, size = ends - starts, labels.numel()
    ends = torch.repeat_interleave(ends, lengths, output_size=size).view(labels.shape)
    positions = torch.arange(tokens, device=device)
    mask, targets = whole.tensors.get("attention_mask"), []
    for distance in range(shift_labels, shift_labels + (ahead or 1)):
        shifted = labels.roll(-distance, 1)
        # At distance 0, of labels that are targets already, the end of a document keeps its label.
        shifted = shifted.masked_fill(positions + distance >= ends, ignore_index)
        if mask is not None:
            shifted = shifted.masked_fill((mask == 0).to(device), ignore_index)
        targets.append(shifted)
    return targets[0] if ahead is None else torch.stack(targets, -1)
