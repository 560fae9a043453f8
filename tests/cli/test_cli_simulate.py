"""`mesh-attention simulate`: numbers to people and as JSON, traces, charts, and the search."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from mesh_attention.cli.main import main
from mesh_attention.cli.simulate import Simulated, to_lines
from mesh_attention.cost import simulate as simulate_plan
from mesh_attention.cost.planning import plan_on
from mesh_attention.machine.load import cluster_names
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

KEYS = {"runtime_seconds", "mfu_percent", "exposed_communication_seconds", "peak_bytes", "setting"}
SMALL = "simulate --method mesh --cluster paper --ranks 16 --tokens 8192 --heads 16 --causal"


def output(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(line.split()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def as_json(line: str, capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(output(f"{line} --json", capsys))


@pytest.fixture(scope="module")
def plain() -> Any:
    """What SMALL answers without more options."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main([*SMALL.split(), "--json"]) == 0
    return json.loads(out.getvalue())


def test_one_pass_is_one_object_and_both_are_one_each(capsys: pytest.CaptureFixture[str]) -> None:
    both = as_json(SMALL, capsys)
    assert list(both) == ["forward", "backward"]
    for direction, result in both.items():
        assert set(result) >= KEYS
        assert as_json(f"{SMALL} --pass {direction}", capsys) == result
    assert both["backward"]["runtime_seconds"] > both["forward"]["runtime_seconds"]


