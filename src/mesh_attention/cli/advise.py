"""`mesh-attention advise`: which method to use, how fast it is, and how much memory it needs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_attention.choose.auto import PlanChoice, find_best, find_default
from mesh_attention.choose.explain import TIE_TEXT, about, behind, seconds_of
from mesh_attention.choose.plan_file import python_line, write_choice
from mesh_attention.choose.ranking import RankedMethod, Ranking, name_of, ranked
from mesh_attention.choose.scored import gpu_bytes
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
from mesh_attention.cost.detect_cluster import (
    NEAREST,
    Machine,
    find_cluster,
    gpu_of_driver,
    nic_gbits,
)
from mesh_attention.cost.planning import collector_paused
from mesh_attention.files import check_writable
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names, load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.problem import Problem, problem_text
from mesh_attention.plan.read.count import least_bytes


@dataclass(frozen=True)
class AskedOfAll:
    """What a command line asks of all methods. `found_by` says which cluster was taken, and why."""

    problem: Problem
    ranks: int
    cluster: Cluster
    found_by: str
    directions: tuple[Direction, ...]
    options: dict[str, Any]
    kernel: str | None

    def search(self, tell: Progress | None) -> PlanChoice:
        return find_best(
            *(self.problem, self.ranks, self.cluster),
            directions=self.directions,
            options=self.options,
            kernel=self.kernel,
            progress=tell,
        )

    def default(self) -> PlanChoice | None:
        """What `auto` takes, which knows of no kernel that is asked for."""
        if self.kernel is not None:
            return None
        how = self.problem, self.ranks, self.cluster, self.options
        return find_default(*how, directions=self.directions)


def asked_of_all(args: argparse.Namespace, command: str) -> AskedOfAll:
    if args.method is not None:
        raise UsageError(
            f"{command} compares all methods; leave --method out, or see simulate --best"
        )
    problem, ranks, options = _problem(args), ranks_of(args), options_of(args)
    if args.cluster is None:
        gpu = gpu_of_driver()
        cluster, line = find_cluster(Machine(gpu, nic_gbits=nic_gbits() if gpu else ()))
    else:
        cluster = load_cluster(args.cluster)
        line = f"{cluster.name}, as given"
    return AskedOfAll(problem, ranks, cluster, line, directions_of(args), options, args.kernel)


@collector_paused()
def run(args: argparse.Namespace) -> int:
    asked = asked_of_all(args, "advise")
    problem, ranks, cluster = asked.problem, asked.ranks, asked.cluster
    if args.output is not None:
        check_writable(args.output)
    with progress("searching") as tell:
        ranking = ranked(asked.search(tell), asked.default())
    choice, chosen = ranking.choice, ranking.chosen
    if args.output is not None:
        write_choice(args.output, choice.question)
    least = {one: least_bytes(problem, ranks, one) for one in asked.directions}
    python, auto = python_line(choice, args.output), _default_note(chosen, ranking.default)
    return show(
        args,
        lambda: {
            "cluster": cluster.name,
            "cluster_found": asked.found_by,
            "ranks": ranks,
            "reason": ranking.reason,
            "python": python,
            "default": ranking.default and ranking.default.to_json() | {"text": auto},
            "least_received_bytes": {one.value: size for one, size in least.items()},
            "chosen": chosen.to_json(),
            "gpu_bytes": gpu_bytes(cluster),
            "place": choice.place,
            "methods": [row.to_json() | {"tie": ranking.is_tie(row)} for row in ranking.rows],
            "refused": ranking.refused,
            "settings_tried": choice.tried,
            "kernels_not_installed": missing_kernels(
                one.timeline for one in choice.chosen.values()
            ),
        },
        lambda: "\n".join(
            [
                _head(problem, ranks, cluster),
                _table(ranking, least),
                *_marks_note(ranking, cluster),
                *_bound_note(problem),
                *(f"{name}: {reason}" for name, reason in ranking.refused.items()),
                "",
                ranking.reason,
                *chosen.too_large(),
                *([auto] if auto else []),
                "",
                python,
                *([] if args.output is None else [f"The plan is in {args.output}."]),
                "",
                *_moved_note(choice),
                f"Cluster: {asked.found_by}.",
                f"Best of {choice.tried} settings. Modelled, not measured; memory for batch 1.",
                *missing_kernels_note([one.timeline for one in choice.chosen.values()]),
            ]
        ),
    )


_TOO_MUCH, _TIE = "!", "="  # beside what needs more memory than there is, and what is as fast


def _marks_note(ranking: Ranking, cluster: Cluster) -> list[str]:
    rows = ranking.rows
    notes = {
        f"{_TIE} as fast as the choice: {TIE_TEXT}.": any(map(ranking.is_tie, rows[1:])),
        "about: not simulated, as one rank sees it; ranks that wait for each other take longer.": (
            not all(row.is_simulated for row in rows)
        ),
        f"{_TOO_MUCH} needs more than the {bytes_text(gpu_bytes(cluster))} of a GPU.": (
            not all(row.fits_gpu for row in rows)
        ),
    }
    return [text for text, holds in notes.items() if holds]


def _default_note(chosen: RankedMethod, default: RankedMethod | None) -> str:
    """How far the default is behind; nothing where it is not known."""
    if default is None:
        return ""
    what = 'The default, method="auto",'
    if [one.key for one in default.passes.values()] == [one.key for one in chosen.passes.values()]:
        return f"{what} makes the same plan."
    late = behind(default.seconds, chosen.seconds)
    return f"{what} is {default.name}: {about(default.passes)}, {late}."


def _bound_note(problem: Problem) -> list[str]:
    """Under other masks than a full one the bound is true, and out of reach."""
    if problem.mask.is_full:
        return []
    return [
        "least possible: by the visible area alone, as if all of it lay in full boxes; plans come "
        "near to it under a full mask only (docs/theory.md).",
    ]


def _moved_note(choice: PlanChoice) -> list[str]:
    """Where the best has tokens elsewhere than objects have them by default."""
    if not choice.place:
        return []
    says = ", ".join(f"{name}={value!r}" for name, value in choice.place.items())
    late = behind(seconds_of(choice.unmoved), choice.seconds)
    return [
        f"Tokens lie otherwise than by default: all objects that share them say {says}. The best "
        f"without is {name_of(choice.unmoved)}: {about(choice.unmoved)}, {late}.",
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


def _table(ranking: Ranking, least: dict[Direction, float]) -> str:
    directions = list(least)
    heads = ["method", *map(str, directions)]
    if len(directions) > 1:
        heads.append("both")
    heads += ["MFU", *(f"received {one}" for one in directions), "other nodes", "memory"]
    heads += [f"setting {one}" for one in directions]
    lines = [heads]
    for row in ranking.rows:
        tie = row is not ranking.chosen and ranking.is_tie(row)
        cells = [f"{row.name}{f' {_TIE}' if tie else ''}"]
        cells += [_time(one.seconds, one.is_simulated) for one in row.passes.values()]
        if len(directions) > 1:
            cells.append(_time(row.seconds, row.is_simulated))
        cells.append(f"{row.mfu_percent:.1f} %")
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


def _time(seconds: float, is_simulated: bool) -> str:
    return f"{'' if is_simulated else 'about '}{seconds * 1e3:.2f} ms"


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
    flags=(
        *FLAGS,
        Flag("--output", "write the plan for ContextParallel(plan=...)", Path, "FILE.json"),
    ),
    more_flags=add_plan_flags,
    examples=(
        "mesh-attention advise --ranks 32 --model llama-70b --tokens 131072",
        "mesh-attention advise --ranks 64 --heads 64 --kv-heads 8 --tokens 524288 --causal --json",
        "mesh-attention advise --ranks 32 --model llama-70b --output plan.json",
    ),
)
