"""What a picture is: variants as plotly.js reads them, and the controls that choose among them.

`pictures.py` makes pictures of these parts. Colours of text and
grids are the page's, so that they follow light and dark. Colours of data are those of Okabe and
Ito, or cividis: people who see fewer colours can tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b59f00", "#7f7f7f")
SCALE = "Cividis"
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "hexagon")
# In columns, also on a phone.
LEGEND = {"orientation": "h", "entrywidthmode": "fraction", "entrywidth": 0.3}
_FEW_TICKS = 4


class Control(NamedTuple):
    """(value, label) of each choice; the first is chosen to begin with."""

    name: str
    label: str
    choices: tuple[tuple[str, str], ...]


class Variant(NamedTuple):
    """`data` and `layout` are plotly's."""

    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


class Picture(NamedTuple):
    """`variants` by the values of all controls, joined by `|`."""

    name: str
    controls: tuple[Control, ...]
    variants: dict[str, Variant]


def picture_of(name: str, controls: Sequence[Control], make: Callable[..., Variant]) -> Picture:
    """All variants: `make` is called with every combination of the values of the controls."""
    values = product(*([value for value, _ in control.choices] for control in controls))
    return Picture(name, tuple(controls), {"|".join(chosen): make(*chosen) for chosen in values})


def pass_control(directions: Iterable[str], *more: str) -> Control:
    return Control("pass", "Pass", tuple((d, d) for d in (*more, *map(str, directions))))


def ms(seconds: float) -> float:
    """Milliseconds, without digits that mean nothing."""
    return round(seconds * 1e3, 6)


def gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 4)


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, **more}


def log_axis(title: str, values: Iterable[float]) -> dict[str, Any]:
    """Ticks are a few numbers, written out, whatever the range."""
    known = [value for value in values if value > 0] or [1.0]
    low, high = min(known) / 1.15, max(known) * 1.15
    ticks: list[float] = []
    for steps in ((1, 10), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        tried = {float(f"{step * 10.0**power:.6g}") for power in decades for step in steps}
        ticks = sorted(tick for tick in tried if low <= tick <= high)
        if len(ticks) >= _FEW_TICKS:
            break
    text = [f"{tick:g}" for tick in ticks]
    ends = [math.log10(low), math.log10(high)]
    return axis(title, type="log", tickvals=ticks, ticktext=text, range=ends)


def heat_map(
    x: list[Any], y: list[Any], z: list[list[Any]], hover: str, *, gap: int, **more: Any
) -> dict[str, Any]:
    """A cell for each x and y, without colour where z has None."""
    template = {"hovertemplate": f"{hover}<extra></extra>", "hoverongaps": False}
    return {"type": "heatmap", "x": x, "y": y, "z": z, "xgap": gap, "ygap": gap, **template, **more}


def colour_bar(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "thickness": 12, **more}


def points(
    name: str, x: list[Any], y: list[Any], hover: str, marker: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Marks at x and y; with another `mode`, lines through them."""
    trace = {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker}
    return {**trace, "hovertemplate": f"{hover}<extra></extra>", **more}


def style_of(at: int) -> tuple[str, str]:
    """Colour and symbol of the method at this place: no two of a dozen are alike in both."""
    return PALETTE[at % len(PALETTE)], SYMBOLS[at % len(SYMBOLS)]
