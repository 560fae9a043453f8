"""cuDNN Frontend's attention with row intervals: any mask in one call, on Hopper and Blackwell.

`cudnn.flex_attention` takes for every query a union of intervals of keys, `[0, F0) u [F1, F2) ...`,
as numbers on the device. It is marked experimental there: this file is its only user, asks for the
versions it was written for, and says what it found. Its functions that allocate cost the host more
than the kernel of a small call takes, so kernels are compiled once for a shape and launched on
tensors that are made here.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

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
from mesh_attention.kernels.launches import WrittenLaunch
from mesh_attention.kernels.ready_made import load
from mesh_attention.kernels.visibility import interval_ends
from mesh_attention.plan.language.plan import Direction

_PACKAGE = "nvidia-cudnn-frontend"
_VERSIONS = ((1, 32), (1, 33))  # from, and below
_NUM_WITHOUT_DELTA = 9  # tensors of a backward call: q, k, v, out, grad_out, lse, dq, dk, dv


class CudnnRanges:
    name = "cudnn_ranges"
    takes_unions = True
    deterministic = True
    backward_needs = BackwardNeeds()

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
        return request.why_not_grouped() or _why_unusable() or _why_no_such_heads(request)

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        """Results; backward an fp32 accumulator of dq and three rows of statistics, and where query
        heads share keys one of dk and dv; rows in tiles of 128."""
        results = block.result_bytes(direction, block.element_bytes)
        if direction is Direction.FORWARD:
            return results + 128
        rows, keys = (-(-n // 128) * 128 for n in (block.num_queries, block.num_keys))
        D, E = (-(-dim // 16) * 16 for dim in (block.head_dim, block.v_head_dim))
        own = rows * block.num_heads * (D + 3) * 4
        if block.num_heads != block.num_kv_heads:
            own += keys * block.num_kv_heads * (D + E) * 4
        return results + own

    def prepare(self, direction: Direction, block: Block) -> None:
        if block.q.numel() and block.k.numel():
            q, k, v = (_aligned(x) for x in block[:3])
            _prepared(block.mask, q, k, v, backward=direction is Direction.BACKWARD)

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

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_aligned(x) for x in block[:3])
        grad_out = _aligned(inputs.grad_out.to(q.dtype))
        into = block.into or (None, None, None)
        dq, dk, dv = (
            wanted if _fits(wanted) else x.new_empty(x.shape)
            for wanted, x in zip(into, (q, k, v), strict=True)
        )
        if q.numel() == 0 or k.numel() == 0:
            return dq.zero_(), dk.zero_(), dv.zero_()
        prepared = _prepared(block.mask, q, k, v, backward=True)
        if inputs.delta is not None:
            # In the place of `out` something that nobody reads.
            prepared.backward(
                block, (q, k, v, grad_out, grad_out, inputs.lse, dq, dk, dv, inputs.delta)
            )
        else:
            assert inputs.out is not None  # either is
            out, lse = _aligned(inputs.out.to(q.dtype)), _in_order(inputs.lse)
            prepared.backward(block, (q, k, v, out, grad_out, lse, dq, dk, dv))
        return dq, dk, dv


class _Prepared:
    """What was made of a mask for tensors of one shape: its plan, and launches by strides."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self._launches: dict[Any, WrittenLaunch] = {}

    def forward(self, block: Block, tensors: tuple[Tensor, ...]) -> None:
        key = (block.leave_sms, block.softmax_scale, *(x.stride() for x in tensors))
        launch = self._launches.get(key)
        if launch is None:
            launch = self._written("FlexAttentionFwd", tensors, 4, block.softmax_scale)
            launch.leave(block.leave_sms)
            self._launches[key] = launch
        launch(*tensors)

    def backward(self, block: Block, tensors: tuple[Tensor, ...]) -> None:
        key = (block.deterministic, block.softmax_scale, *(x.stride() for x in tensors))
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._written_backward(block, tensors)
        launch(*tensors)

    def _written_backward(self, block: Block, tensors: tuple[Tensor, ...]) -> WrittenLaunch:
        """It makes row sums of `out`, less the gradient of the log-sum-exp, in a first kernel that
        reads as much as ours for delta did. Where delta is there, a kernel of our own hands it on,
        and `out` is there for that first kernel's sake alone, once."""
        q, k, v, out, grad_out, lse, *grads = tensors
        has_delta = len(tensors) > _NUM_WITHOUT_DELTA
        if has_delta:
            out = grad_out.new_zeros(grad_out.shape[3]).expand(grad_out.shape)
            lse, grads[3] = _in_order(lse), _in_order(grads[3])
        tensors = (q, k, v, out, grad_out, lse, *grads)
        options = {"deterministic": block.deterministic}
        launch = self._written(
            "FlexAttentionBwd", tensors, _NUM_WITHOUT_DELTA, block.softmax_scale, **options
        )
        if has_delta:
            launch.begin_with(_hand_on)
        return launch

    def _written(
        self, name: str, tensors: tuple[Tensor, ...], plan_at: int, scale: float, **options: bool
    ) -> WrittenLaunch:
        """The kernels of a pass, which takes the plan of the mask behind `plan_at` tensors."""

        def with_plan(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
            return (*tensors[:plan_at], self._plan, *tensors[plan_at:])

        compiled = _flex(name)(*with_plan(tensors), **options)
        compiled.check_support()
        compiled.compile()

        def execute(*tensors: Tensor, **own: Any) -> None:
            compiled.execute(*with_plan(tensors), softmax_scale=scale, **own)

        return WrittenLaunch(compiled, execute, tensors)


def _hand_on(
    out: Tensor,
    grad_out: Tensor,
    tiled_delta: Tensor,
    lse: Tensor,
    tiled_lse: Tensor,
    grad_q: Tensor | None,
    cumulative: None,
    delta: Tensor,
    longest: int,
) -> None:
    """In place of the package's first kernel, with its arguments."""
    # Imported here: it needs Triton, without which this kernel is never chosen.
    from mesh_attention.kernels.fused.row_kernels import tile_statistics

    tile_statistics(delta, lse, tiled_delta, tiled_lse, grad_q)


@cache
def _why_unusable() -> str | None:
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{_PACKAGE} is not installed; mesh-attention selftest says how to"
    low, high = (".".join(map(str, bound)) for bound in _VERSIONS)
    if not _VERSIONS[0] <= tuple(map(int, version.split(".")[:2])) < _VERSIONS[1]:
        return f"was written for {_PACKAGE} from {low} to below {high}, found {version}"
    wanted = ("create_mask_plan", "FlexAttentionFwd", "FlexAttentionBwd")
    for module, name in (*(("cudnn.flex_attention", name) for name in wanted), ("triton", "jit")):
        function = load(module, name)
        if isinstance(function, str):
            return function
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
def _flex(name: str) -> Any:
    function = load("cudnn.flex_attention", name)
    assert not isinstance(function, str), function
    return function


def _aligned(x: Tensor) -> Tensor:
    """At an address and with strides that are multiples of 16 bytes; the innermost is 1 always."""
    if x.requires_grad:
        x = x.detach()
    return x if _fits(x) else x.clone(memory_format=torch.contiguous_format)


def _in_order(x_BHS: Tensor) -> Tensor:
    """Contiguous, also by the strides of sides of length one, at which the package looks."""
    _, H, S = x_BHS.shape
    if x_BHS.stride() == (H * S, S, 1):
        return x_BHS
    return x_BHS.clone(memory_format=torch.contiguous_format)


def _fits(x: Tensor | None) -> TypeGuard[Tensor]:
    if x is None:
        return False
    step = 16 // x.element_size()
    return all(s % step == 0 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0


def _prepared(mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> _Prepared:
    """Made once for a mask and sizes; this waits for the device."""
    assert isinstance(mask, RowRange), "chosen for row ranges only"
    key = ("cudnn_ranges", q.device, q.dtype, q.shape, k.shape, v.shape)
    prepared: _Prepared | None = mask.kept.get((True, *key))  # serves both passes
    if prepared is None and not backward:
        prepared = mask.kept.get((False, *key))
    if prepared is None:
        ends = interval_ends(mask, q.device).repeat(1, q.shape[0])[None].contiguous()
        plan = _flex("create_mask_plan")(ends, q, k, v, build_backward=backward)
        prepared = mask.kept[backward, *key] = _Prepared(plan)
    return prepared
