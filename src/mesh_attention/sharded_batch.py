"""A batch of training code, made ready for this rank: labels shifted before anything is cut.

What goes wrong in silence when it is done by hand is done here: the target of a shard's last token
is on another rank, padding must not count in the loss, positions are not 0, 1, 2, ... on a rank,
and a padding mask must reach attention, as documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor

from mesh_attention.batch_documents import Rows, rows_of_documents, rows_of_pack
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.pack import Pack
from mesh_attention.runtime.documents import Documents
from mesh_attention.runtime.prepared_call import CallOptions
from mesh_attention.runtime.shards import Shards
from mesh_attention.runtime.share import Share

IGNORE_INDEX = -100
_FEWEST_LABELS = 8  # that tell labels of next tokens from others
_MARK = "_mesh_attention_shard"  # of tensors that are sharded


class Sharder(Protocol):
    """What is asked of a `ContextParallel`."""

    _share: Share

    @property
    def _options(self) -> CallOptions: ...

    def documents(self, cu_seqlens: Any, *, also: Sequence[Any] = ()) -> Documents: ...

    def _layer(self) -> object: ...

    def _shards(self, documents: Documents | None) -> Shards: ...


@dataclass(frozen=True, eq=False)
class ShardedBatch(Mapping[str, Any]):
    """This rank's slots of a batch, (rows, local tokens) each; also a mapping of what there is.

    labels        targets: what each token is to predict, `ignore_index` where nothing
    position_ids  as given, or counted in each document
    padding       true where a slot holds no token, or one that the mask says is padding
    documents     to hand to `attention` and `unshard`; None where the object says all
    others        tensors that were given by other names
    num_targets   of the whole batch, of all ranks of the group: a tensor, nobody waits for it

    Where rows have documents of their own they are one pack, and `rows` is 1 here.
    """

    input_ids: Tensor | None
    labels: Tensor | None
    position_ids: Tensor
    padding: Tensor
    documents: Documents | None
    num_targets: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    def model_inputs(self) -> dict[str, Any]:
        """What a model takes: no labels, since models that take some shift them once more."""
        found = {"input_ids": self.input_ids, "position_ids": self.position_ids, **self.others}
        found["documents"] = self.documents  # type: ignore[assignment]
        return {name: x for name, x in found.items() if x is not None}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ShardedBatch:
        def moved(x: Tensor | None) -> Any:
            if x is None:
                return None
            there = x.to(device, non_blocking=non_blocking)
            setattr(there, _MARK, True)
            return there

        return ShardedBatch(
            moved(self.input_ids),
            moved(self.labels),
            moved(self.position_ids),
            moved(self.padding),
            self.documents,
            moved(self.num_targets),
            {name: moved(x) for name, x in self.others.items()},
        )

    def _named(self) -> dict[str, Any]:
        own = {"labels": self.labels, "padding": self.padding, "num_targets": self.num_targets}
        return self.model_inputs() | {name: x for name, x in own.items() if x is not None}

    def __getitem__(self, name: str) -> Any:
        return self._named()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named())

    def __len__(self) -> int:
        return len(self._named())


@dataclass(frozen=True)
class WholeBatch:
    """Tensors (rows, tokens, ...) by name, as they were given, and what was said with them."""

    tensors: dict[str, Tensor]
    cu_seqlens: Any
    documents: Documents | None
    check: bool | None

    @property
    def shape(self) -> tuple[int, int]:
        first = next(iter(self.tensors.values()))
        return first.shape[0], first.shape[1]

    @property
    def says_documents(self) -> bool:
        return self.cu_seqlens is not None or self.documents is not None

    def readable(self, name: str) -> Tensor | None:
        """A tensor on the host, if it is there or may be fetched."""
        x = self.tensors.get(name)
        return x.cpu() if x is not None and (x.device.type == "cpu" or self.check) else None

    def rows(self) -> Rows:
        """The documents of each row."""
        for name in ("position_ids", "attention_mask"):
            is_needed = name == "attention_mask" or not self.says_documents
            if name in self.tensors and self.readable(name) is None and is_needed:
                raise MeshAttentionError(
                    f"{name} is on {self.tensors[name].device}, and documents are read on the "
                    "host, which would have to wait: keep it on the CPU, give cu_seqlens in its "
                    "place, or say check=True to wait"
                )
        read = (self.readable("position_ids"), self.readable("attention_mask"))
        pack = self.cu_seqlens if self.documents is None else self.documents.pack
        if not isinstance(pack, Pack):
            return rows_of_documents(self.shape, pack, *read)
        fixed = rows_of_pack(pack, self.shape)
        said = fixed if self.cu_seqlens is None or pack is self.cu_seqlens else self.cu_seqlens
        rows = rows_of_documents(self.shape, said, *read)
        if [{*row} for row in rows] != [{*row} for row in fixed]:
            raise MeshAttentionError(
                "the documents that were made are not those of the batch: by its cu_seqlens, or "
                "since attention_mask begins padding inside one of them"
            )
        return rows

    def contents(self, **more: Any) -> str:
        """What ranks compare: digests of what was read here, shapes of the rest."""
        told = [f"{name} {value}" for name, value in more.items()]
        for name, x in sorted(self.tensors.items()):
            told.append(f"{name} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}")
            small = self.check is None and x.device.type == "cpu" and not x.is_floating_point()
            if small or self.check:
                held = x.detach().cpu().contiguous().view(torch.uint8).numpy()
                told[-1] += f" {blake2b(held.tobytes(), digest_size=8).hexdigest()}"
        return ", ".join(told)


def shard_batch(
    cp: Sharder,
    tensors: Mapping[str, Any],
    *,
    cu_seqlens: Any,
    documents: Documents | None,
    also: Sequence[Any],
    shift_labels: bool,
    ignore_index: int,
    check: bool | None,
) -> ShardedBatch:
    """As `ContextParallel.shard_batch` describes it."""
    whole = WholeBatch(_checked(tensors), cu_seqlens, documents, check)
    if documents is not None:
        cp._shards(documents)  # refuses what is none
    if not isinstance(shift_labels, bool):
        raise MeshAttentionError(
            "shift_labels is True or False: give labels that are targets already as labels, with "
            "shift_labels=False"
        )
    if not whole.says_documents:
        _refuse_local_length(cp, whole)
    handle, shards, rows = _sharing(cp, whole, also)
    if handle is not None:
        handle.hold(whole.contents(shift_labels=shift_labels, ignore_index=ignore_index))
    tensors = {**whole.tensors}
    num_targets = None
    if "labels" in tensors:
        tensors["labels"] = _targets(whole, rows, shift_labels, ignore_index)
        num_targets = (tensors["labels"] != ignore_index).sum()
    device = next(iter(tensors.values())).device  # what else was kept on the CPU goes there too
    found = {
        name: shards.shard(x, 1, "q").to(device, non_blocking=True) for name, x in tensors.items()
    }
    empty = shards.padding("q", device)
    size = next(iter(found.values())).shape[:2]
    if "labels" in found:
        found["labels"].masked_fill_(empty, ignore_index)
    if "position_ids" not in found:
        found["position_ids"] = shards.positions("q", device, restart=True).expand(size)
    real = found.pop("attention_mask", None)
    for x in found.values():
        setattr(x, _MARK, True)
    return ShardedBatch(
        found.pop("input_ids", None),
        found.pop("labels", None),
        found.pop("position_ids"),
        padding=empty.expand(size) if real is None else ~real.bool(),
        documents=handle,
        num_targets=num_targets,
        others=found,
    )


def _checked(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those that there are, all of (rows, tokens, ...)."""
    tensors = {name: x for name, x in given.items() if x is not None}
    for name, x in tensors.items():
        if hasattr(x, _MARK):
            raise MeshAttentionError(
                f"{name} is what shard_batch returned; a batch is sharded once"
            )
        if name in ("padding", "num_targets"):
            raise MeshAttentionError(f"{name} is what shard_batch finds out; leave it out")
    first = next((n for n in ("input_ids", "inputs_embeds", "labels") if n in tensors), None)
    if first is None:
        raise MeshAttentionError("give input_ids (or inputs_embeds), of (batch, tokens)")
    for name in (first, *tensors):
        x = tensors[name]
        if not isinstance(x, Tensor) or (name == first and x.ndim < 2):
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise MeshAttentionError(
                f"{name} is {shape}: give tensors of (batch, tokens, ...); what has no tokens goes "
                "to the model by itself"
            )
    size = tensors[first].shape[:2]
    if 0 in size:
        raise MeshAttentionError(f"{first} has shape {tuple(tensors[first].shape)}: it is empty")
    positions = tensors.get("position_ids")
    if positions is not None and positions.shape in (size[1:], (1, *size[1:])):
        tensors["position_ids"] = positions.expand(size)  # the same in all rows
    exactly = ("input_ids", "labels", "attention_mask", "position_ids")
    for name, x in tensors.items():
        if x.shape[:2] != size or (name in exactly and x.ndim != 2):
            wanted = f"{tuple(size)}" + ("" if name in exactly else " and more")
            raise MeshAttentionError(
                f"{name} has shape {tuple(x.shape)}, expected {wanted} as {first} has"
                + (
                    "; a mask of rows by tokens is refused: give cu_seqlens, or make the object "
                    "with a Mask"
                    if name == "attention_mask"
                    else ""
                )
            )
    return {first: tensors.pop(first), **tensors}


