"""New documents at every step, over links that are the bottleneck: what does a step cost?

    sudo python benchmarks/documents_over_links.py --json result.json

Eight gloo ranks, each in a network namespace with a shaped link (`namespaces.py`), causal attention
over 16 packed documents of log-normal lengths, others at every step, forward and backward in
float32: what `cp.documents` chooses, against ways that send all keys and values to all ranks
whatever the mask says: a ring and an all-gather of this library, and PyTorch's own. Choosing,
planning and cutting the tensors are part of a step. The ways take turns, each with all steps of a
round, so that other load on the machine meets them alike. Nothing is timed after a failed
comparison with float64 (`document_steps.py`). The last line is the ratio to the ring.

Times are of the slowest rank, with the least and the most of all steps; "plan" is until the call
could begin, of the slowest rank, with the CPU time of one rank. Ranks share the cores of one
machine: "CPU" is what all of them took, and "link" how long the link with the most bytes needs.
Sizes and rates are such that for a ring links take longer than two cores do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from document_steps import say
from document_ways import AHEAD, CHOSEN, TORCH, Sizes
from namespaces import Links, NamespaceError, Namespaces
from provenance import taken

RING = "ring gradients=travel"  # as published; faster here than the library's default
MIB = 2**20
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One way: medians of its steps. Bytes are means of all steps and ranks."""

    way: str
    ms: float
    least_ms: float
    most_ms: float
    plan_ms: float
    plan_cpu_ms: float
    cpu_ms: float
    sent_mib: float | None
    most_sent_mib: float | None
    wire_mib: float
    link_ms: float | None


def make_row(way: str, steps: Sequence[Sequence[dict[str, Any]]], links: Links) -> Row:
    """`steps` of all ranks: of each step what every rank measured."""

    def slowest(name: str) -> list[float]:
        return [1e3 * max(rank[name] for rank in step) for step in steps]

    ms = slowest("seconds")
    every = [rank for step in steps for rank in step]
    sent = [rank["sent"] for rank in every if rank["sent"] is not None]
    alone = [max(max(x["wire_sent"], x["wire_received"]) for x in step) for step in steps]
    return Row(
        *(way, statistics.median(ms), min(ms), max(ms)),
        plan_ms=statistics.median(slowest("plan")),
        plan_cpu_ms=1e3 * statistics.median(rank["plan_cpu"] for rank in every),
        cpu_ms=1e3 * statistics.median(sum(rank["cpu"] for rank in step) for step in steps),
        sent_mib=statistics.mean(sent) / MIB if sent else None,
        most_sent_mib=max(sent) / MIB if sent else None,
        wire_mib=statistics.mean(rank["wire_sent"] for rank in every) / MIB,
        link_ms=8e-3 * statistics.median(alone) / links.between
        if links.ranks_per_node == 1
        else None,
    )


