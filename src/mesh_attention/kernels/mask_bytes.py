"""Bytes that masks hold on a device: their own tables, and what kernels made of them and kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mesh_attention.kernels.interface import BlockMask

_GRAIN = 512  # bytes; PyTorch gives out memory on a GPU by these
_OWNERS = ("mesh_attention", "cudnn")  # packages whose objects are looked into


def kept_bytes(masks: Iterable[BlockMask], device: torch.device) -> int:
    """Each piece of memory once, whoever holds it: tensors, also sparse ones, in tuples, lists,
    sets and mappings, and in objects of ours and of cuDNN Frontend."""
    found: dict[int, int] = {}
    for x in _tensors(list(masks), set()):
        if x.device.type == device.type:
            for part in _parts(x):
                storage = part.untyped_storage()
                found[storage.data_ptr()] = -(-storage.nbytes() // _GRAIN) * _GRAIN
    return sum(found.values())


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """What holds the memory of a tensor: sparse ones have none of their own."""
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    return (x,)


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    parts: Iterable[Any] = ()
    if isinstance(thing, Mapping):
        parts = thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        parts = thing
    elif type(thing).__module__.partition(".")[0] in _OWNERS:
        parts = [*getattr(thing, "__dict__", {}).values(), *_in_slots(thing)]
    for part in parts:
        yield from _tensors(part, seen)


def _in_slots(thing: Any) -> Iterator[Any]:
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield getattr(thing, name)
