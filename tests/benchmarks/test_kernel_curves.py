"""A kernel is measured by its name, and curves fitted to its calls become a cluster's sections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from kernel_curves import pass_section

from mesh_attention.machine.kernel_facts import KernelRate, PassRates
from mesh_attention.machine.load import read_cluster
from mesh_attention.measure.curve_fit import Point, curve_tflops, fit
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import CallKind

ROOT = Path(__file__).parents[2]
K = 1024


def measured(rate: KernelRate) -> list[Point]:
    """What a GPU would show that follows the curve."""
    squares = [(n * K, n * K, 64) for n in (1, 2, 4, 8, 16, 32)]
    points = []
    for rows, columns, heads in (*squares, (2 * K, 16 * K, 64), (16 * K, 2 * K, 64), (K, K, 8)):
        point = Point("", rows, columns, heads, 1e12, 1.0)
        lasts = 1.0 / curve_tflops(rate, point)
        points.append(Point("", rows, columns, heads, 1e12, lasts))
    return points


@pytest.mark.parametrize("halves", [(60.0, 500.0), (0.0, 30.0), (30.0, 0.0)])
def test_a_fit_finds_the_curve_that_calls_follow(halves: tuple[float, float]) -> None:
    rate = KernelRate(650.0, *halves)
    fitted = fit(measured(rate))
    assert fitted.tflops == pytest.approx(rate.tflops, rel=1e-3)
    assert (fitted.half_rows, fitted.half_columns) == pytest.approx(halves, abs=0.2)


def test_no_half_is_negative() -> None:
    """Large calls that are slower than small ones, as on a hot GPU, give a flat curve."""
    points = [Point("", n, n, 64, 1e12, 1.0 / (700 - n / 100)) for n in (1024, 4096, 16384)]
    fitted = fit(points)
    assert (fitted.half_rows, fitted.half_columns) == (0.0, 0.0)
    assert 536 < fitted.tflops < 690


def test_the_sections_are_those_of_a_cluster() -> None:
    full, ranges = KernelRate(660.0, 20.0, 40.0), KernelRate(650.0, 0.0, 400.0)
    rates = PassRates(True, False, 0, 41.0, full, None, ranges)
    points = {CallKind(kind): measured(rate) for kind, rate in rates.rates.items()}
    texts = [
        pass_section(
            "cudnn_ranges", direction, rates, points, source="measured", done_at="done at 99"
        )
        for direction in Direction
    ]
    shipped = resources.files("mesh_attention.machine") / "clusters" / "hgx-h200.toml"
    table = tomllib.loads(shipped.read_text(encoding="utf-8"))
    cluster = read_cluster(table | tomllib.loads("\n".join(texts)), "measured.toml")
    assert cluster.kernels["cudnn_ranges"].forward == rates
    assert cluster.kernels["cudnn_ranges"].backward == rates


@pytest.mark.slow
def test_the_script_measures_a_kernel_by_its_name() -> None:
    script = ROOT / "benchmarks" / "kernel_curves.py"
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", "benchmarks"))
    sizes = ["--heads", "2", "--head-dim", "16", "--lasting", "0.01"]
    done = subprocess.run(
        [sys.executable, str(script), "--kernel", "blockwise", "--pass", "forward", *sizes],
        env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *sections, last = done.stdout.splitlines()
    assert tomllib.loads("\n".join(sections))["kernels"]["blockwise"]["forward"]["full"]
    assert json.loads(last)["forward"]["points"]["full"]
