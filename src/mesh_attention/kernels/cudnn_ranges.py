"""cuDNN Frontend's attention with row intervals: any mask in one call, on Hopper and Blackwell.

`cudnn.flex_attention` takes for every query a union of intervals of keys, `[0, F0) u [F1, F2) ...`,
as numbers on the device. It is marked experimental there: this file is its only user, asks for the
versions it was written for, and says what it found. Its functions that allocate cost the host more
than the kernel of a small call takes, so kernels are compiled once for a shape and launched on
tensors that are made here.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.interface import (
    BackwardInputs,
    BackwardNeeds,
    Block,
    BlockMask,
    BlockSize,
    MaskKind,
    Request,
    RowRange,
)
from mesh_attention.kernels.probe import load, why_not_grouped
from mesh_attention.plan.plan import Direction

_PACKAGE = "nvidia-cudnn-frontend"
_VERSIONS = ((1, 32), (1, 33))  # from, and below
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
        if request.mask is not MaskKind.RANGE:
            return "is used for row ranges: dense kernels are faster without"
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
        return why_not_grouped(request) or _why_unusable() or _why_no_such_heads(request)

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
        (wanted,) = block.into or (None,)
        out = wanted if _fits(wanted) else q.new_empty(B, S, H, v.shape[3])
        lse = q.new_empty(B, H, S, dtype=torch.float32)
        if q.numel() == 0 or k.numel() == 0:
            return out.zero_(), lse.fill_(-torch.inf)
        prepared = _prepared(block.mask, q, k, v, backward=False)
        prepared.forward(block, (q, k, v, out, lse))
        return out, lse

    def backward(self, block: Block, given: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_aligned(x) for x in block[:3])
        grad_out = _aligned(given.grad_out.to(q.dtype))
        into = block.into or (None, None, None)
        dq, dk, dv = (
            wanted if _fits(wanted) else x.new_empty(x.shape)
            for wanted, x in zip(into, (q, k, v), strict=True)
        )
        if q.numel() == 0 or k.numel() == 0:
            return dq.zero_(), dk.zero_(), dv.zero_()
        assert given.delta is not None  # as `backward_needs` says
        # It takes row sums from `out`, less the gradient of the log-sum-exp: with zeros for the
        # one, and -delta for the other, neither `out` nor a stand-in has to be there.
        prepared = _prepared(block.mask, q, k, v, backward=True)
        tensors = (q, k, v, prepared.zeros(grad_out), grad_out, given.lse, dq, dk, dv)
        prepared.backward(block, (*tensors, -given.delta.contiguous()))
        return dq, dk, dv


class _Prepared:
    """What was made of a mask for tensors of one shape: its plan, and launches by strides."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self._launches: dict[Any, _WrittenLaunch] = {}
        self._zeros: Tensor | None = None

    def forward(self, block: Block, tensors: tuple[Tensor, ...]) -> None:
        scale = block.softmax_scale
        key = (block.leave_sms, scale, *(x.stride() for x in tensors))
        launch = self._launches.get(key)
        if launch is None:
            q, k, v, out, lse = tensors
            compiled = _ready(_flex("FlexAttentionFwd")(q, k, v, out, self._plan, lse))

            def execute(
                q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **own: Any
            ) -> None:
                compiled.execute(q, k, v, out, self._plan, lse, softmax_scale=scale, **own)

            launch = self._launches[key] = _WrittenLaunch(compiled, execute, tensors)
            launch.leave(block.leave_sms)
        launch(*tensors)

    def backward(self, block: Block, tensors: tuple[Tensor, ...]) -> None:
        deterministic, scale = torch.are_deterministic_algorithms_enabled(), block.softmax_scale
        key = (deterministic, scale, *(x.stride() for x in tensors))
        launch = self._launches.get(key)
        if launch is None:
            *others, minus_delta = tensors
            backward = _flex("FlexAttentionBwd")
            compiled = _ready(
                backward(*others, self._plan, minus_delta, deterministic=deterministic)
            )

            def execute(*given: Tensor, **own: Any) -> None:
                *others, minus_delta = given
                compiled.execute(*others, self._plan, minus_delta, softmax_scale=scale, **own)

            launch = self._launches[key] = _WrittenLaunch(compiled, execute, tensors)
        launch(*tensors)

    def zeros(self, like: Tensor) -> Tensor:
        """In place of `out`: one row, spread over all."""
        if self._zeros is None:
            self._zeros = like.new_zeros(like.shape[3]).expand(like.shape)
        return self._zeros


def _ready(compiled: Any) -> Any:
    compiled.check_support()
    compiled.compile()
    return compiled


