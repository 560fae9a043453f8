"""Ours beside its peers: PyTorch's `context_parallel`, Ulysses by hand, other libraries.

    python benchmarks/against_peers.py --json result.json
    python benchmarks/against_peers.py --ranks 8 --tokens 65536 --masks causal
    python benchmarks/against_peers.py --contestants hand-ulysses default default,keep=gathered
    python benchmarks/against_peers.py --gloo --json result.json
    sudo python benchmarks/against_peers.py --gloo --mbit 200 --json result.json

NCCL ranks share one GPU and talk through sockets (`sockets.py`), in bfloat16; with `--gloo` they
are on CPUs, in float32, over the loopback, or with `--mbit` over shaped links between network
namespaces (`namespaces.py`). For each number of ranks processes start once and profile: `default`
is `ContextParallel` with that cluster file, and each of our methods is searched by it
(`peer_contestants.py`). Nothing is timed that differs from one device, in out or a gradient; what
cannot run has its reason in place of a time. Contestants take turns in every round
(`peer_rounds.py`). Times are of the slowest rank, medians over rounds; backward is the difference
of both passes and forward alone. Bytes are what a rank receives, the most of all ranks, where they
can be counted. Beside ours stands what the simulator predicts by that cluster file
(`predicted_against_measured.py`).

Times on a shared GPU follow bytes and host time; they say little about GPUs of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from namespaces import Links, Namespaces
from peer_cell import MASKS
from peer_contestants import CONTESTANTS, HAND, PEERS, entry_of
from peer_rounds import run_cells
from rank_processes import LaunchError, RankProcesses
from script import host, provenance, save, script_parser
from sockets import Sockets

from mesh_attention.cli.output import table
from mesh_attention.cli.values import size
from mesh_attention.measure.ranks import ranks_of_launcher

USUAL: dict[bool, dict[str, Any]] = {  # by --gloo
    False: {"ranks": [2, 4, 8], "tokens": [32768], "heads": ["32:8", "16:16"], "dim": 128},
    True: {"ranks": [4], "tokens": [2048], "heads": ["16:16", "8:2"], "dim": 64},
}
USUAL_SECONDS = 500.0
ARGUMENTS = "arguments.json"  # what ranks are told, in their folder
WIDTH = 140  # characters of a setting, which is whole in the JSON
PATIENCE = 60.0  # seconds beyond those, for the cell that runs when they end


def parser() -> argparse.ArgumentParser:
    reader = script_parser(__doc__)
    add = reader.add_argument
    add("--gloo", action="store_true", help="on CPUs, in place of NCCL ranks on one GPU")
    add("--mbit", type=float, help="with --gloo: links of so many Mbit/s a rank (needs root)")
    add(
        "--ranks-per-node",
        type=int,
        default=1,
        help="with --mbit: behind one link of so many Mbit/s",
    )
    add("--inside", type=float, default=400.0, help="with nodes of several ranks: Mbit/s of a rank")
    add("--ranks", type=int, nargs="+", help="default 2 4 8, or with --gloo 4")
    add("--tokens", type=size, nargs="+", help="default 32768, or with --gloo 2048")
    add("--heads", nargs="+", type=_heads, help="of Q:KV; default 32:8 16:16, --gloo 16:16 8:2")
    add("--dim", type=int, help="of a head; default 128, or with --gloo 64")
    add("--masks", nargs="+", choices=MASKS, default=[*MASKS])
    add("--rounds", type=int, default=20, help="in each all contestants take a turn; default 20")
    names = (
        f"with options, as ulysses,chunks=(1,1), of {' '.join(CONTESTANTS)}; default: to default"
    )
    add("--contestants", nargs="+", default=PEERS, metavar="NAME", help=names)
    quick = "a profile of seconds, the default, or of a minute for each number of ranks"
    add("--quick", action=argparse.BooleanOptionalAction, default=True, help=quick)
    seconds = "no cell begins later, shared by all numbers of ranks; default 500"
    add("--seconds", type=float, help=seconds)
    add("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank
    return reader


def _heads(text: str) -> str:
    if not re.fullmatch(r"\d+:\d+", text):
        raise argparse.ArgumentTypeError(f"{text}: heads of Q and KV, as 32:8")
    return text


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the arguments of the command line, or `words` in place of them."""
    reader = parser()
    args = reader.parse_args(words)
    vars(args).update({n: x for n, x in USUAL[args.gloo].items() if getattr(args, n) is None})
    args.seconds = args.seconds or USUAL_SECONDS
    try:
        for text in args.contestants:
            entry_of(text)
    except ValueError as error:
        reader.error(str(error))
    if args.mbit and not args.gloo:
        reader.error("--mbit shapes links of --gloo")
    return args


def main() -> None:
    args = arguments()
    if args.folder is not None:
        _be_a_rank(args.folder)
        return
    result = Run(args).run()
    if "broken_off" in result:
        raise SystemExit(f"error: {result['broken_off']}")


