"""`advise`: all methods ranked, with bytes beside their bound, the reason, and a line to paste."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_attention.choose.auto import find_default
from mesh_attention.choose.ranking import RankedMethod
from mesh_attention.choose.scored import Scored
from mesh_attention.cli import options, output
from mesh_attention.cli.advise import _default_note, _moved_note
from mesh_attention.cli.command import Parser
from mesh_attention.cli.main import COMMANDS, main
from mesh_attention.cli.options import options_of
from mesh_attention.cost.planning import plan_on
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.step.model_shapes import MODELS
from mesh_attention.step.splits import plan_step

SMALL = ["--ranks", "4", "--tokens", "8192"]


def test_it_answers_with_a_table_a_reason_and_a_line_to_paste(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["advise", *SMALL, "--model", "gpt-oss-120b"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("Use ")
    assert " It fits: attention needs " in lines[0]
    assert "% less time than ring (" in lines[1]
    assert lines[2].endswith("gpt-oss-120b are not modelled: it has experts.")
    assert lines[4] == "4 ranks of hgx-h100 (H100 SXM), 1 node of 8"
    assert "64 heads of 64 (8 KV heads)" in lines[5]
    assert "causal" in lines[5]
    begins = [line.split()[0] for line in lines if line]
    assert {*METHODS} <= {*begins}
    assert ">=" not in out
    assert any(line.startswith("least possible  ") for line in lines)
    assert any(line.startswith("least possible: a lower bound") for line in lines)
    assert 'The default, method="auto", ' in out
    assert any(line.startswith("cp = ContextParallel(") for line in lines)


def test_settings_of_the_table_can_be_typed_back() -> None:
    problem = Problem(16384, 8, 64, num_kv_heads=4, mask=Mask(causal=True))
    cluster, way = load_cluster("hgx-h100"), Direction.FORWARD
    known = find_default(problem, 8, cluster)
    parser = Parser("advise", COMMANDS["advise"])
    cut = {"chunks": (1, 2), "head_slices": (1, 2)}
    settings: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in METHODS]
    settings += [("mesh", {"tile": (2, 4), "combine": "nodes", **cut}), ("allgather-kv", cut)]
    for name, chosen in settings:
        scored = Scored(way, name, chosen, 1.0, 1, True, "", True, 1, False)
        row = RankedMethod({way: scored}, known.asked)
        words = [word.split("=") for word in row.setting(way).split() if word != "-"]
        flags = [x for name, value in words for x in (f"--{name.replace('_', '-')}", value)]
        asked: dict[str, Any] = {"method": name, "directions": (way,)}
        typed = plan_on(cluster, problem, 8, **asked, **options_of(parser.parse(flags)))
        assert digest(typed) == digest(row.plans[way])
        assert {*chosen} <= {name for name, _ in words}


def test_json_ranks_methods_and_has_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *SMALL, "--heads", "8", "--kv-heads", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = answer["methods"]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert answer["chosen"] == {name: x for name, x in rows[0].items() if name != "tie"}
    assert {row["method"] for row in rows} | {*answer["refused"]} >= {*METHODS}
    for row in rows:
        for direction, bound in answer["least_received_bytes"].items():
            assert row["passes"][direction]["received_bytes"] >= 0.999 * bound
        assert 0 < row["mfu_percent"] < 100
        assert row["peak_bytes"] > 0
        assert row["fits_gpu"]
        assert row["tie"] == (row["seconds"] < rows[0]["seconds"] / 0.97)
    default = find_default(Problem(8192, 8, 128, num_kv_heads=2), 4, "hgx-h100")
    assert answer["default"]["method"] == default.plan().method
    assert answer["default"]["simulated"]
    assert answer["default"]["seconds"] >= rows[0]["seconds"]


def test_where_the_default_differs_is_told() -> None:
    default = find_default(Problem(8192, 8, 64, mask=Mask(causal=True)), 4, "hgx-h100")
    begin = 'The default, method="auto",'
    for factor, text in ((1.0, "makes the same plan"), (0.99, "as fast (within"), (0.5, "2 times")):
        passes = {
            d: replace(
                scored, seconds=factor * scored.seconds, options=scored.options | {"x": factor}
            )
            if factor < 1
            else scored
            for d, scored in default.chosen.items()
        }
        usual = RankedMethod(default.chosen, default.asked)
        line = _default_note(RankedMethod(passes, default.asked), usual)
        assert line.startswith(begin)
        assert text in line


def test_the_verdict_has_tokens_per_second_of_the_model_as_the_step_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--ranks", "2", "--tokens", "16k", "--model", "qwen3-0.6b", "--batch", "4"]
    assert main(["advise", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    fits, _, batch, model = answer["verdict"]
    assert f"needs {bytes_text(4 * answer['chosen']['peak_bytes'])} of the 80.00 GiB" in fits
    assert batch.startswith("4 sequences at a time need 4 times the memory and traffic of one")
    step = plan_step("qwen3-0.6b", 16384, 2, cluster="hgx-h100", batch=4, context=2).best
    speed = step.tokens_per_second_per_gpu
    assert f"trains at {2 * speed:,.0f} tokens a second ({speed:,.0f} a GPU)" in model


def test_one_rank_is_told_that_it_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--ranks", "1", "--tokens", "4096", "--heads", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("One rank needs no context parallelism: use scaled_dot_product_attention")
    assert "\n1 rank of " in out


def test_what_does_not_fit_a_gpu_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "--cluster", "hgx-h100", "--memory", "107374", "--ranks", "2"]
    words += ["--tokens", "512", "--heads", "4", "--pass", "forward"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("It does not fit: a rank needs ")
    assert "more than the 104.86 KiB of a GPU" in out
    (ulysses,) = (line for line in out.splitlines() if line.startswith("ulysses  "))
    assert " !" in ulysses
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert not answer["chosen"]["fits_gpu"]
    assert answer["chosen"]["peak_bytes"] > answer["gpu_bytes"] == 107374
    assert not any(row["fits_gpu"] for row in answer["methods"])


def test_what_does_not_fit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--method", "ring"]) == 2
    assert "leave --method out" in capsys.readouterr().err
    assert main(["advise", "--model", "llama-70"]) == 2
    assert "did you mean llama-70b?" in capsys.readouterr().err
    assert main(["advise", "--ranks", "4", "--team", "2", "--inner", "2"]) == 2
    assert "no method has all of the options" in capsys.readouterr().err


def test_shapes_of_models_can_be_planned() -> None:
    for shape in MODELS.values():
        problem = Problem(1024, **shape.heads)
        assert problem.num_heads % problem.kv_heads == 0


def test_simulate_says_which_kernels_are_not_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["simulate", *SMALL, "--causal", "--kernel", "cudnn", "--pass", "forward"]
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    assert main(words) == 0
    assert "Not installed here: cudnn; the times assume them" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels_not_installed"] == ["cudnn"]
    monkeypatch.setattr(output, "find_spec", lambda name: name)
    assert main(words) == 0
    assert "Not installed" not in capsys.readouterr().out


def test_auto_is_a_method_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "volume", "verify", "draw", "simulate"):
        assert main([command, "--ranks", "4", "--tokens", "256", "--method", "auto"]) == 0
    words = ["simulate", *SMALL, "--method", "auto", "--best", "--pass", "forward", "--json"]
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(out)["settings_tried"] > len(METHODS)


def test_where_tokens_are_moved_it_is_told_with_what_that_brings() -> None:
    ring = SimpleNamespace(name="ring", seconds=0.002, is_simulated=True)
    choice: Any = SimpleNamespace(
        place={"layout": "contiguous"}, unmoved={Direction.FORWARD: ring}, seconds=0.001
    )
    note, _ = _moved_note(choice)
    assert "layout='contiguous'" in note
    assert "ring: 2 ms, 2 times as long" in note


def test_a_file_that_cannot_be_written_is_told_before_the_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_best", None)
    assert main(["advise", *SMALL, "--output", "/no/such/plan.json"]) == 2
    assert "/no/such/plan.json" in capsys.readouterr().err
