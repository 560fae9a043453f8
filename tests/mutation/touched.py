"""Which tests run which statements, so that a mutant meets only the tests that can see it.

In a copy of the tree, every statement inside a function gets a statement before it that marks a
byte of a file mapped into memory; processes and threads that a test starts mark bytes there too. A
plugin of pytest reads and clears the marks around each test. coverage.py with a context for each
test would do the same, but makes planning three times slower on Python 3.11. `run.py` uses it, in
copies of the tree only.
"""

from __future__ import annotations

import ast
import contextlib
import json
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path("src/mesh_attention")
MEMORY_BYTES = 24 << 30  # of addresses: some mutants grow without end
Touch = dict[str, dict[str, Any]]  # of each test: its seconds, the numbers of what it touches
MARKS = '''"""Marks of the statements that were run."""
import mmap
from pathlib import Path
with Path(__file__).with_name("_marks.bin").open("r+b") as file:
    MARK = mmap.mmap(file.fileno(), 0)
'''


@dataclass(frozen=True, slots=True)
class Statement:
    """`start` and `stop` are (line, column); `number` is that of its mark."""

    number: int
    start: tuple[int, int]
    stop: tuple[int, int]


def mark_statements(tree: Path, files: list[str]) -> dict[str, list[Statement]]:
    """Changes the files of the copy `tree` so that they mark what runs; returns the marks."""
    marked: dict[str, list[Statement]] = {}
    count = 0
    for name in files:
        module = ast.parse((tree / name).read_text())
        marked[name] = []
        for child, block in list(_statements(module, False)):
            stop = (child.end_lineno or child.lineno, child.end_col_offset or 0)
            marked[name].append(Statement(count, (child.lineno, child.col_offset), stop))
            mark = ast.parse(f"_MARK[{count}] = 1").body[0]
            block.insert(next(at for at, each in enumerate(block) if each is child), mark)
            count += 1
        future = [
            at
            for at, each in enumerate(module.body)
            if isinstance(each, ast.ImportFrom) and each.module == "__future__"
        ]
        imported = ast.parse("from mesh_attention._marks import MARK as _MARK").body
        at = max(future, default=0) + 1  # after the docstring in any case
        module.body[at:at] = imported
        (tree / name).write_text(ast.unparse(ast.fix_missing_locations(module)))
    (tree / PACKAGE / "_marks.py").write_text(MARKS)
    (tree / PACKAGE / "_marks.bin").write_bytes(bytes(max(count, 1)))
    return marked


def _statements(node: ast.AST, inside: bool) -> Iterator[tuple[ast.stmt, list[ast.stmt]]]:
    """Every statement inside a function except docstrings, with the block that it is in."""
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        block = getattr(node, name, [])
        if not isinstance(block, list):  # of a lambda, or of `a if b else c`
            continue
        for child in block:
            if inside and isinstance(child, ast.stmt):
                text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                if not text:
                    yield child, block
            yield from _statements(child, inside)


class Recorder:
    """A plugin of pytest that writes which statements each test of a file runs, and its seconds.

    Tests run in a random order and recording ends after `max_seconds`: a file of many long tests
    is represented by some of them. Tests that fail are left out.
    """

    def __init__(self, tree: Path, output: Path, max_seconds: float) -> None:
        self._output, self._max_seconds = output, max_seconds
        with (tree / PACKAGE / "_marks.bin").open("r+b") as file:
            self._marks = mmap.mmap(file.fileno(), 0)
        self._tests: Touch = {}
        self._failed: set[str] = set()
        self._started = time.monotonic()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        random.Random(0).shuffle(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._marks[:] = bytes(len(self._marks))
        started = time.monotonic()
        result = yield
        seconds = time.monotonic() - started
        if item.nodeid not in self._failed:
            touched = [at for at, mark in enumerate(self._marks[:]) if mark]
            self._tests[item.nodeid] = {"seconds": round(seconds, 4), "touched": touched}
        if time.monotonic() - self._started > self._max_seconds:
            item.session.shouldstop = "enough was recorded"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._output.write_text(json.dumps(self._tests))


class InOrder:
    """A plugin of pytest that runs the given tests in the given order, each with a time limit, and
    writes the name of the one that fails."""

    def __init__(self, seconds: dict[str, float], output: Path) -> None:
        self._seconds, self._output = seconds, output

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        place = {name: at for at, name in enumerate(self._seconds)}
        items[:] = [item for item in items if item.nodeid in place]
        items.sort(key=lambda item: place[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # Nobody handles this signal: it ends the process.
        signal.setitimer(signal.ITIMER_REAL, 30 + 8 * self._seconds[item.nodeid])
        result = yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._output.write_text(report.nodeid)


def record(marked: Path, name: str, max_seconds: float) -> Touch:
    """Which statements the tests of a file run, by running them for `max_seconds` or a little more.
    `marked` is what `mark_statements` changed."""
    tree = own_copy(marked)
    output = tree / "touched.json"
    output.unlink(missing_ok=True)
    wait_for(start(tree, [name], Recorder(tree, output, max_seconds)), 300 + max_seconds)
    # There is none where no test of it could be collected.
    touched: Touch = json.loads(output.read_text()) if output.exists() else {}
    return touched


def own_copy(tree: Path) -> Path:
    """Of this process, so that several can change and run it."""
    copy = tree.with_name(f"{tree.name}-{os.getpid()}")
    if not copy.exists():
        shutil.copytree(tree, copy)
    return copy


def start(tree: Path, arguments: list[str], plugin: object) -> int:
    """Forks a process that runs pytest in a copy of the tree. Packages that this process has
    imported are there already, except the library: this process has the checkout's modules, and
    the copy's are to be tested."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            os.chdir(tree)
            output = os.open(tree / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            os.environ["PYTHONPATH"] = str(tree / "src")
            sys.path.insert(0, str(tree / "src"))
            for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE.name]:
                del sys.modules[name]
            options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(tree)]
            code = int(pytest.main([*options, *arguments], plugins=[plugin]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    return pid


def wait_for(pid: int, seconds: float) -> int:
    """The exit code, negative if it was ended by a signal or after so many seconds. Processes that
    its tests have left behind are ended too."""
    until = time.monotonic() + seconds
    over, status = 0, 0
    try:
        while not over and time.monotonic() < until:
            over, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    if not over:
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)
