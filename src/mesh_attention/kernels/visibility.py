"""Which queries see which keys: as a dense matrix, block by block, and as intervals of rows.

The dense form is the plain truth for the reference kernel. The block form answers, for a run
of queries and a run of keys, whether none, all or some pairs are visible, from the smallest
and largest positions alone, so that hidden blocks cost nothing (design.md, "Compute lowering").
The intervals of rows are what cuDNN Frontend takes, where keys lie in a few runs.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.interface import BlockMask, Causal, Full, RowRange

_NEVER = 2**31 - 1  # a position that no key has
_MOST_RUNS = 4096
_FAR = 1 << 40  # behind every row
_MOST_CELLS = 1 << 19  # of queries by runs of keys, some eighty bytes for each


class Seen(Enum):
    NONE = 0
    SOME = 1
    ALL = 2


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
    """Rows that nobody sees, and that see nothing: they may hold anything, also NaN, and zero times
    NaN is NaN. None where there are none."""

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
    """Some rows of a dimension, with zeros in place of padding; a view where there is none."""
    part = x[(slice(None),) * dim + (rows,)]
    if padding is None:
        return part
    shape = [1] * x.dim()
    shape[dim] = -1
    return part.masked_fill(padding[rows].view(shape), 0.0)


def dense_mask(
    mask: BlockMask, num_queries: int, num_keys: int, device: torch.device
) -> Tensor | None:
    """(S, T) bool, True where visible; None when everything is."""
    check_mask(mask, num_queries, num_keys)
    if isinstance(mask, Full):
        return None
    lo, hi, key_position = _positions(mask, num_queries, device)
    return _visible(lo, hi, key_position)


class BlockVisibility:
    """Visibility of blocks of `query_block` x `key_block`, the last of each may be shorter."""

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
        self._blocks = query_block, key_block
        self._positions: tuple[Tensor, Tensor, Tensor] | None = None
        self._states: list[list[int]] | None = None
        if isinstance(mask, Full):
            return
        self._positions = _positions(mask, num_queries, device)
        # Reading states off a device would make the host wait for it.
        if isinstance(mask, Causal) or mask.key_position.device.type == "cpu":
            kept = mask.kept if isinstance(mask, RowRange) else {}
            key = ("states", query_block, key_block)
            if key not in kept:
                positions = _positions(mask, num_queries, torch.device("cpu"))
                whole, part = block_states(*positions, query_block, key_block)
                kept[key] = (whole * Seen.ALL.value + part * Seen.SOME.value).tolist()
            self._states = kept[key]

    def seen(self, query_start: int, key_start: int) -> Seen:
        if self._positions is None:
            return Seen.ALL
        if self._states is None:
            return Seen.SOME
        query_block, key_block = self._blocks
        return Seen(self._states[query_start // query_block][key_start // key_block])

    def mask(self, queries: slice, keys: slice) -> Tensor:
        """(queries, keys) bool, True where visible."""
        assert self._positions is not None
        lo, hi, key_position = self._positions
        return _visible(lo[..., queries], hi[..., queries], key_position[keys])


def block_states(
    lo: Tensor, hi: Tensor, key_position: Tensor, query_block: int, key_block: int
) -> tuple[Tensor, Tensor]:
    """(blocks of queries, blocks of keys) bool: which see each other whole, and which in part.

    A block with a row that sees nothing, or with fewer rows than others, is never whole, so that
    a kernel need not look at bounds in whole blocks.
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
    if key not in mask.kept:  # of one mask many calls are made, and graphs take no copies
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
    """(2 n + 1, S) int32: what a query sees as `[0, F0) u [F1, F2) u ...`, sorted.

    Keys that follow each other in rows and positions form runs. What a query sees of a run are at
    most its own intervals, in order; those that touch are one.
    """
    lo, hi, position = (x.to(device, torch.int32) for x in (mask.lo, mask.hi, mask.key_position))
    if mask.ascending and lo.dim() == 1:
        # One interval of rows: nothing to look for, and nothing that the host would wait for.
        low, high = torch.searchsorted(position, torch.stack((lo, hi)), out_int32=True)
        high = torch.maximum(low, high)
        if mask.from_first:
            return high[None]
        return torch.stack((torch.zeros_like(low), low, high))
    if len(position) == 0:
        return lo.new_zeros(1, lo.shape[-1])
    breaks = torch.ones_like(position, dtype=torch.bool)
    # What follows padding, which is at -1, is the beginning of a run, though it be at 0.
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
    # Some queries at a time: all of a long sequence by all runs of keys are more memory than the
    # pass takes that the mask is for.
    some = max(1, _MOST_CELLS // max(1, len(first_row) * len(lo)))
    num_queries = lo.shape[1]
    parts = [
        _pairs(runs, lo[:, at : at + some], hi[:, at : at + some])
        for at in range(0, max(num_queries, 1), some)
    ]
    most = max(x.shape[1] for x in parts)
    # Intervals that a query does not have are empty ones behind its last.
    pairs = torch.cat(
        [torch.cat((x, x[:, -1:].expand(-1, most - x.shape[1])), dim=1) for x in parts]
    )
    if bool((pairs[:, 0] > 0).any()):
        pairs = torch.cat((pairs.new_zeros(len(pairs), 1), pairs), dim=1)
    else:
        pairs = pairs[:, 1:]
    return pairs.T.contiguous()


class _Runs(NamedTuple):
    """Of keys, each a column: the rows and the positions where they begin, and how many."""

    row: Tensor
    position: Tensor
    length: Tensor


def _pairs(runs: _Runs, lo: Tensor, hi: Tensor) -> Tensor:
    """(S, 2 n) int32: where what queries see begins and ends, b0, e0, b1, e1, ..."""
    # (S, runs * intervals): where what is seen of a run begins and ends, as rows.
    low, high = (
        (
            runs.row + torch.minimum((bound.T[:, None] - runs.position).clamp_(min=0), runs.length)
        ).flatten(1)
        for bound in (lo, hi)
    )
    real = (runs.position >= 0).expand(len(runs.row), len(lo)).flatten()
    seen = (low < high) & real
    low, high = low.masked_fill_(~seen, -1), high.masked_fill_(~seen, -1)
    before = torch.cummax(high, dim=1).values.roll(1, dims=1)
    before[:, 0] = -1
    opens = seen & (low != before)
    number = opens.cumsum(dim=1) - 1  # of the interval that a run belongs to
    most = max(int(number.max()) + 1, 1) if number.numel() else 1
    target = number.clamp_(min=0)
    begins = torch.full((len(low), most), _FAR, device=low.device)
    ends = torch.full((len(low), most), -1, device=low.device)
    begins.scatter_reduce_(1, target, low.masked_fill_(~seen, _FAR), "amin")
    ends.scatter_reduce_(1, target, high, "amax")
    ends = ends.clamp_(min=0).cummax(dim=1).values
    begins = torch.minimum(begins, ends)
    return torch.stack((begins, ends), dim=2).flatten(1).int()
