"""The README's commands and examples, executed: words that drift from the code fail here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_attention.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def _commands() -> list[str]:
    return [line for block in _blocks("bash") for line in block.splitlines() if line.strip()]


def test_the_readme_opens_with_the_demonstration_and_an_example_for_torchrun() -> None:
    assert README.index("make demo") < README.index("torchrun") < README.index("make test")
    example = _blocks("python")[0]
    assert len(example.strip().splitlines()) <= 16


@pytest.mark.parametrize("command", [c for c in _commands() if c.startswith("mesh-attention")])
def test_every_command_of_the_readme_works(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_make_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for command in _commands():
        if command.startswith("make "):
            assert command.split()[1] in targets


def test_the_torchrun_example_runs_on_four_ranks(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(_blocks("python")[0])
    arguments = ["--nproc-per-node", "4", "--standalone", str(script)]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert len([line for line in run.stdout.splitlines() if "torch.Size" in line]) == 4


def test_the_planning_example_runs_without_torch() -> None:
    code = _blocks("python")[1] + "\nimport sys; assert 'torch' not in sys.modules\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "mean" in run.stdout


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
