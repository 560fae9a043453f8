"""Contestants of `against_peers.py` from other libraries: ring-flash-attention and yunchang.

Both import flash-attn; where it is not installed they run on PyTorch's own flash kernels
(`flash_attn_shim.py`), and what they print as their setting says so. Their bytes are not counted.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from flash_attn_shim import install
from peer_cell import Cell, Contestant, Surroundings
from torch import Tensor

from mesh_attention.errors import PlanError


def _library(module: str, distribution: str, cell: Cell, here: Surroundings) -> tuple[Any, str]:
    kernels = install()
    if here.ranks.device.type == "cpu":
        # Refused here and not by a kernel, when ranks are in the middle of a ring.
        cell.refuse("window", "packed", because="flash kernels for this mask want a GPU")
    if module == "ring_flash_attn":
        # Its adapter for transformers imports names that newer versions do not have.
        sys.modules.setdefault("ring_flash_attn.adapters", _NoAdapters("ring_flash_attn.adapters"))
    try:
        library = import_module(module)
    except ModuleNotFoundError as error:
        raise PlanError(f"{error.name} is not installed: pip install {distribution}") from error
    try:
        number = version(distribution)
    except PackageNotFoundError:
        number = getattr(library, "__version__", "")
    return library, f"{distribution} {number}, {kernels}"


class _NoAdapters(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class RingFlashAttention(Contestant):
    """Zigzag for causal masks, also of documents, and a plain ring for full ones."""

    def __init__(self, cell: Cell, here: Surroundings) -> None:
        super().__init__(cell, here)
        self._library, self.setting = _library("ring_flash_attn", "ring-flash-attn", cell, here)
        self._zigzag = cell.causal
        cuts = cell.mask.documents or (0, cell.tokens)
        if any(x % (2 * self._n) for x in cuts):
            raise PlanError(f"documents must be multiples of {2 * self._n} tokens")
        self._cuts = cuts
        local = [x // self._n for x in cuts]
        self._cu_seqlens = torch.tensor(local, dtype=torch.int32, device=here.ranks.device)
        self._longest = max(b - a for a, b in pairwise(local))

    def shard(self, whole: Tensor) -> Tensor:
        if not self._zigzag:
            return super().shard(whole)
        parts = []
        for start, stop in pairwise(self._cuts):
            chunks = whole[:, start:stop].chunk(2 * self._n, 1)
            parts += [chunks[self._rank], chunks[2 * self._n - 1 - self._rank]]
        return torch.cat(parts, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cell, library = self._cell, self._library
        if cell.mask_name == "packed":
            packed: Tensor = library.zigzag_ring_flash_attn_varlen_func(
                *(q[0], k[0], v[0], self._cu_seqlens, self._longest), causal=True
            )
            return packed[None]
        function = library.zigzag_ring_flash_attn_func if self._zigzag else None
        out: Tensor = (function or library.ring_flash_attn_func)(
            q, k, v, causal=cell.causal, window_size=cell.window
        )
        return out


class Llama3FlashAttention(Contestant):
    """All keys and values of some heads are gathered at a time; shards are contiguous."""

    def __init__(self, cell: Cell, here: Surroundings) -> None:
        super().__init__(cell, here)
        self._library, self.setting = _library("ring_flash_attn", "ring-flash-attn", cell, here)
        if here.ranks.device.type == "cpu":
            raise PlanError("it calls flash-attn's kernels for packed documents, which want a GPU")
        cuts = torch.tensor(cell.mask.documents or (0, cell.tokens), dtype=torch.int32)
        prepared = self._library.llama3_flash_attn_prepare_cu_seqlens(
            cuts.to(here.ranks.device), cell.causal, self._rank, self._n
        )
        *self._lengths, self._keys = prepared

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cell = self._cell
        out: Tensor = self._library.llama3_flash_attn_varlen_func(
            *(q[0], k[0], v[0], *self._lengths),
            heads_k_stride=1,
            local_k_slice=self._keys,
            causal=cell.causal,
            window_size=cell.window,
        )
        return out[None]


class Yunchang(Contestant):
    """Its `UlyssesAttention`, or `LongContextAttention` with zigzag rings around Ulysses."""

    def __init__(self, cell: Cell, here: Surroundings, *, ulysses: int) -> None:
        super().__init__(cell, here)
        self._library, self.setting = _library("yunchang", "yunchang", cell, here)
        cell.refuse("packed", because="it has no packed documents")
        n, rank = self._n, self._rank
        if cell.heads % ulysses or cell.kv_heads % ulysses:
            raise PlanError(f"{cell.heads}:{cell.kv_heads} heads cannot be dealt to {ulysses}")
        self._ulysses, self._zigzag = ulysses, cell.causal and ulysses < n
        self._library.set_seq_parallel_pg(ulysses, n // ulysses, rank, n)
        library, kind = self._library, import_module("yunchang.kernels").AttnType.FA
        self._attention = (
            library.UlyssesAttention(here.ranks.group, attn_type=kind)
            if ulysses == n
            else library.LongContextAttention(
                ring_impl_type="zigzag" if self._zigzag else "basic", attn_type=kind
            )
        )
        self.setting += f", ulysses {ulysses} x ring {n // ulysses}"

    def shard(self, whole: Tensor) -> Tensor:
        extract = self._library.EXTRACT_FUNC_DICT["zigzag" if self._zigzag else "basic"]
        n, inner = self._n, self._ulysses
        shard: Tensor = extract(whole, self._rank, world_size=n, rd=n // inner, ud=inner)
        return shard.clone()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cell = self._cell
        out: Tensor = self._attention(q, k, v, causal=cell.causal, window_size=cell.window)
        return out
