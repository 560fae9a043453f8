"""Adapters whose libraries cannot run here: their calls are bound, not computed.

Tensors on the "meta" device go through the real op schemas; FlashAttention's packages are
stood in for by functions with the signatures of several of its releases, computed in float64.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from block_cases import Shape, assert_close, backward, causal, full, make_block, run, truth
from torch import Tensor

from mesh_attention.kernels import BackwardInputs, Block, Full, flash_attn, ready_made
from mesh_attention.kernels.flash_attn import FlashAttn3, FlashAttn4
from mesh_attention.kernels.interface import Causal
from mesh_attention.kernels.ready_made import DenseKernel
from mesh_attention.kernels.reference import Reference
from mesh_attention.kernels.torch_ops import CudaFlash, Cudnn
from mesh_attention.machine.seconds import sms_left


@pytest.mark.parametrize("kernel", [Cudnn(), CudaFlash()], ids=lambda k: k.name)
def test_cuda_adapters_fit_the_op_schemas(kernel: DenseKernel) -> None:
    q = torch.empty(2, 32, 8, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 48, 2, 64, dtype=torch.bfloat16, device="meta")
    block = Block(q, k, k, Full(), 0.1)
    out, lse = kernel.forward(block)
    assert out.shape == q.shape
    assert lse.shape == (2, 8, 32)
    for inputs in ((out, None), (None, lse)):
        dq, dk, dv = backward(kernel, block, out, inputs[0], lse, inputs[1])
        assert dq.shape == q.shape
        assert dk.shape == dv.shape == k.shape


def forward64(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Any:
    mask = Causal() if is_causal else Full()
    return Reference().forward(Block(q, k, v, mask, scale))


def backward64(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, scale: Any, is_causal: Any
) -> tuple[Tensor, Tensor, Tensor]:
    mask = Causal() if is_causal else Full()
    inputs = BackwardInputs(dout, out, lse, None)
    return Reference().backward(Block(q, k, v, mask, scale), inputs)


def fa3_of_today() -> ModuleType:
    module = ModuleType("flash_attn_interface")

    class CustomOp:
        """As `torch.library.custom_op` makes them: the signature is hidden in `_init_fn`."""

        def __init__(self, function: Any) -> None:
            self._init_fn = function

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._init_fn(*args, **kwargs)

    def _flash_attn_forward(
        q: Any,
        k: Any,
        v: Any,
        k_new: Any = None,
        softmax_scale: Any = None,
        causal: Any = False,
        softcap: float = 0.0,
        sm_margin: int = 0,
    ) -> Any:
        return (*forward64(q, k, v, softmax_scale, causal), None, None)

    def _flash_attn_backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        softmax_lse: Any,
        cu_seqlens_q: Any = None,
        dq: Any = None,
        dk: Any = None,
        dv: Any = None,
        softmax_scale: Any = None,
        is_causal: Any = False,
        softcap: float = 0.0,
    ) -> Any:
        grads = backward64(dout, q, k, v, out, softmax_lse, softmax_scale, is_causal)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)

    module._flash_attn_forward = CustomOp(_flash_attn_forward)  # type: ignore[attr-defined]
    module._flash_attn_backward = CustomOp(_flash_attn_backward)  # type: ignore[attr-defined]
    return module


def fa3_of_the_first_releases() -> ModuleType:
    module = ModuleType("flash_attn_interface")

    def _flash_attn_forward(
        q: Any,
        k: Any,
        v: Any,
        k_new: Any,
        page_table: Any,
        softmax_scale: Any,
        causal: Any,
        softcap: float = 0.0,
        sm_margin: int = 0,
    ) -> Any:
        assert k_new is None
        assert page_table is None
        return (*forward64(q, k, v, softmax_scale, causal), None, None)

    def _flash_attn_backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        softmax_lse: Any,
        cu_seqlens_q: Any,
        sequed_q: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        softmax_scale: Any,
        causal: Any,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
    ) -> Any:
        grads = backward64(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)

    module._flash_attn_forward = _flash_attn_forward  # type: ignore[attr-defined]
    module._flash_attn_backward = _flash_attn_backward  # type: ignore[attr-defined]
    return module


def fa4() -> ModuleType:
    module = ModuleType("flash_attn.cute.interface")

    def _flash_attn_fwd(
        q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: Any = False, return_lse: Any = 0
    ) -> Any:
        assert return_lse
        return forward64(q, k, v, softmax_scale, causal)

    def _flash_attn_bwd(
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        dout: Any,
        lse: Any,
        softmax_scale: Any = None,
        causal: Any = False,
        softcap: Any = 0.0,
    ) -> Any:
        return backward64(dout, q, k, v, out, lse, softmax_scale, causal)

    module._flash_attn_fwd = _flash_attn_fwd  # type: ignore[attr-defined]
    module._flash_attn_bwd = _flash_attn_bwd  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("kernel", "module"),
    [
        (FlashAttn3(), fa3_of_today()),
        (FlashAttn3(), fa3_of_the_first_releases()),
        (FlashAttn4(), fa4()),
    ],
    ids=["fa3", "fa3-early", "fa4"],
)
def test_flash_attention_packages_are_called_by_name(
    kernel: DenseKernel, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(type(kernel), "refuses", lambda self, request: None)
    for mask in (full, causal):
        block = make_block(Shape(S=20, T=20, H=4, G=2), torch.float64, mask, strided=True)
        for delta_only in (False, True):
            assert_close(run(kernel, block, delta_only=delta_only), truth(block), 1e-10, mask)


def test_a_function_that_wants_something_unknown_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("package_with_a_novelty")
    module.function = lambda q, novelty: (q, novelty)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def package(argument: str, *may_be_none: str) -> ready_made.PackageFunction:
        names = (module.__name__, "function")
        return ready_made.PackageFunction(*names, (argument,), frozenset(may_be_none))

    assert "wants novelty" in str(package("q").why_unusable())
    assert "without k|key" in str(package("k|key").why_unusable())
    assert package("k|q", "novelty").why_unusable() is None
    assert package("k|q", "novelty")(1) == (1, None)


def test_a_package_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no_such_module is not installed" in str(ready_made.load("no_such_module", "f"))
    assert ready_made.load("math", "no_such_function") == "math has no no_such_function"


@pytest.mark.parametrize(("sms", "asked"), [(132, 16), (131, 16), (148, 15), (18, 16), (17, 16)])
def test_a_call_leaves_all_sms_that_cost_it_no_round(sms: int, asked: int) -> None:
    for tiles in range(600):
        left, most = sms_left(tiles, sms, asked), sms - asked
        programs = sms - left
        assert left >= asked
        assert programs >= 1
        assert programs % 2 == 0 or programs == most  # pairs, or all that there are
        assert -(-tiles // programs) == -(-tiles // most), tiles
        assert programs <= 2 or -(-tiles // (programs - 2)) > -(-tiles // most), tiles
    assert sms_left(512, 16, 16) == 16  # which leaves nothing to compute with: not asked for


@pytest.mark.parametrize(
    ("width", "is_causal", "asked", "expected"),
    [
        *((128, False, 16, 28), (128, False, 0, 0)),
        *((128, True, 16, 16), (64, False, 16, 16)),  # shares and tiles that are not known
    ],
)
def test_flash_attn3_is_asked_for_them(
    monkeypatch: pytest.MonkeyPatch, width: int, is_causal: bool, asked: int, expected: int
) -> None:
    monkeypatch.setattr(flash_attn, "_num_sms", lambda device: 132)
    margins = []

    def forward(*inputs: Any) -> Any:
        margins.append(inputs[-1])
        return None, None

    monkeypatch.setattr(FlashAttn3, "forward_function", staticmethod(forward))
    monkeypatch.setattr(FlashAttn3, "_uses_fa3_fwd", lambda self: False)
    x = torch.empty(1, 512 * 128, 1, width, device="meta")
    block = Block(x, x, x, Causal() if is_causal else Full(), 1.0, leave_sms=asked)
    FlashAttn3().run_forward(block, is_causal)
    assert margins == [expected]
