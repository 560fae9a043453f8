"""A whole batch as training code gives it: checked before anything is made of it, read where it
has to be, and described for other ranks, which must have the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from mesh_attention.choose.pack import Pack
from mesh_attention.errors import MeshAttentionError, raise_fault
from mesh_attention.request.tensor_checks import fault_of_kind
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.train.batch_documents import Rows, rows_of_documents, rows_of_pack

MARK = "_mesh_attention_shard"  # of tensors that are sharded: the fields of their `BatchIdentity`
_FEWEST_LABELS = 8  # that tell labels of next tokens from others


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
        parts = [f"{name} {value}" for name, value in more.items()]
        for name, x in sorted(self.tensors.items()):
            parts.append(f"{name} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}")
            small = self.check is None and x.device.type == "cpu" and not x.is_floating_point()
            if small or self.check:
                held = x.detach().cpu().contiguous().view(torch.uint8).numpy()
                parts[-1] += f" {blake2b(held.tobytes(), digest_size=8).hexdigest()}"
        return ", ".join(parts)

    def refuse_next_tokens(self, ignore_index: int) -> None:
        """Labels that are next tokens already would be shifted twice, and nobody would see it."""
        ids, labels = (self.readable(name) for name in ("input_ids", "labels"))
        if ids is None or labels is None or self.check is False:
            return
        valid = labels[:, :-1] != ignore_index
        shifted = (labels[:, :-1] == ids[:, 1:])[valid]
        plain = (labels[:, :-1] == ids[:, :-1])[valid]
        if len(shifted) >= _FEWEST_LABELS and bool(shifted.all()) and not bool(plain.all()):
            raise MeshAttentionError(
                "labels are the next tokens of input_ids already: set shift_labels=False, or give "
                "them unshifted"
            )


def checked_tensors(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those that there are, all of (rows, tokens, ...)."""
    tensors = {name: x for name, x in arguments.items() if x is not None}
    for name, x in tensors.items():
        if hasattr(x, MARK):
            raise MeshAttentionError(
                f"{name} comes from shard_batch already: give the whole batch, which is cut once"
            )
        if isinstance(x, Tensor):
            raise_fault(fault_of_kind(**{name: x}))
        if name in ("padding", "num_targets"):
            raise MeshAttentionError(f"{name}: shard_batch computes it; leave it out")
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


def index_of_64_bits(ignore_index: Any) -> int:
    whole = isinstance(ignore_index, Integral) and not isinstance(ignore_index, bool)
    if not whole or not -(2**63) <= ignore_index < 2**63:
        raise MeshAttentionError(
            f"ignore_index={ignore_index!r}: must be a whole number of at most 64 bits"
        )
    return int(ignore_index)
