"""FlashAttention 3 and 4 from their own packages, where those are installed.

`registry.py` lists the kernels. They call low-level functions, since a backward pass must take the
log-sum-exp of the whole softmax; `ready_made.py` copes with signatures that vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from mesh_attention.kernels.interface import Block, Request
from mesh_attention.kernels.ready_made import DenseKernel, PackageFunction, load, why_not_on_cuda
from mesh_attention.machine.seconds import sms_left
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.passes.split_calls import TILE_ROWS

# Parameters without a default in early releases of FlashAttention 3, unused by dense attention.
_MAY_BE_NONE = frozenset(
    {
        *("k_new", "v_new", "qv", "out", "out_", "page_table", "kv_batch_idx", "leftpad_k"),
        *("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "max_seqlen_q", "max_seqlen_k"),
        *("seqused_q", "seqused_k", "sequed_q", "sequed_k"),
        *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
    }
)


class FlashPackage(DenseKernel):
    """What FlashAttention 3 and 4 share: limits, and the functions of their packages."""

    generations: tuple[int, ...]  # major versions of compute capability
    head_dims: Sequence[int]
    head_dims_text: str
    forward_function: PackageFunction
    backward_function: PackageFunction

    def refuses(self, request: Request) -> str | None:
        if (reason := why_not_on_cuda(request)) is not None:
            return reason
        if request.capability is None or request.capability[0] not in self.generations:
            names = " and ".join(f"{number}.x" for number in self.generations)
            return f"is for compute capability {names}, found {request.capability}"
        dims = request.head_dim, request.v_head_dim
        if dims[0] != dims[1] or dims[0] not in self.head_dims:
            return f"is used for equal head sizes {self.head_dims_text}, not {dims}"
        if request.direction is Direction.BACKWARD:
            return self.backward_function.why_unusable()
        return self.why_no_forward(request)

    def why_no_forward(self, request: Request) -> str | None:
        return self.forward_function.why_unusable()


class FlashAttn3(FlashPackage):
    """The fastest dense kernel on Hopper GPUs, from its own package; without it the forward pass
    comes from `fa3-fwd`. No other dense kernel can leave multiprocessors to a transfer."""

    name = "flash_attn3"
    deterministic = "forward"
    has_softcap = True
    generations = (9,)
    head_dims = range(257)
    head_dims_text = "up to 256"
    forward_function = PackageFunction(
        "flash_attn_interface",
        "_flash_attn_forward",
        ("q", "k", "v", "softmax_scale", "causal", "softcap", "sm_margin"),
        _MAY_BE_NONE,
    )
    backward_function = PackageFunction(
        "flash_attn_interface",
        "_flash_attn_backward",
        (
            *("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"),
            *("softmax_scale", "is_causal|causal", "softcap"),
        ),
        _MAY_BE_NONE,
    )

    def why_no_forward(self, request: Request) -> str | None:
        package = super().why_no_forward(request)
        fa3_fwd = package and _why_not_fa3_fwd()
        if package and not fa3_fwd and request.dtype is torch.float16:
            fa3_fwd = "fa3_fwd is built without float16"
        return f"{package}; {fa3_fwd}" if fa3_fwd else None

    @cache  # noqa: B019  (the registry has one object)
    def _uses_fa3_fwd(self) -> bool:
        return self.forward_function.why_unusable() is not None

    def run_forward(self, block: Block, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v, _, scale, softcap, _, into, *_ = block
        leave_sms = _sms_left(block, causal)
        if not self._uses_fa3_fwd():
            out, lse, *_ = self.forward_function(q, k, v, scale, causal, softcap, leave_sms)
            return out, lse
        (target,) = into or (None,)
        out, lse, *_ = torch.ops.fa3_fwd.fwd(
            q,
            k,
            v,
            out=target,
            softmax_scale=scale,
            is_causal=causal,
            softcap=softcap,
            num_splits=1,  # more splits would return parts to be added
            sm_margin=leave_sms,
        )
        return out if target is None else target, lse

    def run_backward(
        self, block: Block, grad_out_BSHE: Tensor, out_BSHE: Tensor, lse_BHS: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_empty(x.shape) for x in block[:3])
        values = (grad_out_BSHE, *block[:3], out_BSHE, lse_BHS, dq, dk, dv)
        self.backward_function(*values, block.softmax_scale, causal, block.softcap)
        return dq, dk, dv


def _sms_left(block: Block, causal: bool) -> int:
    q, asked = block.q, block.leave_sms
    if not asked or causal or q.shape[3] not in _HEAD_DIMS_OF_TILES:
        return asked
    B, S, H, _ = q.shape
    return sms_left(B * H * -(-S // TILE_ROWS), _num_sms(q.device), asked)


_HEAD_DIMS_OF_TILES = range(97, 257)  # smaller ones have tiles of more rows


@cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _why_not_fa3_fwd() -> str | None:
    extension = load("fa3_fwd._C", "__name__")  # loading it registers the operator
    if isinstance(extension, str) and "is not installed" in extension:
        return extension
    try:
        arguments = {x.name for x in torch.ops.fa3_fwd.fwd.default._schema.arguments}
    except AttributeError:
        return "fa3_fwd has no operator fwd"
    wanted = {"out", "softmax_scale", "is_causal", "softcap", "num_splits", "sm_margin"}
    missing = wanted - arguments
    return f"fa3_fwd.fwd has no {sorted(missing)}" if missing else None


class FlashAttn4(FlashPackage):
    """Used on Blackwell GPUs and only for the head sizes its authors list: on Hopper its backward
    is younger than FlashAttention 3's and than cuDNN's."""

    name = "flash_attn4"
    deterministic = "forward"
    generations = (10, 11)
    head_dims = (64, 96, 128)
    head_dims_text = f"of {head_dims}"
    forward_function = PackageFunction(
        "flash_attn.cute.interface",
        "_flash_attn_fwd",
        ("q", "k", "v", "softmax_scale", "causal", "return_lse"),
    )
    backward_function = PackageFunction(
        "flash_attn.cute.interface",
        "_flash_attn_bwd",
        ("q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal"),
    )

    def run_forward(self, block: Block, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.forward_function(*block[:3], block.softmax_scale, causal, True)
        return out, lse

    def run_backward(
        self, block: Block, grad_out_BSHE: Tensor, out_BSHE: Tensor, lse_BHS: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = (*block[:3], out_BSHE, grad_out_BSHE, lse_BHS, block.softmax_scale, causal)
        dq, dk, dv, *_ = self.backward_function(*values)
        return dq, dk, dv
