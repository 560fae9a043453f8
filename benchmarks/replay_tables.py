"""Whole tables of replays: compute measured on one GPU, the network modelled.

    python benchmarks/replay_tables.py --prepare cells/ --tables auto     # plans; any computer
    python benchmarks/replay_tables.py --cells cells/ --json results.json  # on a GPU

Cells are planned before, by `--workers` processes, and stored: planning and simulating 256 ranks
takes longer than replaying one of them, and the GPU measures 1 to 5 % slower meanwhile. A cell that
fails or was not prepared is reported and passed over; `--limit` seconds end the repetitions of a
cell, and no cell begins after `--budget` seconds. All ranks of a cell are replayed that end nearly
last in the simulation, and the slowest of them counts. Results are written after every cell.
`--show results.json` prints the table again, with the goals.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from replay.rank import RankToReplay, may_be_slowest, rank_to_replay
from script import host, provenance, save, script_parser

from mesh_attention.choose.auto import find_best, find_default
from mesh_attention.cli.output import table
from mesh_attention.cost.planning import setting_of
from mesh_attention.errors import MeshAttentionError
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import AUTO
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

K = 1024
TABLES = ("auto", "default")
SMS = 16
# Goals for MFU in percent on `hgx-h100` with at most 14 units in any pass, and more where bytes are
# free; on `paper`; and for few KV heads in TFLOP/s. By pass and whether the mask is causal.
GOALS = {
    ("forward", False): (65.0, 67.0, 65.0),
    ("forward", True): (61.0, 63.0, 60.0),
    ("backward", False): (56.0, 57.0, 55.0),
    ("backward", True): (55.0, 56.0, 54.0),
}
GROUPED_GOALS = {"forward": 660.0, "backward": 560.0}
SHOWN = {"tile", "ulysses", "units_per_node", "team", "ring", "head_slices", "chunks"}
SHOWN |= {"even_chunks", "short_start", "combine", "layout", "keep"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A method at its best setting, or with `auto` the best of all methods, in one pass."""

    table: str
    cluster: str
    method: str
    ranks: int
    tokens: int
    causal: bool
    direction: str
    kv_heads: int = 64
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        method = "default" if self.table == "default" else self.method
        words = [self.cluster, method, str(self.ranks), f"{self.tokens // K}K"]
        words += ["causal" if self.causal else "full", self.direction]
        words += [f"kv{self.kv_heads}"] if self.kv_heads != 64 else []
        for key, value in self.options.items():
            text = "x".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f"{key}={text}")
        return "-".join(words)

    @property
    def problem(self) -> Problem:
        mask = Mask(causal=self.causal)
        return Problem(self.tokens, 64, 128, num_kv_heads=self.kv_heads, mask=mask)


def cells() -> Iterator[Cell]:
    """`default` has the problems of `auto` with the default, which leaves tokens where they are."""
    auto = list(_auto())
    yield from auto
    yield from (replace(cell, table="default") for cell in auto if cell.method == AUTO)


def _auto() -> Iterator[Cell]:
    """The best of all methods; beside it the box of heads, queries and keys that receives the least
    (at most 14 units in any pass); and the published problem of few KV heads."""
    least = {"ulysses": 64, "tile": (2, 2)}
    for causal, direction in product((False, True), Direction):
        sizes = (256, 512 * K, causal, direction.value)
        yield Cell("auto", "hgx-h100", AUTO, *sizes)
        yield Cell("auto", "hgx-h100", "mesh-usp", *sizes, options=least)
    for ranks, direction in product((8, 16, 32, 64), Direction):
        yield Cell("auto", "hgx-h100", AUTO, ranks, ranks * 8 * K, True, direction.value, 8)
    for cluster, tokens in (("hgx-h100", 1024 * K), ("paper", 512 * K)):
        for causal, direction in product((False, True), Direction):
            yield Cell("auto", cluster, AUTO, 256, tokens, causal, direction.value)


