"""Commands that torchrun starts on real ranks: `profile` measures this cluster and writes its file;
`tune` measures the best predicted settings, and writes the fastest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_attention.cli.command import Args, Command
from mesh_attention.cli.options import (
    CLUSTERS,
    MODEL_FLAG,
    Asked,
    asked_of_all,
    question_flags,
)
from mesh_attention.cli.output import progress, show, table
from mesh_attention.cli.values import UsageError, one_of
from mesh_attention.files import check_writable, replacing
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.problem import problem_text

if TYPE_CHECKING:
    from mesh_attention.measure.ranks import Ranks
    from mesh_attention.measure.tune import TuningOutcome

DTYPES = ("bfloat16", "float16", "float32", "float64")


def _on_ranks(
    args: Args, command: str, ranks_per_node: int | None, work: Callable[[Args, Ranks], int]
) -> int:
    """Runs `work` on the ranks that torchrun started, and returns the exit code. Without torchrun,
    the error shows how it starts `command`. All ranks raise alike, so only the first reports it."""
    from mesh_attention.measure.ranks import MeasureError, ranks_of_launcher  # imports torch

    try:
        with ranks_of_launcher(ranks_per_node, command=command) as ranks:
            return work(args, ranks)
    except (MeasureError, UsageError):
        if os.environ.get("RANK", "0") == "0":
            raise
        return 2


def run_profile(args: Args) -> int:
    return _on_ranks(args, "profile --output cluster.toml", args.ranks_per_node, _profile)


def _profile(args: Args, ranks: Ranks) -> int:
    """All ranks measure; the first one writes the file and prints what is in it."""
    # Imported here, as they import torch, which most commands do not need.
    import torch

    from mesh_attention.measure.kernel_rates import Sizes
    from mesh_attention.measure.profile import profile_ranks

    ranks.of_first(lambda: check_writable(args.output))
    with progress("measuring", shown=ranks.rank == 0) as tell:
        profile = profile_ranks(
            ranks,
            name=args.name or args.output.stem or "measured",
            sizes=Sizes.usual(
                ranks.device,
                heads=args.num_heads,
                head_dim=args.head_dim,
                dtype=None if args.dtype is None else getattr(torch, args.dtype),
                quick=args.quick,
            ),
            progress=tell,
        )

    def write() -> None:
        with replacing(args.output) as part:
            part.write_text(profile.text, encoding="utf-8")

    ranks.of_first(write)
    if ranks.rank == 0:
        show(
            args,
            lambda: {"file": str(args.output), "cluster": asdict(profile.cluster)},
            lambda: _profile_text(profile.cluster, args.output),
        )
    return 0


def _profile_text(cluster: Cluster, file: Path) -> list[str]:
    gpu, node, network = cluster.gpu, cluster.node, cluster.network
    lines = [
        f"{cluster.description}",
        f"peak {gpu.peak_tflops:g} TFLOP/s; merges at {gpu.memory_gb_per_second:g} GB/s",
    ]
    for name, kernel in cluster.kernels.items():
        for direction, rates in (("forward", kernel.forward), ("backward", kernel.backward)):
            if rates is not None:
                kinds = [f"{kind} {rate.tflops:g}" for kind, rate in rates.rates.items()]
                lines.append(f"{name} {direction}: {', '.join(kinds)} TFLOP/s")
    lines.append(
        f"inside a node: collectives {node.collective.gb_per_second:g} GB/s, point-to-point "
        f"{node.peer.gb_per_second:g}, all-to-alls {node.all_to_all_gb_per_second:g}"
    )
    if cluster.nodes > 1:
        lines.append(
            f"between nodes: {network.nics} NICs a node, collectives "
            f"{network.collective.gb_per_second:g} GB/s a NIC, point-to-point "
            f"{network.peer.gb_per_second:g}, all-to-alls {network.many_peers.gb_per_second:g}"
        )
    lines.append(f"written to {file}; use it as --cluster {file}, or ContextParallel(cluster=...)")
    return lines


def run_tune(args: Args) -> int:
    if args.method is not None:
        raise UsageError("tune measures all methods; leave --method out")
    if args.output is None:
        raise UsageError(
            "--output is missing: the file that the answer goes to, as in --output tuned.json; "
            "ContextParallel(tuned='tuned.json') then uses it"
        )
    return _on_ranks(args, "tune --tokens 65536 --causal --output tuned.json", None, _tune)


def _tune(args: Args, ranks: Ranks) -> int:
    """All ranks measure; the first one reads the question, and writes and prints the answer."""
    # Imported here, as they import torch, which most commands do not need.
    from mesh_attention.measure.ranks import MeasureError
    from mesh_attention.measure.tune import tune_ranks
    from mesh_attention.request.auto import cluster_here

    if args.ranks not in (None, ranks.size):
        raise MeasureError(
            f"--ranks {args.ranks}: torchrun started {ranks.size}; leave --ranks out"
        )
    args.ranks = ranks.size
    asked: Asked = ranks.of_first(lambda: asked_of_all(args, "tune"))
    cluster, found_by = cluster_here(ranks.group, asked.options.get("ranks_per_node"))
    if args.cluster is not None:
        cluster, found_by = asked.cluster, asked.found_by
    with progress("measuring", shown=ranks.rank == 0) as tell:
        outcome = tune_ranks(
            ranks,
            asked.problem,
            cluster,
            asked.options,
            output=args.output,
            measurements=args.measurements,
            again=args.again,
            progress=tell,
            tell_line=_log if ranks.rank == 0 and not sys.stderr.isatty() else None,
        )
    if ranks.rank == 0:
        show(
            args,
            lambda: _tune_json(outcome, args.output, cluster, found_by),
            lambda: [
                problem_text(asked.problem),
                *_tune_text(outcome, args.output),
                f"Cluster: {found_by}.",
            ],
        )
    return 0


def _log(line: str) -> None:
    """Prints progress in place of a bar, if standard error is no terminal."""
    print(f"tune: {line}", file=sys.stderr, flush=True)


def _rows(outcome: TuningOutcome, direction: Direction) -> list[dict[str, Any]]:
    """The measured settings of a direction, the fastest first; those that cannot run are last."""
    tuning = outcome.tuning
    known = [scored for scored in tuning.contenders[direction] if scored.key in tuning.known]
    return [
        {
            "method": scored.name,
            "options": scored.options,
            "text": scored.text,
            "predicted_seconds": scored.seconds,
            "seconds": tuning.measured(scored) if tuning.measured(scored) < inf else None,
            "cannot_run": tuning.known[scored.key] if tuning.measured(scored) == inf else None,
        }
        for scored in sorted(known, key=tuning.measured)
    ]


def _tune_json(
    outcome: TuningOutcome, file: Path, cluster: Cluster, found_by: str
) -> dict[str, Any]:
    return {
        "cluster": cluster.name,
        "cluster_found": found_by,
        "chosen": {
            scored.direction.value: {
                "method": scored.name,
                "options": scored.options,
                "seconds": outcome.tuning.measured(scored),
            }
            for scored in outcome.best
        },
        "seconds": outcome.seconds,
        "measurements": outcome.taken,
        "measurements_before": outcome.before,
        "contenders": {d.value: len(x) for d, x in outcome.tuning.contenders.items()},
        "measured": {d.value: _rows(outcome, d) for d in Direction},
        "file": str(file),
        "earlier_answer_stays": outcome.stays,
    }


def _tune_text(outcome: TuningOutcome, file: Path) -> list[str]:
    lines = []
    for direction in Direction:
        rows = [(direction.value, "measured", "predicted")]
        reasons = []
        for row in _rows(outcome, direction):
            seconds = row["seconds"]
            took = "cannot run" if seconds is None else f"{seconds * 1e3:.2f} ms"
            rows.append((row["text"], took, f"{row['predicted_seconds'] * 1e3:.2f} ms"))
            if row["cannot_run"]:
                reasons.append(f"{row['text']} cannot run: {row['cannot_run']}")
        lines += [table(rows), *reasons, ""]
    forward, backward = (scored.text for scored in outcome.best)
    before = f", {outcome.before} of an earlier tuning" if outcome.before else ""
    lines.append(
        f"The fastest: forward {forward}, backward {backward}: {outcome.seconds * 1e3:.2f} ms "
        f"together ({outcome.taken} measurements{before})."
    )
    if outcome.stays:
        answer = outcome.answer
        lines.append(
            f"The answer that {file} has stays ({answer.text}): it took {answer.seconds * 1e3:.2f} "
            f"ms when it was measured, on {answer.measured_on}; --again replaces it."
        )
    lines.append(f"Use it: ContextParallel(tuned={str(file)!r}, ...) with the same sizes.")
    return lines


PROFILE = Command(
    run_profile,
    f"""\
