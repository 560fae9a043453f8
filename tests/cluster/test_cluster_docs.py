"""docs/simulate.md, docs/clusters.md and docs/make_scaling.py do what they say."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from mesh_attention.cli.main import main
from mesh_attention.cost import cluster_names

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "\n".join((DOCS / name).read_text() for name in ("simulate.md", "clusters.md"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


LINES = [line for block in blocks("bash") for line in block.splitlines()]


# `profile` runs in `tests/measure`; a file that it could have written is there.
@pytest.mark.parametrize("command", [line for line in LINES if not line.startswith("torchrun ")])
def test_every_command_of_the_pages_works(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = resources.files("mesh_attention.machine") / "clusters" / "hgx-h100.toml"
    (tmp_path / "cluster.toml").write_text(shipped.read_text())
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_the_example_runs_without_torch() -> None:
    code = blocks("python")[0] + "\nimport sys; assert 'torch' not in sys.modules\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "runtime_seconds" in run.stdout


def test_the_pages_name_every_cluster() -> None:
    assert all(f"`{name}`" in TEXT for name in cluster_names())


def test_the_generator_of_scaling_writes_every_cell() -> None:
    generator = runpy.run_path(str(DOCS / "make_scaling.py"))
    point, result_type = generator["Point"], generator["Answer"]
    scaling = {4: 65536, 16: 131072}
    rows = generator["rows_of"]("paper", scaling)
    points = [point for row in rows for cell in generator["cells"](row) for point in cell]
    assert len(points) == len(scaling) * 4 * len(generator["METHODS"])
    times = {point: result_type(1.0 + (point.method != "mesh"), 50.0) for point in points}
    text = generator["table"]("paper", scaling, times)
    assert text.count("**50.0/50.0**") == len(rows)
    small = point("paper", True, "backward", 4, 4096, "usp")
    result = generator["simulate_point"](small)
    assert 0 < result.seconds < 1
    assert 0 < result.mfu_percent < 100
