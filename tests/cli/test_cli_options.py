"""Flags are made from the settings of the methods: a new option touches its setting alone."""

from __future__ import annotations

import dataclasses
import json
import runpy
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import pytest

from mesh_attention.cli.main import main
from mesh_attention.cli.options import add_question_flags
from mesh_attention.plan.build.setting import option
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods import table
from mesh_attention.plan.methods.mesh import MeshSetting
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import make_plan
from mesh_attention.plan.text import digest

DOCS = Path(__file__).parents[2] / "docs"


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class PaintedSetting(MeshSetting):
    """The mesh, with one option of each kind that it does not have."""

    colour: Colour = option(Colour.RED, "what it is painted with; `red` dries faster", "NAME")
    num_coats: int | None = option(None, "how often it is painted (needs `colour`)")
    can_bytes: int | None = option(None, "the size of a can", "BYTES")
    primer: bool = option(True, "begin with a primer")


@pytest.fixture
def painted(monkeypatch: pytest.MonkeyPatch) -> list[PaintedSetting]:
    """A method whose builder keeps what it was asked for."""
    asked: list[PaintedSetting] = []
    mesh = table.METHODS["mesh"]

    def build(problem: Problem, ranks: int, setting: PaintedSetting, directions: Any) -> Any:
        asked.append(setting)
        return mesh.build(problem, ranks, setting, directions)

    row = table.Method("painted", "a mesh with colour", PaintedSetting, build, mesh.candidates)
    monkeypatch.setitem(cast("dict[str, table.Method]", table.METHODS), "painted", row)
    return asked


def test_a_new_option_has_its_flag_and_its_help(
    painted: list[PaintedSetting], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    part = " ".join(text[text.index("options of painted:") :].split())
    assert "--colour red|blue what it is painted with; red dries faster (default red)" in part
    assert "--num-coats N how often it is painted (needs --colour)" in part
    assert "--primer, --no-primer begin with a primer (default yes)" in part
    line = "plan --method painted --tokens 64 --ranks 4 --json --no-primer"
    assert main([*line.split(), "--colour", "blue", "--num-coats", "3", "--can-bytes", "2KiB"]) == 0
    (asked,) = painted
    assert asked.colour is Colour.BLUE
    assert (asked.num_coats, asked.can_bytes, asked.primer) == (3, 2048, False)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--colour blu", "'blu' is not a colour (did you mean blue?); known: red, blue"),
        ("--num-coats 0", "--num-coats: 0 is not possible; give a whole number of at least 1"),
        ("--method mesh --no-primer", "method mesh has no option --primer; its options: --layout"),
    ],
)
def test_a_new_option_is_validated_and_refused_by_the_name_of_its_flag(
    flags: str, says: str, painted: list[PaintedSetting], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--method", "painted", *flags.split()]) == 2
    assert says in capsys.readouterr().err


def test_a_new_option_is_known_to_python_and_to_the_page_of_methods(
    painted: list[PaintedSetting],
) -> None:
    problem = Problem(64, 2, 8)
    make_plan(problem, 4, method="painted", colour="blue")
    assert painted[0].colour is Colour.BLUE
    with pytest.raises(ValueError, match="colour='grey' is unknown; known: red, blue"):
        make_plan(problem, 4, method="painted", colour="grey")
    rows = runpy.run_path(str(DOCS / "make_methods.py"))["option_rows"]()
    words = {name: (text, methods) for name, text, methods in rows}
    assert words["`num_coats`"] == ("how often it is painted (needs `colour`)", "`painted`")


def test_an_option_means_the_same_wherever_it_stands() -> None:
    for method in table.METHODS.values():
        for name, found in method.options().items():
            assert found == table.all_options()[name][0]


def test_every_part_of_a_problem_and_of_a_mask_has_a_flag() -> None:
    import argparse

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
