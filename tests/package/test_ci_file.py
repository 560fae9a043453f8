"""The public CI file runs what the package claims: its Pythons, its torches, its commands."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from mesh_attention.version import NEWEST_TORCH, OLDEST_TORCH

ROOT = Path(__file__).parents[2]
CI = (ROOT / ".github/workflows/ci.yml").read_text()
PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(file: str) -> dict[str, str]:
    text = (ROOT / f"requirements-{file}.txt").read_text()
    return dict(re.findall(r"^([\w-]+)==(.*)$", text, re.MULTILINE))


def versions(name: str) -> list[str]:
    (texts,) = re.findall(rf"^ +{name}: (\[.*\])$", CI, re.MULTILINE)
    listed: list[str] = json.loads(texts)
    return listed


def test_every_python_of_the_package_is_run() -> None:
    claimed = [c.rpartition(" ")[2] for c in PACKAGE["classifiers"] if ":: Python :: 3." in c]
    assert versions("python") == claimed
    assert PACKAGE["requires-python"] == f">={claimed[0]}"


def test_every_torch_of_the_package_is_run() -> None:
    ends = versions("torch")
    between = re.findall(r'- \{python: "[\d.]+", torch: "([\d.]+)"\}', CI)
    run = [(2, int(version.split(".")[1])) for version in (ends[0], *between, ends[1])]
    assert run == [(2, minor) for minor in range(OLDEST_TORCH[1], NEWEST_TORCH[1] + 1)]
    assert f"torch>=2.{OLDEST_TORCH[1]}" in PACKAGE["dependencies"]
    assert pins("dev")["torch"] in (*ends, *between)


def test_the_oldest_versions_are_those_of_the_package_and_of_its_page() -> None:
    extras = PACKAGE["optional-dependencies"]
    bounds = [
        *PACKAGE["dependencies"],
        *(x for n in ("huggingface", "lora", "trl") for x in extras[n]),
    ]
    oldest = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(bounds), re.MULTILINE))
    del oldest["numpy"]  # requirements-oldest.txt says why
    assert {name: pin.removesuffix(".0") for name, pin in pins("oldest").items()} == oldest
    page = (ROOT / "docs/huggingface.md").read_text()
    for name in ("transformers", "accelerate", "peft", "trl"):
        assert f"| {name} | {pins('oldest')[name]} | {pins('dev')[name]} |" in page


def test_the_commands_are_targets_of_the_makefile_and_take_the_torch() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"- run: make (.*)$", CI, re.MULTILINE)
    torch = " TORCH=${{ matrix.torch }}"
    of_torch = [f"{command}{torch}" for command in ("demo", "selftest", "test")]
    assert commands == ["lint", "docs", *of_torch, "test-oldest", "wheel", "test"]
    assert all(f"\n{command.removesuffix(torch)}:" in makefile for command in commands)
