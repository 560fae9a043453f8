"""A whole batch as training code gives it: checked before anything is made of it, its documents
read, and described for other ranks, which must have the same. `shard_batch` calls it.

Documents come from `cu_seqlens`, from packed `position_ids`, or from a padding mask: padding
becomes a document of its own, so no real token sees it. What contradicts itself is refused by name,
and so is a mask that documents cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.choose.documents import Starts
from mesh_attention.choose.pack import Pack, document_starts
from mesh_attention.errors import MeshAttentionError, raise_fault
from mesh_attention.request.tensor_checks import fault_of_kind
from mesh_attention.runtime.agreement.identity import BatchIdentity
from mesh_attention.runtime.session.documents import Documents

Rows = list[Starts]  # cumulative starts (0, ..., tokens) of the documents of each row

MARK = "_mesh_attention_shard"  # attribute of a shard's tensors: the fields of its `BatchIdentity`
_NOTE = "_mesh_attention_note"  # and what else is known of them, of `Note`, with their version
FEWEST_LABELS = 8  # that tell labels of next tokens from others


def batch_of(x: Any) -> BatchIdentity | None:
    """The batch that `shard_batch` has noted on a tensor, or on that of which it is a view; None
    where it has not."""
    mark = _noted_on(x, MARK)
    return mark and BatchIdentity(*mark)


class Note(NamedTuple):
    """The name of a tensor in its shard, and of labels, what they have where there is no target."""

    name: str = ""
    ignore_index: int | None = None


def note(x: Tensor, *about: Any) -> None:
    """Notes on a tensor the fields of `Note`, in a plain tuple, which torch.save can write."""
    setattr(x, _NOTE, (_version(x), *about))


def note_on(x: Any) -> Note:
    """What was noted on a tensor, or on that of which it is a view, unless written to since."""
    version, *about = _noted_on(x, _NOTE) or (None,)
    return Note(*about) if about and version == _version(x) else Note()


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # of those, writes are not counted


def _noted_on(x: Any, name: str) -> Any:
    noted = getattr(x, name, None)
    return getattr(getattr(x, "_base", None), name, None) if noted is None else noted


@dataclass(frozen=True)
class WholeBatch:
    """Tensors (rows, tokens, ...) by name, and the arguments of `shard_batch` that go with them."""

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
        """A tensor on the host; None if it is on a device and `check` does not allow to wait."""
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
        pack = None if self.documents is None else self.documents.pack
        said = pack if self.cu_seqlens is None else self.cu_seqlens
        read = (self.readable("position_ids"), self.readable("attention_mask"))
        rows, pack = rows_of_documents(self.shape, said, *read), pack or said
        if isinstance(pack, Pack) and any(
            {*row} != {*made} for row, made in zip(rows, _rows(pack, self.shape), strict=True)
        ):
            raise MeshAttentionError(
                "the documents that were made are not those of the batch: by its cu_seqlens, or "
                "since attention_mask begins padding inside one of them"
            )
        return rows

    def contents(self, **more: Any) -> str:
        """A text by which ranks compare their batches: `more`, all shapes, and digests of what may
        be read."""
        parts = [f"{name} {value}" for name, value in more.items()]
        for name, x in sorted(self.tensors.items()):
            parts.append(f"{name} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}")
            small = self.check is None and x.device.type == "cpu" and not x.is_floating_point()
            if small or self.check:
                held = x.detach().cpu().contiguous().view(torch.uint8).numpy()
                parts[-1] += f" {blake2b(held.tobytes(), digest_size=8).hexdigest()}"
        return ", ".join(parts)

    def refuse_wrong_shift(self, shift_labels: bool, ignore_index: int, *, causal: bool) -> None:
        """Labels that are next tokens already would be shifted twice, and under a causal mask those
        that are not would never be; nobody would see it."""
        ids, labels = (self.readable(name) for name in ("input_ids", "labels"))
        if ids is None or labels is None or self.check is False:
            return
        valid = labels[:, :-1] != ignore_index
        if int(valid.sum()) < FEWEST_LABELS:
            return
        are_next = bool((labels[:, :-1] == ids[:, 1:])[valid].all())
        are_same = bool((labels[:, :-1] == ids[:, :-1])[valid].all())
        if shift_labels and are_next and not are_same:
            raise MeshAttentionError(
                "labels are the next tokens of input_ids already: set shift_labels=False, or give "
                "them unshifted"
            )
        if not shift_labels and causal and are_same and not are_next:
            raise MeshAttentionError(
                "labels are input_ids, and with shift_labels=False each token is its own target: "
                "leave shift_labels out, and the target is the next token; if you mean its own, "
                "say check=False"
            )


def checked_tensors(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those that are not None, first the one that says the size; raises unless all of them are
    (rows, tokens, ...)."""
    tensors = {name: x for name, x in arguments.items() if x is not None}
    first = next((n for n in ("input_ids", "inputs_embeds", "labels") if n in tensors), None)
    if first is None:
        raise MeshAttentionError("give input_ids (or inputs_embeds), of (batch, tokens)")
    tensors = {first: tensors.pop(first), **tensors}
    for name, x in tensors.items():
        if hasattr(x, MARK):
            raise MeshAttentionError(
                f"{name} comes from shard_batch already: give the whole batch, which is cut once"
            )
        if name in ("padding", "num_targets"):
            raise MeshAttentionError(f"{name}: shard_batch computes it; leave it out")
        if not isinstance(x, Tensor) or (name == first and x.ndim < 2):
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise MeshAttentionError(
                f"{name} is {shape}: give tensors of (batch, tokens, ...); what has no tokens goes "
                "to the model by itself"
            )
        raise_fault(fault_of_kind(**{name: x}))
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
    return tensors


