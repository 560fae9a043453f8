"""From measured calls of a kernel to the sections of a cluster's file (docs/simulate.md).

No GPU here: `kernel_curves.py` measures, this fits and prints. A curve is
`tflops / (1 + half_rows * 64 / (rows * heads) + half_columns / columns)`, linear in seconds for
each FLOP, so it is fitted by least squares of relative errors, with no negative halves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mesh_attention.cluster.cluster import REFERENCE_HEADS, KernelRate, PassRates
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import CallKind

__all__ = ["Point", "curve_tflops", "fit", "pass_section"]


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
    used = [0, 1, 2]
    terms = np.array([(1.0, *point.losses) for point in points])
    measured = np.array([1.0 / point.tflops for point in points])
    while True:
        # Relative errors: a row of the system is divided by what was measured.
        found, *_ = np.linalg.lstsq(
            terms[:, used] / measured[:, None], np.ones(len(points)), rcond=None
        )
        negative = [at for at, value in zip(used, found, strict=True) if value < 0 and at]
        if not negative:
            break
        used.remove(negative[0])
    values = dict(zip(used, found, strict=True))
    base = values[0]
    return KernelRate(
        round(float(1.0 / base), 1),
        *(round(float(values.get(at, 0.0) / base), 1) for at in (1, 2)),
    )


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
            f"# {p.what}: {p.tflops:.0f}; the curve gives {curve_tflops(rate, p):.0f}."
            for p in points[kind]
        ]
        lines += [
            f"{field} = {getattr(rate, field):g}  # {source}: fitted to the lines above"
            for field in ("tflops", "half_rows", "half_columns")
        ]
    return "\n".join(lines)