def test_the_setting_says_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --pass forward --tile 4x4 --chunks 2x1 --alpha 2 --layout striped"
    setting = as_json(line, capsys)["setting"]
    assert setting["tile"] == "4x4"
    assert setting["chunks"] == "2x1"
    assert setting["alpha"] == 2
    assert setting["layout"] == "striped"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_asked_for(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = as_json(f"{SMALL} --method {method}", capsys)
    assert {result["method"] for result in facts.values()} == {method}


@pytest.mark.parametrize(
    "more",
    [
        "--method usp --ulysses 4",
        "--method startrail --team 2",
        "--no-rotation",
        "--kv-heads 4 --head-dim 64",
        "--gather-out --combine reduce-scatter",
        "--backward-tile 2x8 --backward-chunks 1x2",
        "--window 1000 --gamma 2",
    ],
)
def test_the_options_of_plans_are_taken(
    more: str, plain: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_json(f"{SMALL} {more}", capsys) != plain


def test_ways_to_overlap_differ(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --tokens 65536 --chunks 2x2 --pass forward --overlap"
    times = [as_json(f"{line} {way}", capsys) for way in ("events", "strict", "none")]
    assert [results["overlap"] for results in times] == ["events", "strict", "none"]
    seconds = [results["runtime_seconds"] for results in times]
    assert seconds == sorted(seconds)


def test_people_get_a_table_that_says_it_is_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(SMALL, capsys)
    assert out.startswith("mesh on 16 ranks of paper, 2 nodes of 8\n8192 tokens")
    for word in ("runtime", "MFU", "exposed communication", "peak memory", "tile 4x4"):
        assert word in out
    assert "Modelled, not measured" in out
    assert "best of" not in out
    huge = output("simulate --ranks 2 --tokens 16777216 --heads 64 --pass forward", capsys)
    assert "needs more than the 80.00 GiB of a GPU" in huge


@pytest.mark.parametrize("method", ["mesh", "mesh-usp", "ring", "startrail"])
def test_best_is_at_least_as_fast_as_the_default(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{SMALL} --ranks 4 --method {method}"
    usual, best = as_json(line, capsys), as_json(f"{line} --best", capsys)
    for direction in usual:
        assert best[direction]["runtime_seconds"] <= usual[direction]["runtime_seconds"]
        assert best[direction]["settings_tried"] >= 1
    assert "best of" in output(f"{line} --ranks 2 --best --pass forward", capsys)


def test_best_keeps_what_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --best --pass backward --tile 2x8 --chunks 1x2"
    setting = as_json(line, capsys)["setting"]
    assert (setting["tile"], setting["chunks"]) == ("2x8", "1x2")


def test_a_trace_and_a_chart_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, chart = tmp_path / "trace.json", tmp_path / "chart.svg"
    files = f"--trace {trace} --trace-ranks 2 --gantt {chart} --gantt-ranks 2"
    out = output(f"{SMALL} {files}", capsys)
    assert f"trace: {trace} (ranks 0 to 1;" in out
    assert f"picture: {chart}" in out
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert chart.read_text().startswith("<?xml")


def test_clusters_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    out = output("simulate --clusters", capsys)
    assert [line.split()[0] for line in out.splitlines()] == list(cluster_names())
    assert list(as_json("simulate --clusters", capsys)) == list(cluster_names())


def test_a_cluster_of_ones_own_is_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib import resources

    text = (resources.files("mesh_attention.machine") / "clusters/hgx-h100.toml").read_text()
    file = tmp_path / "mine.toml"
    file.write_text(text.replace('name = "hgx-h100"', 'name = "mine"'))
    line = "simulate --ranks 16 --tokens 8192 --pass forward"
    own = as_json(f"{line} --cluster {file}", capsys)
    shipped = as_json(f"{line} --cluster hgx-h100", capsys)
    assert own | {"cluster": "hgx-h100"} == shipped


@pytest.mark.parametrize("option", ["trace", "gantt"])
def test_ranks_of_a_file_that_is_not_written_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", f"--{option}-ranks", "3"]) == 2
    assert f"--{option}-ranks does nothing without --{option}" in capsys.readouterr().err


def test_waiting_for_slower_ranks_is_no_communication(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cuts = ",".join(map(str, (0, *range(8192, 32769, 1024))))  # a long one, and short ones
    uneven = ["--ranks", "4", "--tokens", "32768", "--layout", "contiguous", "--heads", "4"]
    words = ["simulate", *uneven, "--documents", cuts, "--pass", "forward", "--method", "seen"]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["communication_busy_seconds"]["max"] == 0
    assert facts["open_communication_seconds"] == 0
    idle = facts["exposed_communication_seconds"]  # all of it
    assert facts["waiting_for_ranks_seconds"] == idle > 0
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^exposed communication +0.000 ms \(0%\)$", out, re.MULTILINE)
    assert re.search(r"^waiting for other ranks +[0-9.]+ ms \([1-9]", out, re.MULTILINE)


def test_passes_of_two_methods_are_told_apart() -> None:
    problem = Problem(4096, 8, 64, mask=Mask(causal=True))
    results = []
    for method, direction in (("usp", Direction.FORWARD), ("mesh-usp", Direction.BACKWARD)):
        plan = plan_on("paper", problem, 4, method=method, directions=(direction,))
        results.append(Simulated(simulate_plan(plan, "paper", direction), {}))
    lines = "\n".join(to_lines(results)).splitlines()
    assert lines[0].startswith("usp and mesh-usp on 4 ranks of paper")
    assert any(line.startswith("forward: usp, ") for line in lines)
    assert any(line.startswith("backward: mesh-usp, ") for line in lines)
    assert to_lines(results[:1])[0].startswith("usp on 4 ranks")
    assert not any("forward: usp" in line for line in to_lines(results[:1]))


def test_a_batch_multiplies_bytes_and_says_how_long_it_takes_at_most(
    plain: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for direction, numbers in as_json(f"{SMALL} --batch 3", capsys).items():
        alone = plain[direction]
        assert (alone["batch"], numbers["batch"]) == (1, 3)
        assert numbers["peak_bytes"] == 3 * alone["peak_bytes"]
        assert numbers["received_bytes"]["max"] == 3 * alone["received_bytes"]["max"]
        assert numbers["runtime_seconds"] == alone["runtime_seconds"]
    both = 3e3 * sum(numbers["runtime_seconds"] for numbers in plain.values())
    assert f"at most 3 times as long: {both:.3g} ms." in output(f"{SMALL} --batch 3", capsys)


def test_a_batch_that_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    peak = as_json(f"{SMALL} --pass forward", capsys)["peak_bytes"]
    fits = int(80 * 2**30 / peak)
    assert "needs more than" not in output(f"{SMALL} --pass forward --batch {fits}", capsys)
    assert "needs more than the 80.00 GiB" in output(
        f"{SMALL} --pass forward --batch {fits + 1}", capsys
    )
