"""The public CI file runs what the package claims: its Pythons, its torches, its commands."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CI = (ROOT / ".github/workflows/ci.yml").read_text()
PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = re.findall(r"^torch==(.*)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)


def versions(name: str) -> list[str]:
    (found,) = re.findall(rf"^ +{name}: (\[.*\])$", CI, re.MULTILINE)
    listed: list[str] = json.loads(found)
    return listed


def test_every_python_of_the_package_is_run() -> None:
    claimed = [c.rpartition(" ")[2] for c in PACKAGE["classifiers"] if ":: Python :: 3." in c]
    assert versions("python") == claimed
    assert PACKAGE["requires-python"] == f">={claimed[0]}"


def test_every_torch_of_the_package_is_run_up_to_the_pinned_one() -> None:
    (claimed,) = (d for d in PACKAGE["dependencies"] if d.startswith("torch"))
    minors = [int(version.split(".")[1]) for version in versions("torch")]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert claimed == f"torch>=2.{minors[0]},<2.{minors[-1] + 1}"
    assert versions("torch")[-1:] == PINNED


def test_the_commands_are_targets_of_the_makefile_and_take_the_torch() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"- run: make (\w+) TORCH=\$\{\{ matrix\.torch \}\}$", CI, re.MULTILINE)
    assert commands == ["lint", "demo", "test"]
    assert all(f"\n{command}: $(STAMP)\n" in makefile for command in commands)
