"""Gantt charts are written in the format that the name asks for, or not at all."""

from __future__ import annotations

import builtins
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_cases import timeline_of

from mesh_attention.cost.pictures import _label, _title, check_gantt, draw_gantt
from mesh_attention.cost.timeline import Event, Stream
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Direction


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_chart_of_both_passes_is_drawn(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"chart.{ending}"
    draw_gantt([timeline_of("mesh", direction=direction) for direction in Direction], file)
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(content) > 10_000


class Axis:
    """Writes down what is written on it, and where."""

    def __init__(self) -> None:
        self.texts: list[tuple[float, float, str]] = []

    def text(self, x: float, y: float, text: str, **_: object) -> None:
        self.texts.append((x, y, text))


def test_a_name_stands_in_the_middle_of_its_bar_where_there_is_room_for_it() -> None:
    axis = Axis()
    event = Event(0, Stream.COMPUTE, "C-0-0", "Attend", 0.25, 0.25, 0.75)
    _label(axis, 3, event, 1000.0)
    assert axis.texts == [(500.0, 3, "C-0-0")]
    _label(axis, 3, event, 10_000.0)
    assert len(axis.texts) == 1


def test_the_title_has_the_ranks_and_the_milliseconds() -> None:
    timeline: Any = SimpleNamespace(
        plan=SimpleNamespace(method="ring", num_ranks=8),
        pass_=SimpleNamespace(direction=Direction.FORWARD),
        cluster=SimpleNamespace(name="small"),
        runtime_seconds=0.004,
        mfu_percent=50.0,
        open_communication_seconds=0.00125,
        waiting_for_ranks_seconds=0.0005,
    )
    for shown, ranks in ((2, "ranks 0 to 1 of 8"), (8, "all ranks")):
        assert _title(timeline, shown) == (
            f"ring forward on small, {ranks}: 4.000 ms, MFU 50.0 %, exposed communication 1.250 "
            "ms, waiting for other ranks 0.500 ms"
        )


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    timeline = timeline_of("ring")
    check_gantt("chart.png", 1)
    with pytest.raises(MeshAttentionError, match=r"written as \.png or \.svg"):
        draw_gantt([timeline], tmp_path / "chart.pdf")
    with pytest.raises(MeshAttentionError, match="at least 1 rank"):
        draw_gantt([timeline], tmp_path / "chart.png", num_ranks=0)


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_import = builtins.__import__

    def refuse(name: str, *more: Any, **others: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return true_import(name, *more, **others)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MeshAttentionError, match=r"pip install matplotlib"):
        draw_gantt([timeline_of("ring")], tmp_path / "chart.png")
