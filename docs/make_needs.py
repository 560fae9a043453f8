"""Writes docs/needs.md from docs/needs.toml: needs of users, not met first, and their tests.

python docs/make_needs.py
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE, DATA = FOLDER / "needs.md", FOLDER / "needs.toml"

INTRODUCTION = """# Needs and their tests

What users of such libraries suffer from, in about 120 public issue threads, most painful first, and
the test that shows that it does not happen here. Tests are in `tests/`; those in `gpu/` need a GPU
(`make test-gpu`). Faults of ranks: [guarantees](guarantees.md).

Written by `python docs/make_needs.py` from `docs/needs.toml`.
"""


def needs() -> dict[int, dict[str, Any]]:
    return dict(enumerate(tomllib.loads(DATA.read_text())["need"], 1))


def page() -> str:
    open_, met = [], []
    for number, need in needs().items():
        tests = ", ".join(f"`{test}`" for test in need["tests"])
        row = f"| {number} | {need['statement']} "
        if "not_met" in need:
            open_.append(f"{row}| {need['not_met']} | {tests} |")
        else:
            met.append(f"{row}| {tests} |")
    return "\n".join(
        (
            INTRODUCTION,
            f"## Not met, or in part: {len(open_)} of {len(open_) + len(met)}\n",
            "| | need | what is lacking | what is shown |\n|---|---|---|---|",
            *open_,
            f"\n## Met: {len(met)}\n",
            "| | need | shown by |\n|---|---|---|",
            *met,
            "",
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
