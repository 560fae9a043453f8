"""`profile` on real processes: the file that it writes is one that the simulator takes. No test is
about a time: only what must be so on any machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mesh_attention.measure.ranks as measure_ranks
from mesh_attention import Mask, Problem
from mesh_attention.cli.main import main
from mesh_attention.cost import simulate
from mesh_attention.cost.planning import plan_on
from mesh_attention.files import check_writable
from mesh_attention.machine.load import parse_cluster
from mesh_attention.measure.kernel_rates import Sizes
from mesh_attention.measure.profile import profile_ranks
from mesh_attention.measure.ranks import Ranks, ranks_of_group
from mesh_attention.plan.language.plan import Direction
from support.pool import WorkerPool
from support.raised import raised_by

CPU = torch.device("cpu")
SHORT = Sizes(1, 8, torch.float32, 8, (1 << 10, 1 << 12), 0.001)
MANY = "LOCAL_WORLD_SIZE"


def measured(ranks: Ranks, **how: Any) -> str:
    return profile_ranks(ranks, sizes=SHORT, **how).text


def one_node(rank: int, world_size: int) -> dict[str, Any]:
    os.environ.pop(MANY, None)
    steps: list[tuple[int, int]] = []
    text = measured(ranks_of_group(None, CPU), progress=lambda *at: steps.append(at))
    return {"text": text, "steps": steps}


def two_nodes(rank: int, world_size: int) -> dict[str, Any]:
    os.environ[MANY] = "2"
    ranks = ranks_of_group(None, CPU)
    results: dict[str, Any] = {"text": measured(ranks, name="two nodes")}
    os.environ.pop(MANY)
    for name, per_node in (("odd", 3), ("many", 8)):
        results[name] = raised_by(partial(ranks_of_group, None, CPU, per_node))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_ranks, "__version__", f"0.{rank}")  # each has another installed
        results["versions"] = raised_by(lambda: ranks_of_group(None, CPU))
    results["first"] = raised_by(
        lambda: ranks.of_first(lambda: check_writable("/no/such/folder/file"))
    )
    results["mean"] = ranks.average([float(rank), 1.0])
    return results


@pytest.fixture(scope="module")
def results(pool: WorkerPool) -> dict[int, list[dict[str, Any]]]:
    """By number of nodes: what each rank found."""
    return {1: pool.run(one_node, 2, seconds=300), 2: pool.run(two_nodes, 4, seconds=300)}


@pytest.mark.parametrize("nodes", [1, 2])
def test_all_ranks_have_the_same_file_and_the_simulator_takes_it(
    results: dict[int, list[dict[str, Any]]], nodes: int
) -> None:
    texts = {result["text"] for result in results[nodes]}
    assert len(texts) == 1
    text = texts.pop()
    cluster = parse_cluster(text, "measured")
    assert (cluster.nodes, cluster.node.ranks) == (nodes, 2)
    assert cluster.host_driven
    assert set(cluster.kernels) == {"cpu_flash", "blockwise"}
    for direction in Direction:
        passes = cluster.passes(direction)
        assert set(passes["cpu_flash"].rates) == {"full", "causal"}
        assert set(passes["blockwise"].rates) == {"range"}
        assert not passes["blockwise"].ranges  # the runtime never hands it whole attentions
    assert (cluster.network.all_to_all is None) == (nodes == 1)
    problem = Problem(64, 4, 8, mask=Mask(causal=True), element_bytes=4)
    for method in ("mesh", "ring", "ulysses", "usp"):
        plan = plan_on(cluster, problem, 2 * nodes, method=method)
        for direction in Direction:
            assert simulate(plan, cluster, direction).runtime_seconds > 0
    # What was measured is said in the file.
    for words in (
        *("gloo", "float32", "all-gather of", "reduce-scatter of", "all-to-all of", "ring"),
        *("beside forward calls", "the curve gives", "merge"),
    ):
        assert words in text
    assert ("over all nodes" in text) == (nodes == 2)


def test_progress_only_grows(results: dict[int, list[dict[str, Any]]]) -> None:
    steps = results[1][0]["steps"]
    assert steps == sorted(steps)
    assert steps[-1][0] >= 0.9 * steps[-1][1]


def test_what_does_not_fit_is_refused_on_all_ranks(
    results: dict[int, list[dict[str, Any]]],
) -> None:
    for name, words in (
        ("odd", "ranks_per_node=3: 4 ranks are no whole nodes"),
        ("many", "ranks_per_node=8: 4 ranks are no whole nodes"),
        ("versions", "rank 0 has mesh-attention 0.0"),
        ("first", "/no/such/folder/file: No such file"),
    ):
        for result in results[2]:
            assert words in str(result[name].error)
            assert result[name].kind == "MeasureError"
    assert all(each["mean"] == [1.5, 1.0] for each in results[2])


def test_it_says_how_it_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["profile"]) == 2
    assert "torchrun --nproc-per-node 8 -m mesh_attention profile" in capsys.readouterr().err
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["profile"]) == 2
    assert "there is one rank" in capsys.readouterr().err


def test_what_cannot_be_written_is_found_before(tmp_path: Path) -> None:
    there = tmp_path / "there.toml"
    there.write_text("as it was")
    check_writable(there)
    check_writable(tmp_path / "new.toml")
    check_writable("/dev/null")
    assert [file.name for file in tmp_path.iterdir()] == ["there.toml"]
    assert there.read_text() == "as it was"
    for wrong in (tmp_path, tmp_path / "no" / "file", there / "file"):
        with pytest.raises(OSError, match=re.escape(str(wrong))):
            check_writable(wrong)


@pytest.mark.slow
def test_torchrun_writes_a_file_that_simulate_takes(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["-m", "mesh_attention", "profile", "--quick", "--output", str(file), "--json"]
    made = subprocess.run([*run, *words], capture_output=True, text=True, timeout=300, check=True)
    assert made.stdout.count("\n") == 1  # of the first rank alone
    assert f'"file": "{file}"' in made.stdout
    assert main(["simulate", "--cluster", str(file), "--ranks", "2", "--tokens", "256"]) == 0
    words[5] = "/no/such/folder/file.toml"
    refused = subprocess.run([*run, *words], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert refused.stderr.count("mesh-attention profile: /no/such/folder/file.toml: No such") == 1
