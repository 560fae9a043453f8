"""Each command says what it should, to people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mesh_attention.cli.main import main
from mesh_attention.plan.language.text import digest, parse_plan

GOLDEN = Path(__file__).parent / "golden"
PAPER = (
    "volume --method mesh --ranks 256 --tile 16x16 --tokens 524288 --heads 64 --head-dim 128 "
    "--ranks-per-node 8 --alpha 4 --chunks 1x1 --json"
)


def output(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert main(line.split()) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def as_json(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    return json.loads(output(line, capsys, code))


def test_volume_has_the_promised_keys_for_the_passes_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for asked, passes in (("both", ["forward", "backward"]), ("backward", ["backward"])):
        facts = as_json(
            f"volume --method mesh --ranks 9 --tokens 576 --pass {asked} --json", capsys
        )
        between = facts.pop("between_passes", None)
        assert (between is not None) == (asked == "both")
        assert list(facts) == passes
        for result in facts.values():
            assert set(result["bytes_per_rank"]) == {"mean", "max"}
            assert set(result["inter_node_bytes_per_rank"]) == {"mean", "max"}
            assert isinstance(result["peak_buffer_bytes"], int)
            assert result["units_total"] > 0


def test_a_comparison_says_why_a_method_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    line = "volume --compare --ranks 16 --tokens 1024 --heads 16 --backward-tile 3x3"
    results = output(line, capsys).splitlines()
    for name in ("mesh", "mesh-usp"):
        assert any(x.startswith(f"{name}: tile 3x3 has 9 cells") for x in results)
        assert any(x.split()[:2] == [name, "cannot"] for x in results)


@pytest.mark.parametrize(("more", "units"), [("", 72), ("--no-rotation", 84), ("--tile 1x9", 144)])
def test_volume_counts_the_papers_units_for_nine_ranks(
    more: str, units: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"volume --method mesh --ranks 9 --tokens 576 --pass forward --json {more}"
    assert as_json(line, capsys)["forward"]["units_total"] == units


def test_volume_gives_the_papers_gigabytes_for_256_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def gib(result: Any, direction: str) -> tuple[float, float]:
        facts = result[direction]
        total, between = facts["bytes_per_rank"]["mean"], facts["inter_node_bytes_per_rank"]["mean"]
        return round(total / 2**30, 1), round(between / 2**30, 1)

    with_delta = as_json(PAPER, capsys)
    with_out = as_json(PAPER + " --gather-out", capsys)
    assert gib(with_out, "forward") == (1.9, 0.6)
    assert gib(with_out, "backward") == (3.8, 1.3)
    assert gib(with_delta, "backward") < (3.8, 1.3)


def test_volume_shows_people_one_column_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    out = output("volume --method mesh --ranks 9 --tokens 576", capsys)
    assert "forward" in out
    assert "backward" in out
    assert "72" in out
    assert "1 unit is one Q partition, 512.00 KiB" in out


def test_verify_says_ok(capsys: pytest.CaptureFixture[str]) -> None:
    line = "verify --method mesh --ranks 6 --tokens 100 --causal --chunks 2x2"
    assert output(line, capsys).startswith("ok: mesh on 6 ranks, forward and backward")
    facts = as_json(line + " --json", capsys)
    planned = as_json(line.replace("verify", "plan") + " --json", capsys)
    assert facts == {"ok": True, "digest": planned["digest"], "problems": []}


def test_a_plan_file_verifies_and_a_corrupted_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    output(f"plan --method mesh --ranks 9 --tokens 576 --chunks 2x2 --text {good}", capsys)
    lines = good.read_text().splitlines(keepends=True)
    doomed = next(i for i, line in enumerate(lines) if line.startswith("  C-1-0: attend"))
    bad.write_text("".join(lines[:doomed] + lines[doomed + 1 :]))
    facts = as_json(f"verify --text {good} --json", capsys)
    assert facts == {"ok": True, "digest": digest(parse_plan(good.read_text())), "problems": []}
    results = as_json(f"verify --text {bad} --json", capsys, code=1)
    assert results["ok"] is False
    assert results["digest"] == digest(parse_plan(bad.read_text()))
    assert {problem["pass"] for problem in results["problems"]} == {"forward"}
    out = output(f"verify --text {bad}", capsys, code=1)
    assert out.splitlines()[-1].startswith("bad: ")
    assert "rank" in out
    assert as_json(f"verify --text {bad} --pass backward --json", capsys)["ok"] is True


def test_the_text_form_on_standard_output_is_nothing_but_the_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "plan --method mesh --ranks 4 --tokens 64 --causal"
    text = output(f"{options} --text -", capsys)
    assert digest(parse_plan(text)) == as_json(f"{options} --json", capsys)["digest"]


def test_plan_summarises_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(
        "plan --method mesh --ranks 9 --tokens 576 --causal --chunks 3x3 --pass forward", capsys
    )
    assert len(out.splitlines()) < 40
    for word in ("mesh on 9 ranks", "576 tokens", "tile 3x3", "zigzag", "KV0: 0 3 6", "RS-Q-2"):
        assert word in out
    assert "max/mean visible pairs 1.0000" in out


def test_plan_json_holds_settings_steps_volume_and_digest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = as_json("plan --method mesh --ranks 9 --tokens 576 --chunks 3x3 --json", capsys)
    assert len(facts["digest"]) == 64
    assert facts["problem"]["q_tokens"] == 576
    forward = facts["passes"]["forward"]
    assert forward["setting"]["tile"] == "3x3"
    assert forward["groups"]["KV0"] == [0, 3, 6]
    assert forward["steps"][0] == {"communication": "AG-KV-0", "compute": []}
    assert sum(len(step["compute"]) for step in forward["steps"]) == 9
    assert forward["volume"]["units_total"] == 72


def test_a_memory_cap_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    line = "volume --method mesh --ranks 16 --tokens 65536 --chunks 4x4 --pass forward --json"
    free = as_json(line, capsys)["forward"]["peak_buffer_bytes"]
    capped = as_json(f"{line} --max-memory-bytes 450MiB", capsys)["forward"]["peak_buffer_bytes"]
    assert capped <= 450 * 2**20 < free


def test_ranks_follow_from_the_tile(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json("plan --tile 2x3 --tokens 64 --json", capsys)["ranks"] == 6


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ("--window 100", "causal, window 100:0"),
        ("--window 100:inf", "full, window 100:inf"),
        ("--causal --prefix 30", "causal, prefix 30"),
        ("--causal --documents 0,100,576", "causal, 2 documents"),
        ("--kv-tokens 288 --documents 0,100,576 --kv-documents 0,50,288", "full, 2 documents"),
    ],
)
def test_masks_can_be_asked_for(
    options: str, mask: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mask in output(f"plan --method mesh --ranks 4 --tokens 576 {options}", capsys)
    assert (
        as_json(f"verify --method mesh --ranks 4 --tokens 576 {options} --json", capsys)["ok"]
        is True
    )


DRAWINGS = {
    "draw_9_rotation": "draw --method mesh --ranks 9 --tokens 576 --chunks 3x3 --pass forward",
    "draw_9_no_rotation": "draw --method mesh --ranks 9 --tokens 576 --no-rotation --pass forward",
    "draw_9_causal": "draw --method mesh --ranks 9 --tokens 576 --causal --layout contiguous "
    "--pass backward",
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_of_nine_ranks_match_the_golden_files(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output(DRAWINGS[name], capsys) == (GOLDEN / f"{name}.txt").read_text()


def test_draw_json_is_the_matrix_and_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    line = "draw --method mesh --ranks 4 --tokens 64 --causal --layout contiguous --pass forward"
    facts = as_json(f"{line} --json", capsys)["forward"]
    nobody = None
    assert facts["matrix"] == [
        [0, nobody, nobody, nobody],
        [0, 1, nobody, nobody],
        [2, 3, 2, nobody],
        [2, 3, 2, 3],
    ]
    assert facts["steps"][-1] == {"communication": "RS-Q-0", "compute": []}
    assert facts["head_slices"] is None


def test_draw_says_what_slices_of_heads_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    line = "draw --method mesh --ranks 4 --tokens 64 --heads 8 --head-slices 1x4 --pass forward"
    assert main(line.split()) == 0
    drawn = capsys.readouterr().out
    sizes = as_json(f"{line} --json", capsys)["forward"]["head_slices"]
    assert sum(map(int, sizes.split("+"))) == 8
    assert f"slices of {sizes} heads, each of 1x1 chunks" in drawn


@pytest.mark.parametrize("more", [[], ["--compare"]])
def test_a_batch_moves_and_holds_as_many_times_the_bytes_and_nothing_else(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def numbers(batch: int) -> dict[str, Any]:
        words = ["--ranks", "4", "--tokens", "1k", "--batch", str(batch), "--json"]
        assert main(["volume", *words, *more]) == 0
        flat: dict[str, Any] = {}

        def walk(value: Any, key: str) -> None:
            if isinstance(value, dict | list):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for name, inner in items:
                    walk(inner, f"{key} {name}")
            else:
                flat[key] = value

        walk(json.loads(capsys.readouterr().out), "")
        return flat

    alone, three = numbers(1), numbers(3)
    assert sum("bytes" in key for key in alone) > 8
    assert three == {k: 3 * x if "bytes" in k else x for k, x in alone.items()}
