"""`mesh-attention advise`: which method to use, how fast it is, and how much memory it needs."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_attention.choose.answers import keep_answer
from mesh_attention.choose.auto import BestOfAll, find_best_of_all
from mesh_attention.choose.ranking import RankedMethod, gpu_bytes, python_line, ranked_methods
from mesh_attention.cli.command import Command, Flag, UsageError
from mesh_attention.cli.installed import missing_kernels, missing_kernels_note
from mesh_attention.cli.models import MODELS
from mesh_attention.cli.options import (
    add_plan_flags,
    directions_of,
    options_of,
    problem_of,
    ranks_of,
)
from mesh_attention.cli.output import Progress, progress, show, table
from mesh_attention.cli.values import one_of
from mesh_attention.cost.collector import collector_paused
from mesh_attention.cost.detect_cluster import (
    NEAREST,
    Machine,
    find_cluster,
    gpu_of_driver,
    nic_gbits,
)
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.machine.load import cluster_names, load_cluster
from mesh_attention.plan.bounds import least_bytes
from mesh_attention.plan.draw.summary import bytes_text, problem_text
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem


@dataclass(frozen=True)
class Asked:
    """What a command line asks of all methods. `found_by` says which cluster was taken, and why."""

    problem: Problem
    ranks: int
    cluster: Cluster
    named: str  # Python that makes it
    found_by: str
    directions: tuple[Direction, ...]
    options: dict[str, Any]
    kernel: str | None

    def search(self, tell: Progress | None) -> tuple[BestOfAll, Path | None]:
        """And where the answer is kept, for `auto`."""
        found = find_best_of_all(
            *(self.problem, self.ranks, self.cluster),
            directions=self.directions,
            options=self.options,
            kernel=self.kernel,
            progress=tell,
        )
        if self.kernel is not None:
            return found, None
        return found, keep_answer(self.problem, self.ranks, self.cluster, found, self.options)


def asked_of_all(args: argparse.Namespace, command: str) -> Asked:
    if args.method is not None:
        raise UsageError(
            f"{command} compares all methods; leave --method out, or see simulate --best"
        )
    problem, ranks, options = _problem(args), ranks_of(args), options_of(args)
    directions = directions_of(args)
    if args.cluster is None:
        gpu = gpu_of_driver()
        machine = Machine(gpu, nic_gbits=nic_gbits() if gpu else ())
        cluster, line = find_cluster(machine)
        named = repr(cluster.name)
        if cluster.name not in cluster_names() or cluster != load_cluster(cluster.name):
            named = f"find_cluster({machine!r})[0]"  # no file describes it
    else:
        cluster = load_cluster(args.cluster)
        line, named = f"{cluster.name}, as given", repr(args.cluster)
    return Asked(problem, ranks, cluster, named, line, directions, options, args.kernel)


@collector_paused()
def run(args: argparse.Namespace) -> int:
    asked = asked_of_all(args, "advise")
    problem, ranks, cluster = asked.problem, asked.ranks, asked.cluster
    with progress("searching") as tell, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, kept = asked.search(tell)
    for one in told:
        print(f"mesh-attention advise: {one.message}", file=sys.stderr)
    rows = ranked_methods(found, problem, ranks, cluster)
    chosen = RankedMethod(found.chosen, problem, ranks, cluster)
    least = {one: least_bytes(problem, ranks, one) for one in asked.directions}
    how = problem, cluster, asked.options, asked.named
    python = python_line(found, *how, is_kept=kept is not None)
    return show(
        args,
        lambda: {
            "cluster": cluster.name,
            "cluster_found": asked.found_by,
            "ranks": ranks,
            "reason": found.reason,
            "python": python,
            "least_received_bytes": {one.value: size for one, size in least.items()},
            "chosen": {
                d.value: {"method": s.name, "options": s.options} for d, s in found.chosen.items()
            },
            "plan": found.plan().method,
            "peak_bytes": chosen.peak_bytes,
            "gpu_bytes": gpu_bytes(cluster),
            "fits_gpu": chosen.fits_gpu,
            "place": found.place,
            "kept_in": None if kept is None else str(kept),
            "methods": [row.to_json() for row in rows],
            "refused": found.refused,
            "settings_tried": found.tried,
            "kernels_not_installed": missing_kernels(one.timeline for one in found.chosen.values()),
        },
        lambda: "\n".join(
            [
                _head(problem, ranks, cluster),
                _table(rows, least),
                *_memory_note(rows, cluster),
                *_bound_note(problem),
                *(f"{name}: {reason}" for name, reason in found.refused.items()),
                "",
                f"{found.reason}.",
                *chosen.too_large(),
                "",
                python,
                "",
                *_moved_note(found, is_kept=kept is not None),
                "Kept nowhere: auto does not know of it."
                if kept is None
                else f"Kept in {kept}: where that file is, auto uses it.",
                f"Cluster: {asked.found_by}.",
                f"Best of {found.tried} settings. Modelled, not measured; memory for batch 1.",
                *_simulated_note(rows),
                *missing_kernels_note([one.timeline for one in found.chosen.values()]),
            ]
        ),
    )


_TOO_MUCH = "!"  # beside what needs more memory than there is


def _memory_note(rows: Sequence[RankedMethod], cluster: Cluster) -> list[str]:
    if all(row.fits_gpu for row in rows):
        return []
    return [f"{_TOO_MUCH} needs more than the {bytes_text(gpu_bytes(cluster))} of a GPU."]


def _simulated_note(rows: Sequence[RankedMethod]) -> list[str]:
    if all(row.is_simulated for row in rows):
        return []
    return [
        ">= was not simulated, since no setting tried can be faster than that; simulate --best "
        "--method NAME says how long it takes."
    ]


def _bound_note(problem: Problem) -> list[str]:
    """Under other masks than a full one the bound is true, and out of reach."""
    if problem.mask.is_full:
        return []
    return [
        "least possible: by the visible area alone, as if all of it lay in full boxes; plans come "
        "near to it under a full mask only (docs/theory.md).",
    ]


def _moved_note(found: BestOfAll, *, is_kept: bool) -> list[str]:
    """Where the best has tokens elsewhere than objects have them by default."""
    if not found.place:
        return []
    says = ", ".join(f"{name}={value!r}" for name, value in found.place.items())
    names = "/".join(dict.fromkeys(one.name for one in found.unmoved.values()))
    seconds = sum(one.seconds for one in found.unmoved.values())
    without = f"{names} in {seconds * 1e3:.2f} ms"
    return [
        f"Tokens lie otherwise than by default: all objects that share them say {says}. The best "
        + (f"without, {without}, is kept for auto." if is_kept else f"without is {without}."),
        "",
    ]


def _problem(args: argparse.Namespace) -> Problem:
    if args.model is not None:
        shape = MODELS[args.model]
        for name, value in shape._asdict().items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        if args.causal is None and args.slices is None:
            args.causal = True
    return problem_of(args)


def _head(problem: Problem, ranks: int, cluster: Cluster) -> str:
    nodes = -(-ranks // cluster.node.ranks)
    return (
        f"{ranks} ranks of {cluster.name} ({cluster.gpu.name}), {nodes} "
        f"node{'s' if nodes > 1 else ''} of {cluster.node.ranks}\n{problem_text(problem)}"
    )


def _table(rows: Sequence[RankedMethod], least: dict[Direction, float]) -> str:
    directions = list(least)
    heads = ["method", *map(str, directions)]
    if len(directions) > 1:
        heads.append("both")
    heads += ["MFU", *(f"received {one}" for one in directions), "other nodes", "memory"]
    heads += [f"setting {one}" for one in directions]
    lines = [heads]
    for row in rows:
        cells = [row.name]
        for direction in directions:
            one = row.passes[direction]
            cells.append(f"{'>= ' if one.is_bound else ''}{one.seconds * 1e3:.2f} ms")
        if len(directions) > 1:
            cells.append(f"{'' if row.is_simulated else '>= '}{row.seconds * 1e3:.2f} ms")
        cells.append(f"{'' if row.is_simulated else '<= '}{row.mfu_percent:.1f} %")
        cells += [bytes_text(row.received[one][0]) for one in directions]
        cells.append(bytes_text(sum(between for _, between in row.received.values())))
        cells.append(f"{'' if row.fits_gpu else _TOO_MUCH}{bytes_text(row.peak_bytes)}")
        cells += [row.setting(one) for one in directions]
        lines.append(cells)
    empty = [""] * (2 if len(directions) > 1 else 1)
    bound = ["least possible", *([""] * len(directions)), *empty]
    bound += [bytes_text(least[one]) for one in directions]
    lines.append(bound + [""] * (len(heads) - len(bound)))
    return table(lines)


FLAGS = (
    Flag(
        "--model",
        f"heads of a known model, causal: {', '.join(MODELS)}",
        *(one_of("model", MODELS), "NAME"),
    ),
    Flag(
        "--cluster",
        f"{', '.join(cluster_names())}, or a TOML file (default: by this machine's GPU, or "
        f"{NEAREST})",
        *(str, "NAME|FILE"),
    ),
    Flag("--kernel", "one of the cluster's kernels, where it can", str, "NAME"),
)
COMMAND = Command(
    name="advise",
    summary="which method to use, why, how fast and how much memory: all of them, ranked",
    run=run,
    flags=FLAGS,
    more_flags=add_plan_flags,
    examples=(
        "mesh-attention advise --ranks 32 --model llama-70b --tokens 131072",
        "mesh-attention advise --ranks 64 --heads 64 --kv-heads 8 --tokens 524288 --causal --json",
    ),
)
