"""From measured seconds to the numbers of a cluster's file (docs/simulate.md).

Nothing is measured here: this fits and prints. The curve of a kernel is
`tflops / (1 + half_rows * 64 / (rows * heads) + half_columns / columns)`, linear in seconds for
each FLOP; a link takes a latency and a time for each byte. Both are fitted by least squares of
relative errors, with nothing negative, so that small sizes count as much as large ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mesh_attention.machine.kernel_facts import REFERENCE_HEADS, KernelRate, PassRates
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import CallKind


@dataclass(frozen=True, slots=True)
class Point:
    """One measured call. Columns of a row range are twice the keys that a row sees in the mean."""

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
    """A digit after the point, and three that count where there are fewer before it."""
    return round(value, 1) if value >= 100 else float(f"{value:.3g}")


def fit_terms(
    terms: Sequence[Sequence[float]], measured: Sequence[float], *, needed: Sequence[int] = ()
) -> list[float]:
    """What each column of `terms` is multiplied by so that the sums are nearest to what was
    measured, by relative errors. None is negative: a term that would be is left out, unless it is
    `needed`, and is then what the others leave."""
    used = list(range(len(terms[0])))
    # Relative errors: a row of the system is divided by what was measured.
    system = np.array(terms, dtype=float) / np.array(measured, dtype=float)[:, None]
    while True:
        found, *_ = np.linalg.lstsq(system[:, used], np.ones(len(system)), rcond=None)
        negative = [at for at, value in zip(used, found, strict=True) if value <= 0]
        negative = [at for at in negative if at not in needed] or (
            [at for at in used if at not in needed][-1:] if negative else []
        )
        if not negative:
            break
        used.remove(negative[0])
    values = dict(zip(used, (float(value) for value in found), strict=True))
    return [values.get(at, 0.0) for at in range(len(terms[0]))]


def pass_section(
    name: str,
    direction: Direction,
    rates: PassRates,
    points: Mapping[CallKind, Sequence[Point]],
    *,
    source: str,
    done_at: str,
) -> str:
    """TOML. `source` says where it was measured, `done_at` when a transfer was over that began in
    the middle of a call."""
    head = f"kernels.{name}.{direction}"
    lines = [
        f"[{head}]",
        f"ranges = {str(rates.ranges).lower()}",
        f"lets_transfers_begin = {str(rates.lets_transfers_begin).lower()}  # {done_at}",
        f"sm_margin = {rates.sm_margin}  # {source}: whether calls with it are slower alone",
        f"launch_microseconds = {rates.launch_microseconds:.0f}  # {source}: host time of a call",
    ]
    for kind, rate in rates.rates.items():
        lines.append(f"[{head}.{kind}]")
        lines += [
            f"# {p.what}: {p.tflops:.4g}; the curve gives {curve_tflops(rate, p):.4g}."
            for p in points[CallKind(kind)]
        ]
        lines += [
            f"{field} = {getattr(rate, field):g}  # {source}: fitted to the lines above"
            for field in ("tflops", "half_rows", "half_columns")
        ]
    return "\n".join(lines)
