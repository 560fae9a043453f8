"""`benchmarks/against_peers.py`: its words and arithmetic, and Ulysses by hand on gloo ranks."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from against_peers import lines_of, timed
from peer_contestants import entry_of

from mesh_attention.errors import PlanError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "against_peers.py"


def test_options_follow_a_name_and_functions_are_told_the_number_of_ranks() -> None:
    entry = entry_of("usp,chunks=(1,1),keep=gathered")
    asked = {"method": "usp", "ulysses": 4, "chunks": (1, 1), "keep": "gathered"}
    assert entry.options_on(8) == asked
    with pytest.raises(PlanError, match="on 2 ranks"):
        entry.options_on(2)
    with pytest.raises(ValueError, match="unknown contestant best; known: torch-allgather"):
        entry_of("best")


def test_the_page_is_made_of_the_results() -> None:
    docs = SCRIPT.parents[1] / "docs"
    page = runpy.run_path(str(docs / "make_peers.py"))["page"]()
    assert page == (docs / "peers.md").read_text(), "python docs/make_peers.py"
    assert "| 8, window | refused | refused |" in page
    assert "| wrong |" in page


def test_lines_have_ratios_to_hand_and_say_what_was_not_timed() -> None:
    hand = {
        "forward_ms": 10.0,
        "backward_ms": 20.0,
        "both_ms": 30.0,
        "rounds": 20,
        "cpu_seconds": 0.5,
        "error": 3e-3,
        "received_bytes": {"forward": 2e6, "backward": 1e6},
        "setting": "by FLASH",
    }
    ours = hand | {"forward_ms": 5.0, "backward_ms": 40.0, "both_ms": 45.0, "rounds": 5}
    contestants = {
        "torch-allgather": {"refused": "no CPU"},
        "hand-ulysses": hand,
        "mesh": ours,
        "default": {"same_as": "mesh", "setting": "mesh"},
    }
    cell = {"ranks": 4, "tokens": 512, "heads": 8, "kv_heads": 2, "dim": 64, "mask": "causal"}
    assert timed({"contestants": contestants}, "default") == ours
    assert timed({"contestants": contestants}, "torch-allgather") == {}
    text = "\n".join(lines_of(cell | {"contestants": contestants}))
    for line in (
        *("torch-allgather is not timed: no CPU", "default is the same plan as mesh"),
        *("4 ranks, 512 tokens, 8:2 heads of 64, causal", " 1.50 "),
    ):
        assert line in text
    assert "not run: late" in "\n".join(lines_of(cell | {"not_run": "late"}))


@pytest.mark.slow
def test_contestants_run_on_gloo_and_a_wrong_or_refused_one_is_not_timed(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    contestants = ["torch-allgather", "hand-ulysses", "default", "mesh,softcap=5.0", "mesh-usp"]
    sizes = ["--ranks", "2", "--tokens", "256", "--heads", "4:2", "--dim", "16", "--rounds", "2"]
    command = [sys.executable, str(SCRIPT), "--gloo", *sizes, "--json", str(file)]
    command += ["--masks", "causal", "full", "--contestants", *contestants]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads(file.read_text())["cells"]
    assert [cell["mask"] for cell in cells] == ["causal", "full"]
    for cell in cells:
        rows = cell["contestants"]
        assert "no ring for SDPA on CPUs" in rows["torch-allgather"]["refused"]
        assert "wrong: differs from one device" in rows["mesh,softcap=5.0"]["refused"]
        assert "on 2 ranks" in rows["mesh-usp"]["refused"]
        assert rows["hand-ulysses"]["rounds"] == rows["default"]["rounds"] == 2
        assert rows["hand-ulysses"]["error"] < 2e-6
        # Q, K, V and out go over once in each pass: half of what a rank has, on two ranks.
        shard = 256 // 2 * 16 * 4 * (4 + 2 + 2 + 4)
        assert rows["hand-ulysses"]["received_bytes"] == {
            "forward": shard / 2,
            "backward": shard / 2,
        }
