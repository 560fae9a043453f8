"""Contestants of `against_peers.py` that are not ours, for `peer_contestants.py`.

They are PyTorch's `context_parallel`, Ulysses by hand, ring-flash-attention and yunchang.

Both libraries import flash-attn; where it is not installed they run on PyTorch's own flash kernels
(`flash_attn_shim.py`), and what they print as their setting says so. Their bytes are not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from flash_attn_shim import install
from peer_cell import Cell, Contestant, Surroundings
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend

from mesh_attention.errors import PlanError


class TorchRing(Contestant):
    """`context_parallel`: SDPA is replaced inside its block, and cuts tensors as it wants them."""

    setting = "SDPA as PyTorch chooses"

    def __init__(self, cell: Cell, here: Surroundings, *, rotate: str) -> None:
        # Private in all versions, and the only way to choose rotation and load balance.
        from torch.distributed.tensor.experimental import _attention

        self._torch: Any = _attention
        super().__init__(cell, here)
        self._rotate, self._device = rotate, here.ranks.device
        cell.refuse(
            *("window", "packed"),
            because="context_parallel replaces SDPA, which has neither windows nor documents",
        )
        if self._device.type == "cpu":
            raise PlanError("context_parallel has no ring for SDPA on CPUs, forward or backward")
        self._mesh = init_device_mesh(self._device.type, (self._n,))

    @contextmanager
    def _block(self, buffer: Tensor) -> Iterator[None]:
        """A whole tensor (1, heads, tokens, head_dim) is this rank's shard inside."""
        # Its load balance is for causal masks only.
        self._torch._cp_options.enable_load_balance = self._cell.causal
        self._torch.set_rotate_method(self._rotate)
        with self._torch.context_parallel(
            self._mesh, buffers=[buffer], buffer_seq_dims=[2], no_restore_buffers={buffer}
        ):
            yield

    def shard(self, whole: Tensor) -> Tensor:
        buffer = whole.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        with self._block(buffer):
            return buffer.clone()

    @contextmanager
    def around(self) -> Iterator[None]:
        # Something to cut is needed; were it not cut evenly, nothing would be balanced.
        smallest = torch.zeros(1, 1, 2 * self._n, 1, device=self._device)
        with self._block(smallest):
            yield

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=self._cell.causal, enable_gqa=grouped
        )


class Exchange(torch.autograd.Function):
    """Part i of the first dimension goes to rank i, and gradients come back the same way."""

    received = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        Exchange.received += x.nbytes - x[0].nbytes
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return Exchange.forward(ctx, grads[0].contiguous())


class HandUlysses(Contestant):
    """All-to-all, SDPA, all-to-all: autograd keeps what was exchanged, and nothing is hidden."""

    def __init__(self, cell: Cell, here: Surroundings) -> None:
        super().__init__(cell, here)
        self._documents = None
        if (documents := cell.mask.documents) is not None:
            self._documents = torch.tensor(documents, dtype=torch.int32, device=here.ranks.device)
        if here.ranks.device.type == "cpu":
            cell.refuse(
                *("window", "packed"),
                because="SDPA has neither windows nor documents, and flash kernels want a GPU",
            )
        if cell.heads % self._n or (cell.kv_heads % self._n and self._n % cell.kv_heads):
            raise PlanError(
                f"{cell.heads}:{cell.kv_heads} heads cannot be dealt to {self._n} ranks"
            )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        Exchange.received = 0
        shape, n = q.shape, self._n
        q, k, v = (self._heads(x) for x in (q, k, v))
        out = self._attend(q, k, v)
        parts = out.transpose(1, 2).reshape(n, shape[1], shape[2] // n, shape[3])
        exchanged: Tensor = Exchange.apply(parts.contiguous())  # type: ignore[no-untyped-call]
        self._forward = Exchange.received
        return exchanged.transpose(0, 1).reshape(shape)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cell = self._cell
        if cell.mask_name in ("window", "packed"):
            self.setting = "PyTorch's flash kernels"
            rows = [x.transpose(1, 2) for x in (q, k, v)]
            return flash(rows, cell, self._documents).transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        if not self.setting:
            chosen = torch._fused_sdp_choice(q, k, v, is_causal=cell.causal, enable_gqa=grouped)
            self.setting = f"SDPA by {SDPBackend(chosen).name}"
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=cell.causal, enable_gqa=grouped
        )

    def _heads(self, x: Tensor) -> Tensor:
        """Some heads of all tokens, (1, heads, tokens, head_dim), for all heads of some tokens."""
        n, (_, tokens, heads, dim) = self._n, x.shape
        if heads < n:
            x = x.repeat_interleave(n // heads, 2)
        parts = x.reshape(tokens, n, -1, dim).transpose(0, 1).contiguous()
        exchanged: Tensor = Exchange.apply(parts)  # type: ignore[no-untyped-call]
        return exchanged.reshape(1, n * tokens, -1, dim).transpose(1, 2)

    def check(self) -> None:
        self.received = (self._forward, Exchange.received - self._forward)


def flash(rows: Sequence[Tensor], cell: Cell, documents: Tensor | None) -> Tensor:
    """PyTorch's flash kernel with a window or documents; (1, tokens, heads, head_dim)."""
    longest = cell.tokens
    if documents is not None:
        rows = [x[0] for x in rows]
        longest = max(b - a for a, b in pairwise(cell.mask.documents or ()))
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(x.contiguous() for x in rows),
        *(documents, documents, longest, longest, 0.0, True, False),
        scale=cell.scale,
        window_size_left=cell.window[0],
        window_size_right=cell.window[1],
    )[0]
    return out if documents is None else out[None]


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