def rows_of_documents(
    shape: tuple[int, int],
    cu_seqlens: Any = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Rows:
    """The documents of a batch of (rows, tokens). Positions and mask are on the CPU, of that shape.
    Positions of padding say nothing."""
    num_rows, num_tokens = shape
    real = None if attention_mask is None else attention_mask.bool()
    said = None if cu_seqlens is None else _rows(cu_seqlens, shape)
    restarts = None if position_ids is None else _restarts(position_ids, real)
    if position_ids is not None and said is None:
        _refuse_negative_and_jumps(position_ids, real)
    spans = None if attention_mask is None else _real_tokens(attention_mask)
    rows = said or restarts or [(0, num_tokens)] * num_rows
    for row, starts in enumerate(rows):
        inside = sorted({*restarts[row]} - {*starts}) if restarts else []
        if inside:
            raise MeshAttentionError(
                f"position_ids of row {row} restart at token {inside[0]}, where cu_seqlens begin "
                "no document; leave one of them out"
            )
        if spans is None:
            continue
        first, stop = spans[row]
        inside = [s for s in starts if 0 < s < first or stop < s < num_tokens]
        if inside:
            raise MeshAttentionError(
                f"cu_seqlens begin a document at token {inside[0]} of row {row}, inside what "
                "attention_mask says is padding; leave one of them out"
            )
        rows[row] = tuple(sorted({0, first, stop, num_tokens, *starts}))
    return rows


def _rows(starts: Any, shape: tuple[int, int]) -> Rows:
    """Of cumulative starts as people write them, or of a pack."""
    rows, tokens = shape
    if isinstance(starts, Pack):
        starts, num_rows = starts.documents, starts.num_rows
    else:
        starts, num_rows = document_starts("cu_seqlens", starts)
    per_row = starts[-1] // num_rows
    if per_row != tokens:
        raise MeshAttentionError(
            f"the documents have {per_row} tokens in a row, and the batch has {tokens}; give the "
            "whole batch, which is sharded here and only once"
        )
    if num_rows not in (1, rows):
        raise MeshAttentionError(
            f"the documents are those of {num_rows} rows, and the batch has {rows}"
        )
    if num_rows == 1:
        return [starts] * rows
    return [
        tuple(s - row * tokens for s in starts if row * tokens <= s <= (row + 1) * tokens)
        for row in range(rows)
    ]


def _restarts(positions: Tensor, real: Tensor | None) -> Rows:
    """A document begins at every position 0, and at the first token whatever its position."""
    begins = positions == 0
    if real is not None:
        begins = begins & real
    return [tuple(sorted({0, *torch.nonzero(row).flatten().tolist(), len(row)})) for row in begins]


def _refuse_negative_and_jumps(positions: Tensor, real: Tensor | None) -> None:
    """Negative positions would come to 0 inside a document, and begin another there."""
    real = torch.ones_like(positions, dtype=torch.bool) if real is None else real
    negative = (positions < 0) & real
    if negative.any():
        row, at = torch.nonzero(negative)[0].tolist()
        raise MeshAttentionError(
            f"position_ids of row {row} are {positions[row, at].item()} at token {at}, and "
            "negative positions begin no document: count from 0"
        )
    jumps = (positions[:, 1:] != positions[:, :-1] + 1) & (positions[:, 1:] != 0)
    jumps &= real[:, 1:] & real[:, :-1]
    if jumps.any():
        row, at = torch.nonzero(jumps)[0].tolist()
        before, after = positions[row, at : at + 2].tolist()
        raise MeshAttentionError(
            f"position_ids of row {row} go from {before} to {after} at token {at + 1}, which is "
            "neither the next position nor the begin of a document: give whole batches, which are "
            "cut here, and with cu_seqlens positions may be anything"
        )


def _real_tokens(attention_mask: Tensor) -> list[tuple[int, int]]:
    """(first, stop) of each row: a mask may say no more than that."""
    real = attention_mask.bool()
    if bool((attention_mask != real).any()):
        raise MeshAttentionError(
            "attention_mask holds other values than 0 and 1; give the documents of a pack as "
            "cu_seqlens or position_ids"
        )
    counts = real.sum(1).tolist()
    firsts = real.int().argmax(1).tolist()
    spans = []
    for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        if not bool(real[row, first : first + count].all()):
            raise MeshAttentionError(
                f"attention_mask of row {row} has padding between tokens; only padding on the "
                "left or on the right of a row is supported"
            )
        spans.append((first, first + count))
    return spans
