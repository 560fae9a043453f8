"""Which of the known clusters a machine is: by the name of its GPU and the speed of its NICs.

Nothing is measured. The GPU decides on a cluster file, the ranks of a node and its NICs, where the
kernel tells their speed, correct it; what is not known is taken from the file. One line says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.load import load_cluster

NEAREST = "hgx-h100"  # for what is not known
# A word in the name of a GPU, and the cluster of such GPUs; the first that fits.
_GPUS = (
    (r"\bG?B[123]00\b", "gb200-nvl72"),
    (r"\b(H200|GH200)\b", "hgx-h200"),
    (r"\b(H100|H800|H20)\b", "hgx-h100"),
    (r"\b(A100|A800)\b", "a100-roce"),
)
_REACHED = 0.96  # of the line rate: 48 of the 50 GB/s of a 400 Gb port
_ALIKE = 1.25  # times more or less: the file is as good


@dataclass(frozen=True, slots=True)
class Machine:
    """None: not known. `nic_gbits` are line rates of the ports of one node."""

    gpu: str | None = None
    node_ranks: int | None = None
    nic_gbits: tuple[float, ...] = ()


def is_known_gpu(name: str) -> bool:
    return any(re.search(word, name) for word, _ in _GPUS)


def find_cluster(machine: Machine) -> tuple[Cluster, str]:
    """The nearest known cluster, and a line that says what was found and what was made of it."""
    name = next((c for word, c in _GPUS if re.search(word, machine.gpu or "")), None)
    cluster = load_cluster(name or NEAREST)
    told = [machine.gpu or "no GPU"]
    if machine.node_ranks is not None:
        told.append(f"{machine.node_ranks} ranks a node")
        cluster = _with_node(cluster, machine.node_ranks)
    if machine.nic_gbits:
        rates = sorted({f"{rate:g}" for rate in machine.nic_gbits})
        told.append(f"{len(machine.nic_gbits)} NICs of {' and '.join(rates)} Gb/s")
        cluster = _with_nics(cluster, machine.nic_gbits)
    nearest = "" if name else ", the nearest that is known; cluster= says another"
    return cluster, f"{', '.join(told)}: reckoned as {cluster.name}{nearest}"


def _with_node(cluster: Cluster, ranks: int) -> Cluster:
    if ranks == cluster.node.ranks:
        return cluster
    nics = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n <= cluster.network.nics)
    return replace(
        cluster,
        name=f"{cluster.name} with {ranks} ranks a node",
        nodes=max(cluster.nodes, -(-cluster.num_ranks // ranks)),
        node=replace(cluster.node, ranks=ranks),
        network=replace(cluster.network, nics=nics),
    )


def _with_nics(cluster: Cluster, gbits: tuple[float, ...]) -> Cluster:
    """Slower or faster between nodes, by what all ports of a node carry together."""
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
    """Ports of InfiniBand or RoCE that are up; without any, the network devices with a speed."""
    found = [
        float(rate)
        for port in _sorted(root / "infiniband", "*/ports/*")
        if "ACTIVE" in _text(port / "state")
        for rate in re.findall(r"^([0-9.]+) Gb", _text(port / "rate"))
    ]
    if not found:
        speeds = [
            _text(device / "speed")
            for device in _sorted(root / "net", "*")
            if (device / "device").exists()
        ]
        found = [int(speed) / 1000 for speed in speeds if speed.isdecimal() and int(speed) > 0]
        found = [max(found)] if found else []
    return tuple(found)


def gpu_of_driver(root: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """The name of the first GPU that NVIDIA's driver lists: without torch."""
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
