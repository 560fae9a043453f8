"""Does the simulator predict what runs? Methods over shaped links, measured beside simulated.

    sudo python benchmarks/predicted_against_measured.py --nodes 2 --json result.json

Eight gloo ranks as two nodes of four (or sixteen as four, `--nodes 4`), each in a network namespace
with a link of its own, and one link between the nodes and the rest (`namespaces.py`). They run as
contestants of `against_peers.py`: the network and these cores are profiled, and by that cluster
alone each method gets its setting. The options that define it are fixed, the rest is searched;
`auto` is searched over all methods. Nothing is timed that differs from float64, and all take turns.
Times are of the slowest rank, medians over rounds, forward with backward.

Rates are such that links take much longer than computing does, since ranks share few cores: "CPU s"
is what all ranks took for both passes, on all cores together. The last lines say how near it was.

    python benchmarks/predicted_against_measured.py --sockets nccl --json result.json

does the same with eight NCCL ranks that share one GPU and talk through sockets (`sockets.py`), in
bfloat16, without root, for the order only: times on a shared GPU say little about a cluster.
`--sockets gloo` tries that on CPUs, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from against_peers import Run, arguments, timed
from script import save, script_parser

from mesh_attention.cli.values import size

AUTO, REFERENCE = "auto", "mesh"
ALIKE = 0.03  # methods whose predicted times differ by less have no order
NEAR = 0.15  # of ratios to the mesh
Seconds = Mapping[str, tuple[float, float]]  # of each method: measured and predicted


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=2, choices=(2, 4), help="of four ranks")
    parser.add_argument(
        "--sockets",
        choices=("nccl", "gloo"),
        help="in place of --nodes: eight nodes of one rank, on one GPU or (gloo) on CPUs",
    )
    parser.add_argument("--between", default="40", help="Mbit/s of a node")
    parser.add_argument("--inside", default="320", help="Mbit/s of a rank in a node")
    parser.add_argument("--tokens", type=size, help="512, or 32768 on a GPU")
    parser.add_argument("--heads", default="16:16", help="of Q:KV")
    parser.add_argument("--dim", default="128")
    parser.add_argument("--rounds", default="4")
    parser.add_argument("--seconds", default="900", help="then the ranks are ended")
    args = parser.parse_args()
    num_ranks = 8 if args.sockets else 4 * args.nodes
    words = ["--ranks", str(num_ranks), "--masks", "causal"]
    words += ["--tokens", str(args.tokens or (32768 if args.sockets == "nccl" else 512))]
    for name in ("heads", "dim", "rounds", "seconds"):
        words += [f"--{name}", getattr(args, name)]
    if args.sockets != "nccl":
        words.append("--gloo")
    if not args.sockets:
        words += ["--no-quick", "--mbit", args.between, "--ranks-per-node", "4"]
        words += ["--inside", args.inside]
    words += ["--json", str(args.json)] if args.json else []
    result = Run(arguments([*words, "--contestants", *contestants(num_ranks)])).run()
    if "broken_off" in result:
        raise SystemExit(f"error: {result['broken_off']}")
    (cell,) = result["cells"]
    result["verdict"] = verdict(seconds_of(cell))
    save(args.json, result)
    print(words_of(result["verdict"]))


def contestants(num_ranks: int) -> list[str]:
    """Names with the options that make a method what it is: if these were left free, USP might
    become Ulysses, and StarTrail a ring."""
    tile, ulysses = ((2, 4), 2) if num_ranks == 8 else ((4, 4), 4)
    return [
        "ring",
        "usp,ulysses=4",  # as many as a node has ranks
        "ulysses",
        "startrail,team=2",
        f"{REFERENCE},tile={tile}",
        f"mesh-usp,ulysses={ulysses},tile=(2, 2)",
        "allgather-kv",
        AUTO,
    ]


def seconds_of(cell: Mapping[str, Any]) -> Seconds:
    """Without methods that had no time; one that is wrong or refused ends the script."""
    if "not_run" in cell:
        raise SystemExit(f"error: {cell['not_run']}")
    seconds = {}
    for text, row in cell["contestants"].items():
        if "refused" in row:
            raise SystemExit(f"error: {text}: {row['refused']}")
        row = timed(cell, text)
        seconds[text.partition(",")[0]] = (row["both_ms"] / 1e3, row["predicted_ms"] / 1e3)
    return seconds


def verdict(seconds: Seconds) -> dict[str, Any]:
    """Who comes before whom, and by how much beside the mesh. `agreement`: Kendall's, of the pairs
    that are not predicted alike, 1 where all are as predicted and -1 where none is."""
    measured, predicted = ({n: x[at] for n, x in seconds.items()} for at in (0, 1))
    pairs = [
        (first, then)
        for first, then in combinations(sorted(predicted, key=predicted.__getitem__), 2)
        if predicted[then] > (1 + ALIKE) * predicted[first]
    ]
    turned = [(first, then) for first, then in pairs if measured[then] < measured[first]]
    ratios = {
        name: (measured[name] / measured[REFERENCE], predicted[name] / predicted[REFERENCE])
        for name in seconds
    }
    off = {name: b / a - 1 for name, (a, b) in ratios.items()}
    worst = max(off, key=lambda name: abs(off[name]))
    fastest = min(measured, key=measured.__getitem__)
    return {
        "ratios": ratios,
        "worst_ratio": [worst, round(off[worst], 3)],
        "ratios_near": abs(off[worst]) <= NEAR,
        "turned_round": turned,
        "pairs": len(pairs),
        "agreement": round(1 - 2 * len(turned) / len(pairs), 3) if pairs else None,
        "measured_order": sorted(measured, key=measured.__getitem__),
        "predicted_order": sorted(predicted, key=predicted.__getitem__),
        "fastest": fastest,
        "auto_behind": round(measured[AUTO] / measured[fastest] - 1, 3),
    }


def words_of(verdict: Mapping[str, Any]) -> str:
    turned = ", ".join(f"{a} before {b}" for a, b in verdict["turned_round"])
    behind, (worst, off) = verdict["auto_behind"], verdict["worst_ratio"]
    right = verdict["pairs"] - len(verdict["turned_round"])
    ratios = (f"{name} {a:.2f} ({b:.2f})" for name, (a, b) in verdict["ratios"].items())
    return "\n".join(
        [
            f"to {REFERENCE}, measured (predicted): {', '.join(ratios)}; "
            f"{worst} off most, {off:+.1%}",
            f"order: {f'predicted, but not measured: {turned}' if turned else 'as predicted'}; "
            f"{right} of {verdict['pairs']} pairs, Kendall's tau {verdict['agreement']}",
            f"measured {' < '.join(verdict['measured_order'])}",
            f"predicted {' < '.join(verdict['predicted_order'])}",
            f"auto: {f'{behind:.1%} behind ' + verdict['fastest'] if behind else 'the fastest'}",
        ]
    )


if __name__ == "__main__":
    main()
