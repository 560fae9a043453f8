"""The front of the command: help, version, exit codes, closed pipes, and no torch."""

from __future__ import annotations

import doctest
import errno
import io
import os
import re
import runpy
import subprocess
import sys
from types import ModuleType

import pytest

from mesh_attention.cli import command, output, simulate, values
from mesh_attention.cli.main import COMMANDS, main
from mesh_attention.report import page
from mesh_attention.version import __version__

PLANNING = ("plan", "volume", "verify", "simulate", "draw")
OPTIONS = [
    "--method",
    "--ranks",
    "--tile",
    "--tokens",
    "--kv-tokens",
    "--heads",
    "--kv-heads",
    "--head-dim",
    "--v-head-dim",
    "--element-bytes",
    "--causal",
    "--window",
    "--documents",
    "--prefix",
    "--layout",
    "--stripe-block",
    "--chunks",
    "--backward-tile",
    "--backward-chunks",
    "--ranks-per-node",
    "--alpha",
    "--no-rotation",
    "--combine",
    "--gather-out",
    "--max-memory-bytes",
    "--pass",
    "--json",
]


def test_alone_it_prints_help_with_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and c.summary in out for name, c in COMMANDS.items())


@pytest.mark.parametrize("name", PLANNING)
def test_help_of_a_command_names_its_options_and_defaults(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help-all"]) == 0
    out = capsys.readouterr().out
    assert main([name, "--all"]) == 0
    assert capsys.readouterr().out == out
    for option in OPTIONS:
        assert option in out
    assert "default 64k" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_short_help_fits_a_screen_and_shows_examples_before_options(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") <= 50
    assert 0 < out.index("examples:\n  ") < out.index("--json")
    assert ("--help-all" in out) == (name in (*PLANNING, "advise", "report", "tune"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_declares_a_summary_examples_and_flags_that_differ(name: str) -> None:
    known = COMMANDS[name]
    assert known.summary == known.summary.strip() != ""
    assert all(re.match(r"mesh-attention \w|torchrun .* mesh_attention", x) for x in known.examples)
    assert any(f" {name} " in f"{example} " for example in known.examples)
    names = [each for flag in known.flags() for each in flag.names]
    assert len(names) == len({*names})
    attributes = [flag.attribute for flag in known.flags()]
    assert len(attributes) == len({*attributes})
    assert all(flag.help for flag in known.flags())


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mesh-attention {__version__}\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("verify --method mesh --ranks 4 --tokens 64", 0),
        ("volume --tile 3x4 --ranks 9", 2),
    ],
)
def test_python_m_ends_with_0_for_done_and_2_for_the_impossible(
    line: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mesh-attention", *line.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("mesh_attention", run_name="__main__")
    assert ended.value.code == code
    out, err = capsys.readouterr()
    if code == 0:
        assert err == ""
        assert out.startswith("ok: mesh on 4 ranks")
    else:
        assert out == ""
        assert err.count("\n") == 1


def test_a_reader_that_stops_early_causes_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["plan", "--ranks", "64", "--text", "-"]) == 141
        pipe.write("what an interpreter flushes as it ends")
    assert capsys.readouterr().err == ""


def test_an_answer_that_cannot_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it where it is closed
    assert main(["verify", "--ranks", "2", "--tokens", "64"]) == 2
    assert capsys.readouterr().err == (
        "mesh-attention verify: standard output is closed, and the answer is lost\n"
    )

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["advise", "--help"]) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_a_closed_input_and_the_root_folder_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it where it is closed
    assert main(["verify", "--text", "-"]) == 2
    assert "standard input is closed" in capsys.readouterr().err
    assert main(["plan", "--ranks", "2", "--text", "/"]) == 2
    assert capsys.readouterr().err == "mesh-attention plan: /: Is a directory\n"


def test_no_command_imports_torch() -> None:
    script = (
        "import sys\n"
        "from mesh_attention.cli.main import COMMANDS, main\n"
        "for name in ('plan', 'volume', 'verify', 'simulate', 'draw'):\n"
        "    for more in ([], ['--json']):\n"
        "        assert main([name, '--ranks', '4', '--tokens', '64', *more]) == 0\n"
        "        assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("with_rich", [True, False])
def test_progress_is_only_for_a_person_at_a_terminal(
    with_rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with output.progress("verifying") as tell:
        assert tell is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(output, "_PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(output, "_REDRAW_SECONDS", -1.0)
    monkeypatch.setattr(output, "find_spec", lambda name: object() if with_rich else None)
    assert main(["verify", "--ranks", "4", "--tokens", "64", "--json"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r'{"ok": true, "digest": "[0-9a-f]{64}", "problems": \[\]}\n', out)
    assert "verifying" in err


@pytest.mark.parametrize("module", [command, output, page, simulate, values])
def test_examples_in_docstrings_are_true(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
