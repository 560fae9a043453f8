"""The kernel checks of `mesh-attention selftest` on a GPU."""

from __future__ import annotations

import pytest

from mesh_attention.measure.exactness import kernel_checks

pytestmark = pytest.mark.gpu


def test_every_kernel_that_is_here_is_checked_and_exact() -> None:
    checks = kernel_checks("cuda")
    assert [check for check in checks if not check.ok] == []
    checked = {check.kernel for check in checks if check.errors is not None}
    assert checked >= {"cuda_flash", "triton", "blockwise", "reference"}
    for check in checks:
        assert check.errors is not None or check.note