def _refuse_local_length(cp: Sharder, whole: WholeBatch) -> None:
    """What is on a device is not compared among ranks: there the length is all that tells."""
    if all(x.device.type == "cpu" for x in whole.tensors.values()):
        return
    try:
        layout = cp._shards(None).q_layout
    except MeshAttentionError:
        return  # the length comes with batches
    if whole.shape[1] == layout.slots != layout.num_tokens:
        raise MeshAttentionError(
            f"the batch has {layout.slots} tokens, as a shard of {layout.num_tokens} has, and "
            f"looks sharded already; if it is whole, give cu_seqlens=(0, {layout.slots})"
        )


def _sharing(
    cp: Sharder, whole: WholeBatch, also: Sequence[Any]
) -> tuple[Documents | None, Shards, Rows]:
    """How the batch is shared out; by the object alone where that is for one length and mask."""
    handle = whole.documents
    rows = whole.rows()
    if handle is None:
        same = all(row == rows[0] for row in rows)
        try:
            cp._layer()
        except MeshAttentionError:
            shards = cp._shards(None)
            own = shards.starts[0]
            if not same or rows[0] not in (own, (0, own[-1])):
                raise
            return None, shards, [own] * len(rows)
        made = whole.cu_seqlens
        if not isinstance(made, Pack):
            made = rows[0] if same else rows
        handle = cp.documents(made, also=also)
    return handle, cp._shards(handle), rows


