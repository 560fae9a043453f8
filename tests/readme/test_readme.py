"""Commands and examples of README and docs, executed: words that drift from the code fail here."""

import contextlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from mesh_attention.cli.main import main
from support.pool import WorkerPool

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("README", "docs/planning", "docs/slices", "docs/start", "docs/long-sequences")
PAGES = {name: (ROOT / f"{name}.md").read_text() for name in NAMES}
README, PLANNING = PAGES["README"], PAGES["docs/planning"]


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def _commands() -> list[str]:
    blocks = [block for page in PAGES.values() for block in _blocks(page, "bash")]
    return list(dict.fromkeys(line for block in blocks for line in block.splitlines() if line))


def test_the_readme_shows_use_then_the_picture_then_two_commands_and_where_to_read_on() -> None:
    wanted = (
        "pip install",
        "torchrun",
        "pictures/methods.png",
        "make demo",
        "make test",
        "Read on",
    )
    places = [README.index(word) for word in wanted]
    assert places == sorted(places)
    example = _blocks(README, "python")[0].strip().splitlines()
    use = [line for line in example if line and not line.startswith(("import", "from"))]
    assert len(use) <= 7  # six, and the end of the process group


def test_every_file_that_the_readme_names_exists() -> None:
    for path in re.findall(r"`((?:docs|examples|benchmarks)/[\w/.]*|[A-Z]+\.\w+)`", README):
        assert (ROOT / path).exists(), path


OURS = [command for command in _commands() if command.startswith("mesh-attention")]
MANY_RANKS, FEWER = "--ranks 256 --tile 16x16", "--ranks 16 --tile 4x4"  # seconds, and none


@pytest.mark.parametrize("command", [command.replace(MANY_RANKS, FEWER) for command in OURS])
def test_every_command_of_the_pages_works(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in OURS if MANY_RANKS in command])
def test_every_command_of_the_pages_works_on_as_many_ranks_as_it_says(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_make_commands_of_the_pages_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for command in _commands():
        if command.startswith("make "):
            assert command.split()[1] in targets


def run_example(rank: int, world_size: int, script: str) -> tuple[list[str], str]:
    """In a process that has torch and a group already: what it asks of torch.distributed, which
    is done, and what it prints."""
    asked: list[str] = []

    def ask(name: str) -> Any:
        return patch.object(dist, name, lambda *args: asked.append(f"{name}{args}"))

    printed = io.StringIO()
    with (
        ask("init_process_group"),
        ask("destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        made = runpy.run_path(script)
    made["cp"].close()  # its groups are real
    return asked, printed.getvalue()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_example_runs_on_every_rank(pool: WorkerPool, tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "step.py"
    script.write_text(_blocks(README, "python")[0])
    wanted = ["init_process_group('gloo',)", "destroy_process_group()"]
    for rank, (asked, printed) in enumerate(pool.run(run_example, ranks, str(script))):
        assert asked == wanted
        assert printed.startswith(f"{rank} ")
        assert printed.endswith(f"torch.Size([1, {1000 // ranks}, 8, 64])\n")


@pytest.mark.slow  # a process with torch takes two seconds of a core
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_torchrun_example_runs_on_every_rank(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "step.py"
    script.write_text(_blocks(README, "python")[0])
    arguments = ["--nproc-per-node", str(ranks), "--standalone", str(script)]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("torch.Size") == ranks  # lines of two ranks may come as one


def test_the_planning_example_runs_without_torch() -> None:
    code = _blocks(PLANNING, "python")[0] + "\nimport sys; assert 'torch' not in sys.modules\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "mean" in run.stdout


@pytest.mark.parametrize("name", ["11-15-replay-waiting", "11-19-replay-search-and-default"])
def test_tables_of_stored_replays_can_be_printed_again(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show = runpy.run_path(str(ROOT / "benchmarks" / "replay_tables.py"))["show"]
    results = ROOT / "benchmarks" / "results" / f"2026-{name}-h200.json"
    show(json.loads(results.read_text()))
    assert "chunks 2x2" in capsys.readouterr().out


def test_the_demonstration_is_exact_and_counts_what_the_paper_predicts(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "mesh_attention", "demo", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for units in (144, 84, 72):
        assert run.stdout.count(f"{units} units") == 2
    for picture in ("assignment.png", "schedule.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
    assert run.stdout.splitlines()[-1] == f"page: {tmp_path / 'report.html'} (open it in a browser)"
    assert "<title>" in (tmp_path / "report.html").read_text()