def prepare_cell(cell: Cell, folder: Path) -> None:
    """Plans, simulates, and stores the parts of ranks that may be the slowest."""
    cluster, direction = load_cluster(cell.cluster), Direction(cell.direction)
    how: dict[str, Any] = {"directions": (direction,), "options": cell.options}
    if cell.table == "default":
        choice = find_default(cell.problem, cell.ranks, cluster, **how)
    else:
        method = None if cell.method == AUTO else cell.method
        choice = find_best(cell.problem, cell.ranks, cluster, method=method, **how)
    timeline, options = choice.timeline(direction), choice.chosen[direction].options
    setting = setting_of(timeline.plan, timeline.pass_, options)
    texts = {key: str(value) for key, value in setting.items()}
    if cell.method == AUTO:
        texts["method"] = timeline.plan.method
    parts = []
    for rank in may_be_slowest(timeline):
        part = rank_to_replay(timeline, rank)
        part.predicted["setting"] = texts
        parts.append(part.to_json())
    path = path_of(cell, folder)
    part_of_it = path.with_suffix(".part")
    with gzip.open(part_of_it, "wt", encoding="utf-8") as file:
        json.dump(parts, file)
    part_of_it.rename(path)


def load_cell(cell: Cell, folder: Path) -> list[RankToReplay]:
    with gzip.open(path_of(cell, folder), "rt", encoding="utf-8") as file:
        return [RankToReplay.from_json(part) for part in json.load(file)]


def path_of(cell: Cell, folder: Path) -> Path:
    return folder / f"{cell.name}.json.gz"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="plan the cells, and stop")
    parser.add_argument("--cells", type=Path, metavar="FOLDER", help="run what was prepared there")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of a result")
    parser.add_argument("--tables", nargs="+", default=TABLES, choices=TABLES)
    parser.add_argument("--match", default="", help="only cells with this in their name")
    parser.add_argument("--repeats", type=int, default=5, help="at most; fewer for long runs")
    parser.add_argument("--sms", type=int, default=SMS, help="that a communication takes")
    parser.add_argument("--workers", type=int, default=2, help="processes that plan cells")
    parser.add_argument("--limit", type=float, default=6.0, help="seconds of a cell")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds of everything")
    args = parser.parse_args()
    if args.show:
        try:
            result = json.loads(args.show.read_text()) if args.show.is_file() else None
        except ValueError:
            result = None
        if not isinstance(result, dict) or not {"rows", "what", "failed"} <= set(result):
            parser.error(f"{args.show} is not a result of this script")
        show(result)
        return
    chosen = [c for c in cells() if c.table in args.tables and args.match in c.name]
    if not chosen:
        parser.error("no cell is of these tables, with this in its name")
    folder = args.prepare or args.cells
    if folder is None:
        parser.error("give --prepare, --cells or --show")
    if not folder.is_dir() and (folder.exists() or not args.prepare):
        parser.error(f"{folder} is no folder")
    if args.prepare:
        _prepare_all(chosen, args.prepare, args.workers)
        return
    _run(chosen, args)


