"""`mesh-attention advise`: which method to use, how fast it is, and how much memory it needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mesh_attention.cli.command import Command, Flag, UsageError
from mesh_attention.cli.installed import missing_kernels_note
from mesh_attention.cli.models import MODELS
from mesh_attention.cli.options import (
    add_plan_flags,
    directions_of,
    options_of,
    problem_of,
    ranks_of,
)
from mesh_attention.cli.output import progress, show, table
from mesh_attention.cli.values import one_of
from mesh_attention.cluster.answers import keep_answer
from mesh_attention.cluster.auto import BestOfAll, Standing, find_best_of_all
from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.found import (
    NEAREST,
    Machine,
    find_cluster,
    gpu_of_driver,
    nic_gbits,
)
from mesh_attention.cluster.load import cluster_names, load_cluster
from mesh_attention.cluster.one_rank import estimate
from mesh_attention.cluster.planning import plan_on, setting_of
from mesh_attention.cluster.reasons import moved
from mesh_attention.plan.bounds import least_bytes
from mesh_attention.plan.draw.summary import bytes_text, problem_text
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.runs import Run, visible_pairs


def run(args: argparse.Namespace) -> int:
    if args.method is not None:
        raise UsageError("advise compares all methods; leave --method out, or see simulate --best")
    problem, ranks, options = _problem(args), ranks_of(args), options_of(args)
    directions = directions_of(args)
    if args.cluster is None:
        gpu = gpu_of_driver()
        cluster, line = find_cluster(Machine(gpu, nic_gbits=nic_gbits() if gpu else ()))
    else:
        cluster = load_cluster(args.cluster)
        line = f"{cluster.name}, as given"
    with progress("searching") as tell:
        found = find_best_of_all(
            *(problem, ranks, cluster),
            directions=directions,
            options=options,
            kernel=args.kernel,
            progress=tell,
        )
    kept = None
    if args.kernel is None:
        kept = keep_answer(problem, ranks, cluster, found, options)
    rows = _rows(found, problem, ranks, cluster)
    least = {one: least_bytes(problem, ranks, one) for one in directions}
    python = _python(found, problem, cluster, options)
    return show(
        args,
        lambda: {
            "cluster": cluster.name,
            "cluster_found": line,
            "ranks": ranks,
            "reason": found.reason,
            "python": python,
            "least_received_bytes": {one.value: size for one, size in least.items()},
            "chosen": {
                d.value: {"method": s.name, "options": s.options} for d, s in found.chosen.items()
            },
            "plan": found.plan().method,
            "kept_in": None if kept is None else str(kept),
            "methods": [row.to_json() for row in rows],
            "refused": found.refused,
            "settings_tried": found.tried,
        },
        lambda: "\n".join(
            [
                _head(problem, ranks, cluster),
                _table(rows, least),
                *(f"{name}: {reason}" for name, reason in found.refused.items()),
                "",
                f"{found.reason}.",
                "",
                python,
                "",
                f"Cluster: {line}.",
                f"Best of {found.tried} settings. Modelled, not measured; memory for batch 1; ~ is "
                "expected by one rank, not simulated.",
                *missing_kernels_note([one.timeline for one in found.chosen.values()]),
            ]
        ),
    )


def _problem(args: argparse.Namespace) -> Problem:
    if args.model is not None:
        shape = MODELS[args.model]
        for name, value in shape._asdict().items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        if args.causal is None and args.slices is None:
            args.causal = True
    return problem_of(args)


@dataclass(frozen=True)
class _Row:
    """A method at its best in every pass asked for."""

    passes: dict[Direction, Standing]
    problem: Problem
    num_ranks: int
    cluster: Cluster

    @property
    def name(self) -> str:
        return next(iter(self.passes.values())).name

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.passes.values())

    @property
    def is_simulated(self) -> bool:
        return all(one.timeline is not None for one in self.passes.values())

    @cached_property
    def plans(self) -> dict[Direction, Plan]:
        return {
            direction: one.timeline.plan
            if one.timeline is not None
            else plan_on(
                *(self.cluster, self.problem, self.num_ranks),
                **{"method": one.name, "directions": (direction,), **one.options},
            )
            for direction, one in self.passes.items()
        }

    @property
    def mfu_percent(self) -> float:
        everything = [Run(0, self.problem.q_tokens)], [Run(0, self.problem.keys)]
        pairs = int(visible_pairs(*everything, self.problem.rows)[0, 0])
        flops = sum(
            self.problem.flops(pairs, backward=one is Direction.BACKWARD) for one in self.passes
        )
        peak = self.cluster.gpu.peak_tflops * 1e12 * self.num_ranks
        return 100 * flops / (peak * self.seconds) if self.seconds else 0.0

    @cached_property
    def received(self) -> dict[Direction, tuple[int, int]]:
        """In all, and from other nodes."""
        return {one: moved(plan, plan.direction(one)) for one, plan in self.plans.items()}

    @cached_property
    def peak_bytes(self) -> int:
        peaks = []
        for direction, one in self.passes.items():
            if one.timeline is not None:
                peaks.append(one.timeline.peak_bytes)
            else:
                middle = (self.num_ranks // 2,)
                seen = estimate(self.plans[direction], self.cluster, direction, ranks=middle)
                peaks.append(seen.peak_bytes)
        return max(peaks)

    def setting(self, direction: Direction) -> str:
        plan, options = self.plans[direction], self.passes[direction].options
        setting = setting_of(plan, plan.direction(direction), {})
        words = {name: str(setting.get(name) or _short(value)) for name, value in options.items()}
        for name in ("ulysses", "tile", "team"):
            if name in setting:
                words.setdefault(name, str(setting[name]))
        return " ".join(f"{name}={value}" for name, value in words.items()) or "-"

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.name,
            "seconds": self.seconds,
            "mfu_percent": self.mfu_percent,
            "peak_bytes": self.peak_bytes,
            "passes": {
                direction.value: {
                    "seconds": one.seconds,
                    "simulated": one.timeline is not None,
                    "options": one.options,
                    "received_bytes": self.received[direction][0],
                    "received_bytes_from_other_nodes": self.received[direction][1],
                }
                for direction, one in self.passes.items()
            },
        }


def _short(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _rows(found: BestOfAll, problem: Problem, ranks: int, cluster: Cluster) -> list[_Row]:
    by_name: dict[str, dict[Direction, Standing]] = {}
    for direction, standings in found.standings.items():
        for one in standings:
            by_name.setdefault(one.name, {})[direction] = one
    rows = [_Row(passes, problem, ranks, cluster) for passes in by_name.values()]
    return sorted(rows, key=lambda row: row.seconds)


def _head(problem: Problem, ranks: int, cluster: Cluster) -> str:
    nodes = -(-ranks // cluster.node.ranks)
    return (
        f"{ranks} ranks of {cluster.name} ({cluster.gpu.name}), {nodes} "
        f"node{'s' if nodes > 1 else ''} of {cluster.node.ranks}\n{problem_text(problem)}"
    )


def _table(rows: Sequence[_Row], least: dict[Direction, float]) -> str:
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
            about = "" if one.timeline is not None else "~"
            cells.append(f"{about}{one.seconds * 1e3:.2f} ms")
        if len(directions) > 1:
            cells.append(f"{'' if row.is_simulated else '~'}{row.seconds * 1e3:.2f} ms")
        cells.append(f"{row.mfu_percent:.1f} %")
        cells += [bytes_text(row.received[one][0]) for one in directions]
        cells.append(bytes_text(sum(between for _, between in row.received.values())))
        cells.append(bytes_text(row.peak_bytes))
        cells += [row.setting(one) for one in directions]
        lines.append(cells)
    empty = [""] * (2 if len(directions) > 1 else 1)
    bound = ["least possible", *([""] * len(directions)), *empty]
    bound += [bytes_text(least[one]) for one in directions]
    lines.append(bound + [""] * (len(heads) - len(bound)))
    return table(lines)


def _python(found: BestOfAll, problem: Problem, cluster: Cluster, options: dict[str, Any]) -> str:
    """A line to paste: the options themselves, where both passes have the same, and otherwise
    `auto`, which finds the answer kept on this machine."""
    sizes = f"seq_len={problem.q_tokens}, num_heads={problem.num_heads}, "
    if problem.kv_heads != problem.num_heads:
        sizes += f"num_kv_heads={problem.kv_heads}, "
    sizes += f"head_dim={problem.head_dim}, "
    if problem.v_dim != problem.head_dim:
        sizes += f"v_head_dim={problem.v_dim}, "
    if problem.keys != problem.q_tokens:
        sizes += f"kv_seq_len={problem.keys}, "
    plain = problem.mask.is_full or problem.mask == type(problem.mask)(causal=True)
    sizes += f"causal={problem.mask.causal}" if plain else "mask=mask"
    chosen = [*found.chosen.values()]
    if len({(one.name, repr(sorted(one.options.items()))) for one in chosen}) == 1:
        given = {**options, **chosen[0].options}
        how = "".join(f", {name}={value!r}" for name, value in given.items())
        how = f'method="{chosen[0].name}"{how}, ranks_per_node={cluster.node.ranks}'
    else:
        how = "".join(f", {name}={value!r}" for name, value in options.items())
        how = f'method="auto"{how}, cluster="{cluster.name}"'
    return f"cp = ContextParallel(group, {sizes}, {how})"


COMMAND = Command(
    name="advise",
    summary="which method to use, why, how fast and how much memory: all of them, ranked",
    run=run,
    flags=(
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
    ),
    more_flags=add_plan_flags,
    examples=(
        "mesh-attention advise --ranks 32 --model llama-70b --tokens 131072",
        "mesh-attention advise --ranks 64 --heads 64 --kv-heads 8 --tokens 524288 --causal --json",
    ),
)
