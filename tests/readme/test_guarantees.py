"""docs/guarantees.md names tests that exist, and for each need of users those that show it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NEEDS = {3, 6, 8, 9, 11, 12, 20, 22, 23, 27, 35}


def test_every_test_that_the_guarantees_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 15
    files = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert sorted(name for name in named if f"def {name}(" not in files) == []


def needs_of_tests() -> dict[str, set[int]]:
    """By the names of tests: the numbers that follow "need" in their docstrings or their file's."""
    found: dict[str, set[int]] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        text = file.read_text()
        tree = ast.parse(text if re.search(r"[Nn]eeds? \d", text) else "")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                said = f"{ast.get_docstring(node)}\n{ast.get_docstring(tree)}"
                told = re.findall(r"[Nn]eeds? (\d+(?:(?:, | and )\d+)*)", said)
                numbers = {int(x) for one in told for x in re.findall(r"\d+", one)}
                found.setdefault(node.name, set()).update(numbers)
    return found


def test_every_need_has_a_row_with_tests_that_name_it() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| .* \| (`test_.*`) \|$", PAGE, flags=re.MULTILINE))
    assert {int(number) for number in rows} == NEEDS
    said = needs_of_tests()
    for number, tests in rows.items():
        for name in re.findall(r"`(test_\w+)`", tests):
            assert int(number) in said[name], (number, name)
