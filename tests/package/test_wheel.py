"""What is published: the wheel and the sdist, and the selftest of the wheel, which can fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mesh_attention.version import __version__

ROOT = Path(__file__).parents[2]
PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_page_and_no_message_installs_this_package_from_an_index() -> None:
    """None has it. Error messages name packages of others; pages install a clone or a wheel."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir()]
    files += (ROOT / "src").rglob("*.py")
    wrong = re.compile(r"pip install ['\"]?mesh[-_]attention(?!-[\w.*-]+\.whl)")
    assert [path for path in files if path.is_file() and wrong.search(path.read_text())] == []


def test_extras_that_the_pages_install_exist_and_all_has_those_of_every_machine() -> None:
    extras = PACKAGE["optional-dependencies"]
    pages = "\n".join(path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    named = re.findall(r"pip install [^`\n]*?(?:\.|\.whl)\[([\w,]+)\]", pages)
    assert named
    assert {name for names in named for name in names.split(",")} <= extras.keys()
    (everything,) = extras["all"]
    inside = {"hopper", "all", *re.findall(r"\w+", everything)[2:]}
    # An extra may bring another.
    inside |= {
        x for name in inside for text in extras[name] for x in re.findall(r"\[(\w+)\]", text)
    }
    assert inside == extras.keys()


def test_the_version_is_the_same_in_all_places() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", __version__)
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_the_wheel_passes_its_selftest_and_a_mutant_of_it_does_not(tmp_path: Path) -> None:
    def python(*words: object, code: int = 0, **more: Any) -> str:
        line = [sys.executable, *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, check=False, **more)
        assert done.returncode == code, done.stdout + done.stderr
        return str(done.stdout)

    dist, right, wrong = (tmp_path / name for name in ("dist", "right", "wrong"))
    python("-m", "build", "--no-isolation", "--outdir", dist, cwd=ROOT)
    python("-m", "twine", "check", "--strict", *dist.iterdir())
    (wheel,) = dist.glob("*.whl")
    python("-m", "pip", "install", "--quiet", "--no-deps", "--target", right, wheel)
    shutil.copytree(right, wrong)
    file, line = wrong / "mesh_attention/kernels/rows.py", "advantage = lse - acc_lse\n"
    text = file.read_text()
    assert text.count(line) == 1
    file.write_text(text.replace(line, "advantage = lse - acc_lse + 1e-6\n"))
    for folder, code in ((right, 0), (wrong, 1)):
        environment = os.environ | {"PYTHONPATH": str(folder)}
        words = ("-m", "mesh_attention", "selftest", "--method", "mesh", "--json")
        answer = json.loads(python(*words, code=code, env=environment, cwd="/"))
        assert answer["version"] == __version__
        assert answer["ok"] is (code == 0)
