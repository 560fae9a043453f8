"""Host time of a warm `cp.attention`, beside other clones of the library.

    python benchmarks/warm_call_time.py --against ../mesh_attention-0.2 --json results.json

Small tensors (64 tokens a rank, 4 heads of 16, float32) on CPUs, so that work hardly counts, on
rank 0 of four: a mesh of 2x2 ranks, Ulysses, and a group of one rank. Four processes of each clone
stay for the whole run, and clones are measured in turns, a few calls at a time, since a machine
is never quiet. `gloo` is the call as it is; all ranks call at once and share the cores. `none` has
stand-ins for the transfers of torch.distributed that move nothing: rank 0 calls alone, before the
others do, and what is left is the time of the library and of PyTorch's operations.

In microseconds: CPU time of the caller's thread, which leaves out all waiting, and time by the
clock. The median over the calls of a round, then over rounds. The machine differs from minute to
minute: numbers of two runs say less than those of two clones in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from script import commit, host, provenance, save, script_parser

RANKS, TOKENS, HEADS, DIM = 4, 64, 4, 16
CASES: dict[str, dict[str, Any]] = {
    "mesh of 2x2": {"method": "mesh", "tile": (2, 2)},
    "ulysses": {"method": "ulysses"},
    "one rank": {},
}
PASSES = ("forward, no_grad", "forward", "forward and backward")
TRANSFERS = ("gloo", "none")
WARM_CALLS = 5
FUNCTIONS = (
    "all_reduce", "batch_isend_irecv", "all_gather_single", "all_gather_into_tensor",
    "reduce_scatter_single", "reduce_scatter_tensor",
)  # fmt: skip
METHODS = ("allreduce", "send", "recv")


class Moved:
    """A transfer that is over, and has moved nothing."""

    def wait(self, *_: object) -> bool:
        return True


class StandIns:
    """In place of all transfers, where `on`. Whoever keeps a function keeps its stand-in."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.on = False
        self._moved = Moved()
        for holder, names in ((dist, FUNCTIONS), (dist.ProcessGroup, METHODS)):
            for name in names:
                if hasattr(holder, name):
                    several = name == "batch_isend_irecv"
                    setattr(holder, name, self._instead(getattr(holder, name), several))

    def _instead(self, transfer: Callable[..., Any], several: bool) -> Callable[..., Any]:
        result: Any = [self._moved] if several else self._moved

        def moves(*args: Any, **kwargs: Any) -> Any:
            return result if self.on else transfer(*args, **kwargs)

        moves.__name__ = getattr(transfer, "__name__", "")
        return moves


