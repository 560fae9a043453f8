"""Flags ask what Python asks: one name, one meaning, one digest (new options: tests/methods)."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import pytest

from mesh_attention.cli.main import main
from mesh_attention.cli.options import add_question_flags
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods import table
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import make_plan
from mesh_attention.plan.text import digest


def test_an_option_means_the_same_wherever_it_stands() -> None:
    for method in table.METHODS.values():
        for name, found in method.options().items():
            assert found == table.all_options()[name][0]


def test_help_tells_options_as_flags_and_errors_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(needs --ranks-per-node)" in text
    assert "options of mesh, mesh-usp: --backward-tile AxB" in text
    assert "`" not in text
    assert main(["plan", "--method", "ring", "--no-rotation"]) == 2
    told = capsys.readouterr().err
    assert "method ring has no option --rotation; its options: --layout, --stripe-block" in told


def test_every_part_of_a_problem_and_of_a_mask_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_question_flags(parser)
    known = {action.dest for action in parser._actions}
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
    found = json.loads(capsys.readouterr().out)["digest"]
    assert found == digest(make_plan(problem, 16, **options))
