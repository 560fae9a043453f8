"""Flags ask what Python asks: one name, one meaning, one digest (new options: tests/methods)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mesh_attention.choose.ask import make_plan
from mesh_attention.cli.main import main
from mesh_attention.cli.options import question_flags
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.methods import table
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem


def test_an_option_means_the_same_wherever_it_stands() -> None:
    for method in table.METHODS.values():
        for name, result in method.options().items():
            assert result == table.all_options()[name][0]


def test_help_tells_options_as_flags_and_errors_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(needs --ranks-per-node)" in text
    assert "options of mesh, mesh-usp: --backward-tile AxB" in text
    assert "`" not in text
    assert main(["plan", "--method", "ring", "--no-rotation"]) == 2
    message = capsys.readouterr().err
    assert "method ring has no option --rotation; its options: --layout, --stripe-block" in message


def test_every_part_of_a_problem_and_of_a_mask_has_a_flag() -> None:
    known = {flag.attribute for flag in question_flags()}
    parts = (*dataclasses.fields(Problem), *dataclasses.fields(Mask))
    assert {part.name for part in parts} - known == {"mask"}


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--tile 2x8 --chunks 2x1 --causal", {"tile": (2, 8), "chunks": (2, 1)}),
        ("--causal", {}),
        ("--causal --no-rotation --gather-out", {"rotation": False, "gather_out": True}),
        ("--causal --method usp --ulysses 4", {"method": "usp", "ulysses": 4}),
        ("--causal --max-memory-bytes 96MiB", {"max_memory_bytes": 96 * 2**20}),
    ],
)
def test_the_command_line_and_python_ask_the_same_question(
    line: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--ranks 16 --tokens 16384 --heads 8 --head-dim 64"
    assert main(["plan", *sizes.split(), *line.split(), "--json"]) == 0
    problem = Problem(16384, 8, 64, mask=Mask(causal=True))
    facts = json.loads(capsys.readouterr().out)["digest"]
    assert facts == digest(make_plan(problem, 16, **options))


def test_slices_are_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, line = tmp_path / "slices.json", "plan --ranks 4 --tokens 64 --heads 4 --head-dim 8"
    file.write_text('[[[0, 64], [0, 8], "full"], [[8, 64], [8, 64], "causal"]]')
    mask = Mask(slices=(((0, 64), (0, 8), "full"), ((8, 64), (8, 64), "causal")))
    facts = json.loads(run(f"{line} --slices {file} --json", capsys)[0])
    assert facts["digest"] == digest(make_plan(Problem(64, 4, 8, mask=mask), 4))
    assert "2 slices" in run(f"{line} --slices {file}", capsys)[0]
    for text, message in (
        ("[[[0, 64], [0, 8]]]", "slice 0 is"),
        (
            '[[[0, 65], [0, 8], "full"]]',
            "slice 0 has queries up to 65 and keys up to 8, but there are 64",
        ),
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ):
        file.write_text(text)
        assert main([*line.split(), "--slices", str(file)]) == 2
        assert message in capsys.readouterr().err
    assert main([*line.split(), "--slices", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    assert main(line.split()) == 0
    return capsys.readouterr()


def test_fewer_chunks_than_asked_for_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    few, enough = "--ranks 4 --tokens 4 --chunks 3x3", "--ranks 4 --tokens 64 --chunks 3x3"
    for command in ("plan", "volume", "verify", "draw", "simulate"):
        message = run(f"{command} {few} --json", capsys)[1].splitlines()
        assert message == [
            f"note: --chunks 3x3 became 1x1 in the {direction} pass, as a rank has no more rows"
            for direction in ("forward", "backward")
        ]
        assert run(f"{command} {enough} --json", capsys)[1] == ""
    line = "plan --ranks 4 --tokens 8 --chunks 2x2 --backward-chunks 4x1"
    assert run(line, capsys)[1].splitlines() == [
        "note: --backward-chunks 4x1 became 2x1 in the backward pass, as a rank has no more rows"
    ]


def test_a_mask_can_be_said_to_be_not_causal(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "plan --ranks 2 --tokens 8 --json"
    plain, no, yes, window, both = (
        json.loads(run(f"{sizes} {more}", capsys)[0])["problem"]["mask"]
        for more in ("", "--no-causal", "--causal", "--window 2", "--window 2 --no-causal")
    )
    assert no == plain
    assert [mask["causal"] for mask in (no, yes, window, both)] == [False, True, True, False]


def kinds_of_numbers(value: Any, path: str = "") -> dict[str, str]:
    """The JSON type of each field that is a number; numbered keys and items are one field."""
    if isinstance(value, dict):
        parts = [(f"{path}.{'*' if name.isdigit() else name}", v) for name, v in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}.[]", item) for item in value]
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return {path: type(value).__name__} if number else {}
    return {where: kind for name, v in parts for where, kind in kinds_of_numbers(v, name).items()}


@pytest.mark.parametrize("command", ["plan", "volume", "volume --compare", "simulate", "draw"])
def test_a_field_of_json_is_of_one_type_whatever_its_value(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some are whole here and have a fraction there: means, units, pairs."""
    results: dict[str, str] = {}
    for sizes in (
        "--ranks 4 --tokens 64",
        "--ranks 1 --tokens 5",
        "--ranks 6 --tokens 61 --causal --heads 6 --kv-heads 2",
        "--ranks 8 --tokens 128 --kv-heads 1",
    ):
        kinds = kinds_of_numbers(json.loads(run(f"{command} {sizes} --json", capsys)[0]))
        assert {field: results.get(field, kind) for field, kind in kinds.items()} == kinds
        results |= kinds
    assert results
