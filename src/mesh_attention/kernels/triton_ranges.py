"""Our own attention kernels in Triton: any row ranges in one call, forward and backward.

The kernels are in `fused/attention_*.py`, their launches in `launches.py`. `TritonRanges`, which
`registry.py` lists, chooses tiles, allocates results, and keeps a launch for all calls of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.kernels.interface import (
    BackwardInputs,
    BackwardNeeds,
    Block,
    BlockSize,
    Request,
)
from mesh_attention.kernels.launches import InnerTensor, KernelLaunch, KernelTile, padded
from mesh_attention.kernels.range_blocks import RangeBlocks, listed_intervals, range_blocks
from mesh_attention.kernels.ready_made import load, why_not_on_ampere
from mesh_attention.plan.language.plan import Direction

_LOG2_E = 1.4426950408889634
_PLAIN, _SCALED, _CAPPED = range(3)  # as in fused/attention_tiles.py
_MOST_LAUNCHES = 4096
_MOST_BLOCK = 128  # of all tables below
_MOST_INTERVALS = 32  # a kernel compares a masked block with each, one after another


class KernelTiles(NamedTuple):
    """Tiles of the kernels, which divide a visible block of `block` rows and keys."""

    block: int
    forward: KernelTile
    backward_queries: KernelTile  # dQ
    backward_keys: KernelTile  # dK and dV
    ahead: bool = False  # whether the kernel of dK and dV begins a product before exponentials


def tiles_for(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, v_head_dim: int
) -> KernelTiles:
    """The fastest tiles that were measured."""
    head_dim, smaller = max(head_dim, v_head_dim), min(head_dim, v_head_dim)
    if dtype == torch.float32:  # of heads of up to 64, as `refuses` says
        return _tiles(64, (64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1))
    # The other GPUs of these generations have 99 KiB of shared memory for a program.
    if capability[0] == 9 or capability == (10, 0):
        if head_dim <= 64:
            tiles = _tiles(128, (64, 128, 4, 3), (64, 128, 4, 3), (64, 64, 4, 3))
            return tiles._replace(forward=tiles.forward._replace(described=True))
        if head_dim <= 128:
            tiles = _tiles(128, (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2))
            return tiles._replace(
                forward=tiles.forward._replace(described=True),
                backward_keys=tiles.backward_keys._replace(described=True),
                ahead=True,
            )
        if smaller <= 128:
            return _tiles(128, (128, 64, 8, 2), (128, 64, 8, 2), (32, 64, 4, 2))
        # Both large: more rows would take more shared memory than there is.
        rows = 64 if capability[0] == 9 else 32
        return _tiles(128, (128, 64, 8, 2), (64, 64, 8, 2), (rows, 64, 8, 2))
    if head_dim <= 64:
        return _tiles(128, (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2))
    if head_dim <= 128:
        return _tiles(128, (128, 32, 8, 2), (64, 32, 4, 2), (32, 64, 4, 2))
    return _tiles(128, (64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1))


def _tiles(block: int, *tiles: tuple[int, int, int, int]) -> KernelTiles:
    """Of the tiles (rows, keys, warps, stages): forward, dQ, and dK and dV."""
    forward, of_queries, of_keys = (KernelTile(*tile) for tile in tiles)
    return KernelTiles(block, forward, of_queries, of_keys)


class TritonRanges:
    """Sums are always made in the same order. Results have the dtype of the inputs."""

    name = "triton"
    has_softcap = True
    takes_unions = True
    deterministic = True
    any_heads = True
    backward_needs = BackwardNeeds(delta=True)

    def __init__(self, *, tiles: KernelTiles | None = None) -> None:
        self._tiles = tiles
        self._launches: dict[tuple[Any, ...], tuple[KernelLaunch, ...]] = {}

    def refuses(self, request: Request) -> str | None:
        if (reason := why_not_on_ampere(request)) is not None:
            return reason
        if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"takes float16, bfloat16 and float32, not {request.dtype}"
        if max(request.head_dim, request.v_head_dim) > 256:
            sizes = f"{request.head_dim} and {request.v_head_dim}"
            return f"head sizes must be at most 256, not {sizes}"
        if request.dtype == torch.float32 and max(request.head_dim, request.v_head_dim) > 64:
            return "in float32 its tiles of head sizes above 64 do not fit into registers"
        if request.intervals > _MOST_INTERVALS:
            return f"takes up to {_MOST_INTERVALS} intervals of keys for a query"
        triton = load("triton", "jit")
        return triton if isinstance(triton, str) else request.why_not_grouped()

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        results = block.result_bytes(direction, block.element_bytes)
        if direction is Direction.FORWARD:
            return results
        rows = whole_blocks(block.num_queries, self._tiles.block if self._tiles else _MOST_BLOCK)
        return results + 2 * 4 * rows * block.num_heads

    def prepare(self, direction: Direction, block: Block) -> None:
        """Makes the lists of visible blocks, for whose lengths the host waits."""
        if block.q.numel() and block.k.numel():
            self._blocks(block, (self._tiles or _tiles_of(block)).block)

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q, k, v, *_ = block
        B, S, H, _ = q.shape
        (target,) = block.into or (None,)
        out = _result(target, (B, S, H, v.shape[3]), q)
        lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
        if k.numel() == 0 or out.numel() == 0:
            return out.zero_(), lse.fill_(-torch.inf)
        (launch,) = self._launches_for(block, (q, k, v, out))
        blocks = self._blocks(block, launch.block)
        launch(q, k, v, None, None, out, lse, *blocks[:4], blocks.by_query)
        return out, lse

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = block
        grad_out, _, lse, delta = inputs
        assert delta is not None  # as `backward_needs` says
        B, S, H, _ = q.shape
        into = block.into or (None, None, None)
        dq, dk, dv = (_result(x, like.shape, q) for x, like in zip(into, (q, k, v), strict=True))
        if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
            return dq.zero_(), dk.zero_(), dv.zero_()
        grad_out = grad_out.to(q.dtype)
        tensors = (q, k, v, grad_out, lse, delta, dq, dk, dv)
        of_queries, of_keys = self._launches_for(block, tensors)
        blocks = self._blocks(block, of_queries.block)
        rows = whole_blocks(S, of_queries.block)
        statistics = torch.empty(2, B, H, rows, dtype=torch.float32, device=q.device)
        lists = (*blocks[:4], blocks.by_query)
        of_queries(q, k, v, None, None, grad_out, lse, delta, statistics, dq, *lists)
        lists = (*blocks[:4], blocks.by_key)
        of_keys(q, k, v, grad_out, None, None, statistics, dk, dv, *lists)
        return dq, dk, dv

    def _blocks(self, block: Block, size: int) -> RangeBlocks:
        S, T, device = block.q.shape[1], block.k.shape[1], block.q.device
        return range_blocks(block.mask, S, T, size, device)

    def _launches_for(self, block: Block, tensors: tuple[Tensor, ...]) -> tuple[KernelLaunch, ...]:
        key = (len(tensors), *_kind(*tensors), *block[4:6], listed_intervals(block.mask))
        launches = self._launches.get(key)
        if launches is None:
            if len(self._launches) >= _MOST_LAUNCHES:
                self._launches.clear()
            make = _forward if len(tensors) == 4 else _backward
            launches = make(block, tensors, self._tiles or _tiles_of(block))
            self._launches[key] = launches
        return launches


def _result(target: Tensor | None, shape: Sequence[int], q: Tensor) -> Tensor:
    """Memory for a result: the caller's, if the kernels can write its rows."""
    if target is not None and target.dtype == q.dtype and target.stride(3) == 1:
        return target
    return torch.empty(shape, dtype=q.dtype, device=q.device)


