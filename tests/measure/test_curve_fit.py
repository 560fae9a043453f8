"""From measured seconds to the numbers of a cluster's file, and the file that is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_attention.machine.load import cluster_names, load_cluster, parse_cluster
from mesh_attention.measure.curve_fit import cluster_text, fit_terms
from mesh_attention.measure.links import Sample, nics_of


def test_a_latency_and_a_rate_are_found_again() -> None:
    sizes = [2.0**n for n in range(10, 24, 3)]
    latency, per_byte = fit_terms([(1.0, s) for s in sizes], [3e-5 + s / 2e9 for s in sizes])
    assert latency == pytest.approx(3e-5, rel=1e-6)
    assert per_byte == pytest.approx(1 / 2e9, rel=1e-6)


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """The large size is 1 % longer than a line says; the latency stays."""
    sizes = [1e3, 1e4, 1e6, 1e8]
    seconds = [1e-4 + s / 1e9 for s in sizes]
    seconds[-1] *= 1.01
    latency, _ = fit_terms([(1.0, s) for s in sizes], seconds)
    assert latency == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize("seconds", [[1.0, 1.0, 1.0], [3.0, 2.0, 1.0], [1.0, 8.0, 64.0]])
def test_nothing_is_negative_and_what_is_needed_is_there(seconds: list[float]) -> None:
    """Also of times that fall with size, as on a machine that others use."""
    latency, per_byte = fit_terms([(1.0, s) for s in (1e3, 1e4, 1e5)], seconds, needed=(1,))
    assert latency >= 0
    assert per_byte > 0


@pytest.mark.parametrize(("loses", "nics"), [(1.0, 8), (1.2, 8), (2.1, 4), (8.0, 1), (30.0, 1)])
def test_nics_are_what_explains_the_loss_of_ranks_that_send_together(
    loses: float, nics: int
) -> None:
    alone = [Sample("", 2, 1024, 0.5), Sample("", 2, 4096, 1.0)]
    together = [Sample("", 2, 1024, 0.5), Sample("", 2, 4096, loses)]
    assert nics_of(8, alone, together) == nics


@pytest.mark.parametrize("name", cluster_names())
def test_a_cluster_is_read_back_from_its_text(name: str) -> None:
    cluster = load_cluster(name)
    notes = {
        "gpu.sms": 'said by "somebody"\nand one more line = 3',
        "node": ["two lines", "at a section"],
        "node.all_to_all_gb_per_second": ["lines above a number"],
        "network": "x" * 5000,
    }
    text = cluster_text(cluster, notes, ["a head"])
    assert parse_cluster(text, name) == cluster
    driven = replace(cluster, host_driven=True)
    assert parse_cluster(cluster_text(driven, notes, []), name) == driven
    assert text.startswith("# a head\n")
    assert "# two lines\n# at a section\n" in text
    assert "# lines above a number\nall_to_all" in text
