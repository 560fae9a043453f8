"""Our Triton kernels compiled for a GPU that is not there: what makes their loops slow is no error,
so no other test would see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


PASSES = ["backward_keys", "forward", "backward_queries"]  # the first is the one that spills


@pytest.fixture(
    scope="module", params=[PASSES[:1], pytest.param(PASSES[1:], marks=pytest.mark.slow)], ids=str
)
def code(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", "benchmarks"))
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(Path(__file__).with_name("triton_code.py"))]
    command += ["--pass", *request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)["passes"]
    return results


def test_loops_read_numbers_of_rows_without_a_mask(code: list[dict[str, Any]]) -> None:
    """Whatever the length of a sequence, of which kernels know nothing when they are compiled."""
    for loop in code:
        assert loop["masked_loads_in_loops"] == [], loop["pass"]


def test_loops_multiply_and_keep_in_registers_what_they_write(code: list[dict[str, Any]]) -> None:
    for of_pass in code:
        whole, masked = of_pass["loops"]  # blocks
        assert whole["spill_stores"] <= 2, of_pass["pass"]
        assert masked["spill_stores"] <= 9, of_pass["pass"]  # 8, 6 and 9 by Triton 3.6, 3.7 and 3.9
        described = of_pass["tile"][4]
        for loop in (whole, masked):
            assert loop["products"] >= 16
            # Tiles of tokens come by their descriptors, or in whole 16 bytes.
            assert loop["copies_by_bytes"].get("16", 0) >= 8 or (described and loop is whole)