def _kind(q: Tensor, *others: Tensor) -> tuple[Any, ...]:
    """A key of all properties of the tensors that a launch depends on."""
    kind: list[Any] = [q.dtype, q.device, q.shape, q.stride(), q.data_ptr() % 16]
    for x in others:
        kind += (x.shape, x.stride(), x.data_ptr() % 16)
    return tuple(kind)


def _tiles_of(block: Block) -> KernelTiles:
    capability = torch.cuda.get_device_capability(block.q.device)
    return tiles_for(capability, block.q.dtype, block.q.shape[3], block.v.shape[3])


def _forward(
    block: Block, tensors: tuple[Tensor, ...], tiles: KernelTiles
) -> tuple[KernelLaunch, ...]:
    # Imported here: Triton comes with CUDA builds of PyTorch only.
    from mesh_attention.kernels.fused.attention_forward import attention_forward_kernel

    q, k, v, _ = tensors
    B, S, H, _ = q.shape
    scales, constants = _constants(block)
    numbers = (*_strides(*tensors), S, H, *scales, *constants)
    grid = (_programs(S, tiles.block, tiles.forward.rows), B * H, 1)
    tile, inner = tiles.forward, (InnerTensor(1, 3, k), InnerTensor(2, 4, v))
    launch = KernelLaunch(
        attention_forward_kernel, grid, numbers, tiles.block, tile, inner, tile.keys
    )
    return (launch,)


def _backward(
    block: Block, tensors: tuple[Tensor, ...], tiles: KernelTiles
) -> tuple[KernelLaunch, ...]:
    from mesh_attention.kernels.fused import attention_backward as kernels

    q, k, v, grad_out, lse, delta, dq, dk, dv = tensors
    B, S, H, _ = q.shape
    T, G = k.shape[1:3]
    scales, constants = _constants(block)
    scales = (*scales, block.softmax_scale)
    strides = _strides(q, k, v, grad_out)
    of_rows = _strides(lse.transpose(1, 2), delta.transpose(1, 2), dq)
    of_queries, of_keys = tiles.backward_queries, tiles.backward_keys
    return (
        KernelLaunch(
            kernels.attention_backward_queries_kernel,
            (_programs(S, tiles.block, of_queries.rows), B * H, 1),
            (*strides, *of_rows, S, H, *scales, *constants),
            tiles.block,
            of_queries,
            (InnerTensor(1, 3, k), InnerTensor(2, 4, v)),
            of_queries.keys,
        ),
        KernelLaunch(
            kernels.attention_backward_keys_kernel,
            (_programs(T, tiles.block, of_keys.keys), B * G, 1),
            (*strides, *_strides(dk, dv), S, T, G, *scales, *constants, tiles.ahead),
            tiles.block,
            of_keys,
            (InnerTensor(0, 4, q), InnerTensor(3, 5, grad_out)),
            of_keys.rows,
        ),
    )


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of batch, row and head of each tensor."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def whole_blocks(length: int, block: int) -> int:
    return -(-length // block) * block


def _programs(length: int, block: int, rows: int) -> int:
    return whole_blocks(length, block) // rows


def _constants(block: Block) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """(scale and inner scale, constants of a kernel up to the intervals of a query)"""
    _, H, D = block.q.shape[1:]
    G, E = block.v.shape[2:]
    scale, softcap = block.softmax_scale, block.softcap
    if softcap:
        scales, kind = (softcap * _LOG2_E, scale / softcap), _CAPPED
    elif scale > 0:
        scales, kind = (scale * _LOG2_E, 1.0), _PLAIN
    else:
        scales, kind = (_LOG2_E, scale), _SCALED
    intervals = listed_intervals(block.mask)
    return scales, (H // G, D, E, padded(D), padded(E), kind, intervals)
