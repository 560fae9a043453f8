"""The choice of row kernels says why, and the plain ones store where nothing was before."""

from __future__ import annotations

import sys

import pytest
import torch

from mesh_attention.kernels import choose_rows
from mesh_attention.kernels.rows import RowKernels

INF = torch.inf


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        ("cpu", torch.bfloat16, "runs on cuda, not on cpu"),
        ("cuda", torch.float64, "takes float32, bfloat16 and float16, not torch.float64"),
    ],
)
def test_what_the_fused_kernels_cannot_do_is_done_by_the_plain_ones(
    device: str, dtype: torch.dtype, reason: str
) -> None:
    choice = choose_rows(device, dtype)
    assert choice.rows.name == "plain"
    assert choice.reasons == (("fused", reason), ("plain", "chosen"))


def test_without_triton_the_plain_kernels_are_used_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    choice = choose_rows("cuda", torch.bfloat16)
    assert choice.rows.name == "plain"
    assert "triton is not installed" in dict(choice.reasons)["fused"]


def test_choosing_on_the_cpu_imports_no_triton() -> None:
    choose_rows("cpu", torch.bfloat16)
    assert "mesh_attention.kernels.fused.rows" not in sys.modules


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_fresh_merge_is_a_merge_into_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = torch.randn(2, 7, 3, 5).to(dtype), torch.randn(2, 3, 7, dtype=wide)
    lse[:, :, 2] = -INF
    out[:, 2] = torch.nan
    results = torch.full(out.shape, torch.nan, dtype=wide), torch.full_like(lse, torch.nan)
    RowKernels().merge_into(*results, out, lse, fresh=True)
    expected = torch.full(out.shape, torch.nan, dtype=wide), torch.full_like(lse, -INF)
    RowKernels().merge_into(*expected, out, lse, fresh=False)
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_sums_are_rounded_once_and_may_go_into_a_part(dtype: torch.dtype) -> None:
    parts = [torch.randn(2, 5, 3, 4).to(dtype) for _ in range(5)]
    target = torch.full_like(parts[0], torch.nan)
    RowKernels().sum(parts, target)
    exact = sum(part.double() for part in parts)
    assert isinstance(exact, torch.Tensor)
    torch.testing.assert_close(target.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    total = parts[0].to(torch.promote_types(dtype, torch.float32))
    wanted = total + parts[1]
    RowKernels().sum((total, parts[1]), total)
    assert torch.equal(total, wanted)
