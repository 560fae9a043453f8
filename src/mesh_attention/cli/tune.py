"""`mesh-attention tune`: measures the best predicted settings on real ranks, under torchrun."""

from __future__ import annotations

import argparse
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_attention.cli.command import Command, Flag, UsageError, on_ranks
from mesh_attention.cli.options import MODEL_FLAG, AskedOfAll, add_question_flags, asked_of_all
from mesh_attention.cli.output import progress, show, table
from mesh_attention.cli.values import size
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.problem import problem_text

if TYPE_CHECKING:
    from mesh_attention.measure.ranks import Ranks
    from mesh_attention.measure.tune import TuningOutcome

USUAL_MEASUREMENTS = 10


def run(args: argparse.Namespace) -> int:
    if args.method is not None:
        raise UsageError("tune measures all methods; leave --method out")
    if args.output is None:
        raise UsageError(
            "--output is missing: the file that the answer goes to, as in --output tuned.json; "
            "ContextParallel(tuned='tuned.json') then uses it"
        )
    args.kernel = args.passes = None  # `asked_of_all` reads them; tune has no such flags
    command = "tune --tokens 65536 --causal --output tuned.json"
    return on_ranks(command, None, lambda ranks: _tune(args, ranks))


def _tune(args: argparse.Namespace, ranks: Ranks) -> int:
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
    asked: AskedOfAll = ranks.of_first(lambda: asked_of_all(args, "tune"))
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
            lambda: _to_json(outcome, args.output, cluster, found_by),
            lambda: [
                problem_text(asked.problem),
                *_to_lines(outcome, args.output),
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


def _to_json(outcome: TuningOutcome, file: Path, cluster: Cluster, found_by: str) -> dict[str, Any]:
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


def _to_lines(outcome: TuningOutcome, file: Path) -> list[str]:
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


COMMAND = Command(
    summary="measure the best predicted settings on real ranks (under torchrun), write the fastest",
    run=run,
    flags=(
        Flag(
            "--output",
            "the file of the answer, for ContextParallel(tuned=...); one that is there keeps its "
            "answers to other questions (needed)",
            Path,
            "FILE.json",
        ),
        MODEL_FLAG,
        Flag(
            "--cluster",
            f"what predictions go by: a file of profile, or {', '.join(cluster_names())} (default: "
            "by this machine's GPU)",
            str,
            "NAME|FILE",
        ),
        Flag(
            "--measurements",
            f"at most so many (default {USUAL_MEASUREMENTS}), those of a tuning that was ended too",
            size,
            "N",
            USUAL_MEASUREMENTS,
        ),
        Flag("--again", "measure anew what an earlier tuning has measured, and replace its answer"),
    ),
    more_flags=add_question_flags,
    examples=(
        "torchrun --nproc-per-node 8 -m mesh_attention tune --tokens 65536 --heads 32 --causal "
        "--output tuned.json",
        "torchrun --nproc-per-node 8 -m mesh_attention tune --model llama-8b --tokens 131072 "
        "--cluster cluster.toml --output tuned.json",
    ),
)
