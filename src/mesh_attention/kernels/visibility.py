"""The visible pairs of a mask in three forms: a dense matrix, states of blocks, intervals of rows.

The reference kernel takes the dense matrix. The blockwise kernel and lists of visible blocks take
states of blocks: whether none, all or some pairs of a block are visible, which the smallest and
largest positions say, so hidden blocks cost nothing (design.md, "Compute lowering"). cuDNN Frontend
takes intervals of rows, where keys lie in a few runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.interface import BlockMask, Causal, Full, RowRange

_NEVER = 2**31 - 1  # a position that no key has
_NONE, _SOME, _ALL = range(3)  # of the pairs of a block are visible
_MOST_RUNS = 4096
_FAR = 1 << 40  # behind every row
_MOST_CELLS = 1 << 19  # queries x intervals of runs at a time, about a hundred bytes each


def check_mask(mask: BlockMask, num_queries: int, num_keys: int) -> None:
    if isinstance(mask, Causal) and num_queries != num_keys:
        # Kernels disagree on how a rectangular causal mask is aligned.
        raise MeshAttentionError(
            f"a Causal block must be square, but it has {num_queries} queries and {num_keys} "
            "keys; describe it as a RowRange"
        )
    if isinstance(mask, RowRange):
        rows = (num_queries,) if mask.lo.dim() == 1 else (len(mask.lo), num_queries)
        expected = {"lo": rows, "hi": rows, "key_position": (num_keys,)}
        for name, shape in expected.items():
            actual = tuple(getattr(mask, name).shape)
            if actual != shape:
                raise MeshAttentionError(f"RowRange.{name} has shape {actual}, not {shape}")


class Padding(NamedTuple):
    """Queries that see no key, and keys that no query sees; None where there are none. Padding may
    hold NaN, and zero times NaN is NaN, so kernels clear it."""

    queries: Tensor | None  # (S,) bool
    keys: Tensor | None  # (T,) bool

    @staticmethod
    def of(mask: BlockMask, device: torch.device) -> Padding:
        if not isinstance(mask, RowRange):
            return Padding(None, None)
        key = ("padding", device)
        if key not in mask.kept:
            sees_nothing, at_no_position = mask.hi <= mask.lo, mask.key_position < 0
            if sees_nothing.dim() == 2:
                sees_nothing = sees_nothing.all(dim=0)
            mask.kept[key] = Padding(
                *(x.to(device) if x.any() else None for x in (sees_nothing, at_no_position))
            )
        padding: Padding = mask.kept[key]
        return padding


def cleared(x: Tensor, padding: Tensor | None, rows: slice = slice(None), dim: int = 1) -> Tensor:
    """These rows of `x` along `dim`, with zeros in place of padding; a view without padding."""
    part = x[(slice(None),) * dim + (rows,)]
    if padding is None:
        return part
    shape = [1] * x.dim()
    shape[dim] = -1
    return part.masked_fill(padding[rows].view(shape), 0.0)


def dense_mask(
    mask: BlockMask, num_queries: int, num_keys: int, device: torch.device
) -> Tensor | None:
    """(S, T) bool, True where visible; None if all pairs are."""
    check_mask(mask, num_queries, num_keys)
    if isinstance(mask, Full):
        return None
    lo, hi, key_position = _positions(mask, num_queries, device)
    return _visible(lo, hi, key_position)


class VisibleBlocks:
    """The blocks of `query_block` x `key_block` in which pairs are visible; the last block of a
    side may be shorter."""

    def __init__(
        self,
        mask: BlockMask,
        num_queries: int,
        num_keys: int,
        query_block: int,
        key_block: int,
        device: torch.device,
    ) -> None:
        check_mask(mask, num_queries, num_keys)
        self.queries, self._keys = _slices(num_queries, query_block), _slices(num_keys, key_block)
        self._positions: tuple[Tensor, Tensor, Tensor] | None = None
        self._states: list[list[int]] | None = None
        if isinstance(mask, Full):
            return
        self._positions = _positions(mask, num_queries, device)
        # The host would wait for states from a device: without them each block is masked.
        if isinstance(mask, Causal) or mask.key_position.device.type == "cpu":
            kept = mask.kept if isinstance(mask, RowRange) else {}
            key = ("states", query_block, key_block)
            if key not in kept:
                positions = _positions(mask, num_queries, torch.device("cpu"))
                whole, part = block_states(*positions, query_block, key_block)
                kept[key] = (whole * _ALL + part * _SOME).tolist()
            self._states = kept[key]

    def keys_of(self, number: int) -> Iterator[tuple[slice, Tensor | None]]:
        """The blocks of keys that the block of queries of this number sees, each with a (queries,
        keys) bool, True where visible, or None if all pairs are."""
        queries = self.queries[number]
        for at, keys in enumerate(self._keys):
            if self._positions is None:
                yield keys, None
                continue
            state = _SOME if self._states is None else self._states[number][at]
            if state != _NONE:
                lo, hi, position = self._positions
                bounds = lo[..., queries], hi[..., queries]
                yield keys, None if state == _ALL else _visible(*bounds, position[keys])


def _slices(length: int, block: int) -> list[slice]:
    return [slice(at, min(at + block, length)) for at in range(0, length, block)]


def block_states(
    lo: Tensor, hi: Tensor, key_position: Tensor, query_block: int, key_block: int
) -> tuple[Tensor, Tensor]:
    """Two (blocks of queries, blocks of keys) bool: all pairs are visible, and only some are.

    A block with a row that sees nothing, or with fewer rows than others, never counts as all
    visible, so that a kernel need not check bounds there.
    """
    low_K = _cut(key_position, key_block, _NEVER).amin(dim=1)
    high_K = _cut(key_position, key_block, -1).amax(dim=1)
    # Padding is at the end of the last block alone, and raises its largest position here.
    highest_K = _cut(key_position, key_block, _NEVER).amax(dim=1)
    all_QK = some_QK = torch.zeros((), dtype=torch.bool, device=lo.device)
    for lo_S, hi_S in zip(_by_interval(lo), _by_interval(hi), strict=True):
        sees = hi_S > lo_S
        lo_QR = _cut(lo_S.where(sees, _NEVER), query_block, _NEVER)
        hi_QR = _cut(hi_S.where(sees, -1), query_block, -1)
        seen = (low_K < hi_QR.amax(dim=1)[:, None]) & (high_K >= lo_QR.amin(dim=1)[:, None])
        whole = (lo_QR.amax(dim=1)[:, None] <= low_K) & (highest_K < hi_QR.amin(dim=1)[:, None])
        all_QK, some_QK = all_QK | whole, some_QK | seen
    return all_QK, some_QK & ~all_QK


def _by_interval(bound: Tensor) -> Tensor:
    """(intervals, queries)"""
    return bound[None] if bound.dim() == 1 else bound


def _cut(x: Tensor, block: int, padding: int) -> Tensor:
    """(blocks, block)"""
    return pad(x, (0, -len(x) % block), value=padding).view(-1, block)


def _positions(
    mask: Causal | RowRange, num_queries: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(mask, Causal):
        position = torch.arange(num_queries, device=device)
        return torch.zeros_like(position), position + 1, position
    key = ("positions", device)
    if key not in mask.kept:  # many calls have this mask, and CUDA graphs take no copies
        mask.kept[key] = tuple(x.to(device) for x in (mask.lo, mask.hi, mask.key_position))
    lo, hi, key_position = mask.kept[key]
    return lo, hi, key_position


def _visible(lo: Tensor, hi: Tensor, key_position_T: Tensor) -> Tensor:
    lo, hi = _by_interval(lo)[..., None], _by_interval(hi)[..., None]
    seen = torch.zeros((), dtype=torch.bool, device=lo.device)
    for lo_S1, hi_S1 in zip(lo, hi, strict=True):
        seen = seen | ((lo_S1 <= key_position_T) & (key_position_T < hi_S1))
    return seen


def interval_ends(mask: RowRange, device: torch.device) -> Tensor:
    """(2 n + 1, S) int32: the rows that a query sees, as `[0, F0) u [F1, F2) u ...`, sorted.

    Keys that follow each other in rows and positions form runs. A query sees an interval of rows of
    each run for each interval of its mask; intervals that touch are joined.
    """
    lo, hi, position = (x.to(device, torch.int32) for x in (mask.lo, mask.hi, mask.key_position))
    if mask.ascending and lo.dim() == 1:
        # One interval of rows: no runs to find, and the host does not wait for the device.
        low, high = torch.searchsorted(position, torch.stack((lo, hi)), out_int32=True)
        high = torch.maximum(low, high)
        if mask.from_first:
            return high[None]
        return torch.stack((torch.zeros_like(low), low, high))
    if len(position) == 0:
        return lo.new_zeros(1, lo.shape[-1])
    breaks = torch.ones_like(position, dtype=torch.bool)
    # A key after padding, which is at -1, begins a run even at position 0.
    breaks[1:] = (position[1:] != position[:-1] + 1) | (position[:-1] < 0)
    first_row = breaks.nonzero().flatten()
    if len(first_row) * mask.num_intervals > _MOST_RUNS:
        raise MeshAttentionError(
            f"keys that lie in {len(first_row)} runs are too many intervals for cudnn_ranges"
        )
    lo, hi = _by_interval(lo), _by_interval(hi)
    start = position[first_row].long()[:, None]
    length = torch.diff(first_row, append=first_row.new_tensor([len(position)]))[:, None]
    runs = _Runs(first_row[:, None], start, length)
    # Part by part: all queries by all runs can take more memory than the attention itself.
    size = max(1, _MOST_CELLS // max(1, len(first_row) * len(lo)))
    bounds = zip(torch.split(lo, size, dim=1), torch.split(hi, size, dim=1), strict=True)
    parts = [_ends_in_runs(runs, *of_part) for of_part in bounds]
    most = max(2, *(part.shape[1] for part in parts))
    ends = torch.cat([pad(part, (0, most - part.shape[1]), value=_FAR) for part in parts])
    # A query with fewer intervals gets empty ones behind its last interval.
    ends = torch.minimum(ends, ends.where(ends < _FAR, 0).amax(dim=1, keepdim=True))
    # The first interval of the result begins at row 0.
    ends = pad(ends, (1, 0)) if bool((ends[:, 0] > 0).any()) else ends[:, 1:]
    return ends.T.to(torch.int32).contiguous()


class _Runs(NamedTuple):
    """Runs of keys, as columns: first rows, first positions, and numbers of keys."""

    row: Tensor
    position: Tensor
    length: Tensor


def _ends_in_runs(runs: _Runs, lo: Tensor, hi: Tensor) -> Tensor:
    """(S, 2 n): begin and end of each interval of rows that a query sees, ascending; `_FAR` behind
    the last one of a query."""
    # (S, runs * intervals): the first row that a query sees of a run, and the row after the last.
    low, high = (
        (
            runs.row + torch.minimum((bound.T[:, None] - runs.position).clamp_(min=0), runs.length)
        ).flatten(1)
        for bound in (lo, hi)
    )
    ends = torch.cat((low, torch.maximum(low, high)), dim=1).sort(dim=1).values
    # Equal ends cancel each other in pairs: those of intervals that touch, and of empty ones.
    first, behind = (
        torch.searchsorted(ends, ends, right=right, out_int32=True) for right in (False, True)
    )
    at = torch.arange(ends.shape[1], device=ends.device)
    kept = (first == at) & ((behind - first) % 2 == 1)
    ends = ends.where(kept, _FAR).sort(dim=1).values
    return ends[:, : int((ends < _FAR).any(dim=0).sum())]
