"""`advise`: all methods ranked, with bytes beside their bound, the reason, and a line to paste."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mesh_attention.choose.answers import VARIABLE, ask_auto
from mesh_attention.choose.one_pass import Standing
from mesh_attention.choose.ranking import RankedMethod
from mesh_attention.cli import installed
from mesh_attention.cli.advise import _moved_note
from mesh_attention.cli.main import main
from mesh_attention.cli.models import MODELS
from mesh_attention.cli.options import add_plan_flags, options_of
from mesh_attention.cost.machine.load import load_cluster
from mesh_attention.cost.planning import plan_on
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.text import digest

SMALL = ["--ranks", "4", "--tokens", "8192"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def test_it_answers_with_a_table_a_reason_and_a_line_to_paste(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["advise", *SMALL, "--model", "gpt-oss-120b"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "4 ranks of hgx-h100 (H100 SXM), 1 node of 8"
    assert "64 heads of 64 (8 KV heads)" in lines[1]
    assert "causal" in lines[1]
    begins = [line.split()[0] for line in lines if line]
    assert {*METHODS} <= {*begins}
    assert any(line.startswith("least possible  ") for line in lines)
    assert any(line.startswith("least possible: by the visible area") for line in lines)
    assert "a rank receives" in out
    (python,) = (line for line in lines if line.startswith("cp = ContextParallel("))
    assert "seq_len=8192, num_heads=64, num_kv_heads=8, head_dim=64, causal=True" in python
    assert len([*folder.iterdir()]) == 1  # auto uses it from now on


def test_the_line_says_cluster_file_dtype_and_mask_as_they_were_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = (resources.files("mesh_attention.cost.machine") / "clusters/hgx-h100.toml").read_text()
    file = tmp_path / "ours.toml"
    file.write_text(text)
    given = ["--cluster", str(file), "--heads", "4", "--element-bytes", "4"]
    asked = [*given, "--causal", "--window", "64"]
    assert main(["advise", "--ranks", "2", "--tokens", "512", *asked]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("cp = "))

    def read(group: object, **arguments: Any) -> dict[str, Any]:
        return arguments

    names = {"ContextParallel": read, "group": None, "Mask": Mask, "torch": torch}
    said = eval(line.removeprefix("cp = "), names)
    assert said["dtype"] is torch.float32
    assert said["mask"] == Mask(causal=True, window=(64, 0))
    assert said.get("cluster") in (None, str(file))  # options say all where passes have the same


def test_settings_of_the_table_can_be_typed_back() -> None:
    problem = Problem(16384, 8, 64, num_kv_heads=4, mask=Mask(causal=True))
    cluster, way = load_cluster("hgx-h100"), Direction.FORWARD
    parser = ArgumentParser()
    add_plan_flags(parser)
    cut = {"chunks": (1, 2), "head_slices": (1, 2)}
    settings: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in METHODS]
    settings += [("mesh", {"tile": (2, 4), "combine": "nodes", **cut}), ("allgather-kv", cut)]
    for name, options in settings:
        row = RankedMethod({way: Standing(name, options, 1.0)}, problem, 8, cluster)
        words = [word.split("=") for word in row.setting(way).split() if word != "-"]
        flags = [x for name, value in words for x in (f"--{name.replace('_', '-')}", value)]
        asked: dict[str, Any] = {"method": name, "directions": (way,)}
        typed = plan_on(cluster, problem, 8, **asked, **options_of(parser.parse_args(flags)))
        assert digest(typed) == digest(row.plans[way])
        assert {*options} <= {name for name, _ in words}


def test_what_cannot_be_kept_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/proc/nowhere")
    assert main(["advise", "--ranks", "2", "--tokens", "512", "--heads", "4"]) == 0
    told = capsys.readouterr()
    assert told.err.startswith("mesh-attention advise: the answer could not be kept: ")
    assert len(told.err.splitlines()) == 1
    assert "Kept in" not in told.out
    assert "Kept nowhere" in told.out


def test_json_ranks_methods_and_says_what_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["advise", *SMALL, "--heads", "8", "--kv-heads", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # A bound is no place among times: what is known comes first.
    rows = [(one["at_least"], one["seconds"]) for one in found["methods"]]
    assert rows == sorted(rows)
    assert not rows[0][0]
    assert {one["method"] for one in found["methods"]} | {*found["refused"]} == {*METHODS}
    for one in found["methods"]:
        for direction, bound in found["least_received_bytes"].items():
            assert one["passes"][direction]["received_bytes"] >= 0.999 * bound
        assert 0 < one["mfu_percent"] < 100
        assert one["peak_bytes"] > 0
        assert one["fits_gpu"]
    assert found["fits_gpu"]
    assert Path(found["kept_in"]).is_file()
    problem = Problem(8192, 8, 128, num_kv_heads=2, mask=Mask())
    assert ask_auto(problem, 4, "hgx-h100").plan().method == found["plan"]


def test_what_does_not_fit_a_gpu_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = (resources.files("mesh_attention.cost.machine") / "clusters/hgx-h100.toml").read_text()
    file = tmp_path / "small.toml"
    file.write_text(text.replace("memory_gib = 80 ", "memory_gib = 0.0001 "))
    words = ["advise", "--cluster", str(file), "--ranks", "2", "--tokens", "512", "--heads", "4"]
    words += ["--pass", "forward"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "It does not fit: a rank needs " in out
    assert "more than the 104.86 KiB of a GPU" in out
    (ulysses,) = (line for line in out.splitlines() if line.startswith("ulysses  "))
    assert " !" in ulysses
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["fits_gpu"]
    assert found["peak_bytes"] > found["gpu_bytes"] == 107374
    assert not any(one["fits_gpu"] for one in found["methods"])


def test_what_does_not_fit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--method", "ring"]) == 2
    assert "leave --method out" in capsys.readouterr().err
    assert main(["advise", "--model", "llama-70"]) == 2
    assert "did you mean llama-70b?" in capsys.readouterr().err
    assert main(["advise", "--ranks", "4", "--team", "2", "--inner", "2"]) == 2
    assert "no method has all of the options" in capsys.readouterr().err


def test_shapes_of_models_can_be_planned() -> None:
    for shape in MODELS.values():
        problem = Problem(1024, **shape._asdict())
        assert problem.num_heads % problem.kv_heads == 0


def test_simulate_says_which_kernels_are_not_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["simulate", *SMALL, "--causal", "--kernel", "cudnn", "--pass", "forward"]
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    assert main(words) == 0
    assert "Not installed here: cudnn; the rates used are those" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels_not_installed"] == ["cudnn"]
    monkeypatch.setattr(installed, "find_spec", lambda name: name)
    assert main(words) == 0
    assert "Not installed" not in capsys.readouterr().out


def test_auto_is_a_method_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "volume", "verify", "draw", "simulate"):
        assert main([command, "--ranks", "4", "--tokens", "256", "--method", "auto"]) == 0
    words = ["simulate", *SMALL, "--method", "auto", "--best", "--pass", "forward", "--json"]
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(out)["settings_tried"] > len(METHODS)


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_is_kept_nowhere_is_not_said_to_be_kept(is_kept: bool) -> None:
    standing = SimpleNamespace(name="ring", seconds=0.001)
    found: Any = SimpleNamespace(place={"units_per_node": 4}, unmoved={Direction.FORWARD: standing})
    told, _ = _moved_note(found, is_kept=is_kept)
    assert "units_per_node=4" in told
    assert "ring in 1.00 ms" in told
    assert ("kept" in told) == is_kept