class _WrittenLaunch:
    """Kernels launched without the checks that their library makes every time, which take longer
    than a small call: what it hands to each kernel is written down once, and handed again."""

    def __init__(
        self, compiled: Any, execute: Callable[..., None], tensors: tuple[Tensor, ...]
    ) -> None:
        self._bytes: int = compiled.workspace_size
        # Each argument must be told from the others by its address.
        told_apart = {x.data_ptr(): x for x in tensors}
        if len(told_apart) < len(tensors):
            tensors = tuple(x.clone(memory_format=torch.preserve_format) for x in tensors)
        workspace = self._workspace(tensors[0])
        known = {x.data_ptr(): at for at, x in enumerate(tensors)}
        self._calls: list[tuple[Any, list[_Argument]]] = []

        def written_down(kernel: Any) -> Any:
            def call(*arguments: Any) -> None:
                found = [_Argument.of(x, known, workspace) for x in arguments]
                self._calls.append((kernel, found))
                kernel(*arguments)

            return call

        kernels = compiled._compiled_kernel
        if callable(kernels):
            compiled._compiled_kernel = written_down(kernels)
        else:
            names = ("preprocess", "main", "post_dq", "post_dk", "post_dv")
            spied = {n: written_down(k) for n in names if (k := getattr(kernels, n)) is not None}
            compiled._compiled_kernel = replace(kernels, **spied)
        execute(*tensors, workspace=workspace)
        compiled._compiled_kernel = kernels
        own = {a.offset: a for _, call in self._calls for a in call if a.offset is not None}
        # Those that are added to, or counted in, begin at zero; the others are written first.
        written = {a.offset for a in self._calls[0][1]} if len(self._calls) > 1 else set()
        self._pieces = [(a, at not in written) for at, a in own.items()]

    def leave(self, sms: int) -> None:
        """The forward kernel is persistent: it holds as many multiprocessors as it is told of."""
        if sms:
            count = torch.cuda.get_device_properties().multi_processor_count
            ((_, arguments),) = self._calls
            assert arguments[-1].constant == count, "not the kernel that this was written for"
            arguments[-1] = _Argument(constant=count - sms)

    def _workspace(self, like: Tensor) -> Tensor:
        return like.new_empty(self._bytes, dtype=torch.uint8)

    def __call__(self, *tensors: Tensor) -> None:
        workspace = self._workspace(tensors[0])
        own: dict[int | None, Tensor] = {}
        for piece, zeroed in self._pieces:
            own[piece.offset] = x = piece.view(workspace)
            if zeroed:
                x.zero_()
        for kernel, arguments in self._calls:
            kernel(
                *(
                    tensors[a.place]
                    if a.place is not None
                    else a.constant
                    if a.offset is None
                    else own[a.offset]
                    for a in arguments
                )
            )


@dataclass(frozen=True)
class _Argument:
    """One of the tensors of a call, by its place; a piece of the workspace; or what never changes:
    numbers, and tensors of the mask's plan."""

    constant: Any = None
    place: int | None = None
    offset: int | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8

    @staticmethod
    def of(x: Any, known: Mapping[int, int], workspace: Tensor) -> _Argument:
        if not isinstance(x, Tensor):
            return _Argument(constant=x)
        place = known.get(x.data_ptr())
        if place is not None:
            return _Argument(place=place)
        offset = x.data_ptr() - workspace.data_ptr()
        if 0 <= offset < workspace.numel():
            return _Argument(offset=offset, shape=tuple(x.shape), dtype=x.dtype)
        return _Argument(constant=x)

    def view(self, workspace: Tensor) -> Tensor:
        assert self.offset is not None
        stop = self.offset + math.prod(self.shape) * self.dtype.itemsize
        return workspace[self.offset : stop].view(self.dtype).view(self.shape)


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


def _why_no_such_heads(request: Request) -> str | None:
    """On Hopper its backward pass has fewer head sizes than it documents, and says so if asked."""
    can = load(
        "cudnn.flex_attention.kernels.sm90.bwd.backward_config", "sm90_native_bwd_can_implement"
    )
    if request.direction is Direction.FORWARD or request.capability != (9, 0):
        return None
    sizes = request.head_dim, request.v_head_dim, request.num_heads, request.num_kv_heads
    if isinstance(can, str) or can(*sizes):
        return can if isinstance(can, str) else None
    return f"has no backward pass for head sizes {sizes[:2]} of {sizes[2]}:{sizes[3]} heads"


@cache
def _found(module: str, name: str) -> Any:
    found = load(module, name)
    assert not isinstance(found, str), found
    return found


def _flex(name: str) -> Any:
    return _found("cudnn.flex_attention", name)


def _aligned(x: Tensor) -> Tensor:
    """With strides that are multiples of 16 bytes; the innermost is 1 always."""
    if x.requires_grad:
        x = x.detach()
    return x if _fits(x) else x.contiguous()


def _fits(x: Tensor | None) -> TypeGuard[Tensor]:
    if x is None:
        return False
    step = 16 // x.element_size()
    return all(s % step == 0 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0


def _prepared(mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> _Prepared:
    """Made once for a mask and sizes; this waits for the device."""
    assert isinstance(mask, RowRange), "chosen for row ranges only"
    key = ("cudnn_ranges", backward, q.device, q.dtype, q.shape, k.shape, v.shape)
    found = mask.kept.get(key)
    if found is None:
        ends = interval_ends(mask, q.device).repeat(1, q.shape[0])[None].contiguous()
        plan = _flex("create_mask_plan")(ends, q, k, v, build_backward=backward)
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