def _be_a_rank(folder: Path) -> None:
    args = argparse.Namespace(**json.loads((folder / ARGUMENTS).read_text()), folder=folder)
    torch.set_num_threads(1)
    with ranks_of_launcher(None, command="") as ranks:
        try:
            run_cells(ranks, args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # leaving the group would wait for ranks that wait for this one


class Run:
    """Starts ranks for each number of them; the result is a file that grows meanwhile."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._begun = args, time.monotonic()
        argv = ["FILE" if word == str(args.json) else word for word in sys.argv[1:]]
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        self._result: dict[str, Any] = provenance() | {
            "machine": f"{host()}, {versions}",
            "command": f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(argv)}",
            "load_average": os.getloadavg(),  # of other programs: no rank runs yet
            "links": "nccl, sockets",
            "clusters": {},
            "cells": [],
        }
        if args.gloo:
            shaped = "loopback"
            if args.mbit:
                of = f"node of {args.ranks_per_node}, {args.inside:g} a rank"
                shaped = f"{args.mbit:g} Mbit/s a {of if args.ranks_per_node > 1 else 'rank'}"
            self._result["links"] = f"gloo, {shaped}"
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the ranks

    def run(self) -> dict[str, Any]:
        args, result = self._args, self._result
        with tempfile.TemporaryDirectory() as folder:
            for at, num_ranks in enumerate(args.ranks):
                left = args.seconds - (time.monotonic() - self._begun)
                share = max(left, 1.0) / (len(args.ranks) - at)
                try:
                    self._run_ranks(num_ranks, Path(folder), share)
                except KeyboardInterrupt:
                    raise SystemExit("error: ended by Ctrl-C") from None
                except LaunchError as error:
                    result["broken_off"] = f"{num_ranks} ranks: {error}"
                    save(args.json, result)
                    break
        result["seconds"] = round(time.monotonic() - self._begun, 1)
        save(args.json, result)
        return result

    def _run_ranks(self, num_ranks: int, folder: Path, seconds: float) -> None:
        args = self._args
        network: RankProcesses = Sockets(num_ranks, "gloo" if args.gloo else "nccl")
        if args.mbit:
            nodes = num_ranks // args.ranks_per_node
            network = Namespaces(Links(nodes, args.ranks_per_node, args.mbit, args.inside))
        passed = {name: x for name, x in vars(args).items() if name not in ("json", "folder")}
        (folder / ARGUMENTS).write_text(json.dumps(passed | {"seconds": seconds}))
        command = (sys.executable, __file__, "--folder", str(folder))
        before = list(self._result["cells"])

        def heard(outputs: list[str]) -> None:
            self._hear(outputs[0], before)

        with network:
            if isinstance(network, Sockets):
                self._result["shares_gpu"] = network.shares_gpu
            network.run(command, seconds=seconds + PATIENCE, heard=heard)
        for cell in self._result["cells"][len(before) :]:
            print("\n".join(lines_of(cell)), flush=True)

    def _hear(self, output: str, before: list[Any]) -> None:
        """Adds what the first rank has written so far to the result, and saves it."""
        whole = output[: output.rfind("\n") + 1].splitlines()
        lines = [json.loads(line) for line in whole if line.startswith("{")]
        for line in lines:
            if "cluster" in line:
                self._result["clusters"][str(line["ranks"])] = line["cluster"]
                self._result["device"] = line["device"]
        self._result["cells"] = [*before, *(x for x in lines if "cluster" not in x)]
        save(self._args.json, self._result)


def timed(cell: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The row of a contestant that was timed, or of the one that does the same; otherwise empty."""
    row: dict[str, Any] = cell.get("contestants", {}).get(name, {})
    if "same_as" in row:
        row = timed(cell, row["same_as"])
    return row if "both_ms" in row else {}


def lines_of(cell: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"\n{cell['ranks']} ranks, {cell['tokens']} tokens, {cell['heads']}:{cell['kv_heads']} "
        f"heads of {cell['dim']}, {cell['mask']}"
    )
    if "not_run" in cell:
        yield f"  not run: {cell['not_run']}"
        return
    hand = timed(cell, HAND)
    titles = ("forward ms", "backward", "both", "predicted", "CPU s", "to hand", "MB in", "back")
    rows = [("", *titles, "error", "rounds")]
    notes = []
    for name, row in cell["contestants"].items():
        if "refused" in row:
            notes.append(f"  {name} is not timed: {row['refused']}")
            continue
        if "same_as" in row:
            notes.append(f"  {name} is the same plan as {row['same_as']}")
            continue
        times = [f"{row[f'{what}_ms']:.1f}" for what in ("forward", "backward", "both")]
        ratio = f"{row['both_ms'] / hand['both_ms']:.2f}" if hand else "-"
        received = row.get("received_bytes", {}).values()
        moved = [f"{x / 1e6:.1f}" for x in received] or ["-", "-"]
        times.append(f"{row['predicted_ms']:.1f}" if "predicted_ms" in row else "-")
        times.append(f"{row['cpu_seconds']:.1f}")
        rows.append((name, *times, ratio, *moved, f"{row['error']:.0e}", str(row["rounds"])))
        notes.append(f"  {name}: {row['setting'][:WIDTH]}")
    yield table(rows)
    yield from notes


if __name__ == "__main__":
    main()
