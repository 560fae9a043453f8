"""Writes docs/scaling.md: strong and weak scaling of the methods, simulated, and draws some of it.

    python docs/make_scaling.py                      the page; 15 minutes of two cores, with a bar
    python docs/make_scaling.py --max-ranks 256      more rows than the page has; hours
    python docs/make_scaling.py --jobs 8             on so many processes
    python docs/make_scaling.py --kept points.json  goes on where it was ended, from that file

Every cell is a simulation at the best setting that `find_best` finds, each pass for itself. USP
keeps the degree people use, 8 or as many as there are ranks. `search` is the best over all methods
and settings, `default` what `method="auto"` takes, and their cells name the method. Rings of 256
take longest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mesh_attention.choose.auto import find_best, find_default
from mesh_attention.cli.output import progress
from mesh_attention.cost import load_cluster
from mesh_attention.cost.pictures import pyplot
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.startrail import team_sizes
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

PAGE = Path(__file__).with_name("scaling.md")
PICTURE = Path(__file__).with_name("pictures") / "scaling.png"
DEFAULT, SEARCH = "default", "search"
CHOSEN = (DEFAULT, SEARCH)
METHODS = ("mesh", "ring", "ulysses", "usp", "startrail", "mesh-usp", *CHOSEN)
LONG = ("ring", SEARCH)  # as many steps as ranks, or a search of all methods: these begin first
# What a column stands for, where that is not the best of everything the method has.
FIXED: dict[str, Callable[[int], list[dict[str, int]]]] = {
    "usp": lambda ranks: [{"ulysses": min(8, ranks)}],
    # A team of 1 is the ring, which has a column of its own and takes long to simulate.
    "startrail": lambda ranks: [{"team": size} for size in team_sizes(ranks) if size > 1],
}
CLUSTERS = ("paper", "hgx-h100")
K = 1024
HEADS, HEAD_DIM = 64, 128
MOST_RANKS = {"ulysses": HEADS}  # of methods that end somewhere
STRONG = dict.fromkeys((8, 16, 32, 64, 128, 256), 512 * K)
WEAK = {4: 64 * K, 16: 128 * K, 64: 256 * K, 256: 512 * K}

INTRODUCTION = f"""# Scaling, modelled

This page answers: how each method scales on two clusters, which method is the default, and how much
a longer search gains.

**Modelled, not measured**: every number is a [simulation](simulate.md). `paper` is the machine of
the Mesh-Attention paper, with slow point-to-point links; `hgx-h100` has healthy links, on which a
ring does much better.

A cell is MFU in percent, forward/backward, for {HEADS} heads of {HEAD_DIM}, bf16, batch 1. Each
method has its best setting for each pass, except: USP has Ulysses degree 8 (or the number of
ranks), StarTrail has teams of at least 2, and Ulysses stops at one GPU per head. The last two
columns name the method of each pass: `default` is the choice of `ContextParallel`, `search` that of
`advise` and `simulate --best`. Bold: the fastest of a row, both passes together.

To repeat a cell:

```bash
mesh-attention simulate --cluster paper --method mesh --ranks 16 --tokens 512k --heads 64 --best
mesh-attention advise --cluster paper --ranks 16 --tokens 512k --heads 64 --causal
```

![Modelled MFU of methods under a causal mask, strong scaling](pictures/scaling.png)

