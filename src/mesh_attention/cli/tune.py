"""`mesh-attention tune`: the best predicted settings measured on real ranks, under torchrun."""

from __future__ import annotations

import argparse
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_attention.cli.advise import AskedOfAll, asked_of_all
from mesh_attention.cli.command import Command, Flag, UsageError
from mesh_attention.cli.models import MODELS
from mesh_attention.cli.options import add_question_flags
from mesh_attention.cli.output import progress, show, table
from mesh_attention.cli.values import one_of, size
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.problem import problem_text

if TYPE_CHECKING:
    from mesh_attention.measure.tune import TuningOutcome

USUAL_MEASUREMENTS = 10


def run(args: argparse.Namespace) -> int:
    # Here, since this is a command of ranks: the others need no torch.
    from mesh_attention.cli.on_ranks import on_ranks
    from mesh_attention.measure.ranks import MeasureError, Ranks
    from mesh_attention.measure.tune import tune_ranks
    from mesh_attention.request.auto import cluster_here

    if args.method is not None:
        raise UsageError("tune measures all methods; leave --method out")
    if args.output is None:
        raise UsageError(
            "--output is missing: the file that the answer goes to, as in --output tuned.json; "
            "ContextParallel(tuned='tuned.json') then uses it"
        )
    args.kernel = args.passes = None  # flags of others: both passes, and kernels as they are chosen

    def work(ranks: Ranks) -> int:
        if args.ranks not in (None, ranks.size):
            raise MeasureError(f"--ranks {args.ranks}: {ranks.size} were started; leave it out")
        args.ranks = ranks.size
        asked: AskedOfAll = ranks.of_first(lambda: asked_of_all(args, "tune"))
        here, found_by = cluster_here(ranks.group, asked.options.get("ranks_per_node"))
        cluster = here if args.cluster is None else asked.cluster
        with progress("measuring", shown=ranks.rank == 0) as tell:
            tuned = tune_ranks(
                *(ranks, asked.problem, cluster, asked.options),
                output=args.output,
                measurements=args.measurements,
                again=args.again,
                progress=tell,
                tell_line=_log if ranks.rank == 0 and not sys.stderr.isatty() else None,
            )
        if ranks.rank == 0:
            line = found_by if args.cluster is None else asked.found_by
            show(
                args,
                lambda: _to_json(tuned, args.output, cluster, line),
                lambda: "\n".join(
                    [
                        problem_text(asked.problem),
                        *_for_people(tuned, args.output),
                        f"Cluster: {line}.",
                    ]
                ),
            )
        return 0

    return on_ranks("tune --tokens 65536 --causal --output tuned.json", None, work)


def _log(line: str) -> None:
    """Where nobody sees a bar."""
    print(f"tune: {line}", file=sys.stderr, flush=True)


def _rows(tuned: TuningOutcome, direction: Direction) -> list[dict[str, Any]]:
    """What was measured, the fastest first."""
    measured = tuned.tuning.measured
    known = [one for one in tuned.tuning.contenders[direction] if one.key in measured]
    return [
        {
            "method": one.name,
            "options": one.options,
            "text": one.text,
            "predicted_seconds": one.seconds,
            "seconds": None if measured[one.key] == inf else measured[one.key],
            "cannot_run": tuned.tuning.refused.get(one.key),
        }
        for one in sorted(known, key=lambda one: measured[one.key])
    ]


def _to_json(tuned: TuningOutcome, file: Path, cluster: Cluster, line: str) -> dict[str, Any]:
    return {
        "cluster": cluster.name,
        "cluster_found": line,
        "chosen": {
            one.direction.value: {
                "method": one.name,
                "options": one.options,
                "seconds": tuned.tuning.measured[one.key],
            }
            for one in tuned.best
        },
        "seconds": tuned.seconds,
        "measurements": tuned.taken,
        "measurements_before": tuned.before,
        "contenders": {d.value: len(x) for d, x in tuned.tuning.contenders.items()},
        "measured": {one.value: _rows(tuned, one) for one in Direction},
        "file": str(file),
        "earlier_answer_stays": tuned.stays,
    }


def _for_people(tuned: TuningOutcome, file: Path) -> list[str]:
    lines = []
    for direction in Direction:
        rows = [(direction.value, "measured", "predicted")]
        reasons = []
        for row in _rows(tuned, direction):
            seconds = row["seconds"]
            took = "cannot run" if seconds is None else f"{seconds * 1e3:.2f} ms"
            rows.append((row["text"], took, f"{row['predicted_seconds'] * 1e3:.2f} ms"))
            if row["cannot_run"]:
                reasons.append(f"{row['text']} cannot run: {row['cannot_run']}")
        lines += [table(rows), *reasons, ""]
    forward, backward = (one.text for one in tuned.best)
    before = f", {tuned.before} of an earlier tuning" if tuned.before else ""
    lines.append(
        f"The fastest: forward {forward}, backward {backward}: {tuned.seconds * 1e3:.2f} ms "
        f"together ({tuned.taken} measurements{before})."
    )
    if tuned.stays:
        lines.append(
            f"The answer that {file} has stays ({tuned.answer.text}): it took "
            f"{tuned.answer.seconds * 1e3:.2f} ms when it was measured, on "
            f"{tuned.answer.measured_on}; --again replaces it."
        )
    lines.append(f"Use it: ContextParallel(tuned={str(file)!r}, ...) with the same sizes.")
    return lines


COMMAND = Command(
    name="tune",
    summary="measure the best predicted settings on real ranks (under torchrun), write the fastest",
    run=run,
    flags=(
        Flag(
            "--output",
            "the file of the answer, for ContextParallel(tuned=...); one that is there keeps its "
            "answers to other questions (needed)",
            *(Path, "FILE.json"),
        ),
        Flag(
            "--model",
            f"heads of a known model, causal: {', '.join(MODELS)}",
            *(one_of("model", MODELS), "NAME"),
        ),
        Flag(
            "--cluster",
            f"what predictions go by: a file of profile, or {', '.join(cluster_names())} (default: "
            "by this machine's GPU)",
            *(str, "NAME|FILE"),
        ),
        Flag(
            "--measurements",
            f"at most so many (default {USUAL_MEASUREMENTS}), those of a tuning that was ended too",
            *(size, "N", USUAL_MEASUREMENTS),
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