def serve(rank: int, folder: Path) -> None:
    """On one rank: makes calls as asked on stdin, and answers with their times."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stand_ins = StandIns()
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    calls = {
        (case, what): call
        for case, options in CASES.items()
        for what, call in calls_of(case, options, rank)
    }
    for call in calls.values():
        for _ in range(WARM_CALLS):
            call()
    print("ready", flush=True)
    for line in sys.stdin:
        case, what, transfers, count = json.loads(line)
        stand_ins.on = transfers == "none"
        times = []
        for _ in range(count):
            wall, thread = time.perf_counter(), time.thread_time()
            calls[case, what]()
            times.append((time.thread_time() - thread, time.perf_counter() - wall))
        stand_ins.on = False
        medians = [statistics.median(of) * 1e6 for of in zip(*times, strict=True)]
        print(json.dumps(medians), flush=True)
    dist.destroy_process_group()


def calls_of(
    case: str, options: dict[str, Any], rank: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    import torch
    import torch.distributed as dist

    from mesh_attention import ContextParallel

    group, num_ranks = None, RANKS
    if case == "one rank":
        group, num_ranks = [dist.new_group([each]) for each in range(RANKS)][rank], 1
    sizes: dict[str, Any] = {"seq_len": TOKENS * num_ranks, "num_heads": HEADS, "head_dim": DIM}
    cp = ContextParallel(group, causal=False, dtype=torch.float32, **sizes, **options)
    tensors = [torch.randn(1, TOKENS, HEADS, DIM) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    grad = torch.randn(1, TOKENS, HEADS, DIM)

    def forward() -> None:
        cp.attention(*leaves)

    def without_grad() -> None:
        with torch.no_grad():
            cp.attention(*tensors)

    def both() -> None:
        out = cp.attention(*leaves)
        assert isinstance(out, torch.Tensor)
        torch.autograd.backward(out, grad)

    yield from zip(PASSES, (without_grad, forward, both), strict=True)


class Team:
    """Four ranks of one clone, that wait for what to measure."""

    def __init__(self, source: Path, folder: str) -> None:
        python_path = os.pathsep.join([str(source), str(Path(__file__).parent)])
        environment = os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--folder", folder, "--rank"]
        self._ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        self._hear(self._ranks)

    def measure(self, case: str, what: str, transfers: str, calls: int) -> list[float]:
        """Microseconds of rank 0: CPU time of its thread, and by the clock."""
        together = self._ranks[: 1 if transfers == "none" else RANKS]
        times: list[float] = json.loads(self._ask(together, case, what, transfers, calls))
        if transfers == "none":  # ranks count their calls
            self._ask(self._ranks[1:], case, what, transfers, calls)
        return times

    def _ask(self, ranks: Sequence[subprocess.Popen[str]], *what: str | int) -> str:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(what) + "\n")
            rank.stdin.flush()
        return self._hear(ranks)

    def _hear(self, ranks: Sequence[subprocess.Popen[str]]) -> str:
        """What the first of these says, once all have answered."""
        lines = []
        for rank in ranks:
            assert rank.stdout is not None
            lines.append(rank.stdout.readline())
        if not all(lines):
            raise RuntimeError("a rank has ended; its error is above")
        return lines[0]

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait(60)


@contextmanager
def team(clone: Path) -> Iterator[Team]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = Team(clone / "src", folder)
        try:
            yield ranks
        finally:
            ranks.close()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--against", type=Path, nargs="+", default=(), metavar="CLONE", help="other clones"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=40, help="of a round")
    parser.add_argument("--transfers", nargs="+", choices=TRANSFERS, default=TRANSFERS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        serve(args.rank, args.folder)
        return
    clones = {clone.name: clone.resolve() for clone in args.against}
    clones["now"] = Path(__file__).resolve().parents[1]
    rows = [(case, what, moves) for moves in args.transfers for case in CASES for what in PASSES]
    times: dict[Any, dict[str, list[list[float]]]] = {row: {c: [] for c in clones} for row in rows}
    with ExitStack() as stack:
        teams = {name: stack.enter_context(team(clone)) for name, clone in clones.items()}
        for _ in range(args.rounds):
            for row in rows:
                for name, ranks in teams.items():
                    times[row][name].append(ranks.measure(*row, args.calls))
    results = []
    for row in rows:
        case, what, moves = row
        of_row: dict[str, Any] = {"case": case, "pass": what, "transfers": moves}
        for name, rounds in times[row].items():
            cpu, wall = ([round(x, 1) for x in of] for of in zip(*rounds, strict=True))
            medians = {"cpu": statistics.median(cpu), "wall": statistics.median(wall)}
            of_row[name] = medians | {"cpu of rounds": cpu, "wall of rounds": wall}
        results.append(of_row)
        print(f"{case}, {what}, transfers {moves}: {_line(of_row, list(clones))}")
    named = {name: commit(clone) for name, clone in clones.items()}
    setting = {
        "host": host(),
        "torch": version("torch"),
        "clones": named,
        "rounds": args.rounds,
        "calls": args.calls,
    }
    save(args.json, provenance() | setting | {"unit": "microseconds", "rows": results})


def _line(row: dict[str, Any], clones: list[str]) -> str:
    words = []
    for kind in ("cpu", "wall"):
        numbers = [row[name][kind] for name in clones]
        words.append(f"{kind} {' -> '.join(f'{x:.0f}' for x in numbers)} us")
        if len(numbers) > 1:
            words[-1] += f" ({numbers[-1] / numbers[0]:.2f})"
    return "; ".join(words)


if __name__ == "__main__":
    main()
