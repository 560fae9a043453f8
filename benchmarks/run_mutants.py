"""Mutation testing: one small change of the code at a time, and whether a test of its folder fails.

    make mutants                                    # 300 of them, about an hour on two cores
    python benchmarks/run_mutants.py --count 20 --workers 8 --json results.json

The sample (`mutations.py`) is always the same for a seed. Each mutant meets the tests of its own
folder that run the changed statement (`touched.py`), the closest first, until one fails. All of it
happens in copies of the tree. Ctrl-C ends it with a report of what was tried.

A mutant that ends by a time limit counts as killed. A survivor may be equivalent to the original:
its diff is printed, to be judged by a person.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mutations import Mutant, sample
from script import host, provenance, save, script_parser
from touched import PACKAGE, InOrder, Statement, Touch, recorded, start

ROOT = Path(__file__).parent.parent
FOLDERS = {  # `package` has the examples in docstrings
    "plan": ("plan", "methods", "package"),
    "cost": ("cluster", "package"),
    "machine": ("cluster", "package"),
    "runtime": ("runtime", "distributed"),
}
SURVIVED = ("survived", "not reached")
HARDLY_ANY = 20  # statements


@dataclass(frozen=True, slots=True)
class Result:
    mutant: Mutant
    outcome: str  # killed, timeout, survived, or not reached: no recorded test runs the statement
    by: str  # the test that failed
    seconds: float
    tests: int  # that were chosen
    diff: str


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no process behind
    import torch  # noqa: F401  (here, so that the processes that run tests have it already)

    results: list[Result] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        tree = work / "tree"
        copy_tree(tree)
        files = sorted(
            str(path.relative_to(tree))
            for folder in FOLDERS
            for path in (tree / PACKAGE / folder).rglob("*.py")
        )
        mutants = sample(tree, files, args.seed, args.count, args.only)
        tests = sorted({name for mutant in mutants for name in FOLDERS[mutant.folder]})
        seen = recorded(work, tree, files, tests, args.workers, args.record_seconds)
        try:
            for result in run_all(work, tree, mutants, *seen, args):
                results.append(result)
                progress(results, len(mutants))
        finally:
            report(results, args)


def choose_tests(
    mutant: Mutant, statements: list[Statement], touched: Touch, max_seconds: float
) -> dict[str, float]:
    """Tests that run the innermost statement around the mutant: fast ones that run little else come
    first, as they look closest. What is outside functions runs at import: all tests that run
    anything of the file can see it, and those that run hardly anything and look at classes."""
    folders = tuple(f"tests/{name}/" for name in FOLDERS[mutant.folder])
    at = (mutant.line, mutant.column)
    around = [statement for statement in statements if statement.start <= at < statement.stop]
    wanted = {statement.number for statement in statements}
    if around:
        wanted = {max(around, key=lambda statement: statement.start).number}
    seeing = {
        name: float(test["seconds"])
        for name, test in touched.items()
        if name.startswith(folders)
        and (
            not wanted.isdisjoint(test["touched"])
            or (not around and len(test["touched"]) < HARDLY_ANY)
        )
    }
    chosen: dict[str, float] = {}
    effort = {name: (0.05 + seeing[name]) * len(touched[name]["touched"]) for name in seeing}
    for name in sorted(seeing, key=lambda name: effort[name]):
        if chosen and sum(chosen.values()) + seeing[name] > max_seconds:
            break
        chosen[name] = seeing[name]
    return chosen


def arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="another sample")
    parser.add_argument("--only", default="", help="in files whose path has this in it")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="at a time")
    parser.add_argument(
        "--max-seconds", type=float, default=60, help="of chosen tests for one mutant"
    )
    parser.add_argument(
        "--record-seconds", type=float, default=20, help="of each test file, to see what it runs"
    )
    return parser.parse_args()


def copy_tree(tree: Path) -> None:
    """What git knows or would add, so that no mutant is ever written into the checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    listed = subprocess.run([*command, "--exclude-standard"], capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


@dataclass(slots=True)
class Running:
    mutant: Mutant
    tree: Path
    started: float
    deadline: float
    tests: int
    diff: str


def run_all(
    work: Path,
    tree: Path,
    mutants: list[Mutant],
    statements: dict[str, list[Statement]],
    touched: Touch,
    args: argparse.Namespace,
) -> Iterator[Result]:
    trees = [work / f"mutant-{worker}" for worker in range(args.workers)]
    for copy in trees:
        shutil.copytree(tree, copy)
    running: dict[int, Running] = {}
    try:
        for number, mutant in enumerate(mutants):
            while not trees:
                yield from ended(running, trees, tree)
            source = (tree / mutant.file).read_text()
            changed = mutant.apply(source) or ""
            before, after = source.splitlines(True), changed.splitlines(True)
            diff = "".join(difflib.unified_diff(before, after, mutant.file, mutant.file, n=1))
            tests = choose_tests(mutant, statements[mutant.file], touched, args.max_seconds)
            if not tests:
                yield Result(mutant, "not reached", "", 0.0, 0, diff)
                continue
            place = trees.pop()
            (place / mutant.file).write_text(changed)
            # Python notices that a compiled file is out of date by the second of the change.
            os.utime(place / mutant.file, (number + 1, number + 1))
            (place / "failed").unlink(missing_ok=True)
            files = list(dict.fromkeys(name.split("::")[0] for name in tests))
            pid = start(place, ["-x", *files], InOrder(tests, place / "failed"))
            now = time.monotonic()
            limit = 60 + 5 * sum(tests.values())
            running[pid] = Running(mutant, place, now, now + limit, len(tests), diff)
        while running:
            yield from ended(running, trees, tree)
    finally:
        for pid in running:  # after a keyboard interrupt
            os.killpg(pid, signal.SIGKILL)


def ended(running: dict[int, Running], trees: list[Path], tree: Path) -> Iterator[Result]:
    """Results of the mutants that are through with their tests by now; their trees are free."""
    time.sleep(0.1)
    for pid, run in list(running.items()):
        late = time.monotonic() > run.deadline
        if late:
            os.killpg(pid, signal.SIGKILL)
        is_over, status = os.waitpid(pid, 0 if late else os.WNOHANG)
        if not is_over:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes that its tests have left behind
        shutil.copy2(tree / run.mutant.file, run.tree / run.mutant.file)
        trees.append(run.tree)
        del running[pid]
        code = os.waitstatus_to_exitcode(status)
        outcome = "survived" if code == 0 else "timeout" if code < 0 else "killed"
        failed = run.tree / "failed"
        by = failed.read_text() if failed.exists() else ""
        seconds = round(time.monotonic() - run.started, 1)
        yield Result(run.mutant, outcome, by, seconds, run.tests, run.diff)


def progress(results: list[Result], total: int) -> None:
    counts = Counter(result.outcome for result in results)
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    print(f"\r{len(results)} of {total}: {text}    ", end="", flush=True)


def report(results: list[Result], args: argparse.Namespace) -> None:
    print()
    survivors = [result for result in results if result.outcome in SURVIVED]
    for result in survivors:
        print(f"\n{result.outcome} ({result.tests} tests, {result.mutant.operator})\n{result.diff}")
    by_folder = {
        folder: dict(Counter(r.outcome for r in results if r.mutant.folder == folder))
        for folder in FOLDERS
    }
    killed = len(results) - len(survivors)
    print(f"\n{killed} of {len(results)} killed; by folder: {by_folder}")
    summary = provenance() | {
        "machine": host(),
        "sample": {"count": args.count, "seed": args.seed, "run": len(results)},
        "killed": killed,
        "by_folder": by_folder,
        "survivors": [asdict(survivor) for survivor in survivors],
    }
    save(args.json, summary)


if __name__ == "__main__":
    main()
