"""Answers that were searched are used from then on; files that are damaged are told and ignored."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from simulated_cases import problem_of

from mesh_attention.choose.answers import (
    VARIABLE,
    answers_folder,
    ask_auto,
    keep_answer,
    kept_answer,
    search_and_keep,
)
from mesh_attention.cost import load_cluster
from mesh_attention.plan.methods.table import AUTO
from mesh_attention.choose.ask import ask
from mesh_attention.plan.text import digest

HGX = load_cluster("hgx-h100")
PROBLEM = problem_of(8192)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "answers"))
    return tmp_path / "answers"


def test_a_searched_answer_is_used_from_then_on(folder: Path) -> None:
    first = ask_auto(PROBLEM, 4, HGX)
    assert kept_answer(PROBLEM, 4, HGX) is None
    found = search_and_keep(PROBLEM, 4, HGX, {"tile": (2, 2)})
    assert ask_auto(PROBLEM, 4, HGX) == first  # nothing was asked about that
    assert digest(ask_auto(PROBLEM, 4, HGX, {"tile": (2, 2)}).plan()) == digest(found.plan())
    assert len([*folder.iterdir()]) == 1
    other = kept_answer(PROBLEM, 8, HGX, {"tile": (2, 2)})
    assert other is None

    (file,) = folder.iterdir()
    whole = file.read_text()
    answer = json.loads(whole)
    for damage in (
        "",
        whole[:-10],
        "[]",
        json.dumps(answer | {"version": 99}),
        json.dumps(answer | {"asked": {}}),
        json.dumps(answer | {"chosen": {}}),
        json.dumps(answer | {"chosen": {"forward": {"method": "x", "options": {}}}}),
        "[" * 50_000,
        _changed(whole, method=AUTO),
        _changed(whole, options={"relayout": True}),
    ):
        file.write_text(damage)
        with pytest.warns(UserWarning, match="is damaged or outdated and is ignored"):
            assert kept_answer(PROBLEM, 4, HGX, {"tile": (2, 2)}) is None
    assert keep_answer(PROBLEM, 4, HGX, found, {"tile": (2, 2)}) == file
    assert file.read_text() == whole
    if os.geteuid():  # the superuser may write anywhere
        folder.chmod(0o500)
        with pytest.warns(UserWarning, match="could not be kept"):
            assert keep_answer(PROBLEM, 4, HGX, found) is None
        folder.chmod(0o700)


def _changed(text: str, **changes: Any) -> str:
    """By hand, in one pass."""
    answer = json.loads(text)
    answer["chosen"]["forward"] |= changes
    return json.dumps(answer)


def test_without_a_file_it_is_the_first_answer() -> None:
    by_hand = ask(PROBLEM, 4, method=AUTO, ranks_per_node=8)
    assert ask_auto(PROBLEM, 4, HGX).method == by_hand.method


def test_the_folder_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert answers_folder() == tmp_path / "mesh_attention"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert answers_folder() == Path.home() / ".cache" / "mesh_attention"