def _run(chosen: list[Cell], args: argparse.Namespace) -> None:
    import torch
    from one_rank import need_cuda
    from replay.measure import check_device, measure

    need_cuda()
    result = provenance() | {
        "machine": torch.cuda.get_device_name(check_device(args.sms)),
        "host": host(),
        "torch": torch.__version__,
        "what": "compute measured, network modelled",
        "rows": [],
        "failed": {},
    }
    begin = time.monotonic()
    torch.manual_seed(0)
    for cell in chosen:
        try:
            if time.monotonic() - begin > args.budget:
                raise MeshAttentionError("no time left")
            ranks = load_cell(cell, args.cells)
            lasts = ranks[0].predicted["runtime_seconds"]
            replays = [
                measure(
                    rank,
                    sms=args.sms,
                    repeats=min(args.repeats, 5 if lasts < 0.1 else 3 if lasts < 0.3 else 1),
                    # A run cannot be broken off: a run that cannot be repeated in time runs once.
                    limit_seconds=max(0.0, args.limit - 2 * lasts) / len(ranks),
                )
                for rank in ranks
            ]
        except (OSError, RuntimeError, ValueError) as error:  # out of memory is a RuntimeError
            result["failed"][cell.name] = f"{type(error).__name__}: {error}"[:300]
            print(f"{cell.name}: {result['failed'][cell.name]}", flush=True)
            continue
        slowest = max(replays, key=lambda replay: replay.seconds)
        row = slowest.to_json() | {
            "replayed_ranks": {str(replay.part.rank): replay.seconds for replay in replays},
            "table": cell.table,
            "name": cell.name,
            "tokens": cell.tokens,
            "causal": cell.causal,
            "kv_heads": cell.kv_heads,
            "options": {key: str(value) for key, value in cell.options.items()},
        }
        result["rows"].append(row)
        print("  ".join(_line(row)), flush=True)
        save(args.json, result)
    print(f"{len(result['rows'])} cells in {time.monotonic() - begin:.0f} s", flush=True)
    save(args.json, result)
    show(result)


def _prepare_all(chosen: list[Cell], folder: Path, workers: int) -> None:
    """A cell that is stored already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        missing = [cell for cell in chosen if not path_of(cell, folder).exists()]
        waiting = {pool.submit(prepare_cell, cell, folder): cell for cell in missing}
        for future in as_completed(waiting):
            # Whatever went wrong, the other cells go on.
            print(f"{waiting[future].name}: {future.exception() or 'planned'}"[:300], flush=True)


def show(result: dict[str, Any]) -> None:
    """All rows beside computation alone, what the simulator says, and the goals."""
    title = ["cluster ranks tokens heads mask pass", "asked for", "chosen", "SMs", "ms (MFU %)"]
    title += ["alone", "simulated", "GiB", "goal"]
    print(f"\n{result['what']}; {result['machine']}, {result['date']}, commit {result['commit']}")
    print(table([title, *map(_line, result["rows"])]))
    for name, reason in result["failed"].items():
        print(f"left out: {name}: {reason}")


def _line(row: Row) -> list[str]:
    asked = ["auto" if "-auto-" in row["name"] else row["method"]]
    asked = ["default"] if row["table"] == "default" else asked
    asked += [f"{k} {v}" for k, v in row["options"].items()]
    setting = dict(row["setting"])
    words = [setting.pop("method", row["method"])]
    words += [f"{k} {v}" for k, v in setting.items() if k in SHOWN and v not in ("1", "None")]
    problem = [row["cluster"], str(row["ranks"]), f"{row['tokens'] // 1024}K"]
    problem += [f"64:{row['kv_heads']}", "causal" if row["causal"] else "full", row["direction"]]
    return [
        " ".join(problem),
        " ".join(asked),
        " ".join(words),
        str(row["sms"]),
        f"{row['seconds'] * 1e3:.1f} ({row['mfu_percent']:.1f})",
        f"{row['compute_seconds'] * 1e3:.1f} ({row['compute_mfu_percent']:.1f})",
        f"{row['predicted_seconds'] * 1e3:.1f} ({row['predicted_mfu_percent']:.1f})",
        f"{row['peak_bytes'] / 2**30:.2f}",
        _goal(row),
    ]


def _goal(row: Row) -> str:
    if row["table"] not in ("auto", "default"):
        return ""
    rate = row["mfu_percent"]
    least, more, paper = GOALS[row["direction"], row["causal"]]
    goal = paper if row["cluster"] == "paper" else more if "-auto-" in row["name"] else least
    if row["kv_heads"] != 64:
        rate, goal = rate / 100 * row["peak_tflops"], GROUPED_GOALS[row["direction"]]
    return f"{rate:.1f} of {goal:g} {'reached' if rate >= goal else 'MISSED'}"


if __name__ == "__main__":
    main()
