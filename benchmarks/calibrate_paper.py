"""Fit the `paper` cluster to the paper's 128-GPU table (docs/spec/algorithm.md, 10), or check it.

    python benchmarks/calibrate_paper.py  # simulate all cells, print them side by side
    python benchmarks/calibrate_paper.py --fit --write

One set of constants serves all rows and methods. The authors' settings: striped causal layout, O
gathered in the backward pass, USP with U = 8; mesh and StarTrail at their best setting in each row.
Kernel curves keep the shape measured on an H200 and only their height is fitted. The fit takes
Gauss-Newton steps on the logarithms of (simulated MFU / published MFU), inside physical bounds.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paper_table import Results, run_all, summary, table
from script import provenance, save, script_parser

from mesh_attention.cost import Cluster, load_cluster

Array = NDArray[np.float64]
STEP = 0.05  # of the logarithm, for slopes

# Constants that are fitted, with their physical bounds.
FREE: dict[str, tuple[float, float]] = {
    "kernels.authors.forward.full.tflops": (500, 720),
    "kernels.authors.forward.range.tflops": (300, 700),
    "kernels.authors.backward.full.tflops": (450, 640),
    "kernels.authors.backward.range.tflops": (300, 640),
    "network.peer.gb_per_second": (10, 20),
    "network.peer_node_gb_per_second": (60, 160),
    "network.flows_of_a_pair": (1, 2),
    "network.collective.gb_per_second": (30, 49),
    "network.collective.hop_microseconds": (7, 60),
    "disturbance.compute_slowdown": (0.02, 0.35),
    "disturbance.collective_slowdown": (0.02, 0.5),
    "disturbance.peer_forward_slowdown": (0.05, 0.95),
    "disturbance.peer_backward_slowdown": (0.05, 0.95),
}


def get(cluster: Cluster, path: str) -> float:
    value: Any = cluster
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return float(value)


def put(thing: Any, path: str, value: float) -> Any:
    name, _, rest = path.partition(".")
    inner = thing[name] if isinstance(thing, dict) else getattr(thing, name)
    new = put(inner, rest, value) if rest else value
    return thing | {name: new} if isinstance(thing, dict) else replace(thing, **{name: new})


def logarithms(cluster: Cluster) -> Array:
    return np.log([get(cluster, path) for path in FREE])


def with_logarithms(cluster: Cluster, values: Array) -> Cluster:
    for (path, (low, high)), value in zip(FREE.items(), values, strict=True):
        cluster = put(cluster, path, float(np.clip(math.exp(value), low, high)))
    return cluster


def slopes(cluster: Cluster, base: Results) -> Array:
    """How the logarithm of each cell's MFU follows that of each constant, at its present setting.

    Rings are most of the work and follow the point-to-point rate alone: they need no simulation.
    """
    settings = {cell: [result.setting] for cell, result in base.items() if cell.method != "ring"}
    columns = []
    for at, path in enumerate(FREE):
        moved = logarithms(cluster)
        moved[at] += STEP
        results = run_all(with_logarithms(cluster, moved), settings)
        ring = 1.0 if path == "network.peer.gb_per_second" else 0.0
        columns.append(
            [
                math.log(results[cell].mfu / result.mfu) / STEP if cell in results else ring
                for cell, result in base.items()
            ]
        )
    return np.array(columns).T


def fit(cluster: Cluster, rounds: int) -> Cluster:
    """Weighted, damped Gauss-Newton steps: cells beyond a ratio of 1.15 weigh more and more."""
    results = run_all(cluster)
    best = score(results)
    damping = 0.1
    for number in range(rounds):
        errors = np.array([result.error for result in results.values()])
        weights = 1.0 + (errors / math.log(1.15)) ** 2
        jacobian = slopes(cluster, results)
        for _ in range(3):
            normal = jacobian.T @ (weights[:, None] * jacobian)
            right = jacobian.T @ (weights * errors)
            change = np.linalg.solve(normal + damping * np.eye(len(right)), -right)
            moved = with_logarithms(cluster, logarithms(cluster) + np.clip(change, -0.3, 0.3))
            now = run_all(moved)
            if score(now) < best:
                cluster, results, best = moved, now, score(now)
                damping /= 3
                break
            damping *= 4
        print(f"\nround {number + 1}: {json.dumps(summary(results))}", flush=True)
        print(json.dumps({path: round(get(cluster, path), 4) for path in FREE}), flush=True)
    return cluster


def score(results: Results) -> float:
    """Mean square of the errors; beyond a ratio of 1.2 a cell counts more."""
    errors = [abs(result.error) for result in results.values()]
    return sum(e**2 + 4.0 * max(0.0, e - math.log(1.2)) ** 2 for e in errors) / len(errors)


def write(cluster: Cluster, path: Path) -> None:
    """New values into the lines they belong to; comments stay."""
    section, lines = "", []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        name = line.partition(" = ")[0]
        if section + name in FREE:
            line = re.sub(r"= [\d.]+", f"= {get(cluster, section + name):.4g}", line, count=1)
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="search for better constants first")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="put them into paper.toml")
    args = parser.parse_args()
    cluster = load_cluster("paper")
    begin = time.perf_counter()
    if args.fit:
        cluster = fit(cluster, args.rounds)
        if args.write:
            folder = resources.files("mesh_attention.machine") / "clusters"
            write(cluster, Path(str(folder / "paper.toml")))
    results = run_all(cluster)
    print("\nMFU in percent: simulated / published (ratio)\n")
    print(table(results))
    total = summary(results) | {"seconds": round(time.perf_counter() - begin, 1)}
    rows = [
        {
            "direction": cell.direction.value,
            "causal": cell.causal,
            "tokens": cell.tokens,
            "method": cell.method,
            "setting": result.setting,
            "mfu_percent": result.mfu,
            "published_mfu_percent": cell.published,
        }
        for cell, result in results.items()
    ]
    constants = {path: get(cluster, path) for path in FREE}
    save(args.json, provenance() | {"summary": total, "fitted": constants, "cells": rows})
    print(json.dumps(total))


if __name__ == "__main__":
    main()
