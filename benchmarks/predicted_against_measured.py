"""Does the simulator predict what runs? Methods over shaped links, measured beside simulated.

    sudo python benchmarks/predicted_against_measured.py --nodes 2 --json result.json

Eight gloo ranks as two nodes of four (or sixteen as four, `--nodes 4`), each in a network namespace
with a link of its own, and one link between the nodes and the rest (`namespaces.py`). First
`mesh-attention profile` measures that network and these cores, and writes a cluster file. By that
file alone each method gets its setting: the options that define it are fixed, and the rest is
searched for each pass. `auto` is searched over all methods (`method_ways.py`), and all are
simulated. Then they run, forward and backward, causal, in float32: nothing is timed after a failed
comparison with float64, and the ways take turns (`method_steps.py`). Times are of the slowest rank,
medians over rounds.

Rates are such that links take much longer than computing does, since ranks share few cores: "CPU"
is what all ranks took for a step, on all cores together. The last line says how near it was.

    python benchmarks/predicted_against_measured.py --sockets nccl --json result.json

does the same with eight NCCL ranks that share one GPU and talk through sockets (`sockets.py`), in
bfloat16, without root, for the order only: times on a shared GPU say little about a cluster. Each
method also runs uncut, as cuts may cost more there than they hide. `--sockets gloo` tries that on
CPUs, in float32. The result is written after every round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from method_steps import say
from method_ways import Way, ways, with_uncut
from namespaces import Links, Namespaces
from prediction_report import (
    REFERENCE,
    VERDICTS,
    Row,
    at_best,
    make_rows,
    of_all_ranks,
    order,
    reports_of,
    table,
    title_of,
    uncut,
    verdict,
    words,
)
from rank_processes import LaunchError, RankProcesses
from script import host, provenance, save, script_parser
from sockets import Sockets

from mesh_attention.cli.values import size
from mesh_attention.cost import load_cluster
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.text import plan_text
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

STEPS = Path(__file__).with_name("method_steps.py")
RANKS_OVER_SOCKETS = 8


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=2, choices=(2, 4), help="of four ranks")
    parser.add_argument(
        "--sockets",
        choices=("nccl", "gloo"),
        help="in place of --nodes: eight nodes of one rank, on one GPU or (gloo) on CPUs",
    )
    parser.add_argument("--between", type=float, default=40, help="Mbit/s of a node")
    parser.add_argument("--inside", type=float, default=320, help="Mbit/s of a rank in a node")
    parser.add_argument("--tokens", type=size, help="512, or 32768 on a GPU")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cluster", type=Path, help="a cluster file, in place of profiling")
    parser.add_argument(
        "--seconds", type=float, help="then the ranks are ended: 900, or over sockets 200 for all"
    )
    args = parser.parse_args()
    args.tokens = args.tokens or (32768 if args.sockets == "nccl" else 512)
    args.seconds = args.seconds or (200 if args.sockets else 900)
    try:
        result = _Run(args).run()
    except (MeshAttentionError, LaunchError, KeyboardInterrupt) as error:
        raise SystemExit(f"error: {str(error) or 'ended by Ctrl-C'}") from None
    if "broken_off" in result:
        raise SystemExit(f"error: {result['broken_off']}")


class _Run:
    """Profile, plan, run and report; the result is a file that grows meanwhile."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._begun = args, time.monotonic()
        self._links = Links(args.nodes, 4, args.between, args.inside)
        self._problem = Problem(
            args.tokens,
            args.heads,
            args.dim,
            num_kv_heads=args.kv_heads,
            element_bytes=2 if args.sockets == "nccl" else 4,
            mask=Mask(causal=True),
        )
        self._ways: list[Way] = []
        self._rows: list[Row] = []
        files = {str(file) for file in (args.json, args.cluster) if file is not None}
        argv = ["FILE" if word in files else word for word in sys.argv[1:]]
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        self._result = provenance() | {
            "machine": f"{host()}, Linux {platform.release()}, {versions}",
            "command": f"python benchmarks/{Path(__file__).name} {' '.join(argv)}",
            "load_average": os.getloadavg(),  # of other programs: no rank runs yet
            "links": asdict(self._links),
            "problem": {**asdict(self._problem), "mask": "causal"},
        }
        if args.sockets:
            nodes = {"num_nodes": RANKS_OVER_SOCKETS, "ranks_per_node": 1}
            self._result["links"] = nodes | {"backend": args.sockets}

    def run(self) -> dict[str, Any]:
        args, result = self._args, self._result
        network: RankProcesses = Namespaces(self._links)
        num_ranks = self._links.num_ranks
        if args.sockets:
            num_ranks = RANKS_OVER_SOCKETS
            network = Sockets(num_ranks, args.sockets)
        with tempfile.TemporaryDirectory() as name, network:
            folder = Path(name)
            file = args.cluster or self._profiled(network, folder)
            result["cluster"], cluster = file.read_text(), load_cluster(file)
            if isinstance(network, Sockets):
                result["machine"] += f", {cluster.gpu.name}: {network.shares_gpu}"
            save(args.json, result)
            self._ways = ways(self._problem, num_ranks, cluster)
            if args.sockets:
                self._ways = with_uncut(self._ways, self._problem, num_ranks, cluster)
            say(f"{len(self._ways)} plans after {time.monotonic() - self._begun:.0f} s")
            plans = {way.name: plan_text(way.question.plan()) for way in self._ways}
            (folder / "plans.json").write_text(json.dumps(plans))
            command = (sys.executable, str(STEPS), name, str(args.rounds))
            try:
                network.run(command, seconds=self._left(), heard=self._heard)
            except LaunchError as error:
                if not result.get("rows"):
                    raise
                result["broken_off"] = str(error).splitlines()[0]
        save(args.json, result)
        self._print()
        return result

    def _left(self) -> float:
        """Seconds for the next step of the ranks: over sockets all steps share the time."""
        if not self._args.sockets:
            return float(self._args.seconds)
        return max(float(self._args.seconds) - (time.monotonic() - self._begun), 1.0)

    def _profiled(self, network: RankProcesses, folder: Path) -> Path:
        """The file that `mesh-attention profile` writes of this network and these processors."""
        file, problem, seconds = folder / "links.toml", self._problem, self._left()
        options = ["--heads", str(problem.num_heads), "--head-dim", str(problem.head_dim)]
        if self._args.sockets:
            options.append("--quick")
            seconds /= 2  # so that time is left for the rest
        command = (sys.executable, "-m", "mesh_attention", "profile", *options)
        say("profiling")
        say(network.run((*command, "--output", str(file)), seconds=seconds)[0])
        return file

    def _heard(self, outputs: list[str]) -> None:
        """Adds what ranks have measured so far to the result."""
        reports = reports_of(outputs)
        if not reports:
            return
        result, rows = self._result, make_rows(self._ways, reports)
        self._rows = rows
        result |= {"errors": reports[0]["errors"], "rows": [asdict(row) for row in rows]}
        if rows and len(rows) == len(self._ways):
            if self._args.sockets:
                orders = (order(at_best(rows)), order(uncut(rows)))
                result |= dict(zip(VERDICTS, orders, strict=True))
            else:
                result["verdict"] = verdict(rows)
        result["steps"] = of_all_ranks(reports)
        save(self._args.json, result)

    def _print(self) -> None:
        result, problem, rows = self._result, self._problem, self._rows
        print(f"{title_of(result['links'])}; {result['machine']}")
        print(
            f"{problem.q_tokens} tokens, {problem.num_heads}:{problem.kv_heads} heads of "
            f"{problem.head_dim}, {problem.element_bytes} bytes"
        )
        print(f"load average of the machine before: {result['load_average'][0]:.2f}")
        if any(row.name == REFERENCE for row in rows):
            print("\n".join(table(rows)))
        for name in VERDICTS:
            if name in result:
                print(f"{name}: {words(result[name])}", flush=True)


if __name__ == "__main__":
    main()
