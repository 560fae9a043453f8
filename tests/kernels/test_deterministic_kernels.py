"""Kernels that promise the same bits every time are chosen where that is asked, each pass apart."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from mesh_attention import Problem, make_plan
from mesh_attention.kernels import (
    Block,
    Full,
    KernelRefusedError,
    MaskKind,
    Request,
    choose,
    register,
    unregister,
)
from mesh_attention.kernels.blockwise import Blockwise
from mesh_attention.kernels.registry import _KERNELS, kernel_names
from mesh_attention.kernels.torch_ops import CudaFlash, TorchOp, deterministic_algorithms
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.session.call_options import CallOptions, Determinism, asked_of_torch
from mesh_attention.testing import run_local

BACKWARD = Request(
    *(Direction.BACKWARD, "cpu", None, torch.float64, 8, 8, 4, 2, MaskKind.FULL),
    deterministic=True,
)
FORWARD = replace(BACKWARD, direction=Direction.FORWARD)


class Loose(Blockwise):
    name = "loose"
    deterministic = False


@contextmanager
def registered(said: object) -> Iterator[Loose]:
    kernel = Loose()
    kernel.deterministic = said  # type: ignore[assignment]
    register(kernel, before="cpu_flash")
    try:
        yield kernel
    finally:
        unregister("loose")


@contextmanager
def asked(*, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        (True, {"forward", "backward"}),
        ("forward", {"forward"}),
        ("backward", {"backward"}),
        (False, set()),
        (None, set()),
    ],
)
def test_a_kernel_is_chosen_for_the_passes_that_it_promises(said: object, passes: set[str]) -> None:
    with registered(said):
        for request in (FORWARD, BACKWARD):
            chosen = choose(request)
            expected = "loose" if request.direction.value in passes else "cpu_flash"
            assert chosen.kernel.name == expected
            assert chosen.reasons[-1] == (expected, "chosen, deterministic")
            if expected != "loose":
                why = dict(chosen.reasons)["loose"]
                assert f"its {request.direction} pass is not deterministic" in why
            assert choose(replace(request, deterministic=False)).kernel.name == "loose"


def test_a_kernel_that_is_forced_and_cannot_is_named() -> None:
    """Not left to another kernel, as a pass that it does not have at all would be."""
    with registered("forward"):
        assert choose(FORWARD, force="loose").kernel.name == "loose"
        with pytest.raises(KernelRefusedError, match=r"'loose' cannot .* not deterministic"):
            choose(BACKWARD, force="loose")
        assert choose(replace(BACKWARD, deterministic=False), force="loose").kernel.name == "loose"


def run(kernel: str | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 24, h, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    plan = make_plan(Problem(24, 4, 8, num_kv_heads=2, element_bytes=8), 3, method="mesh")
    result = run_local(plan, q, k, v, grad, kernel=kernel)
    return [x for x in (result.out, result.grad_q, result.grad_k, result.grad_v) if x is not None]


def test_where_pytorch_is_asked_a_kernel_that_cannot_is_an_error_and_with_warn_only_a_warning() -> (
    None
):
    with registered(False):
        usual = run("loose")
        with asked(), pytest.raises(KernelRefusedError, match="'loose' cannot"):
            run("loose")
        with asked(warn_only=True), pytest.warns(UserWarning, match=r"not deterministic.*'loose'"):
            warned = run("loose")
        assert all(torch.equal(a, b) for a, b in zip(usual, warned, strict=True))
        with asked(warn_only=True), warnings.catch_warnings():
            warnings.simplefilter("error")
            run()  # others can, and are taken


def test_what_pytorch_is_asked_is_read_and_put_back() -> None:
    assert asked_of_torch() is Determinism.ANY
    for warn_only, result in ((True, Determinism.PREFERRED), (False, Determinism.REQUIRED)):
        with asked(warn_only=warn_only):
            assert asked_of_torch() is result
            with deterministic_algorithms(True):
                assert asked_of_torch() is Determinism.REQUIRED
            assert asked_of_torch() is result
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(True):
        _ = 1 // 0
    assert asked_of_torch() is Determinism.ANY
    with deterministic_algorithms(False):
        assert asked_of_torch() is Determinism.ANY


def test_options_follow_what_pytorch_is_asked_for_at_the_time_of_a_call() -> None:
    usual, forced = CallOptions(), CallOptions(must_be_deterministic=True)
    assert usual.now() is usual
    for warn_only, result in ((True, Determinism.PREFERRED), (False, Determinism.REQUIRED)):
        with asked(warn_only=warn_only):
            changed = usual.now()
            assert changed == replace(usual, deterministic=result)
            assert changed.now() is changed
            assert forced.now() is forced
        assert changed.now() == usual


def test_the_flash_kernel_of_pytorch_is_asked_by_its_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results: list[Determinism] = []
    monkeypatch.setattr(TorchOp, "run_backward", lambda *_: results.append(asked_of_torch()))
    x = torch.zeros(1, 2, 1, 8)
    block = Block(x, x, x, Full(), 1.0)
    for deterministic in (True, False):
        CudaFlash().run_backward(block._replace(deterministic=deterministic), x, x, x, False)
    assert results == [Determinism.REQUIRED, Determinism.ANY]


def test_every_kernel_of_the_library_says_what_it_promises() -> None:
    said = {kernel.name: getattr(kernel, "deterministic", None) for kernel in _KERNELS}
    assert set(said) == set(kernel_names())
    assert {name for name, what in said.items() if what == "forward"} == {
        "flash_attn4", "flash_attn3", "cudnn",
    }  # fmt: skip
    assert all(what is True for what in said.values() if what != "forward")
    assert {kernel.name for kernel in _KERNELS if not getattr(kernel, "any_heads", False)} == {
        "flash_attn4", "flash_attn3", "cudnn_ranges", "cuda_flash",
    }  # fmt: skip


def test_a_kernel_whose_bits_depend_on_the_number_of_heads_is_left_out_for_same_bits() -> None:
    wanted = replace(FORWARD, any_heads=True)
    with registered(True) as kernel:
        assert choose(wanted).kernel.name == "loose"
        kernel.any_heads = False
        assert choose(FORWARD).kernel.name == "loose"
        chosen = choose(wanted)
        assert chosen.kernel.name == "cpu_flash"
        assert "number of heads" in dict(chosen.reasons)["loose"]
        with pytest.raises(KernelRefusedError, match=r"'loose' cannot .* same_bits=True"):
            choose(wanted, force="loose")
