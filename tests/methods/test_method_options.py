"""A new option is one field of a setting: everything else that knows options reads the field."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import pytest

from mesh_attention import Plan, Problem, make_plan
from mesh_attention.choose.ask import ask
from mesh_attention.cli.main import main
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.box_methods import RingSetting
from mesh_attention.plan.methods.parts.setting import option, options_of
from mesh_attention.plan.methods.table import METHODS, Method

GENERATOR = Path(__file__).parents[2] / "docs" / "make_methods.py"
PROBLEM = Problem(64, 4, 8)
LINE = ["plan", "--method", "new", "--ranks", "4", "--tokens", "64", "--heads", "4"]


class Pace(StrEnum):
    WALK = "walk"
    RUN = "run"


@dataclass(frozen=True)
class NewSetting(RingSetting):
    """The options of a ring, and one more of each type."""

    laps: int | None = option(None, "how often blocks go round", "LAPS")
    pace: Pace = option(Pace.WALK, "blocks `walk` or `run`", "NAME")
    share: float = option(0.5, "of the ring that is used", "X")
    grid: tuple[int, int] | None = option(None, "rows and columns of blocks", "RxC")
    eager: bool = option(False, "blocks leave before they are asked for")
    limit_bytes: int | None = option(None, "the most that a block may hold", "BYTES")


HELP = {
    "laps": "--laps LAPS how often blocks go round",
    "pace": "--pace walk|run blocks walk or run (default walk)",
    "share": "--share X of the ring that is used (default 0.5)",
    "grid": "--grid RxC rows and columns of blocks",
    "eager": "--eager, --no-eager blocks leave before they are asked for (default no)",
    "limit_bytes": "--limit-bytes BYTES the most that a block may hold",
}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[NewSetting]:
    """A method `new` in the table, and the settings that its builder was given."""
    ring, settings = METHODS["ring"], list[NewSetting]()

    def build(
        problem: Problem, ranks: int, setting: Any, directions: tuple[Direction, ...]
    ) -> Plan:
        settings.append(setting)
        return ring.build(problem, ranks, setting, directions)

    method = Method("new", "a ring with new options", NewSetting, build, ring.candidates)
    monkeypatch.setitem(cast("dict[str, Method]", METHODS), "new", method)
    return settings


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", HELP)
def test_a_new_option_is_a_flag_with_its_help(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert HELP[name] in text[text.index("options of new: ") :]


@pytest.mark.usefixtures("built")
def test_a_new_option_is_a_row_of_the_page_of_methods() -> None:
    rows = runpy.run_path(str(GENERATOR))["option_rows"]()
    assert ["`laps`", "how often blocks go round", "`new`"] in rows
    assert ["`pace`", "blocks `walk` or `run`", "`new`"] in rows
    shared = next(methods for name, _, methods in rows if name == "`gradients`")
    assert shared.endswith("`new`")
    assert [methods for name, _, methods in rows if name == "`layout`"] == ["all"]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("laps", "two"), ("laps", 0), ("laps", 1.5), ("laps", True), ("pace", "crawl"),
        ("share", "half"), ("share", float("nan")), ("grid", 3), ("grid", "3"), ("grid", (1, 2, 3)),
        ("eager", "yes"), ("eager", 1), ("limit_bytes", "1GiB"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_the_name_of_the_option(
    name: str, value: object
) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(PlanError, match=f"^{name}="):
        make_plan(PROBLEM, 4, method="new", **options)


@pytest.mark.parametrize("name", HELP)
def test_none_is_a_value_where_it_is_the_default_and_nowhere_else(name: str) -> None:
    new = options_of(NewSetting)[name]
    if new.default is None:
        assert new.read(None) is None
    else:
        with pytest.raises(PlanError, match=f"^{name}=None"):
            new.read(None)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--laps", "two", "'two' is not a whole number"),
        ("--pace", "crawl", "'crawl' is not a pace; known: walk, run"),
        ("--share", "half", "'half' is not a number above 0"),
        ("--grid", "3", "'3' is not a pair such as 2x2 (RxC)"),
        ("--limit-bytes", "much", "'much' is not a size such as 512MiB"),
    ],
)
def test_a_text_that_is_no_value_is_refused_by_the_name_of_the_flag(
    flag: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LINE, flag, text]) == 2
    assert f"{flag}: {message}" in capsys.readouterr().err


def test_a_new_option_reaches_the_builder(
    built: list[NewSetting], capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "laps": 3, "pace": "run", "share": 0.25, "grid": "2x3", "eager": True, "limit_bytes": 2048,
    }  # fmt: skip
    wanted = NewSetting(
        laps=3, pace=Pace.RUN, share=0.25, grid=(2, 3), eager=True, limit_bytes=2048
    )
    make_plan(PROBLEM, 4, method="new", **options)
    ask(PROBLEM, 4, method="new", **options).plan()
    flags = "--laps 3 --pace run --share 0.25 --grid 2x3 --eager --limit-bytes 2KiB"
    assert main([*LINE, *flags.split(), "--json"]) == 0
    make_plan(PROBLEM, 4, method="new")
    assert built == [wanted, wanted, wanted, NewSetting()]
    capsys.readouterr()


@pytest.mark.usefixtures("built")
def test_a_method_without_the_option_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match="method ring has no option 'laps'; its options: layout"):
        make_plan(PROBLEM, 4, method="ring", laps=3)
    assert main(["plan", "--method", "ring", "--ranks", "4", "--tokens", "64", "--laps", "3"]) == 2
    assert "method ring has no option --laps; its options: --layout" in capsys.readouterr().err


def test_every_setting_lists_the_options_of_all_its_bases() -> None:
    """As a dataclass of its own; otherwise it has those of its first base."""
    for method in METHODS.values():
        assert "__dataclass_fields__" in vars(method.setting), method.name
