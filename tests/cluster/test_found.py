"""The cluster of a machine: by its GPU, its ranks and its NICs, and said in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh_attention.cost import load_cluster
from mesh_attention.cost.detect_cluster import Machine, find_cluster, gpu_of_driver, nic_gbits


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "hgx-h100"),
        ("NVIDIA H200", "hgx-h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-roce"),
        ("NVIDIA B200", "hgx-b200"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA GB300", "gb300-nvl72"),
    ],
)
def test_a_known_gpu_has_its_cluster(gpu: str, name: str) -> None:
    cluster, line = find_cluster(Machine(gpu))
    assert cluster == load_cluster(name)
    assert line == f"{gpu}: modelled as {name}"


def test_what_is_not_known_is_taken_for_the_nearest_and_said() -> None:
    for machine in (Machine(), Machine("NVIDIA GeForce RTX 4090")):
        cluster, line = find_cluster(machine)
        assert cluster == load_cluster("hgx-h100")
        assert "the most similar known; cluster= changes it" in line


@pytest.mark.parametrize(
    ("gpu", "name", "gib"),
    [
        ("NVIDIA B300 SXM6 AC", "gb300-nvl72", 259),
        ("NVIDIA H20", "hgx-h100", 96),
        ("NVIDIA H100 PCIe", "hgx-h100", 80),
        ("NVIDIA H100 NVL", "hgx-h100", 94),
        ("NVIDIA H800", "hgx-h100", 80),
        ("NVIDIA H200 NVL", "hgx-h200", 131),
        ("NVIDIA GH200 480GB", "hgx-h200", 96),
        ("NVIDIA A100-SXM4-40GB", "a100-roce", 40),
        ("NVIDIA A100 80GB PCIe", "a100-roce", 80),
    ],
)
def test_of_another_gpu_the_file_is_the_nearest_and_memory_its_own(
    gpu: str, name: str, gib: float
) -> None:
    cluster, line = find_cluster(Machine(gpu))
    file = load_cluster(name)
    assert cluster.gpu.memory_gib == gib
    assert cluster.node == file.node
    called = name if gib == file.gpu.memory_gib else f"{name} with {gib} GiB a GPU"
    assert line == (
        f"{gpu}: modelled as {called}, {file.node.ranks} ranks a node, the most similar known; "
        "cluster= changes it"
    )
    same, _ = find_cluster(Machine(gpu, memory_gib=0.985 * gib))  # as devices count it
    assert same == cluster


def test_a_device_knows_its_memory() -> None:
    for gpu, gib in (("NVIDIA H100 80GB HBM3", 79.1), ("NVIDIA H200", 139.8)):
        assert find_cluster(Machine(gpu, memory_gib=gib)) == find_cluster(Machine(gpu))
    cluster, line = find_cluster(Machine("NVIDIA H100 80GB HBM3 MIG 1g.10gb", memory_gib=9.75))
    assert cluster.gpu.memory_gib == 10
    assert "the most similar known" in line


def test_nodes_and_links_are_those_of_the_machine() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    usual = load_cluster("hgx-h100")
    same, _ = find_cluster(Machine(h100, 8, (400.0,) * 8))
    assert same == usual
    cluster, line = find_cluster(Machine(h100, 4, (100.0, 100.0)))
    assert cluster.node.ranks == 4
    assert 4 % cluster.network.nics == 0
    carried = cluster.network.collective.gb_per_second * cluster.network.nics
    assert carried == pytest.approx(0.96 * 200 / 8)
    assert "4 ranks a node, 2 NICs of 100 Gb/s" in line
    three, _ = find_cluster(Machine(h100, 3))
    assert three.node.ranks % three.network.nics == 0


def test_the_kernel_tells_speeds_and_the_driver_names(tmp_path: Path) -> None:
    assert nic_gbits(tmp_path) == ()
    assert gpu_of_driver(tmp_path) is None
    for speed, gbits in (("0", ()), ("1", (0.001,))):
        (own := tmp_path / speed / "net" / "eth0" / "device").mkdir(parents=True)
        own.with_name("speed").write_text(speed)
        assert nic_gbits(tmp_path / speed) == gbits
    for device, speed in (("eth0", "25000"), ("eth1", "100000"), ("eth2", "-1"), ("lo", "x")):
        (tmp_path / "net" / device / "device").mkdir(parents=True)
        (tmp_path / "net" / device / "speed").write_text(f"{speed}\n")
    assert nic_gbits(tmp_path) == (100.0,)
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        port = tmp_path / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert nic_gbits(tmp_path) == (400.0, 400.0)
    gpu = tmp_path / "gpus" / "0000:18:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    assert gpu_of_driver(tmp_path / "gpus") == "NVIDIA H100 80GB HBM3"