measure kernels and links on real ranks (under torchrun), write a cluster file

examples:
  torchrun --nproc-per-node 8 -m mesh_attention profile --output cluster.toml
  mesh-attention simulate --cluster cluster.toml --ranks 8 --tokens 64k --best

--output FILE.toml=cluster.toml  the file
--name NAME         of the cluster (default: as the file)
--ranks-per-node N  ranks that share a node, one after the other (default: LOCAL_WORLD_SIZE, as
                    torchrun sets it)
--heads N           heads of kernel calls (default 32 on GPUs, 4 on CPUs)
--head-dim N=128    size of a head (default 128)
--dtype NAME        {", ".join(DTYPES)} (default bfloat16 on GPUs, float32 on CPUs)
--quick             fewer sizes and repeats: seconds in place of a minute, less exact
""",
    read={"dtype": one_of("dtype", DTYPES)},
)
TUNE = Command(
    run_tune,
    f"""\
measure the best predicted settings on real ranks (under torchrun), write the fastest

examples:
  torchrun --nproc-per-node 8 -m mesh_attention tune --tokens 65536 --heads 32 --causal
    --output tuned.json
  torchrun --nproc-per-node 8 -m mesh_attention tune --model llama-8b --tokens 131072
    --cluster cluster.toml --output tuned.json

--output FILE.json   the file of the answer, for ContextParallel(tuned=...); one that is there keeps
                     its answers to other questions (needed)
{MODEL_FLAG}
--cluster NAME|FILE  what predictions go by: a file of profile, or {CLUSTERS} (default: by this
                     machine's GPU)
--measurements N=10  at most so many (default 10), those of a tuning that was ended too
--again              measure anew what an earlier tuning has measured, and replace its answer
""",
    question_flags,
)
