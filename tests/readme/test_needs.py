"""docs/needs.md is what its data says, and every test that it names exists."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_needs_is_up_to_date_and_its_tests_exist() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_needs.py"))
    assert (ROOT / "docs" / "needs.md").read_text() == made["page"](), "python docs/make_needs.py"
    named = {test for need in made["needs"]().values() for test in need["tests"]}
    assert len(made["needs"]()) == 35
    missing = []
    for test in named:
        file, _, name = test.partition("::")
        path = ROOT / "tests" / file
        if not path.is_file() or f"\ndef {name}(" not in path.read_text():
            missing.append(test)
    assert sorted(missing) == []
