"""From measured seconds to the numbers of a cluster's file, and to its text (docs/clusters.md).

Nothing is measured here. The curve of a kernel is
`tflops / (1 + half_rows * 64 / (rows * heads) + half_columns / columns)`, linear in seconds for
each FLOP; a link takes a latency and a time for each byte. Both are fitted by least squares of
relative errors, with nothing negative, so that small sizes count as much as large ones.
`profile` and `benchmarks/kernel_curves.py` use it; `machine/load.py` reads what is written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.kernel_facts import REFERENCE_HEADS, KernelRate, PassRates
from mesh_attention.machine.load import MOST_COLUMNS
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import CallKind

Notes = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, slots=True)
class Point:
    """A measured call. Columns of a row range are twice the keys that a row sees in the mean."""

    what: str
    rows: int
    columns: float
    heads: int
    flops: float
    seconds: float

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds * 1e-12

    @property
    def losses(self) -> tuple[float, float]:
        """What half_rows and half_columns are multiplied by."""
        return REFERENCE_HEADS / (self.rows * self.heads), 1.0 / self.columns


def curve_tflops(rate: KernelRate, point: Point) -> float:
    rows, columns = point.losses
    return rate.tflops / (1.0 + rate.half_rows * rows + rate.half_columns * columns)


def fit(points: Sequence[Point]) -> KernelRate:
    base, *halves = fit_terms(
        [(1.0, *point.losses) for point in points],
        [1.0 / point.tflops for point in points],
        needed=(0,),
    )
    rows, columns = (half / base for half in halves)
    return KernelRate(*(_rounded(value) for value in (1.0 / base, rows, columns)))


def _rounded(value: float) -> float:
    """One decimal of a number from 100 on, else three significant digits."""
    return round(value, 1) if value >= 100 else float(f"{value:.3g}")


def short(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def fit_terms(
    terms: Sequence[Sequence[float]], measured: Sequence[float], *, needed: Sequence[int] = ()
) -> list[float]:
    """The factors of the columns of `terms` whose sums are nearest to `measured`, by relative
    errors. No factor is negative: such a term is left out, unless it is `needed`; then the last of
    the others is."""
    used = list(range(len(terms[0])))
    # Relative errors: a row of the system is divided by what was measured.
    system = np.array(terms, dtype=float) / np.array(measured, dtype=float)[:, None]
    while True:
        factors, *_ = np.linalg.lstsq(system[:, used], np.ones(len(system)), rcond=None)
        negative = [at for at, value in zip(used, factors, strict=True) if value <= 0]
        if negative:
            optional = [at for at in used if at not in needed]
            negative = [at for at in negative if at in optional] or optional[-1:]
        if not negative:
            break
        used.remove(negative[0])
    values = dict(zip(used, map(float, factors), strict=True))
    return [values.get(at, 0.0) for at in range(len(terms[0]))]


def pass_notes(
    name: str,
    direction: Direction,
    rates: PassRates,
    points: Mapping[CallKind, Sequence[Point]],
    done_at: str,
) -> dict[str, str | Sequence[str]]:
    """Comments on a measured pass of a kernel. `done_at` says when a transfer was over that began
    in the middle of a call."""
    place = f"kernels.{name}.{direction}"
    notes: dict[str, str | Sequence[str]] = {
        f"{place}.lets_transfers_begin": done_at,
        f"{place}.launch_microseconds": "measured: of the smallest call",
    }
    for kind, rate in rates.rates.items():
        notes[f"{place}.{kind}"] = [
            f"{p.what}: {p.tflops:.4g} TFLOP/s; the curve gives {curve_tflops(rate, p):.4g}"
            for p in points[CallKind(kind)]
        ]
    return notes


def cluster_text(cluster: Cluster, notes: Notes, head: Sequence[str]) -> str:
    """The file of a cluster. `notes` by place in the file ("node.peer.gb_per_second"): a text
    beside a number, or lines above it or at the beginning of a section. `head` are the first lines.
    """
    lines = [comment(line) for line in head]
    add_table(lines, asdict(cluster), (), notes)
    return "\n".join(lines) + "\n"


def add_table(
    lines: list[str], table: Mapping[str, Any], path: tuple[str, ...], notes: Notes
) -> None:
    values = {name: x for name, x in table.items() if x is not None and not isinstance(x, dict)}
    if path and (values or not table):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
        above = notes.get(".".join(path), ())
        lines += [comment(line) for line in ([above] if isinstance(above, str) else above)]
    for name, value in values.items():
        note = notes.get(".".join((*path, name)), "")
        if not isinstance(note, str):
            lines += map(comment, note)
            note = "" if not note else "fitted to the lines above"
        written = json.dumps(value, ensure_ascii=False)
        lines.append(f"{_key(name)} = {written}" + (f"  {comment(note)}" if note else ""))
    for name, value in table.items():
        if isinstance(value, dict):
            add_table(lines, value, (*path, name), notes)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def comment(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text)
    return f"# {shown[: MOST_COLUMNS // 2]}".rstrip()
