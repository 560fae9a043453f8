"""Mutation testing: one small change of the code at a time, and whether a test of its folder fails.

    make mutants                                    # 300 of them, about an hour on two cores
    python benchmarks/mutants.py --count 20 --workers 8 --json results.json

Cosmic Ray makes the mutants: another operator, a number one higher or lower, a condition negated,
a decorator left out, ... A place in the code is drawn at random (always the same ones for a seed),
then one of the mutants at that place. Each meets the tests of its own folder that run the changed
statement (`touched.py`), the fastest first, until one fails. All of it happens in copies of the
tree, and what is found goes to a folder from which an ended run goes on.

Not drawn, since no test could see the change or should: annotations, `if TYPE_CHECKING`, assertions
and `zip(strict=True)` (which hold by themselves in a right program), `slots=True`.

A mutant that ends by its time limit counts as killed. One that survives may be equivalent: its diff
is printed, to be judged by a person.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from provenance import taken
from touched import PACKAGE, InOrder, Recorder, Statement, mark_statements

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "plan": ("plan", "methods"),
    "cluster": ("cluster",),
    "runtime": ("runtime", "distributed"),
}
# Under the load of several mutants at a time a bound on seconds would fail by itself.
NOT_RUN = ("test_four_by_four_chunks_take_less_than_a_second",)
MEMORY_BYTES = 24 << 30  # of addresses: some mutants grow without end
Touch = dict[str, dict[str, Any]]  # of each test: its seconds, the numbers of what it touches


@dataclass(frozen=True, slots=True)
class Mutant:
    """`occurrence` counts the places in the file where the operator can change something."""

    file: str
    line: int
    column: int
    operator: str
    occurrence: int

    @property
    def folder(self) -> str:
        return Path(self.file).relative_to(PACKAGE).parts[0]

    def apply(self, source: str) -> str | None:
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        changed: str | None = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        return changed


@dataclass(frozen=True, slots=True)
class Result:
    mutant: Mutant
    outcome: str  # killed, timeout, survived, or not reached: no recorded test runs the statement
    by: str  # the test that failed
    seconds: float
    tests: int  # that were chosen
    diff: str


def main() -> None:
    given = arguments()
    work: Path = given.folder
    work.mkdir(parents=True, exist_ok=True)
    tree = work / "tree"
    if not tree.exists():
        copy_tree(tree)
    found = (path for folder in FOLDERS for path in (tree / PACKAGE / folder).rglob("*.py"))
    files = sorted(str(path.relative_to(tree)) for path in found)
    import torch  # noqa: F401  (here, so that the processes that run tests have it already)

    statements, touch = recorded(work, tree, files, given)
    mutants = sample(tree, files, given.seed, given.count, given.only)
    results = {each.mutant: each for each in read_results(work / "results.jsonl")}
    todo = [mutant for mutant in mutants if mutant not in results]
    try:
        for result in run_all(work, tree, todo, statements, touch, given):
            results[result.mutant] = result
            with (work / "results.jsonl").open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            progress([results[m] for m in mutants if m in results], len(mutants))
    finally:
        report([results[m] for m in mutants if m in results], given)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "mesh-attention-mutants",
        help="of the copies; a run goes on from what it finds here, remove it to begin again",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write what was found here")
    return parser.parse_args()


def copy_tree(tree: Path) -> None:
    """What git knows or would add, so that no mutant is ever written into the checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    listed = subprocess.run([*command, "--exclude-standard"], capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def sample(tree: Path, files: list[str], seed: int, count: int, only: str) -> list[Mutant]:
    """A random order of places, a random mutant at each: any first part of it is a sample too."""
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for name in files:
        if only in name:
            for mutant in mutants_of(name, (tree / name).read_text()):
                places.setdefault((mutant.file, mutant.line, mutant.column), []).append(mutant)
    choose = random.Random(seed)
    drawn: list[Mutant] = []
    for place in choose.sample(sorted(places), len(places)):
        mutant = choose.choice(places[place])
        if len(drawn) == count:
            break
        if _compiles(mutant.apply((tree / mutant.file).read_text())):
            drawn.append(mutant)
    return drawn


def _compiles(source: str | None) -> bool:
    try:
        compile(source or "(", "mutant", "exec")
    except SyntaxError:
        return False
    return True


def mutants_of(name: str, source: str) -> Iterator[Mutant]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    left_out = list(unseen(ast.parse(source)))
    # Leaves that no operator changes are most of a file.
    nodes = [
        node
        for node in ast_nodes(get_ast(source))
        if node.type not in ("name", "newline", "string", "endmarker")
        and getattr(node, "value", "+") not in "()[]{},:.=;->"
    ]
    for operator in sorted(operator_names()):
        if operator.split("/")[-1].startswith("Variable"):  # want to be told the variable
            continue
        changes = get_operator(operator)()
        positions = [at for node in nodes for at, _ in changes.mutation_positions(node)]
        for occurrence, (line, column) in enumerate(positions):
            if not any(start <= (line, column) < stop for start, stop in left_out):
                yield Mutant(name, line, column, operator, occurrence)


def unseen(module: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """From where to where nothing is drawn."""
    for node in ast.walk(module):
        found: list[ast.AST | None] = []
        match node:
            case ast.Assert():
                found = [node]
            case ast.arg() | ast.AnnAssign():
                found = [node.annotation]
            case ast.FunctionDef():
                found = [node.returns]
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                found = [node.test]
            case ast.keyword(arg="slots" | "strict"):
                found = [node.value]
        for each in found:
            if isinstance(each, ast.expr | ast.stmt):
                stop = (each.end_lineno or each.lineno, each.end_col_offset or 0)
                yield (each.lineno, each.col_offset), stop


def recorded(
    work: Path, tree: Path, files: list[str], given: argparse.Namespace
) -> tuple[dict[str, list[Statement]], dict[str, Touch]]:
    """What the tests of each folder touch, from an earlier run or by running them."""
    trees = [work / f"marked-{worker}" for worker in range(given.workers)]
    statements: dict[str, list[Statement]] = {}
    for each in trees:
        shutil.rmtree(each, ignore_errors=True)
        shutil.copytree(tree, each)
        statements = mark_statements(each, files)
    (work / "touch").mkdir(exist_ok=True)
    output: dict[str, Path] = {}
    for folder in {name for names in FOLDERS.values() for name in names}:
        for path in sorted((tree / "tests" / folder).glob("test_*.py")):
            output[f"tests/{folder}/{path.name}"] = work / "touch" / f"{folder}-{path.stem}.json"
    jobs = {name: path for name, path in output.items() if not path.exists()}
    running: dict[int, Path] = {}
    for done, (name, path) in enumerate(jobs.items()):
        while not trees:
            trees.append(running.pop(wait(running)))
        place = trees.pop()
        running[start(place, [name], Recorder(place, path, given.record_seconds), work)] = place
        print(f"\rrecorded {done} of {len(jobs)} test files", end="", flush=True)
    while running:
        running.pop(wait(running))
    touch: dict[str, Touch] = {folder: {} for folder in FOLDERS}
    for folder, names in FOLDERS.items():
        for name, path in output.items():
            if name.split("/")[1] in names and path.exists():
                touch[folder] |= json.loads(path.read_text())
    return statements, touch


def wait(running: dict[int, Path]) -> int:
    pid, _ = os.wait()
    assert pid in running
    return pid


def choose_tests(
    mutant: Mutant, statements: list[Statement], touch: Touch, max_seconds: float
) -> dict[str, float]:
    """Tests that run the innermost statement around the mutant, the fastest first. What is outside
    functions runs at import: all tests that run anything of the file can see it."""
    at = (mutant.line, mutant.column)
    around = [each for each in statements if each.start <= at < each.stop]
    wanted = {max(around, key=lambda each: each.start).number} if around else {
        each.number for each in statements
    }  # fmt: skip
    seeing = {
        name: float(each["seconds"])
        for name, each in touch.items()
        if not wanted.isdisjoint(each["touched"]) and not any(no in name for no in NOT_RUN)
    }
    chosen: dict[str, float] = {}
    for name in sorted(seeing, key=lambda name: seeing[name]):
        if chosen and sum(chosen.values()) + seeing[name] > max_seconds:
            break
        chosen[name] = seeing[name]
    return chosen


def start(tree: Path, files: list[str], plugin: object, work: Path) -> int:
    """Forks a process that runs tests in a tree: torch and pytest are imported already."""
    log = work / f"{tree.name}.log"
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.chdir(tree)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            os.environ["PYTHONPATH"] = str(tree / "src")
            sys.path.insert(0, str(tree / "src"))
            options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(tree)]
            if isinstance(plugin, Recorder):
                options.remove("-x")
            code = int(pytest.main([*options, *files], plugins=[plugin]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    return pid


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
    touch: dict[str, Touch],
    given: argparse.Namespace,
) -> Iterator[Result]:
    trees = [work / f"mutant-{worker}" for worker in range(given.workers)]
    for each in trees:
        shutil.rmtree(each, ignore_errors=True)
        shutil.copytree(tree, each)
    running: dict[int, Running] = {}
    for number, mutant in enumerate(mutants):
        while not trees:
            yield from ended(running, trees, tree)
        source = (tree / mutant.file).read_text()
        changed = mutant.apply(source) or ""
        lines = (text.splitlines(keepends=True) for text in (source, changed))
        diff = "".join(difflib.unified_diff(*lines, mutant.file, mutant.file, n=1))
        tests = choose_tests(
            mutant, statements[mutant.file], touch[mutant.folder], given.max_seconds
        )
        if not tests:
            yield Result(mutant, "not reached", "", 0.0, 0, diff)
            continue
        place = trees.pop()
        (place / mutant.file).write_text(changed)
        # Compiled files are found out of date by the second of the change.
        os.utime(place / mutant.file, (number + 1, number + 1))
        (place / "failed").unlink(missing_ok=True)
        files = list(dict.fromkeys(name.split("::")[0] for name in tests))
        pid = start(place, files, InOrder(tests, place / "failed"), work)
        now = time.monotonic()
        limit = 60 + 5 * sum(tests.values())
        running[pid] = Running(mutant, place, now, now + limit, len(tests), diff)
    while running:
        yield from ended(running, trees, tree)


def ended(running: dict[int, Running], trees: list[Path], tree: Path) -> Iterator[Result]:
    """Waits until at least one mutant is through with its tests."""
    time.sleep(0.1)
    for pid, one in list(running.items()):
        late = time.monotonic() > one.deadline
        if late:
            os.killpg(pid, signal.SIGKILL)
        found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
        if not found:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes that its tests have left behind
        shutil.copy2(tree / one.mutant.file, one.tree / one.mutant.file)
        trees.append(one.tree)
        del running[pid]
        code = os.waitstatus_to_exitcode(status)
        by = one.tree / "failed"
        outcome = "survived" if code == 0 else "timeout" if code < 0 else "killed"
        yield Result(
            one.mutant,
            outcome,
            by.read_text() if by.exists() else "",
            round(time.monotonic() - one.started, 1),
            one.tests,
            one.diff,
        )


def read_results(path: Path) -> list[Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [Result(**(each | {"mutant": Mutant(**each["mutant"])})) for each in found]


def progress(results: list[Result], total: int) -> None:
    counts = Counter(each.outcome for each in results)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    print(f"\r{len(results)} of {total}: {told}    ", end="", flush=True)


def report(results: list[Result], given: argparse.Namespace) -> None:
    print()
    survivors = [each for each in results if each.outcome in ("survived", "not reached")]
    for each in survivors:
        print(f"\n{each.outcome} ({each.tests} tests, {each.mutant.operator})\n{each.diff}")
    by_folder = {
        folder: dict(Counter(r.outcome for r in results if r.mutant.folder == folder))
        for folder in FOLDERS
    }
    killed = sum(each.outcome in ("killed", "timeout") for each in results)
    print(f"\n{killed} of {len(results)} killed; by folder: {by_folder}")
    if given.json is not None:
        found = {
            **taken(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "sample": {"count": given.count, "seed": given.seed, "run": len(results)},
            "killed": killed,
            "by_folder": by_folder,
            "survivors": [asdict(each) for each in survivors],
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
