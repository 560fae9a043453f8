"""What adapters of ready-made kernels share: why one cannot be used, and the checks around a call.

PyTorch's attention ops are private names: they are looked up, with the arguments an adapter needs,
when a kernel is chosen, and a refusal says what torch has instead. FlashAttention's low-level
functions have gained, renamed and reordered parameters from release to release: an adapter says
which values it has and which further parameters may be left None, and a call's arguments are made
for the function that is installed.

Ready-made kernels are dense or causal, insist on an `out` tensor in the backward pass, assume tight
layouts of it, and crash or disagree on empty blocks and on rows that saw nothing. `DenseKernel`
stands around them; an adapter then only says what it refuses and how its library is called.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.blockwise import Blockwise
from mesh_attention.kernels.interface import (
    BackwardInputs,
    BackwardNeeds,
    Block,
    BlockSize,
    Causal,
    Full,
    MaskKind,
    Request,
    RowRange,
)
from mesh_attention.kernels.rows import accumulator_dtype, delta
from mesh_attention.kernels.visibility import check_mask
from mesh_attention.plan.language.plan import Direction


@cache
def aten(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


def why_op_unusable(name: str, arguments: Iterable[str]) -> str | None:
    """None if the private op `aten::name` exists with these arguments."""
    try:
        names = [argument.name for argument in aten(name)._schema.arguments]
    except AttributeError:
        return f"torch {torch.__version__} has no aten::{name}"
    missing = [argument for argument in arguments if argument not in names]
    return f"aten::{name} takes {names}, without {missing}" if missing else None


def why_not_dense(request: Request) -> str | None:
    if request.mask is MaskKind.RANGE:
        return "has no row-range mask"
    return request.why_not_grouped()


def why_not_on_cuda(request: Request) -> str | None:
    """The limits that all dense CUDA kernels adapted here share."""
    if (reason := why_not_on_ampere(request)) is not None:
        return reason
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {request.dtype}"
    if request.head_dim % 8 or request.v_head_dim % 8:
        return f"head sizes must be multiples of 8, not {request.head_dim} and {request.v_head_dim}"
    return why_not_dense(request)


def why_not_on_ampere(request: Request) -> str | None:
    """The limits of kernels that run on any CUDA device from compute capability 8.0 on."""
    if request.device_type != "cuda":
        return f"runs on cuda, not on {request.device_type}"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    if request.capability is None or request.capability < (8, 0):
        return f"needs compute capability 8.0 or later, found {request.capability}"
    return None


def load(module: str, function: str) -> Callable[..., Any] | str:
    """The function, or one line that says why there is none."""
    try:
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except ImportError as error:
        return f"{module} is not installed ({error})"
    except AttributeError:
        return f"{module} has no {function}"
    except Exception as error:  # a broken binary fails in its own ways; it is then not usable
        return f"{module} does not load ({type(error).__name__}: {error})"
    return loaded


class PackageFunction(NamedTuple):
    """A function of a package that may not be there, called by the names of its arguments.

    An argument such as "is_causal|causal" has had several names."""

    module: str
    name: str
    arguments: tuple[str, ...]
    may_be_none: frozenset[str] = frozenset()

    def why_unusable(self) -> str | None:
        call = self._call_on((None,) * len(self.arguments))
        return call if isinstance(call, str) else None

    def __call__(self, *values: Any) -> Any:
        call = self._call_on(values)
        assert not isinstance(call, str), call
        with torch.no_grad():
            return call()

    def _call_on(self, values: Sequence[Any]) -> Callable[[], Any] | str:
        """The call on values of `arguments`, or one line that says why it cannot be made."""
        function = load(self.module, self.name)
        if isinstance(function, str):
            return function
        # Functions registered as torch custom operators hide their signature behind a wrapper.
        parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
        arguments: dict[str, Any] = {}
        for names, value in zip(self.arguments, values, strict=True):
            name = next((n for n in names.split("|") if n in parameters), None)
            if name is None:
                return f"{function} takes {list(parameters)}, without {names}"
            arguments[name] = value
        for name, parameter in parameters.items():
            if name in arguments or parameter.default is not inspect.Parameter.empty:
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name not in self.may_be_none:
                return f"{function} wants {name}, which this adapter does not know"
            arguments[name] = None
        return partial(function, **arguments)


class DenseKernel(ABC):
    """A dense or causal kernel of a library. Blocks that the library cannot do are done here."""

    name: str
    backward_needs = BackwardNeeds(out=True, finite_lse=True)
    least_rows = 1  # of queries and of keys; the blockwise kernel does blocks with fewer

    @abstractmethod
    def refuses(self, request: Request) -> str | None: ...

    @abstractmethod
    def run_forward(self, block: Block, causal: bool) -> tuple[Tensor, Tensor]:
        """(out_BSHE, lse_BHS) of a block that is not empty."""

    @abstractmethod
    def run_backward(
        self, block: Block, grad_out_BSHE: Tensor, out_BSHE: Tensor, lse_BHS: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); grad_out, out and lse are contiguous and lse is finite."""

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        return block.result_bytes(direction, block.element_bytes)

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q_BSHD, k_BTGD, v_BTGE, *_ = block
        causal = not isinstance(block.mask, Full) and self._is_causal(block)
        if q_BSHD.numel() == 0 or k_BTGD.numel() == 0:
            B, S, H, _ = q_BSHD.shape
            dtype = accumulator_dtype(q_BSHD.dtype)
            out_BSHE = q_BSHD.new_zeros(B, S, H, v_BTGE.shape[3])
            return out_BSHE, q_BSHD.new_full((B, H, S), -torch.inf, dtype=dtype)
        if min(q_BSHD.shape[1], k_BTGD.shape[1]) < self.least_rows:
            return Blockwise().forward(block)
        return self.run_forward(block, causal)

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        q_BSHD, k_BTGD, v_BTGE, *_ = block
        grad_out_BSHE, out_BSHE, lse_BHS, _ = inputs
        assert out_BSHE is not None  # as `backward_needs` says
        causal = not isinstance(block.mask, Full) and self._is_causal(block)
        if q_BSHD.numel() == 0 or k_BTGD.numel() == 0:
            zeros = torch.zeros_like
            return zeros(q_BSHD), zeros(k_BTGD), zeros(v_BTGE)
        if min(q_BSHD.shape[1], k_BTGD.shape[1]) < self.least_rows:
            inputs = inputs._replace(delta=delta(out_BSHE, grad_out_BSHE))
            return Blockwise().backward(block, inputs)
        # Contiguous always: PyTorch has cached cuDNN's plans by the layouts of q, k and v alone,
        # and a plan made for one layout of `out` would silently misread another.
        grad_out, out = (x.to(q_BSHD.dtype).contiguous() for x in (grad_out_BSHE, out_BSHE))
        return self.run_backward(block, grad_out, out, lse_BHS, causal)

    def _is_causal(self, block: Block) -> bool:
        if isinstance(block.mask, RowRange):
            raise MeshAttentionError(f"kernel {self.name!r} has no row-range mask")
        check_mask(block.mask, block.q.shape[1], block.k.shape[1])
        return isinstance(block.mask, Causal)
