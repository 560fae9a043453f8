"""cuDNN Frontend's attention with row intervals: any mask in one call, on Hopper and Blackwell.

`cudnn.flex_attention` takes for every query a union of intervals of keys, `[0, F0) u [F1, F2) ...`,
as numbers on the device. It is marked experimental there: this file is its only user, asks for the
versions it was written for, and says what it found. Its functions that allocate cost the host more
than the kernel of a small call takes, so kernels are compiled once for a shape and launched on
tensors that are made here.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.interface import (
    BackwardInputs,
    BackwardNeeds,
    Block,
    BlockMask,
    BlockSize,
    Request,
    RowRange,
)
from mesh_attention.kernels.probe import load, why_not_grouped
from mesh_attention.plan.plan import Direction

_PACKAGE = "nvidia-cudnn-frontend"
_VERSIONS = ((1, 32), (1, 34))  # from, and below
_MOST_RUNS = 4096
_FAR = 1 << 40  # behind every row


class CudnnRanges:
    name = "cudnn_ranges"
    deterministic = True  # where PyTorch is asked for it
    backward_needs = BackwardNeeds(delta=True, finite_lse=True)

    def refuses(self, request: Request) -> str | None:
        if request.device_type != "cuda":
            return f"runs on cuda, not on {request.device_type}"
        if request.capability is None or request.capability[0] not in (9, 10):
            return f"is for compute capability 9.x and 10.x, found {request.capability}"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16, not {request.dtype}"
        if request.padded:
            return "reads padded rows, which may hold anything"
        if request.scattered:
            return "takes keys that lie in runs, not one by one"
        dims = request.head_dim, request.v_head_dim
        small = all(8 <= dim <= 128 and dim % 8 == 0 for dim in dims)
        if not small and dims not in ((192, 128), (256, 256)):
            return f"takes head sizes 8, 16 to 128, (192, 128) and (256, 256), not {dims}"
        grouped = request.num_heads != request.num_kv_heads
        if request.direction is Direction.BACKWARD and dims == (192, 128) and grouped:
            return "has no backward pass for head sizes (192, 128) with fewer KV heads"
        return why_not_grouped(request) or _why_unusable()

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        """Results; backward an fp32 accumulator of dq and two rows of statistics, and where query
        heads share keys one of dk and dv; rows in tiles of 128."""
        results = block.result_bytes(direction, block.element_bytes)
        if direction is Direction.FORWARD:
            return results + 128
        rows, keys = (-(-n // 128) * 128 for n in (block.num_queries, block.num_keys))
        D, E = (-(-dim // 16) * 16 for dim in (block.head_dim, block.v_head_dim))
        own = rows * block.num_heads * (D + 2) * 4
        if block.num_heads != block.num_kv_heads:
            own += keys * block.num_kv_heads * (D + E) * 4
        return results + own

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q, k, v = (_aligned(x) for x in block[:3])
        B, S, H, _ = q.shape
        out = q.new_empty(B, S, H, v.shape[3])
        lse = q.new_empty(B, H, S, dtype=torch.float32)
        if q.numel() == 0 or k.numel() == 0:
            return out.zero_(), lse.fill_(-torch.inf)
        _prepared(block.mask, q, k, v).forward(block, (q, k, v, out, lse))
        return out, lse

    def backward(self, block: Block, given: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_aligned(x) for x in block[:3])
        grad_out = _aligned(given.grad_out.to(q.dtype))
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        if q.numel() == 0 or k.numel() == 0:
            return dq.zero_(), dk.zero_(), dv.zero_()
        assert given.delta is not None  # as `backward_needs` says
        # It takes row sums from `out`, less the gradient of the log-sum-exp: with zeros for the
        # one, and -delta for the other, neither `out` nor a stand-in has to be there.
        prepared = _prepared(block.mask, q, k, v)
        tensors = (q, k, v, prepared.zeros(grad_out), grad_out, given.lse, dq, dk, dv)
        prepared.backward(block, tensors, -given.delta.contiguous())
        return dq, dk, dv


class _Prepared:
    """What was made of a mask for tensors of one shape: its plan, and kernels by strides."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self._launches: dict[Any, Any] = {}
        self._zeros: Tensor | None = None

    def forward(self, block: Block, tensors: tuple[Tensor, ...]) -> None:
        q, k, v, out, lse = tensors
        strides = (q.stride(), k.stride(), v.stride())
        launch = self._launches.get(strides)
        if launch is None:
            launch = _flex("FlexAttentionFwd")(q, k, v, out, self._plan, lse)
            launch.check_support()
            launch.compile()
            launch = self._launches[strides] = _Forward(launch, self._plan, q, k, v)
        launch(block, tensors)

    def backward(self, block: Block, tensors: tuple[Tensor, ...], minus_delta: Tensor) -> None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        strides = (deterministic, *(x.stride() for x in tensors))
        launch = self._launches.get(strides)
        if launch is None:
            launch = _flex("FlexAttentionBwd")(
                *tensors, self._plan, minus_delta, deterministic=deterministic
            )
            launch.check_support()
            launch.compile()
            self._launches[strides] = launch
        workspace = minus_delta.new_empty(launch.workspace_size, dtype=torch.uint8)
        launch.execute(
            *tensors,
            self._plan,
            minus_delta,
            workspace=workspace,
            softmax_scale=block.softmax_scale,
        )

    def zeros(self, like: Tensor) -> Tensor:
        """In place of `out`; one row, spread over all."""
        if self._zeros is None:
            self._zeros = like.new_zeros(like.shape[3]).expand(like.shape)
        return self._zeros


