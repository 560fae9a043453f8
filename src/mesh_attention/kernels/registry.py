"""The table of kernels in order of preference, and the choice among them.

A choice is made once for a request, so for each pass separately, and says why: it lists the reason
of every kernel that was asked before. Users may add kernels of their own (`register`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.blockwise import Blockwise
from mesh_attention.kernels.cudnn_ranges import CudnnRanges
from mesh_attention.kernels.flash_attn import FlashAttn3, FlashAttn4
from mesh_attention.kernels.interface import BackwardNeeds, Kernel, MaskKind, Request
from mesh_attention.kernels.ready_made import load
from mesh_attention.kernels.reference import Reference
from mesh_attention.kernels.rows import RowKernels
from mesh_attention.kernels.torch_ops import CpuFlash, CudaFlash, Cudnn
from mesh_attention.kernels.triton_ranges import TritonRanges
from mesh_attention.machine.kernel_facts import facts_fault
from mesh_attention.plan.language.plan import Direction

_KERNELS: list[Kernel] = [
    FlashAttn4(),
    FlashAttn3(),
    Cudnn(),
    CudnnRanges(),
    CudaFlash(),
    CpuFlash(),
    TritonRanges(),
    Blockwise(),
    Reference(),
]

_OWN = frozenset(kernel.name for kernel in _KERNELS)
_version = 0

_METHODS = ("refuses", "scratch_bytes", "forward")


class UnknownKernelError(MeshAttentionError):
    """A name that is not in the table."""


class KernelNameError(MeshAttentionError):
    """A name that is already taken, or that of one of the library's own kernels."""


class KernelRefusedError(MeshAttentionError):
    """No kernel, or not the one that was asked for, can do the request."""


@dataclass(frozen=True)
class Choice:
    kernel: Kernel
    # (name, why not, or "chosen", or "chosen, deterministic"), in the order asked
    reasons: tuple[tuple[str, str], ...]
    warning: str = ""  # for the caller, by whoever prepares a call with it


def kernel_names() -> tuple[str, ...]:
    return tuple(kernel.name for kernel in _KERNELS)


def table_version() -> int:
    """Another whenever a kernel has come or gone, also one of the same name."""
    return _version


def offers(request: Request) -> list[tuple[Kernel, str | None]]:
    """Every kernel, with None if it can do the request, otherwise why it cannot."""
    return [(kernel, _why_not(kernel, request)) for kernel in _KERNELS]


def choose(request: Request, *, force: str | None = None) -> Choice:
    """The first kernel that does not refuse and is not slow, else the first slow one, or the forced
    one.

    A forced kernel that could do the forward pass of the same block, but not its backward pass,
    leaves the latter to the first other kernel that can; the reasons begin with its own.
    """
    candidates = list(_KERNELS)
    if force is not None:
        forced = _KERNELS[_index(force)]
        reason = _why_not(forced, request)
        if reason is not None and not _has_forward_only(forced, request):
            raise KernelRefusedError(f"kernel {force!r} cannot do {request}: {reason}")
        candidates.remove(forced)
        candidates.insert(0, forced)
    reasons: list[tuple[str, str]] = []
    slow: list[Kernel] = []
    chosen = "chosen, deterministic" if request.deterministic else "chosen"
    for kernel in candidates:
        reason = _why_not(kernel, request)
        if reason is None and kernel.name != force:
            reason = getattr(kernel, "slow_for", lambda _: None)(request)
            slow += [] if reason is None else [kernel]
        reasons.append((kernel.name, reason or chosen))
        if reason is None:
            return Choice(kernel, tuple(reasons))
    if slow:
        return Choice(slow[0], (*reasons, (slow[0].name, chosen)))
    listing = "; ".join(f"{name}: {reason}" for name, reason in reasons)
    raise KernelRefusedError(f"no kernel can do {request}. {listing}")


def _why_not(kernel: Kernel, request: Request) -> str | None:
    """By the attributes of a kernel, then by its own `refuses`."""
    backward, needs = request.direction is Direction.BACKWARD, kernel.backward_needs
    if backward and needs is None:
        return "has no backward pass"
    if request.softcap and not getattr(kernel, "has_softcap", False):
        return "has no softcap (a kernel with `has_softcap = True` has)"
    union = request.mask is MaskKind.RANGE and request.intervals > 1
    if union and not getattr(kernel, "takes_unions", False):
        return (
            f"takes one interval of keys for each query, not {request.intervals} (a kernel with "
            "`takes_unions = True` does)"
        )
    if backward and request.lse_gradient and needs is not None and needs.out:
        return "its backward pass takes `out`, where differentiable_lse=True needs one with `delta`"
    said = getattr(kernel, "deterministic", False)  # what says nothing has promised nothing
    if request.deterministic and said is not True and said != request.direction:
        return (
            f"its {request.direction} pass is not deterministic (a kernel with `deterministic = "
            "True` is), as deterministic=True or torch.use_deterministic_algorithms asks"
        )
    if request.any_heads and not getattr(kernel, "any_heads", False):
        return (
            "its bits may depend on the number of heads of a call (those of a kernel with "
            "`any_heads = True` do not), as same_bits=True forbids"
        )
    reason = kernel.refuses(request)
    if reason is not None and not (isinstance(reason, str) and reason):
        raise MeshAttentionError(
            f"kernel {kernel.name!r}: refuses() must return None if it can do a request, or one "
            f"line that says why not; it returned {reason!r}"
        )
    return reason