Written by `python docs/make_scaling.py`, in one minute on 16 cores; `--max-ranks 256` adds rows and
takes much longer.
"""


@dataclass(frozen=True)
class Point:
    cluster: str
    causal: bool
    direction: str
    ranks: int
    tokens: int
    method: str


@dataclass(frozen=True)
class Answer:
    seconds: float
    mfu_percent: float
    name: str = ""  # of the method that was chosen, where there is a choice


def simulate_point(point: Point) -> Answer:
    problem = Problem(point.tokens, HEADS, HEAD_DIM, mask=Mask(causal=point.causal))
    cluster, direction = load_cluster(point.cluster), Direction(point.direction)
    answers = []
    place, only = (problem, point.ranks, cluster), (direction,)
    for fixed in fixed_settings(point):
        if point.method == DEFAULT:
            best = find_default(*place, directions=only)
        else:
            method = None if point.method == SEARCH else point.method
            best = find_best(*place, method=method, directions=only, options=fixed)
        timeline = best.timeline(direction)
        name = best.chosen[direction].name if point.method in CHOSEN else ""
        answers.append(Answer(timeline.runtime_seconds, timeline.mfu_percent, name))
    return min(answers, key=lambda answer: answer.seconds)


def fixed_settings(point: Point) -> list[dict[str, int]]:
    """What the search keeps, one search for each; nothing for most methods."""
    return FIXED.get(point.method, lambda _: [{}])(point.ranks)


def rows_of(cluster: str, scaling: dict[int, int]) -> list[Point]:
    """The first cell of every row of a table."""
    return [
        Point(cluster, causal, Direction.FORWARD.value, ranks, tokens, METHODS[0])
        for causal in (False, True)
        for ranks, tokens in scaling.items()
    ]


def cells(row: Point) -> list[tuple[Point, ...]]:
    """Both passes of each method."""
    return [
        tuple(replace(row, method=method, direction=direction.value) for direction in Direction)
        for method in METHODS
        if row.ranks <= MOST_RANKS.get(method, row.ranks)
    ]


def simulate_all(points: Iterable[Point], jobs: int, kept: Path | None) -> dict[Point, Answer]:
    """Each point once, the long ones first. `kept`: a file of those that are known; the others
    are added to it point by point."""
    answers = _known(kept)
    wanted = set(points)
    missing = wanted - answers.keys()
    ordered = sorted(missing, key=lambda p: (p.ranks, p.method in LONG), reverse=True)
    with ProcessPoolExecutor(jobs) as pool, progress("simulating") as tell:
        waiting = {pool.submit(simulate_point, point): point for point in ordered}
        for number, done in enumerate(as_completed(waiting), len(wanted) - len(missing) + 1):
            point = waiting[done]
            answers[point] = done.result()
            if kept is not None:
                with kept.open("a") as file:
                    print(json.dumps([asdict(point), asdict(answers[point])]), file=file)
            if tell:
                tell(number, len(wanted))
            else:  # nobody watches a bar: a line for each in its place
                print(f"{number} of {len(wanted)}: {point}", file=sys.stderr, flush=True)
    return answers


def _known(kept: Path | None) -> dict[Point, Answer]:
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    return {Point(**point): Answer(**answer) for point, answer in map(json.loads, lines)}


def table(cluster: str, scaling: dict[int, int], answers: dict[Point, Answer]) -> str:
    lines = [["mask", "GPUs", "tokens", *METHODS], ["---"] * (3 + len(METHODS))]
    for row in rows_of(cluster, scaling):
        results = {cell[0].method: [answers[point] for point in cell] for cell in cells(row)}
        fastest = min(sum(part.seconds for part in passes) for passes in results.values())
        head = ["causal" if row.causal else "full", str(row.ranks), f"{row.tokens // K}K"]
        texts = {method: cell_text(passes, fastest) for method, passes in results.items()}
        lines.append([*head, *(texts.get(method, "-") for method in METHODS)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell_text(passes: list[Answer], fastest: float) -> str:
    text = "/".join(f"{part.mfu_percent:.1f}" for part in passes)
    names = dict.fromkeys(part.name for part in passes if part.name)
    text += f" {', '.join(names)}" if names else ""
    return f"**{text}**" if sum(part.seconds for part in passes) == fastest else text


def draw(answers: dict[Point, Answer], strong: dict[int, int], clusters: tuple[str, ...]) -> None:
    """MFU of strong scaling under a causal mask: a row for each cluster, a column for each pass."""
    plt = pyplot()
    size = (11, 3.4 * len(clusters) + 0.5)
    figure, axes = plt.subplots(len(clusters), len(Direction), figsize=size, squeeze=False)
    for row, cluster in zip(axes, clusters, strict=True):
        for axis, direction in zip(row, Direction, strict=True):
            for method in METHODS:
                rows = [Point(cluster, True, direction.value, n, strong[n], method) for n in strong]
                points = [point for point in rows if point in answers]
                mfu = [answers[point].mfu_percent for point in points]
                how = (
                    {"color": "black", "lw": 2.2, "ls": "--" if method == SEARCH else ":"}
                    if method in CHOSEN
                    else {"marker": "o"}
                )
                axis.plot([point.ranks for point in points], mfu, label=method, **how)
            axis.set_xscale("log", base=2)
            axis.set_xticks([*strong], [*strong])
            axis.set_ylim(0, None)
            axis.set_title(f"{cluster}, {direction.value}")
            axis.grid(alpha=0.3)
        row[0].set_ylabel("MFU, %, modelled")
    for axis in axes[-1]:
        axis.set_xlabel(f"GPUs, {max(strong.values()) // K}K tokens, {HEADS} heads, causal")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=100)


def page(
    strong: dict[int, int],
    weak: dict[int, int],
    clusters: tuple[str, ...],
    jobs: int,
    *,
    kept: Path | None = None,
    picture: bool = False,
) -> str:
    """The whole page."""
    sections = {
        "Strong scaling: a fixed sequence on more GPUs": strong,
        "Weak scaling: tokens grow with the square root of the GPUs, work per GPU stays": weak,
    }
    points = [
        point
        for scaling in sections.values()
        for cluster in clusters
        for row in rows_of(cluster, scaling)
        for cell in cells(row)
        for point in cell
    ]
    answers = simulate_all(points, jobs, kept)
    if picture:
        draw(answers, strong, clusters)
    parts = [INTRODUCTION]
    for title, scaling in sections.items():
        parts.append(f"## {title}\n")
        parts += [f"### {name}\n\n{table(name, scaling, answers)}\n" for name in clusters]
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write docs/scaling.md from simulations.")
    parser.add_argument("--max-ranks", type=int, default=128, help="leave larger runs out")
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS, help="clusters to simulate")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--kept", type=Path, help="a file of points, to go on from")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    args = parser.parse_args(arguments)
    strong, weak = (
        {ranks: tokens for ranks, tokens in scaling.items() if ranks <= args.max_ranks}
        for scaling in (STRONG, WEAK)
    )
    whole = args.output == PAGE
    clusters = tuple(args.clusters)
    text = page(strong, weak, clusters, args.jobs, kept=args.kept, picture=whole)
    args.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