def of_all_ranks(reports: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """From what each rank has printed: of each step what every rank measured."""
    return [list(ranks) for ranks in zip(*(report["steps"] for report in reports), strict=True)]


def make_rows(steps: Sequence[Sequence[dict[str, Any]]], links: Links) -> list[Row]:
    by_way: dict[str, list[Sequence[dict[str, Any]]]] = {}
    for step in steps:
        by_way.setdefault(step[0]["way"], []).append(step)
    return [make_row(way, found, links) for way, found in by_way.items()]


def raw(steps: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Every step as a line: each number as a list of all ranks."""
    lines = []
    for step in steps:
        numbers = [name for name in step[0] if name not in ("way", "batch")]
        found = {name: [_rounded(rank[name]) for rank in step] for name in numbers}
        lines.append(json.dumps({"way": step[0]["way"], "batch": step[0]["batch"]} | found))
    return lines


def _rounded(number: float | None) -> float | None:
    return round(number, 4) if isinstance(number, float) else number


def table(rows: Sequence[Row]) -> list[str]:
    ring = next((row.ms for row in rows if row.way == RING), None)
    lines = [
        "| | ms a step (least, most) | ring / this | plan ms (CPU) | CPU ms | link ms "
        "| MiB sent a rank (most) | on the link |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sent = "-" if row.sent_mib is None else f"{row.sent_mib:.2f} ({row.most_sent_mib:.2f})"
        cells = [
            row.way,
            f"{row.ms:.0f} ({row.least_ms:.0f}, {row.most_ms:.0f})",
            "-" if ring is None else f"{ring / row.ms:.2f}",
            f"{row.plan_ms:.0f} ({row.plan_cpu_ms:.0f})",
            f"{row.cpu_ms:.0f}",
            "-" if row.link_ms is None else f"{row.link_ms:.0f}",
            sent,
            f"{row.wire_mib:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ratio(rows: Sequence[Row]) -> str:
    by_way = {row.way: row for row in rows}
    if RING not in by_way or CHOSEN not in by_way:
        return "no ratio: one of ring and chosen was not run"
    ring, chosen = by_way[RING].ms, by_way[CHOSEN].ms
    return f"ring / chosen: {ring:.0f} / {chosen:.0f} ms = {ring / chosen:.2f}"


def busy_cores(seconds: float = 2.0) -> float:
    """How many cores of the machine work at this time."""

    def times() -> tuple[int, int]:
        numbers = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]

    before = times()
    time.sleep(seconds)
    whole, idle = (b - a for a, b in zip(before, times(), strict=True))
    return (os.cpu_count() or 1) * (1 - idle / whole)


def load() -> dict[str, Any]:
    """Of the machine while no rank runs: what others take of it."""
    return {"busy_cores": round(busy_cores(), 2), "load_average": os.getloadavg()}


def machine() -> str:
    names = [x for x in Path("/proc/cpuinfo").read_text().split("\n") if x.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.machine()
    return (
        f"{os.cpu_count()} cores of {name}, Linux {platform.release()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--between", type=float, default=20, help="Mbit/s of a node")
    parser.add_argument("--inside", type=float, default=400, help="Mbit/s of a rank in a node")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="of a way in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    ways = [CHOSEN, AHEAD, RING, "allgather-kv", TORCH]
    parser.add_argument(
        "--ways", nargs="+", default=ways, help="these, or methods by name and option=value"
    )
    parser.add_argument("--seconds", type=float, default=1200, help="then the ranks are ended")
    parser.add_argument("--json", type=Path, help="write all that was measured here")
    given = parser.parse_args()
    sizes = Sizes(
        *(given.tokens, given.documents, given.heads, given.kv_heads, given.dim, given.seed)
    )
    links = Links(given.nodes, given.ranks_per_node, given.between, given.inside)
    result = taken() | {"machine": machine(), "command": f"python {' '.join(sys.argv)}"}
    measured: dict[str, Any] = {"links": asdict(links), "sizes": asdict(sizes), "before": load()}
    say(f"load before: {measured['before']}")
    try:
        with tempfile.TemporaryDirectory() as folder, Namespaces(links) as network:
            asked = {
                "sizes": asdict(sizes),
                "folder": folder,
                "ways": given.ways,
                "steps": given.steps,
                "rounds": given.rounds,
                "ranks_per_node": given.ranks_per_node,
            }
            command = (sys.executable, str(HERE / "document_steps.py"), json.dumps(asked))
            reports = [json.loads(x) for x in network.run(command, seconds=given.seconds)]
    except (NamespaceError, KeyboardInterrupt) as error:
        raise SystemExit(f"error: {str(error) or 'ended by Ctrl-C'}") from None
    measured["after"] = load()
    steps = of_all_ranks(reports)
    rows = make_rows(steps, links)
    if given.json is not None:
        told = {name: reports[0][name] for name in ("errors", "reasons", "flex")}
        measured |= {"rows": [asdict(row) for row in rows]} | told | {"steps": raw(steps)}
        given.json.write_text(json.dumps(result | measured, indent=1) + "\n")
    print(
        f"{links.words}; {sizes.documents} documents in {sizes.tokens} tokens, {sizes.heads}:"
        f"{sizes.kv_heads} heads of {sizes.dim}; others keep {measured['before']['busy_cores']} "
        f"and {measured['after']['busy_cores']} cores busy, before and after"
    )
    print(f"PyTorch's context parallelism for flex_attention: {reports[0]['flex']}")
    print("\n".join(table(rows)))
    print(ratio(rows))


if __name__ == "__main__":
    main()
