"""The attention kernels that ship with PyTorch, through its private ops.

All of them take (B, H, S, D) tensors of any strides, so (B, S, H, D) tensors go in as transposed
views, and outputs, laid out like q, are transposed back. All take fewer KV heads than query heads.
`registry.py` lists these kernels; `DenseKernel` calls `run_forward` and `run_backward`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mesh_attention.kernels.interface import Block, BlockSize, Full, Request
from mesh_attention.kernels.ready_made import (
    DenseKernel,
    aten,
    why_not_dense,
    why_not_on_cuda,
    why_op_unusable,
)
from mesh_attention.plan.language.plan import Direction

_INPUTS = ("query", "key", "value", "dropout_p", "is_causal", "scale")
_RESULTS = ("grad_out", "out", "logsumexp")
_HALF = (torch.bfloat16, torch.float16)
# Arguments of the CUDA ops for packed sequences and dropout, both unused.
_UNUSED = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")


class TorchOp(DenseKernel):
    """A kernel of PyTorch: an op for each pass, called by the names of its arguments."""

    op: str  # of the forward pass; the op of the backward pass is named `{op}_backward`
    forward_options: Mapping[str, Any] = {}
    backward_arguments: tuple[str, ...] = ()

    def why_pass_unusable(self, direction: Direction) -> str | None:
        if direction is Direction.FORWARD:
            return why_op_unusable(self.op, (*_INPUTS, *self.forward_options))
        names = (*_INPUTS, *_RESULTS, *self.backward_arguments)
        return why_op_unusable(f"{self.op}_backward", names)

    def backward_options(self, block: Block) -> dict[str, Any]:
        """Values of `backward_arguments`."""
        return {}

    def run_forward(self, block: Block, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten(self.op)(
            query=block.q.transpose(1, 2),
            key=block.k.transpose(1, 2),
            value=block.v.transpose(1, 2),
            dropout_p=0.0,
            is_causal=causal,
            scale=block.softmax_scale,
            **self.forward_options,
        )
        return out.transpose(1, 2), lse

    def run_backward(
        self, block: Block, grad_out_BSHE: Tensor, out_BSHE: Tensor, lse_BHS: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = aten(f"{self.op}_backward")(
            grad_out=grad_out_BSHE.transpose(1, 2),
            query=block.q.transpose(1, 2),
            key=block.k.transpose(1, 2),
            value=block.v.transpose(1, 2),
            out=out_BSHE.transpose(1, 2),
            logsumexp=lse_BHS,
            dropout_p=0.0,
            is_causal=causal,
            scale=block.softmax_scale,
            **self.backward_options(block),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class CpuFlash(TorchOp):
    """Flash attention on a CPU. Tried with torch 2.13: it takes float64, float32, bfloat16 and
    float16, and any S and T but 0, which ends the whole process with a division by zero. D and E
    must agree. The log-sum-exp comes back as a view of (B, S, H)."""

    name = "cpu_flash"
    deterministic = True
    any_heads = True
    op = "_scaled_dot_product_flash_attention_for_cpu"

    def refuses(self, request: Request) -> str | None:
        if request.device_type != "cpu":
            return f"runs on cpu, not on {request.device_type}"
        if request.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"takes float64, float32, bfloat16 and float16, not {request.dtype}"
        if request.head_dim != request.v_head_dim:
            return f"needs D == E, not {request.head_dim} and {request.v_head_dim}"
        return why_not_dense(request) or self.why_pass_unusable(request.direction)

    def slow_for(self, request: Request) -> str | None:
        """On ARM, PyTorch multiplies half precision element by element where oneDNN does not take
        over; the blockwise kernel multiplies in float32. Milliseconds forward and backward on a
        Neoverse N1, and of blockwise (torch 2.13, one thread, 256 x 256, 4 heads of 64): bfloat16
        600 and 1,640 (4 and 13), float16 65 and 3,240 (14 and 30), float32 5 and 8 (7 and 18)."""
        if request.dtype not in _HALF or platform.machine().lower() not in ("aarch64", "arm64"):
            return None
        if request.dtype is torch.bfloat16 and _multiplies_bfloat16():
            return None
        return f"far slower than blockwise on this ARM CPU in {request.dtype}"


def _multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a PyTorch without oneDNN
        return False


class CudaFlash(TorchOp):
    """FlashAttention 2. Slower than cuDNN on recent GPUs, but it takes head sizes up to 256 and
    runs where cuDNN is missing. Its backward reads `logsumexp` as a contiguous (B, H, S). It splits
    the keys of short calls with few heads, so its bits depend on the number of heads."""

    name = "cuda_flash"
    deterministic = True
    op = "_scaled_dot_product_flash_attention"
    forward_options: Mapping[str, Any] = {"return_debug_mask": False}
    backward_arguments = _UNUSED

    def refuses(self, request: Request) -> str | None:
        if (reason := why_not_on_cuda(request)) is not None:
            return reason
        assert request.capability is not None
        if request.head_dim != request.v_head_dim:
            return f"needs D == E, not {request.head_dim} and {request.v_head_dim}"
        if request.head_dim > 256:
            return f"takes head sizes up to 256, not {request.head_dim}"
        # These chips have too little shared memory for the largest backward tiles.
        small = request.capability in ((8, 6), (8, 9)) or request.capability >= (12, 0)
        if request.direction is Direction.BACKWARD and request.head_dim > 192 and small:
            return f"has no backward for head size {request.head_dim} on {request.capability}"
        return self.why_pass_unusable(request.direction)

    def run_forward(self, block: Block, causal: bool) -> tuple[Tensor, Tensor]:
        out_BSHE, lse_BHS = super().run_forward(block, causal)
        # The op marks a row that sees no key by +inf.
        return out_BSHE, lse_BHS.masked_fill(lse_BHS == torch.inf, -torch.inf)

    def run_backward(
        self, block: Block, grad_out_BSHE: Tensor, out_BSHE: Tensor, lse_BHS: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        with deterministic_algorithms(block.deterministic):
            return super().run_backward(block, grad_out_BSHE, out_BSHE, lse_BHS, causal)

    def backward_options(self, block: Block) -> dict[str, Any]:
        # Without dropout the random state is never read; shape and dtype are the forward's.
        device = block.q.device
        seed = torch.empty(2, dtype=torch.uint64, device=device)
        return _unused_arguments(block, seed, torch.empty((), dtype=torch.uint64, device=device))


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Some ops are asked by a switch of the whole process, and in no other way."""
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (was and not warned):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)


