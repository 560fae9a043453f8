"""Whole tables of replays: compute measured on one GPU, the network modelled.

    python benchmarks/replay_tables.py --prepare cells/                   # plans; any computer
    python benchmarks/replay_tables.py --cells cells/ --json results.json  # on a GPU

`replay_cells.py` lists the cells. What is not prepared is planned by `--workers` processes while
the GPU runs other cells. A cell that fails, or that its method refuses, is reported and passed
over; `--limit` seconds end the repetitions of a cell, `--budget` seconds the whole run. Of a cell
those ranks are replayed that the simulator lets end nearly last, and the slowest of them counts.
Results are written after every cell. `--show results.json` prints the tables again. Published
figures and goals stand beside the results.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from device_times import need_cuda
from provenance import taken
from replay.rank import RankToReplay
from replay_cells import TABLES, Cell, cells, load, prepare
from replay_show import show

SMS = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="plan the cells, and stop")
    parser.add_argument("--cells", type=Path, metavar="FOLDER", help="run what was prepared there")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of a result")
    parser.add_argument("--tables", nargs="+", default=TABLES, choices=TABLES)
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--match", default="", help="only cells with this in their name")
    parser.add_argument("--repeats", type=int, default=5, help="at most; fewer for long runs")
    parser.add_argument("--sms", type=int, nargs="+", default=[SMS])
    parser.add_argument("--same-priority", action="store_true")
    parser.add_argument("--workers", type=int, default=2, help="processes that plan cells")
    parser.add_argument("--limit", type=float, default=6.0, help="seconds of a cell")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds of everything")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    if given.show:
        try:
            found = json.loads(given.show.read_text()) if given.show.is_file() else None
        except ValueError:
            found = None
        if not isinstance(found, dict) or not {"rows", "what", "failed"} <= set(found):
            parser.error(f"{given.show} is not a result of this script")
        show(found)
        return
    chosen = [
        cell
        for cell in cells()
        if cell.table in given.tables
        and (not given.methods or cell.method in given.methods)
        and given.match in cell.name
    ]
    if not chosen:
        parser.error("no cell is of these tables and methods, with this in its name")
    folder = given.prepare or given.cells
    if folder is not None and folder.exists() and not folder.is_dir():
        parser.error(f"{folder} is no folder")
    if given.prepare:
        for cell, share in _planned(chosen, given.prepare, given.workers, math.inf):
            print(f"{cell.name}: {share if isinstance(share, str) else 'planned'}", flush=True)
        return
    if given.cells is None:
        parser.error("give --prepare, --cells or --show")
    need_cuda()
    _run(chosen, given)


def _run(chosen: list[Cell], given: argparse.Namespace) -> None:
    import torch
    from replay.measure import check_device, measure

    device = check_device(max(given.sms))
    report: dict[str, Any] = {
        **taken(),
        "machine": torch.cuda.get_device_name(device),
        "host": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "what": "compute measured, network modelled",
        "rows": [],
        "failed": {},
    }
    begin = time.monotonic()
    torch.manual_seed(0)
    for cell, shares in _planned(chosen, given.cells, given.workers, begin + given.budget):
        if isinstance(shares, str):
            report["failed"][cell.name] = shares
            print(f"{cell.name}: {shares}", flush=True)
            continue
        lasts = shares[0].predicted["runtime_seconds"]
        for sms in given.sms:
            try:
                ranks = [
                    measure(
                        share,
                        sms=sms,
                        repeats=min(given.repeats, 5 if lasts < 0.1 else 3 if lasts < 0.3 else 1),
                        high_priority=not given.same_priority,
                        # A run cannot be broken off: what cannot be repeated in time is run once.
                        limit_seconds=max(0.0, given.limit - 2 * lasts) / len(shares),
                    )
                    for share in shares
                ]
            except (RuntimeError, ValueError) as error:  # out of memory is a RuntimeError
                report["failed"][cell.name] = f"{type(error).__name__}: {error}"[:300]
                print(f"{cell.name}: {report['failed'][cell.name]}", flush=True)
                continue
            slowest = max(ranks, key=lambda found: found.seconds)
            row = slowest.to_json() | {
                "replayed_ranks": {str(found.given.rank): found.seconds for found in ranks},
                "table": cell.table,
                "name": cell.name,
                "tokens": cell.tokens,
                "causal": cell.causal,
                "kv_heads": cell.kv_heads,
                "options": {key: str(value) for key, value in cell.options.items()},
            }
            report["rows"].append(row)
            print(_line(row), flush=True)
            if given.json:
                given.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(report['rows'])} cells in {time.monotonic() - begin:.0f} s", flush=True)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


def _planned(
    chosen: list[Cell], folder: Path, workers: int, until: float
) -> Iterator[tuple[Cell, list[RankToReplay] | str]]:
    """Cells as they become ready, or why they do not."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not forked: this process has a CUDA context.
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    under_way = {pool.submit(prepare, cell, folder): cell for cell in chosen}
    while under_way:
        left = until - time.monotonic()
        done = [future for future in under_way if future.done()]
        if left > 0 and not done:
            wait(under_way, None if left == math.inf else left, FIRST_COMPLETED)
            continue
        if left <= 0:
            break
        cell = under_way[done[0]]
        try:
            del under_way[done[0]]
            done[0].result()
            yield cell, load(cell, folder)
        except Exception as error:  # whatever it is, the other cells go on
            yield cell, f"{type(error).__name__}: {error}"[:300]
    for cell in under_way.values():
        yield cell, "no time left"
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list(pool._processes.values()) if pool._processes else []:
        process.terminate()  # plans that nobody will read


def _line(row: dict[str, Any]) -> str:
    ms = 1e3
    ranks = ", ".join(
        f"{rank} {seconds * ms:.2f}" for rank, seconds in row["replayed_ranks"].items()
    )
    return (
        f"{row['name']:44} sms {row['sms']}"
        f" {row['seconds'] * ms:8.2f} ms x{len(row['all_seconds'])}"
        f" alone {row['compute_seconds'] * ms:7.2f} predicted {row['predicted_seconds'] * ms:8.2f}"
        f" MFU {row['mfu_percent']:4.1f} (alone {row['compute_mfu_percent']:4.1f},"
        f" predicted {row['predicted_mfu_percent']:4.1f})"
        f" peak {row['peak_bytes'] / 2**30:.2f} GiB; rank {ranks}"
    )


if __name__ == "__main__":
    main()
