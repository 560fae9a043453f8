"""docs/guarantees.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()


def test_every_test_that_the_guarantees_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 15
    files = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert sorted(name for name in named if f"def {name}(" not in files) == []