class Cudnn(TorchOp):
    """The fastest dense kernel that ships with PyTorch. It needs at least two queries and two keys;
    thinner blocks go to the blockwise kernel (numbers.md, "PyTorch's private attention ops")."""

    name = "cudnn"
    deterministic = "forward"
    any_heads = True
    least_rows = 2
    op = "_scaled_dot_product_cudnn_attention"
    forward_options: Mapping[str, Any] = {
        "attn_bias": None,
        "compute_log_sumexp": True,
        "return_debug_mask": False,
    }
    backward_arguments = ("attn_bias", *_UNUSED)

    def refuses(self, request: Request) -> str | None:
        if (reason := why_not_on_cuda(request)) is not None:
            return reason
        version = _cudnn_version()
        if version is None:
            return "this PyTorch has no cuDNN"
        dims = request.head_dim, request.v_head_dim
        if max(dims) > 128 and not (dims == (192, 128) and version >= 91100):
            return f"takes head sizes up to 128 (192 with 128 from cuDNN 9.11), not {dims}"
        return self.why_pass_unusable(request.direction)

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        """Measured with cuDNN 9.19 on an H200. Backward adds fp32 sums of dq and of rows, in blocks
        of 64 rows, and dk and dv of every query head where query heads share keys."""
        results = super().scratch_bytes(direction, block)
        if direction is Direction.FORWARD:
            return results
        rows, keys = (-(-length // 64) * 64 for length in (block.num_queries, block.num_keys))
        own = rows * block.num_heads * (block.head_dim + 1) * 4
        if block.num_heads != block.num_kv_heads:
            own += keys * block.num_heads * (block.head_dim + block.v_head_dim) * 2
        return results + own

    def run_forward(self, block: Block, causal: bool) -> tuple[Tensor, Tensor]:
        out_BSHE, lse = super().run_forward(block, causal)
        return out_BSHE, lse.reshape(lse.shape[:3])

    def run_backward(
        self, block: Block, grad_out_BSHE: Tensor, out_BSHE: Tensor, lse_BHS: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = lse_BHS[..., None] if _lse_rank(block.q.device) == 4 else lse_BHS
        return super().run_backward(block, grad_out_BSHE, out_BSHE, lse, causal)

    def backward_options(self, block: Block) -> dict[str, Any]:
        # Without dropout the random state is never read; it only has to be a tensor.
        state = torch.empty((), dtype=torch.int64, device=block.q.device)
        return {"attn_bias": None, **_unused_arguments(block, state, state)}


def _unused_arguments(block: Block, seed: Tensor, offset: Tensor) -> dict[str, Any]:
    lengths = block.q.shape[1], block.k.shape[1]
    return dict(zip(_UNUSED, (None, None, *lengths, seed, offset), strict=True))


def _cudnn_version() -> int | None:
    if torch.version.hip is not None:
        return None
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


@cache
def _lse_rank(device: torch.device) -> int:
    """Dimensions of cuDNN's log-sum-exp, (B, H, S, 1) or (B, H, S) by the version of PyTorch: the
    backward op takes it as the forward op returns it."""
    x_BSHD = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16, device=device)
    block = Block(x_BSHD, x_BSHD, x_BSHD, Full(), 1.0)
    _, lse = TorchOp.run_forward(Cudnn(), block, causal=False)
    return lse.dim()