class _Forward:
    """A compiled kernel without the checks that its library makes before every launch."""

    def __init__(self, compiled: Any, plan: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._launch = _found("cudnn.flex_attention.dispatch", "_launch_flex_attn_fwd")
        self._kernel = compiled._compiled_kernel
        self._dispatch = compiled._prepare(q, k, v, plan)
        self._dispatches: dict[int, Any] = {0: self._dispatch}
        self._counts_tiles = compiled.workspace_size > 0

    def __call__(self, block: Block, tensors: tuple[Tensor, ...]) -> None:
        q, k, v, out, lse = tensors
        counter = q.new_empty(1, dtype=torch.int32) if self._counts_tiles else None
        dispatch = self._dispatches.get(block.leave_sms)
        if dispatch is None:
            # The kernel is persistent: it holds as many multiprocessors as it is told there are.
            sms = self._dispatch.num_sms - block.leave_sms
            dispatch = self._dispatches[block.leave_sms] = replace(self._dispatch, num_sms=sms)
        scale = block.softmax_scale
        self._launch(dispatch, self._kernel, q, k, v, out, lse, scale, None, None, counter)


@cache
def _why_unusable() -> str | None:
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{_PACKAGE} is not installed (pip install 'mesh-attention[hopper]')"
    low, high = (".".join(map(str, bound)) for bound in _VERSIONS)
    if not _VERSIONS[0] <= tuple(map(int, version.split(".")[:2])) < _VERSIONS[1]:
        return f"was written for {_PACKAGE} from {low} to below {high}, found {version}"
    for name in ("create_mask_plan", "FlexAttentionFwd", "FlexAttentionBwd"):
        found = load("cudnn.flex_attention", name)
        if isinstance(found, str):
            return found
    return None


@cache
def _found(module: str, name: str) -> Any:
    found = load(module, name)
    assert not isinstance(found, str), found
    return found


def _flex(name: str) -> Any:
    return _found("cudnn.flex_attention", name)


def _aligned(x: Tensor) -> Tensor:
    """With strides that are multiples of 16 bytes; the innermost is 1 always."""
    step = 16 // x.element_size()
    fits = all(s % step == 0 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


def _prepared(mask: BlockMask, q: Tensor, k: Tensor, v: Tensor) -> _Prepared:
    """Made once for a mask and sizes; this waits for the device."""
    assert isinstance(mask, RowRange), "chosen for row ranges only"
    key = ("cudnn_ranges", q.device, q.dtype, q.shape, k.shape, v.shape)
    found = mask.kept.get(key)
    if found is None:
        ends = interval_ends(mask, q.device).repeat(1, q.shape[0])[None].contiguous()
        plan = _flex("create_mask_plan")(ends, q, k, v, build_backward=True)
        found = mask.kept[key] = _Prepared(plan)
    prepared: _Prepared = found
    return prepared


def interval_ends(mask: RowRange, device: torch.device) -> Tensor:
    """(2 n + 1, S) int32: what a query sees as `[0, F0) u [F1, F2) u ...`, sorted.

    Keys that follow each other in rows and positions form runs; a query sees at most one interval
    of each, and those that touch are one.
    """
    lo, hi, position = (x.to(device, torch.int32) for x in (mask.lo, mask.hi, mask.key_position))
    breaks = torch.ones_like(position, dtype=torch.bool)
    breaks[1:] = position[1:] != position[:-1] + 1
    first_row = breaks.nonzero().flatten()
    if len(first_row) > _MOST_RUNS:
        raise MeshAttentionError(
            f"keys that lie in {len(first_row)} runs are too many intervals for cudnn_ranges"
        )
    start = position[first_row].long()
    length = torch.diff(first_row, append=first_row.new_tensor([len(position)]))
    # (S, runs): where what is seen of a run begins and ends, as rows.
    hidden = start < 0
    low, high = (
        first_row + torch.minimum((bound[:, None] - start).clamp_(min=0), length)
        for bound in (lo, hi)
    )
    seen = (low < high) & ~hidden
    low, high = low.masked_fill(~seen, -1), high.masked_fill(~seen, -1)
    before = torch.cummax(high, dim=1).values.roll(1, dims=1)
    before[:, 0] = -1
    opens = seen & (low != before)
    number = opens.cumsum(dim=1) - 1  # of the interval that a run belongs to
    most = max(int(number.max()) + 1, 1)
    target = number.clamp_(min=0)
    begins = torch.full((len(lo), most), _FAR, device=device)
    ends = torch.full((len(lo), most), -1, device=device)
    begins.scatter_reduce_(1, target, low.masked_fill(~seen, _FAR), "amin")
    ends.scatter_reduce_(1, target, high, "amax")
    # Intervals that a query does not have are empty ones behind its last.
    ends = ends.clamp_(min=0).cummax(dim=1).values
    begins = torch.minimum(begins, ends)
    pairs = torch.stack((begins, ends), dim=2).flatten(1).int()  # b0, e0, b1, e1, ...
    if bool((begins[:, 0] > 0).any()):
        pairs = torch.cat((pairs.new_zeros(len(lo), 1), pairs), dim=1)
    else:
        pairs = pairs[:, 1:]
    return pairs.T.contiguous()
