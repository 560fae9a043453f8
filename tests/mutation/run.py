"""Mutation testing: one small change of the code at a time, and whether a test of its folder fails.

    make mutants                                    # 300 of them, about an hour on two cores
    python tests/mutation/run.py --count 20 --workers 8 --json results.json

The sample (`mutations.py`) is always the same for a seed. Each mutant meets the tests of its own
folder that run the changed statement (`touched.py`), the closest first, until one fails. All of it
happens in copies of the tree. Ctrl-C ends it with a report of what was tried.

A mutant that ends by a time limit counts as killed. A survivor may be equivalent to the original:
its diff is printed, to be judged by a person.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / name) for name in ("tests", "benchmarks")]

from script import host, provenance, save, script_parser

from mutation.mutations import Mutant, sample
from mutation.touched import (
    PACKAGE,
    InOrder,
    Statement,
    Touch,
    mark_statements,
    own_copy,
    record,
    start,
    wait_for,
)

ROOT = Path(__file__).parents[2]
FOLDERS = {  # `package` has the examples in docstrings
    "plan": ("plan", "methods", "cluster", "kernels", "package"),
    "cost": ("cluster", "package"),
    "machine": ("cluster", "package"),
    "runtime": ("runtime", "distributed", "kernels"),
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
    import torch  # noqa: F401  (here, so that the processes that run tests have it already)

    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ProcessPoolExecutor(args.workers, get_context("fork")) as pool,
    ):
        tree, marked = Path(folder) / "tree", Path(folder) / "marked"
        copy_tree(tree)
        files = sorted(
            str(path.relative_to(tree))
            for name in FOLDERS
            for path in (tree / PACKAGE / name).rglob("*.py")
        )
        mutants = sample(tree, files, args.seed, args.count, args.only)
        shutil.copytree(tree, marked)
        statements = mark_statements(marked, files)
        touched: Touch = {}
        recording = [
            pool.submit(record, marked, name, args.record_seconds)
            for name in test_files(tree, mutants)
        ]
        for done, recorded in enumerate(as_completed(recording), 1):
            touched |= recorded.result()
            print(f"\rrecorded {done} of {len(recording)} test files", end="", flush=True)
        trying = []
        for number, mutant in enumerate(mutants):
            tests = choose_tests(mutant, statements[mutant.file], touched, args.max_seconds)
            trying.append(pool.submit(try_mutant, number, tree, mutant, tests))
        try:
            for tried in as_completed(trying):
                results.append(tried.result())
                progress(results, len(mutants))
        finally:
            pool.shutdown(cancel_futures=True)
            report(results, args)


def test_files(tree: Path, mutants: list[Mutant]) -> list[str]:
    folders = sorted({name for mutant in mutants for name in FOLDERS[mutant.folder]})
    paths = (
        path for name in folders for path in sorted((tree / "tests" / name).rglob("test_*.py"))
    )
    return [str(path.relative_to(tree)) for path in paths]


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


def try_mutant(number: int, tree: Path, mutant: Mutant, tests: dict[str, float]) -> Result:
    source = (tree / mutant.file).read_text()
    changed = mutant.apply(source) or ""
    before, after = source.splitlines(True), changed.splitlines(True)
    diff = "".join(difflib.unified_diff(before, after, mutant.file, mutant.file, n=1))
    if not tests:
        return Result(mutant, "not reached", "", 0.0, 0, diff)
    copy = own_copy(tree)
    file, failed = copy / mutant.file, copy / "failed"
    failed.unlink(missing_ok=True)
    file.write_text(changed)
    # Python notices that a compiled file is out of date by the second of the change.
    os.utime(file, (number + 1, number + 1))
    started = time.monotonic()
    pid = start(
        copy, ["-x", *dict.fromkeys(name.split("::")[0] for name in tests)], InOrder(tests, failed)
    )
    code = wait_for(pid, 60 + 5 * sum(tests.values()))
    shutil.copy2(tree / mutant.file, file)
    outcome = "survived" if code == 0 else "timeout" if code < 0 else "killed"
    by = failed.read_text() if failed.exists() else ""
    return Result(mutant, outcome, by, round(time.monotonic() - started, 1), len(tests), diff)


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