def _targets(whole: WholeBatch, rows: Rows, shift_labels: bool, ignore_index: int) -> Tensor:
    """What each token of the whole batch is to predict: nothing at the end of a document."""
    targets = labels = whole.tensors["labels"]
    if shift_labels:
        _refuse_next_tokens(whole, ignore_index)
        targets = labels.new_full(labels.shape, ignore_index)
        targets[:, :-1] = labels[:, 1:]
        tokens = labels.shape[1]
        ends = [at * tokens + s - 1 for at, row in enumerate(rows) for s in row[1:] if s]
        targets.view(-1)[torch.tensor(ends, device=labels.device)] = ignore_index
    mask = whole.tensors.get("attention_mask")
    if mask is None:
        return targets
    return targets.masked_fill((mask == 0).to(targets.device), ignore_index)


def _refuse_next_tokens(whole: WholeBatch, ignore_index: int) -> None:
    """Labels that are next tokens already would be shifted twice, and nobody would see it."""
    ids, labels = (whole.readable(name) for name in ("input_ids", "labels"))
    if ids is None or labels is None or whole.check is False:
        return
    valid = labels[:, :-1] != ignore_index
    shifted = (labels[:, :-1] == ids[:, 1:])[valid]
    plain = (labels[:, :-1] == ids[:, :-1])[valid]
    if len(shifted) >= _FEWEST_LABELS and bool(shifted.all()) and not bool(plain.all()):
        raise MeshAttentionError(
            "labels are the next tokens of input_ids already: say shift_labels=False, or give them "
            "unshifted"
        )
