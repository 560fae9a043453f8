"""Choosing a kernel: order, reasons, errors with the way out, and kernels of the user's own."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mesh_attention import Problem, make_plan
from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import (
    KernelNameError,
    KernelRefusedError,
    MaskKind,
    Request,
    UnknownKernelError,
    choose,
    kernel_names,
    ready_made,
    register,
    registry,
    torch_ops,
    unregister,
)
from mesh_attention.kernels.blockwise import Blockwise
from mesh_attention.kernels.flash_attn import FlashAttn3
from mesh_attention.kernels.torch_ops import CpuFlash, CudaFlash, Cudnn
from mesh_attention.machine.kernel_facts import library_facts
from mesh_attention.plan.language.plan import Direction
from mesh_attention.testing import run_local

ON_CPU = Request(Direction.BACKWARD, "cpu", None, torch.float32, 64, 64, 8, 2, MaskKind.FULL)
ON_HOPPER = replace(ON_CPU, device_type="cuda", capability=(9, 0), dtype=torch.bfloat16)


class Mine(Blockwise):
    name = "mine"


@pytest.fixture
def own() -> Iterator[Mine]:
    kernel = Mine()
    register(kernel, before="cpu_flash")
    yield kernel
    unregister("mine")


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.version, "hip", None)


def test_a_kernel_is_asked_for_several_intervals_only_if_it_says_that_it_takes_them(
    own: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(ON_CPU, mask=MaskKind.RANGE)
    several = replace(changed, intervals=2)
    assert choose(several).kernel is own
    monkeypatch.setattr(Mine, "takes_unions", False)
    assert choose(changed).kernel is own
    assert choose(replace(ON_CPU, intervals=2)).kernel is own  # a rectangle has no intervals
    choice = choose(several)
    assert choice.kernel.name == "blockwise"
    assert "takes one interval of keys for each query, not 2" in dict(choice.reasons)["mine"]


def test_dense_blocks_on_a_cpu_go_to_the_flash_kernel_and_the_choice_says_why() -> None:
    choice = choose(ON_CPU)
    assert choice.kernel.name == "cpu_flash"
    reasons = dict(choice.reasons)
    assert reasons["cudnn"] == "runs on cuda, not on cpu"
    assert choice.reasons[-1] == ("cpu_flash", "chosen")


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "x86_64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_half_precision_on_arm_goes_to_the_faster_kernel_unless_one_is_forced(
    monkeypatch: pytest.MonkeyPatch, machine: str, dtype: torch.dtype, has_bfloat16: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch_ops, "_multiplies_bfloat16", lambda: has_bfloat16)
    quick = dtype is torch.float32 or (dtype is torch.bfloat16 and has_bfloat16)
    for direction in Direction:
        request = replace(ON_CPU, direction=direction, dtype=dtype)
        choice = choose(request)
        assert choose(request, force="cpu_flash").kernel.name == "cpu_flash"
        if quick or machine == "x86_64":
            assert choice.kernel.name == "cpu_flash"
        else:
            assert choice.kernel.name == "blockwise"
            assert dict(choice.reasons)["cpu_flash"].startswith("far slower than blockwise")


def test_a_slow_kernel_is_chosen_where_no_other_can_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = CpuFlash()
    monkeypatch.setattr(flash, "slow_for", lambda request: "slow here")
    monkeypatch.setattr(registry, "_KERNELS", [flash])
    choice = choose(ON_CPU)
    assert choice.kernel is flash
    assert choice.reasons == (("cpu_flash", "slow here"), ("cpu_flash", "chosen"))


def test_row_ranges_and_unequal_head_sizes_go_to_the_blockwise_kernel() -> None:
    assert choose(replace(ON_CPU, mask=MaskKind.RANGE)).kernel.name == "blockwise"
    choice = choose(replace(ON_CPU, v_head_dim=32))
    assert choice.kernel.name == "blockwise"
    assert dict(choice.reasons)["cpu_flash"] == "needs D == E, not 64 and 32"


def test_a_name_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(
        UnknownKernelError, match="cudnn, cudnn_ranges, cuda_flash, cpu_flash, triton, blockwise"
    ) as info:
        choose(ON_CPU, force="flash")
    assert isinstance(info.value, MeshAttentionError)


def test_a_forced_kernel_that_refuses_gives_its_reason() -> None:
    assert choose(ON_CPU, force="reference").kernel.name == "reference"
    with pytest.raises(KernelRefusedError, match=r"'cudnn' cannot do .* runs on cuda, not on cpu"):
        choose(ON_CPU, force="cudnn")


def test_what_was_asked_for_is_told_in_words() -> None:
    with pytest.raises(KernelRefusedError) as info:
        choose(ON_CPU, force="cudnn")
    assert str(info.value) == (
        "kernel 'cudnn' cannot do the backward pass on cpu in float32, 8 heads of 64, 2 KV heads, "
        "with no mask: runs on cuda, not on cpu"
    )
    odd = replace(ON_HOPPER, v_head_dim=32, mask=MaskKind.RANGE, intervals=3, softcap=True)
    odd = replace(odd, padded=True, scattered=True, deterministic=True, lse_gradient=True)
    assert str(odd) == (
        "the backward pass on cuda (compute capability 9.0) in bfloat16, 8 heads of 64 (those of "
        "V of 32), 2 KV heads, with a mask by which each query sees up to 3 intervals of keys, "
        "keys that lie one by one, padding, softcap, a gradient of lse, the same bits every time"
    )
    changed = replace(ON_CPU, mask=MaskKind.RANGE)
    assert str(changed).endswith("with a mask by which each query sees an interval of keys")
    assert str(replace(changed, mask=MaskKind.CAUSAL)).endswith("with a causal mask")


def test_when_no_kernel_can_do_it_all_reasons_are_told() -> None:
    with pytest.raises(KernelRefusedError, match=r"cpu_flash: takes .*reference: takes floating"):
        choose(replace(ON_CPU, dtype=torch.int8))


def test_a_user_can_add_a_kernel_in_front_of_another(own: Mine) -> None:
    names = kernel_names()
    assert names.index("mine") == names.index("cpu_flash") - 1
    assert choose(ON_CPU).kernel is own
    message = r"'mine' is registered already; unregister_kernel\('mine'\) removes it"
    with pytest.raises(KernelNameError, match=message):
        register(own)


def test_the_librarys_own_kernels_stay() -> None:
    before = kernel_names()
    with pytest.raises(KernelNameError, match="'blockwise' is the library's own and stays"):
        unregister("blockwise")
    with pytest.raises(KernelNameError, match="'blockwise' is the library's own; choose another"):
        register(Blockwise())
    assert kernel_names() == before


@pytest.mark.parametrize("kernel", [None, "cudnn", Mine, object()])
def test_what_is_not_a_kernel_cannot_be_added(kernel: Any) -> None:
    before = kernel_names()
    with pytest.raises(MeshAttentionError, match="is not a kernel: give an object with a name"):
        register(kernel)
    assert kernel_names() == before


def test_a_kernel_without_a_backward_pass_is_refused_by_the_name_of_what_it_lacks() -> None:
    half: Any = SimpleNamespace(name="half", refuses=print, forward=print)
    message = (
        "kernel 'half' has no method backward.*`backward_needs = None` says that it has a forward"
    )
    with pytest.raises(MeshAttentionError, match=message):
        register(half)


def test_a_kernel_must_say_what_its_backward_pass_is_to_be_given() -> None:
    whole: Any = SimpleNamespace(
        name="whole", refuses=print, scratch_bytes=print, forward=print, backward=print
    )
    with pytest.raises(
        MeshAttentionError, match=r"'whole' must say in `backward_needs`.*BackwardNeeds"
    ):
        register(whole)
    assert "whole" not in kernel_names()


def test_a_forced_kernel_that_refuses_both_passes_is_not_replaced() -> None:
    odd = replace(ON_CPU, v_head_dim=32)
    for direction in Direction:
        with pytest.raises(KernelRefusedError, match=r"'cpu_flash' cannot do .* needs D == E"):
            choose(replace(odd, direction=direction), force="cpu_flash")


@pytest.mark.usefixtures("with_gpu")
def test_a_package_with_a_forward_only_is_used_for_that_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(
        q: Any, k: Any, v: Any, softmax_scale: Any, causal: Any, softcap: Any, sm_margin: Any
    ) -> None: ...

    module: Any = ModuleType("flash_attn_interface")
    module._flash_attn_forward = forward
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    for force in (None, "flash_attn3"):
        first = choose(replace(ON_HOPPER, direction=Direction.FORWARD), force=force)
        assert first.kernel.name == "flash_attn3"
        second = choose(ON_HOPPER, force=force)
        assert second.kernel.name == "cudnn"
        why = "flash_attn_interface has no _flash_attn_backward"
        assert dict(second.reasons)["flash_attn3"] == why


def test_a_kernel_added_without_a_place_comes_first_and_can_be_removed() -> None:
    before = kernel_names()
    register(Mine())
    assert kernel_names() == ("mine", *before)
    unregister("mine")
    assert kernel_names() == before
    with pytest.raises(UnknownKernelError, match="no kernel is named 'mine'"):
        unregister("mine")


def test_without_a_visible_gpu_cuda_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kernel in (Cudnn(), CudaFlash(), FlashAttn3()):
        assert kernel.refuses(ON_HOPPER) == "no CUDA device is visible"


@pytest.mark.usefixtures("with_gpu")
def test_cuda_kernels_say_what_they_cannot_do() -> None:
    cudnn, flash = Cudnn(), CudaFlash()
    assert cudnn.refuses(ON_HOPPER) is None
    assert flash.refuses(ON_HOPPER) is None
    refusals = {
        "capability": replace(ON_HOPPER, capability=(7, 5)),
        "float32": replace(ON_HOPPER, dtype=torch.float32),
        "multiples of 8": replace(ON_HOPPER, head_dim=60, v_head_dim=60),
        "row-range": replace(ON_HOPPER, mask=MaskKind.RANGE),
        "no multiple of 3": replace(ON_HOPPER, num_kv_heads=3),
    }
    for words, request in refusals.items():
        for kernel in (cudnn, flash):
            assert words in (kernel.refuses(request) or ""), (words, kernel.name)
    large = replace(ON_HOPPER, head_dim=256, v_head_dim=256)
    assert "up to 128" in (cudnn.refuses(large) or "")
    assert flash.refuses(large) is None
    assert "no backward" in (flash.refuses(replace(large, capability=(8, 9))) or "")
    assert cudnn.refuses(replace(ON_HOPPER, head_dim=192, v_head_dim=128)) is None
    assert "D == E" in (flash.refuses(replace(ON_HOPPER, v_head_dim=128)) or "")
    assert choose(ON_HOPPER).kernel.name == "cudnn"
    assert choose(large).kernel.name == "cuda_flash"


@pytest.mark.usefixtures("with_gpu")
def test_a_missing_package_is_named() -> None:
    assert "flash_attn_interface is not installed" in (FlashAttn3().refuses(ON_HOPPER) or "")
    blackwell = replace(ON_HOPPER, capability=(10, 0))
    assert "flash_attn" in dict(choose(blackwell).reasons)["flash_attn4"]


def test_a_private_op_that_changed_is_refused_with_what_was_found() -> None:
    assert ready_made.why_op_unusable("_no_such_op", ()) == (
        f"torch {torch.__version__} has no aten::_no_such_op"
    )
    reason = ready_made.why_op_unusable("relu", ("self", "slope"))
    assert reason == "aten::relu takes ['self'], without ['slope']"


def test_an_op_that_is_gone_makes_its_kernel_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuFlash, "op", "_gone")
    for direction in Direction:
        request = replace(ON_CPU, direction=direction)
        assert "has no aten::_gone" in (CpuFlash().refuses(request) or "")


def test_the_kernel_of_the_docs_works_as_it_stands() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    q, k, v, grad = (torch.randn(1, 40, h, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    plan = make_plan(Problem(40, 4, 8, num_kv_heads=2, element_bytes=8), 4, method="mesh")
    usual = run_local(plan, q, k, v, grad)
    try:
        exec(code, {})
        own = run_local(plan, q, k, v, grad, kernel="plain-full")
    finally:
        unregister("plain-full")
    torch.testing.assert_close((own.out, own.grad_k), (usual.out, usual.grad_k))


@pytest.mark.parametrize("answer", [False, "", 0, b""])
def test_an_answer_that_is_neither_none_nor_a_reason_is_an_error(answer: Any) -> None:
    """Else a kernel could be passed over and be called chosen."""
    kernel = Mine()
    kernel.refuses = lambda request: answer  # type: ignore[method-assign]
    register(kernel)
    try:
        with pytest.raises(MeshAttentionError, match=r"'mine': refuses\(\) must return None"):
            choose(ON_CPU)
    finally:
        unregister("mine")


def test_every_kernel_of_the_library_has_its_facts_beside_it() -> None:
    """Without them a kernel counts as fast as the fastest, and simulations are wrong in silence."""
    assert set(kernel_names()) <= set(library_facts())
