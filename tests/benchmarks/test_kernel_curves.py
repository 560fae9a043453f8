"""Curves fitted to measured calls, and the sections of a cluster's file that come of them."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest
import torch
from kernel_curves import Case, K, cases, range_mask

from mesh_attention.machine.kernel_facts import KernelRate, PassRates
from mesh_attention.machine.load import read_cluster
from mesh_attention.measure.curve_fit import Point, curve_tflops, fit, pass_section
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import CallKind
from mesh_attention.plan.problem.mask import Mask


def measured(rate: KernelRate, kind: CallKind = CallKind.FULL) -> list[Point]:
    """What a GPU would show that follows the curve."""
    found = []
    for case in cases(kind):
        point = Point(case.what, case.rows, case.columns, case.heads, 1e12, 1.0)
        lasts = 1.0 / curve_tflops(rate, point)
        found.append(Point(case.what, case.rows, case.columns, case.heads, 1e12, lasts))
    return found


@pytest.mark.parametrize("halves", [(60.0, 500.0), (0.0, 30.0), (30.0, 0.0)])
def test_a_fit_finds_the_curve_that_calls_follow(halves: tuple[float, float]) -> None:
    rate = KernelRate(650.0, *halves)
    found = fit(measured(rate))
    assert found.tflops == pytest.approx(rate.tflops, rel=1e-3)
    assert (found.half_rows, found.half_columns) == pytest.approx(halves, abs=0.2)


def test_no_half_is_negative() -> None:
    """Large calls that are slower than small ones, as on a hot GPU, give a flat curve."""
    points = [Point("", n, n, 64, 1e12, 1.0 / (700 - n / 100)) for n in (1024, 4096, 16384)]
    found = fit(points)
    assert (found.half_rows, found.half_columns) == (0.0, 0.0)
    assert 536 < found.tflops < 690


def test_the_sections_are_those_of_a_cluster() -> None:
    full, ranges = KernelRate(660.0, 20.0, 40.0), KernelRate(650.0, 0.0, 400.0)
    rates = PassRates(True, False, 0, 41.0, full, None, ranges)
    points = {CallKind(kind): measured(rate, CallKind(kind)) for kind, rate in rates.rates.items()}
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


def test_the_tile_of_a_rank_sees_about_half_of_its_keys() -> None:
    cpu = torch.device("cpu")
    square = Case("", 64, 64, mask=Mask(causal=True))
    mask, pairs = range_mask(square, cpu)
    assert pairs == 64 * 65 // 2
    tile = Case("", K, K, mask=Mask(causal=True), tile=True)
    mask, pairs = range_mask(tile, cpu)
    assert mask.lo.shape == mask.key_position.shape == (K,)
    assert 0.4 < pairs / K**2 < 0.6
