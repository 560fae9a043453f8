"""Does the simulator predict what runs? Methods over shaped links, measured beside simulated.

    sudo python benchmarks/predicted_against_measured.py --nodes 2 --json result.json

Eight gloo ranks as two nodes of four (or sixteen as four, `--nodes 4`), each in a network namespace
with a link of its own, and one link between the nodes and the rest (`namespaces.py`). First
`mesh-attention profile` measures that network and these cores, and writes a cluster file. By that
file alone each method gets its setting, what defines it given and the rest searched for each pass,
`auto` is searched over all methods (`method_ways.py`), and all are simulated. Then they run,
forward and backward, causal, in float32: nothing is timed after a failed comparison with float64,
and the ways take turns (`method_steps.py`). Times are of the slowest rank, medians over rounds.

Rates are such that links take much longer than computing does, since ranks share few cores: "CPU"
is what all ranks took for a step, on all cores together. The last line says how near it was.

    python benchmarks/predicted_against_measured.py --sockets nccl --json result.json

does the same with eight NCCL ranks that share one GPU and talk through sockets (`sockets.py`), in
bfloat16, without root, for the order only: times on a shared GPU say little about a cluster. Each
method also runs uncut, as cuts may cost more there than they hide. `--sockets gloo` tries that on
CPUs, in float32. What was measured is written after every round.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from documents_over_links import load, machine
from method_steps import say
from method_ways import Way, ways, with_uncut
from namespaces import Links, NamespaceError, Namespaces
from prediction_report import (
    REFERENCE,
    VERDICTS,
    at_best,
    make_rows,
    of_all_ranks,
    order,
    reports_of,
    rows_of,
    table,
    title_of,
    uncut,
    verdict,
    words,
)
from provenance import taken
from rank_processes import RankProcesses
from sockets import Sockets

from mesh_attention.cost import load_cluster
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.text import plan_text
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

HERE = Path(__file__).parent
RANKS_OVER_SOCKETS = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2, choices=(2, 4), help="of four ranks")
    parser.add_argument(
        "--sockets",
        choices=("nccl", "gloo"),
        help="in place of --nodes: eight nodes of one rank, on one GPU or (gloo) on CPUs",
    )
    parser.add_argument("--between", type=float, default=40, help="Mbit/s of a node")
    parser.add_argument("--inside", type=float, default=320, help="Mbit/s of a rank in a node")
    parser.add_argument("--tokens", type=int, help="512, or 32768 on a GPU")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cluster", type=Path, help="a cluster file, in place of profiling")
    parser.add_argument(
        "--seconds", type=float, help="then the ranks are ended: 900, or over sockets 200 for all"
    )
    parser.add_argument("--json", type=Path, help="write all that was measured here")
    given = parser.parse_args()
    given.tokens = given.tokens or (32768 if given.sockets == "nccl" else 512)
    given.seconds = given.seconds or (200 if given.sockets else 900)
    try:
        result = _Run(given).run()
    except (MeshAttentionError, NamespaceError, KeyboardInterrupt) as error:
        raise SystemExit(f"error: {str(error) or 'ended by Ctrl-C'}") from None
    if "broken_off" in result:
        raise SystemExit(f"error: {result['broken_off']}")


class _Run:
    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._begun = given, time.monotonic()
        self._links = Links(given.nodes, 4, given.between, given.inside)
        self._problem = Problem(
            *(given.tokens, given.heads, given.dim),
            num_kv_heads=given.kv_heads,
            element_bytes=2 if given.sockets == "nccl" else 4,
            mask=Mask(causal=True),
        )
        self._found: list[Way] = []
        files = {str(file) for file in (given.json, given.cluster) if file is not None}
        told = ["FILE" if word in files else word for word in sys.argv[1:]]
        self._result: dict[str, Any] = {
            **taken(),
            "machine": machine(),
            "command": f"python benchmarks/{Path(__file__).name} {' '.join(told)}",
            "links": asdict(self._links),
            "problem": {**asdict(self._problem), "mask": "causal"},
        }
        if given.sockets:
            nodes = {"num_nodes": RANKS_OVER_SOCKETS, "ranks_per_node": 1}
            self._result["links"] = nodes | {"backend": given.sockets}
        else:
            self._result["before"] = load()

    def run(self) -> dict[str, Any]:
        given, result = self._given, self._result
        network: RankProcesses = Namespaces(self._links)
        num_ranks = self._links.num_ranks
        if given.sockets:
            num_ranks = RANKS_OVER_SOCKETS
            network = Sockets(num_ranks, given.sockets)
        with tempfile.TemporaryDirectory() as name, network:
            folder = Path(name)
            file = given.cluster or self._profiled(network, folder)
            result["cluster"], cluster = file.read_text(), load_cluster(file)
            if isinstance(network, Sockets):
                result["machine"] += f", {cluster.gpu.name}: {network.shares_gpu}"
            self._write()
            self._found = ways(self._problem, num_ranks, cluster)
            if given.sockets:
                self._found = with_uncut(self._found, self._problem, num_ranks, cluster)
            say(f"{len(self._found)} plans after {time.monotonic() - self._begun:.0f} s")
            plans = {way.name: plan_text(way.question.plan()) for way in self._found}
            (folder / "plans.json").write_text(json.dumps(plans))
            command = (sys.executable, str(HERE / "method_steps.py"), name, str(given.rounds))
            try:
                network.run(command, seconds=self._left(), heard=self._heard)
            except NamespaceError as error:
                if not result.get("rows"):
                    raise
                result["broken_off"] = str(error).splitlines()[0]
        if not given.sockets:
            result["after"] = load()
        self._write()
        self._tell()
        return result

    def _left(self) -> float:
        """Seconds of the next thing that ranks do: over sockets all of them share the time."""
        if not self._given.sockets:
            return float(self._given.seconds)
        return max(float(self._given.seconds) - (time.monotonic() - self._begun), 1.0)

    def _profiled(self, network: RankProcesses, folder: Path) -> Path:
        """The file that `mesh-attention profile` writes of this network and these processors."""
        file, problem, seconds = folder / "links.toml", self._problem, self._left()
        options = ["--heads", str(problem.num_heads), "--head-dim", str(problem.head_dim)]
        if self._given.sockets:
            options.append("--quick")
            seconds /= 2  # so that time is left for the rest
        command = (sys.executable, "-m", "mesh_attention", "profile", *options)
        say("profiling")
        say(network.run((*command, "--output", str(file)), seconds=seconds)[0])
        return file

    def _heard(self, outputs: list[str]) -> None:
        """What ranks have measured so far."""
        reports = reports_of(outputs)
        if not reports:
            return
        result, rows = self._result, make_rows(self._found, reports)
        result |= {"errors": reports[0]["errors"], "rows": [asdict(row) for row in rows]}
        if rows and len(rows) == len(self._found):
            if self._given.sockets:
                found = (order(at_best(rows)), order(uncut(rows)))
                result |= dict(zip(VERDICTS, found, strict=True))
            else:
                result["verdict"] = verdict(rows)
        result["steps"] = of_all_ranks(reports)
        self._write()

    def _write(self) -> None:
        if self._given.json is not None:
            self._given.json.write_text(json.dumps(self._result, indent=1) + "\n")

    def _tell(self) -> None:
        result, problem = self._result, self._problem
        rows = rows_of(result)
        print(f"{title_of(result['links'])}; {result['machine']}")
        print(
            f"{problem.q_tokens} tokens, {problem.num_heads}:{problem.kv_heads} heads of "
            f"{problem.head_dim}, {problem.element_bytes} bytes"
        )
        if not self._given.sockets:
            busy = [result[when]["busy_cores"] for when in ("before", "after")]
            print(f"others keep {busy[0]} and {busy[1]} cores busy, before and after")
        if any(row.name == REFERENCE for row in rows):
            print("\n".join(table(rows)))
        for name in VERDICTS:
            if name in result:
                print(f"{name}: {words(result[name])}", flush=True)


if __name__ == "__main__":
    main()