def _has_forward_only(kernel: Kernel, request: Request) -> bool:
    """Whether a kernel that refuses this backward pass takes the forward pass before it. One that
    has the pass, and not the same bits every time, is not left out in silence."""
    if request.direction is not Direction.BACKWARD:
        return False
    if request.deterministic and _why_not(kernel, replace(request, deterministic=False)) is None:
        return False
    return _why_not(kernel, replace(request, direction=Direction.FORWARD)) is None


def register(kernel: Kernel, *, before: str | None = None) -> None:
    """Add a kernel, preferred to all others or to those from `before` on.

    It is any object that answers as `Kernel` in `interface.py` says; no class has to be inherited.
    Experimental.
    """
    if isinstance(kernel, type) or not isinstance(getattr(kernel, "name", None), str):
        raise MeshAttentionError(f"{kernel!r} is not a kernel: give an object with a name")
    needs = getattr(kernel, "backward_needs", BackwardNeeds())
    wanted = _METHODS if needs is None else ("backward", *_METHODS)
    missing = [method for method in wanted if not callable(getattr(kernel, method, None))]
    if missing:
        forward_only = "; `backward_needs = None` says that it has a forward pass only"
        raise MeshAttentionError(
            f"kernel {kernel.name!r} has no method {', '.join(missing)}"
            + (forward_only if "backward" in missing else "")
        )
    if not isinstance(getattr(kernel, "backward_needs", 0), BackwardNeeds | None):
        raise MeshAttentionError(
            f"kernel {kernel.name!r} must say in `backward_needs` what its backward pass is to be "
            "given: None if it has a forward pass only; mesh_attention.kernels.BackwardNeeds() if "
            "it takes `out` or `delta`, whichever there is; BackwardNeeds(out=True) or (delta=True)"
        )
    if (fault := facts_fault(kernel)) is not None:
        raise MeshAttentionError(f"kernel {kernel.name!r} has wrong `facts`: {fault}")
    if kernel.name in kernel_names():
        way_out = f"registered already; unregister_kernel({kernel.name!r}) removes it"
        if kernel.name in _OWN:
            way_out = "the library's own; choose another name"
        raise KernelNameError(f"a kernel named {kernel.name!r} is {way_out}")
    global _version
    _KERNELS.insert(0 if before is None else _index(before), kernel)
    _version += 1


def unregister(name: str) -> None:
    """Remove a kernel that was registered. Calls that were prepared with it keep it.
    Experimental."""
    global _version
    at = _index(name)
    if name in _OWN:
        raise KernelNameError(
            f"kernel {name!r} is the library's own and stays; kernel=... chooses another"
        )
    del _KERNELS[at]
    _version += 1


def _index(name: str) -> int:
    names = kernel_names()
    if name not in names:
        raise UnknownKernelError(
            f"no kernel is named {name!r}. Valid names are: {', '.join(names)}"
        )
    return names.index(name)


@dataclass(frozen=True)
class RowChoice:
    rows: RowKernels
    reasons: tuple[tuple[str, str], ...]  # (name, why not, or "chosen"), in the order asked


def choose_rows(device_type: str, dtype: torch.dtype) -> RowChoice:
    """The row kernels for tensors on such a device; `dtype`: of q, k and v."""
    if device_type != "cuda":
        why_not = f"runs on cuda, not on {device_type}"
    elif dtype not in (torch.float32, torch.bfloat16, torch.float16):
        why_not = f"takes float32, bfloat16 and float16, not {dtype}"
    elif isinstance(triton := load("triton", "jit"), str):
        why_not = triton
    else:
        # Imported here: it needs Triton, which comes with CUDA builds of PyTorch only.
        from mesh_attention.kernels.fused.rows import FusedRows

        return RowChoice(FusedRows(), (("fused", "chosen"),))
    return RowChoice(RowKernels(), (("fused", why_not), ("plain", "chosen")))
