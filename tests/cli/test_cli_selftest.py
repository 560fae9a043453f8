"""`mesh-attention selftest` finds what is wrong, and says what is missing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from mesh_attention import Mask, register_kernel, unregister_kernel
from mesh_attention.cli import selftest
from mesh_attention.cli.main import main
from mesh_attention.cli.selftest import MethodCheck
from mesh_attention.kernels.blockwise import Blockwise
from mesh_attention.measure.exactness import Errors, KernelCheck, kernel_checks, run_method
from support.pool import WorkerPool

MISSING = KernelCheck("flash_attn3", "cuda", None, 2e-2, "is not installed", "fa3-fwd")


def on_rank(rank: int, world_size: int, mask: Mask, scale: float | None) -> Errors:
    return run_method(mask, {"method": "mesh", "softmax_scale": scale}).errors


def test_a_method_that_scales_scores_by_a_thousandth_too_much_is_found(pool: WorkerPool) -> None:
    mask = Mask(causal=True, documents=(0, 11, 203))
    for right in pool.run(on_rank, 4, mask, None):
        assert right.are_within(selftest.TOLERANCE)
    for wrong in pool.run(on_rank, 4, mask, 0.25 * 1.001):
        assert min(wrong) > 1e6 * selftest.TOLERANCE


class Doubtful(Blockwise):
    name = "doubtful"
    wrong: tuple[str, float]

    def forward(self, block: Any) -> Any:
        if self.wrong[0] == "raises":
            raise RuntimeError("no kernel image")
        out, lse = super().forward(block)
        return out * (self.wrong[1] if self.wrong[0] == "out" else 1), lse

    def backward(self, block: Any, inputs: Any) -> Any:
        dq, dk, dv = super().backward(block, inputs)
        return dq, dk * (self.wrong[1] if self.wrong[0] == "dk" else 1), dv


@pytest.mark.parametrize("wrong", [("out", 1.01), ("dk", 1.01), ("dk", math.nan), ("raises", 1.0)])
def test_a_kernel_that_is_wrong_in_one_result_is_found_and_no_other(
    wrong: tuple[str, float],
) -> None:
    kernel = Doubtful()
    kernel.wrong = wrong
    register_kernel(kernel)
    try:
        checks = kernel_checks("cpu")
    finally:
        unregister_kernel("doubtful")
    assert {"cpu_flash", "blockwise", "doubtful"} <= {check.kernel for check in checks}
    assert [check.kernel for check in checks if not check.ok] == ["doubtful"]


@pytest.mark.parametrize(
    ("error", "code"), [(1e-15, 0), (1e-9, 1), (math.nan, 1)], ids=["right", "wrong", "nan"]
)
def test_one_wrong_number_ends_it_with_1(
    error: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [MethodCheck("mesh", "causal", Errors(1e-15, error))]
    monkeypatch.setattr(selftest, "_check_methods", lambda cases: checks)
    monkeypatch.setattr(selftest, "_check_kernels", lambda: ([MISSING], "a GPU"))
    assert main(["selftest", "--method", "mesh"]) == code
    out = capsys.readouterr().out
    assert "not installed: flash_attn3; pip install fa3-fwd\n" in out
    assert out.splitlines()[-1].startswith("WRONG: " if code else "ok: ")
    assert main(["selftest", "--method", "mesh", "--json"]) == code
    answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert answer["ok"] is not bool(code)


def test_checks_that_did_not_run_are_not_ok(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "_check_methods", lambda cases: [])
    monkeypatch.setattr(selftest, "_check_kernels", lambda: ([], None))
    assert main(["selftest"]) == 1
    assert "No GPU was found" in capsys.readouterr().out


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from mesh_attention.cli.main import main
assert main(["selftest"]) == 2
assert main(["advise", "--ranks", "4", "--tokens", "4k"]) == 0
import mesh_attention
assert mesh_attention.verify(mesh_attention.make_plan(mesh_attention.Problem(64, 4, 8), 2)) == []
try:
    from mesh_attention import ContextParallel
except ImportError as error:
    print(error)
"""


def test_without_torch_the_planner_works_and_the_rest_says_what_to_install() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.startswith(
        "mesh-attention selftest: this needs torch, which is not installed: pip install torch ("
    )
    assert run.stderr.count("\n") == 1
    assert "ContextParallel needs torch, which is not installed: pip install torch" in run.stdout
