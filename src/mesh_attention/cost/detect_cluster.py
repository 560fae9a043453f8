"""Which of the known clusters a machine is: by the name of its GPU and the speed of its NICs.

Nothing is measured. The GPU decides on a cluster file. Its memory, the ranks of a node and the NICs
whose speed the kernel tells correct the file; the rest is taken from it. A line says so, and
whether the file is only the nearest, about another GPU. Used where a caller names no cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import load_cluster

NEAREST = "hgx-h100"  # for what is not known
# A word in the name of a GPU, the cluster of such GPUs, and a word in the names of just those; the
# first that fits.
_GPUS = (
    (r"\bG?B300\b", "gb300-nvl72", r"\bGB300\b"),
    (r"\bGB[12]00\b", "gb200-nvl72", r"\bGB200\b"),
    (r"\bB[12]00\b", "hgx-b200", r"\bB200\b"),
    (r"\b(H200|GH200)\b", "hgx-h200", r"\bH200\b"),
    (r"\b(H100|H800|H20)\b", "hgx-h100", r"\bH100\b"),
    (r"\b(A100|A800)\b", "a100-roce", r"\bA100\b"),
)
_OTHER_FORMS = r"PCIe|NVL\b|HBM2\b|MIG"  # slower, or part of one
# GiB of GPUs whose names do not say it: the 480GB of a GH200 are its CPU's.
_MEMORY = (
    (r"\bGH200\b.*\b144G", 144.0),
    (r"\bGH200\b", 96.0),
    (r"\bH100 NVL\b", 94.0),
    (r"\bH20\b", 96.0),
)
_SAME_MEMORY = 1.1  # times more or less: devices and data sheets count it in several ways
_REACHED = 0.96  # of the line rate: 48 of the 50 GB/s of a 400 Gb port
_ALIKE = 1.25  # times more or less: the file is as good


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of a machine; None is not known. `nic_gbits` are line rates of the ports of one
    node; `memory_gib` is what the device tells, where it was asked."""

    gpu: str | None = None
    node_ranks: int | None = None
    nic_gbits: tuple[float, ...] = ()
    memory_gib: float | None = None


def is_known_gpu(name: str) -> bool:
    return any(re.search(word, name) for word, _, _ in _GPUS)


def find_cluster(machine: Machine) -> tuple[Cluster, str]:
    """The nearest known cluster, and a line that names the machine and what it is modelled as."""
    gpu = machine.gpu or ""
    name, exact = next(((c, e) for word, c, e in _GPUS if re.search(word, gpu)), (NEAREST, None))
    file = cluster = load_cluster(name)
    seen = [machine.gpu or "no GPU"]
    cluster = _with_memory(cluster, gpu, machine.memory_gib)
    is_exact = exact is not None and bool(re.search(exact, gpu)) and cluster is file
    is_exact = is_exact and not re.search(_OTHER_FORMS, gpu, re.IGNORECASE)
    taken = ""
    if machine.node_ranks is not None:
        seen.append(f"{machine.node_ranks} ranks a node")
        cluster = _with_node(cluster, machine.node_ranks)
    elif not is_exact:
        taken = f", {cluster.node.ranks} ranks a node"
    if machine.nic_gbits:
        rates = sorted({f"{rate:g}" for rate in machine.nic_gbits})
        seen.append(f"{len(machine.nic_gbits)} NICs of {' and '.join(rates)} Gb/s")
        cluster = _with_nics(cluster, machine.nic_gbits)
    nearest = "" if is_exact else f"{taken}, the most similar known; cluster= changes it"
    return cluster, f"{', '.join(seen)}: modelled as {cluster.name}{nearest}"


def _with_memory(cluster: Cluster, gpu: str, device_gib: float | None) -> Cluster:
    """The cluster with the memory of its file or of the GPU's name, unless the device tells
    another."""
    by_file = cluster.gpu.memory_gib
    written = re.search(r"([0-9]+) ?GB\b", gpu)
    by_name = float(written[1]) if written else by_file
    by_name = next((gib for word, gib in _MEMORY if re.search(word, gpu)), by_name)
    if device_gib is None:
        device_gib = by_name
    alike = (
        gib for gib in (by_file, by_name) if 1 / _SAME_MEMORY < gib / device_gib < _SAME_MEMORY
    )
    gib = next(alike, float(round(device_gib)) or device_gib)
    if gib == by_file:
        return cluster
    name = f"{cluster.name} with {gib:g} GiB a GPU"
    return replace(cluster, name=name, gpu=replace(cluster.gpu, memory_gib=gib))


def _with_node(cluster: Cluster, ranks: int) -> Cluster:
    if ranks == cluster.node.ranks:
        return cluster
    nics = max(n for n in range(1, cluster.network.nics + 1) if ranks % n == 0)
    return replace(
        cluster,
        name=f"{cluster.name} with {ranks} ranks a node",
        nodes=max(cluster.nodes, -(-cluster.num_ranks // ranks)),
        node=replace(cluster.node, ranks=ranks),
        network=replace(cluster.network, nics=nics),
    )


def _with_nics(cluster: Cluster, gbits: tuple[float, ...]) -> Cluster:
    """The cluster with slower or faster links between nodes, by what all ports of a node carry
    together."""
    network = cluster.network
    there = network.collective.gb_per_second * network.nics
    factor = _REACHED * sum(gbits) / 8 / there
    if 1 / _ALIKE < factor < _ALIKE:
        return cluster
    peer, collective = network.peer, network.collective
    scaled = replace(
        network,
        peer=replace(peer, gb_per_second=peer.gb_per_second * factor),
        peer_node_gb_per_second=network.peer_node_gb_per_second * factor,
        collective=replace(collective, gb_per_second=collective.gb_per_second * factor),
    )
    return replace(cluster, name=f"{cluster.name}, links x {factor:.2g}", network=scaled)


def nic_gbits(root: Path = Path("/sys/class")) -> tuple[float, ...]:
    """The line rates of InfiniBand or RoCE ports that are up; without any, of the fastest network
    device."""
    gbits = [
        float(rate)
        for port in _sorted(root / "infiniband", "*/ports/*")
        if "ACTIVE" in _text(port / "state")
        for rate in re.findall(r"^([0-9.]+) Gb", _text(port / "rate"))
    ]
    if not gbits:
        speeds = [
            _text(device / "speed")
            for device in _sorted(root / "net", "*")
            if (device / "device").exists()
        ]
        gbits = [int(speed) / 1000 for speed in speeds if speed.isdecimal() and int(speed) > 0]
        gbits = [max(gbits)] if gbits else []
    return tuple(gbits)


def gpu_of_driver(root: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """The name of the first GPU that NVIDIA's driver lists, found without torch."""
    for file in _sorted(root, "*/information"):
        for name in re.findall(r"^Model:\s*(.+)$", _text(file), flags=re.MULTILINE):
            return str(name).strip()
    return None


def _sorted(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(root.glob(pattern))
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # a device that is down has no speed to read
        return ""
