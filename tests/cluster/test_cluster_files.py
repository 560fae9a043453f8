"""Cluster files: every constant says where it comes from, and mistakes are answered by name."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from mesh_attention.cost import cluster_names, load_cluster
from mesh_attention.machine.kernel_facts import library_facts, library_kernels
from mesh_attention.machine.load import ClusterError, parse_cluster, read_cluster
from mesh_attention.machine.rates import costs_of
from mesh_attention.plan.language.plan import Direction

PACKAGE = resources.files("mesh_attention")
FOLDER = PACKAGE / "machine" / "clusters"
GOOD = (FOLDER / "a100-roce.toml").read_text(encoding="utf-8")  # with kernels of its own
NUMBER = re.compile(r"^\s*([\w.]+)\s*=\s*[-+.\d][\w.+-]*")


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def changed(line: str, instead: str) -> str:
    """The good file with one line (given by its beginning) replaced, or left out."""
    text_and_count = re.subn(rf"(?m)^{re.escape(line)}.*$", instead, GOOD, count=1)
    assert text_and_count[1] == 1, line
    return text_and_count[0]


def test_the_promised_clusters_ship() -> None:
    hopper, blackwell = {"hgx-h100", "hgx-h200"}, {"hgx-b200", "gb200-nvl72", "gb300-nvl72"}
    assert {*cluster_names()} >= {"paper", "a100-roce", *hopper, *blackwell}
    for name in blackwell:
        assert "not calibrated" in load_cluster(name).description
        assert load_cluster(name).kernels == load_cluster("gb200-nvl72").kernels


@pytest.mark.parametrize(
    "file",
    [
        *(f"machine/clusters/{name}.toml" for name in cluster_names()),
        *(f"kernels/{name}.toml" for name in library_facts()),
    ],
)
def test_every_number_says_where_it_comes_from_or_that_it_is_assumed(file: str) -> None:
    text = (PACKAGE / file).read_text(encoding="utf-8")
    numbers = [line for line in text.splitlines() if NUMBER.match(line)]
    assert len(numbers) > 7
    bare = [line for line in numbers if not re.search(r"#\s*\S{3,}", line)]
    assert bare == []


@pytest.mark.parametrize("name", cluster_names())
def test_every_shipped_cluster_is_read_and_named_as_its_file(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name == tomllib.loads(text_of(name))["name"]
    assert cluster.description
    assert cluster.num_ranks >= 256
    for direction in Direction:
        curves = [
            r
            for pass_rates in cluster.passes(direction).values()
            for r in pass_rates.rates.values()
        ]
        assert len(curves) >= 3
        assert all(0 < rate.tflops < cluster.gpu.peak_tflops for rate in curves)
    inside, between = costs_of(cluster, 8), costs_of(cluster, 256)
    assert inside.bytes_per_second > between.bytes_per_second


@pytest.mark.parametrize("name", sorted(set(cluster_names()) - {"paper"}))
def test_clusters_of_today_hold_4096_ranks(name: str) -> None:
    assert load_cluster(name).num_ranks >= 4096


def test_a_file_of_ones_own_is_read_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(changed("nodes", "nodes = 3"))
    assert load_cluster(file) == load_cluster(str(file))
    assert load_cluster(file).num_ranks == 24


BAD = [
    ("nodes", "", "the file lacks 'nodes'"),
    ("nodes", "nodes = 0", "nodes = 0 must be a whole number of at least 1"),
    ("nodes", "nodes = 2.5", "nodes = 2.5 must be a whole number"),
    ("nodes", "nodes = true", "nodes = True must be a number"),
    ("nodes", "nodes = 2\nracks = 4", "the file has no field 'racks'; its fields: name, "),
    ("name =", "name = 7", "name = 7 must be text"),
    ("name =", 'name = "a\\\\u001b[31mb"', "must be text without control characters"),
    ("name =", 'name = "a\\\\nb"', "must be text without control characters"),
    ("nodes", "nodes = 2\nhost_driven = 1", "host_driven = 1 must be true or false"),
    ("peak_tflops", "", "gpu lacks 'peak_tflops'"),
    ("peak_tflops", "peak_tflops = -1", "gpu.peak_tflops = -1 must be above 0"),
    ("peak_tflops", 'peak_tflops = "fast"', "gpu.peak_tflops = 'fast' must be a number"),
    ("peak_tflops", "peak_tflops = inf", "gpu.peak_tflops = inf must be a number"),
    ("peak_tflops", "peak_tflops = nan", "gpu.peak_tflops = nan must be a number"),
    ("memory_gib", "memory_gb = 80", "gpu has no field 'memory_gb'"),
    ("tflops", "tflops = 0", "kernels.cuda_flash.forward.full.tflops = 0 must be above 0"),
    ("tflops", "tflops = 1e4", "cuda_flash.forward.full at 10000 TFLOP/s is faster than gpu.peak"),
    ("half_rows", "half_rows = -5", "forward.full.half_rows = -5 must be at least 0"),
    ("launch_mic", "launch_microseconds = -1", "forward.launch_microseconds = -1"),
    ("ranges", "", "kernels.cuda_flash.forward lacks 'ranges'"),
    ("ranges", "ranges = true", "with ranges = true its curves must be full and range"),
    ("lets_transfers", "lets_transfers_begin = 1", "= 1 must be true or false"),
    ("sm_margin", "sm_margin = -1", "sm_margin = -1 must be a whole number of at least 0"),
    ("sm_margin", "sm_margin = 108", "sm_margin = 108 leaves nothing of gpu.sms = 108"),
    ("nodes", 'nodes = 2\nkernels_of = "mine"', "kernels_of names a cluster of the library"),
    ("nodes", "nodes = 2\nmore_kernels = 3", "give kernels, or more_kernels beside the library's"),
    ("nodes", "nodes = 2\nkernels = 3", "is not TOML"),
    ("[kernels.triton.forward]", "[kernels.triton.forwards]", "has no field 'forwards'"),
    ("nics", "nics = 3", "network.nics = 3 does not divide node.ranks = 8"),
    ("nics", "nics = 16", "network.nics = 16 does not divide node.ranks = 8"),
    ("compute_slowdown", "compute_slowdown = 1", "disturbance.compute_slowdown = 1 must be below"),
    ("collective_slow", "collective_slowdown = -0.1", "must be at least 0"),
    ("[kernels.triton.forward.full]", "[kernels.triton.forward.square]", "forward has no field"),
    ("[disturbance]", "[disturbances]", "the file has no field 'disturbances'"),
    ("[node.peer]", "[node]", "is not TOML"),
]


@pytest.mark.parametrize(("line", "instead", "answer"), BAD, ids=[b or a for a, b, _ in BAD])
def test_a_bad_file_is_refused_with_its_name_and_the_field(
    line: str, instead: str, answer: str
) -> None:
    with pytest.raises(ClusterError) as refused:
        parse_cluster(changed(line, instead), "mine.toml")
    assert "mine.toml" in str(refused.value)
    assert answer in str(refused.value)


def test_a_file_without_kernels_has_those_of_the_library_and_may_have_more_beside_them() -> None:
    library, paper = library_kernels(), load_cluster("paper")
    assert load_cluster("hgx-h100").kernels == load_cluster("hgx-h200").kernels == library
    assert "authors" not in library
    assert paper.kernels == library | {"authors": paper.kernels["authors"]}
    with pytest.raises(ClusterError, match="more_kernels = 3 must be a table"):
        parse_cluster(f"more_kernels = 3\n{text_of('hgx-h200')}", "mine.toml")


def test_a_call_that_no_kernel_takes_is_told_when_the_file_is_read() -> None:
    table = tomllib.loads(GOOD)
    del table["kernels"]["triton"]["backward"]
    with pytest.raises(ClusterError, match="no kernel does range calls backward; add its curve"):
        read_cluster(table, "mine.toml")


def test_what_costs_nothing_may_be_zero() -> None:
    for line in ("launch_microseconds", "half_rows", "latency_microseconds", "compute_slowdown"):
        parse_cluster(changed(line, f"{line} = 0"), "mine.toml")


def test_an_unknown_cluster_is_answered_with_the_nearest_and_with_all(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"did you mean hgx-h100\?.*a100-roce, gb200-nvl72"):
        load_cluster("hgx-h10")
    with pytest.raises(ClusterError, match="neither a file nor one of"):
        load_cluster(tmp_path / "none.toml")
    (tmp_path / "odd.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match="is not text"):
        load_cluster(tmp_path / "odd.toml")
    with pytest.raises(ClusterError, match="is not a cluster"):
        load_cluster(None)  # type: ignore[arg-type]
