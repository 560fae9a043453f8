"""Does the simulator predict what runs? Methods over shaped links, measured beside simulated.

    sudo python benchmarks/predicted_against_measured.py --nodes 2 --json result.json

Eight gloo ranks as two nodes of four (or sixteen as four, `--nodes 4`), each in a network namespace
with a link of its own, and one link between the nodes and the rest (`namespaces.py`). First
`mesh-attention profile` measures that network and these cores, and writes a cluster file. By that
file alone each method gets its setting, what defines it given (`defining`) and the rest searched
for each pass, `auto` is searched over all methods, and all are simulated. Then they run, forward
and backward, causal, in float32: nothing is timed after a failed comparison with float64, and the
ways take turns (`method_steps.py`). Times are of the slowest rank, medians over rounds.

Rates are such that links take much longer than computing does, since ranks share few cores: "CPU"
is what all ranks took for a step, on all cores together. The last line says how near it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from documents_over_links import load, machine
from method_steps import say
from namespaces import Links, NamespaceError, Namespaces
from prediction_report import AUTO, Predicted, make_rows, of_all_ranks, table, verdict, words
from provenance import taken

from mesh_attention.cluster import Cluster, load_cluster, simulate
from mesh_attention.cluster.auto import find_best_of_all
from mesh_attention.cluster.best import find_best
from mesh_attention.cluster.planning import ask_on
from mesh_attention.errors import MeshAttentionError, PlanError
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import BOTH, Question, joined
from mesh_attention.plan.text import plan_text

HERE = Path(__file__).parent
METHODS = ("ring", "usp", "ulysses", "startrail", "mesh", "mesh-usp")


@dataclass(frozen=True)
class Way(Predicted):
    question: Question


# What is run.


def defining(method: str, num_ranks: int) -> dict[str, Any]:
    """What makes a method itself: left free, USP may become Ulysses, and StarTrail a ring."""
    inside = {"ulysses": 4}  # as many as a node has ranks
    of = {
        "usp": inside,
        "startrail": {"team": 2},
        "mesh-usp": {"ulysses": 2, "tile": (2, 2)} if num_ranks == 8 else inside | {"tile": (2, 2)},
        "mesh": {"tile": (2, 4) if num_ranks == 8 else (4, 4)},
    }
    return of.get(method, {})


def ways(problem: Problem, num_ranks: int, cluster: Cluster) -> list[Way]:
    found = [_way(method, problem, num_ranks, cluster) for method in METHODS]
    best = find_best_of_all(problem, num_ranks, cluster)
    say(f"auto: {best.reason}")
    return [*found, _as_way(AUTO, best.question, cluster)]


def _way(method: str, problem: Problem, num_ranks: int, cluster: Cluster) -> Way:
    """Both passes at their best; where these want other shards, the one that loses less."""
    given, asked = defining(method, num_ranks), []
    for direction in BOTH:
        best = find_best(
            *(problem, num_ranks, cluster), method=method, direction=direction, options=given
        )
        options = {"method": method, "directions": (direction,), **best.options}
        asked.append(ask_on(cluster, problem, num_ranks, **options))
    both = [joined(*asked), *(replace(one, directions=BOTH) for one in asked)]
    fitting = [way for question in both if (way := _if_fits(method, question, cluster))]
    return min(fitting, key=lambda way: sum(way.predicted))


def _if_fits(name: str, question: Question, cluster: Cluster) -> Way | None:
    try:
        return _as_way(name, question, cluster)
    except PlanError:
        return None


def _as_way(name: str, question: Question, cluster: Cluster) -> Way:
    plan = question.plan()
    timelines = [simulate(plan, cluster, direction) for direction in BOTH]
    told = [
        " ".join([one.method, *(f"{n}={_word(x)}" for n, x in _given(one).items())])
        for one in (question, question.backward or question)
    ]
    seconds = tuple(one.runtime_seconds for one in timelines)
    return Way(name, tuple(told), seconds, question)


def _given(question: Question) -> Mapping[str, Any]:
    """The options that are not left to their default."""
    setting = question.setting
    usual = type(setting)()
    hidden = ("costs", "ranks_per_node")
    names = [one.name for one in fields(setting) if one.name not in hidden]
    return {
        name: value for name in names if (value := getattr(setting, name)) != getattr(usual, name)
    }


def _word(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2, choices=(2, 4), help="of four ranks")
    parser.add_argument("--between", type=float, default=40, help="Mbit/s of a node")
    parser.add_argument("--inside", type=float, default=320, help="Mbit/s of a rank in a node")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cluster", type=Path, help="a cluster file, in place of profiling")
    parser.add_argument("--seconds", type=float, default=900, help="then the ranks are ended")
    parser.add_argument("--json", type=Path, help="write all that was measured here")
    given = parser.parse_args()
    try:
        result = _run(given)
    except (MeshAttentionError, NamespaceError, KeyboardInterrupt) as error:
        raise SystemExit(f"error: {str(error) or 'ended by Ctrl-C'}") from None
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


def _profiled(network: Namespaces, folder: Path, problem: Problem, seconds: float) -> Path:
    """The cluster file that `mesh-attention profile` writes of this network and these cores."""
    file = folder / "links.toml"
    sizes = ("--heads", str(problem.num_heads), "--head-dim", str(problem.head_dim))
    command = (sys.executable, "-m", "mesh_attention", "profile", *sizes, "--output", str(file))
    say("profiling")
    say(network.run(command, seconds=seconds)[0])
    return file


def _run(given: argparse.Namespace) -> dict[str, Any]:
    links = Links(given.nodes, 4, given.between, given.inside)
    problem = Problem(
        *(given.tokens, given.heads, given.dim),
        num_kv_heads=given.kv_heads,
        element_bytes=4,
        mask=Mask(causal=True),
    )
    result: dict[str, Any] = {
        **taken(),
        "machine": machine(),
        "command": f"python {' '.join(sys.argv)}",
        "links": asdict(links),
        "problem": {**asdict(problem), "mask": "causal"},
        "before": load(),
    }
    with tempfile.TemporaryDirectory() as name, Namespaces(links) as network:
        folder = Path(name)
        file = given.cluster or _profiled(network, folder, problem, given.seconds)
        result["cluster"] = file.read_text()
        found = ways(problem, links.num_ranks, load_cluster(file))
        plans = {way.name: plan_text(way.question.plan()) for way in found}
        (folder / "plans.json").write_text(json.dumps(plans))
        command = (sys.executable, str(HERE / "method_steps.py"), name, str(given.rounds))
        reports = [json.loads(x) for x in network.run(command, seconds=given.seconds)]
    rows = make_rows(found, reports)
    result |= {
        "after": load(),
        "errors": reports[0]["errors"],
        "verdict": verdict(rows),
        "rows": [asdict(row) for row in rows],
        "steps": of_all_ranks(reports),
    }
    busy = [result[when]["busy_cores"] for when in ("before", "after")]
    print(f"{links.words}; {problem.q_tokens} tokens, {problem.num_heads}:{problem.kv_heads} heads")
    print(
        f"of {problem.head_dim}; others keep {busy[0]} and {busy[1]} cores busy, before and after"
    )
    print("\n".join(table(rows)))
    print(words(result["verdict"]))
    return result


if __name__ == "__main__":
    main()
