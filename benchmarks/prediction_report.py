"""What `predicted_against_measured.py` makes of its numbers: rows, a verdict and a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

AUTO, REFERENCE = "auto", "mesh"
UNCUT = " uncut"  # at the end of a name: one slice and one chunk
ALIKE = 0.03  # ways whose predicted times differ by less have no order
NEAR = 0.15  # of ratios to the mesh
VERDICTS = ("verdict", "verdict_uncut")  # in a result


@dataclass(frozen=True)
class Predicted:
    """A way: the setting of each pass in words, and predicted seconds of each."""

    name: str
    settings: tuple[str, ...]
    predicted: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """Seconds of both passes, measured (median of the slowest rank) and predicted, and of all
    rounds the least and the most of both together. CPU seconds: of all ranks."""

    name: str
    settings: tuple[str, ...]
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    least: float
    most: float
    cpu: float

    @property
    def step(self) -> float:
        return sum(self.measured)

    @property
    def predicted_step(self) -> float:
        return sum(self.predicted)


def reports_of(outputs: Sequence[str]) -> list[dict[str, Any]]:
    """What each rank printed so far, as far as all ranks have come: errors, and then steps."""
    whole = [output[: output.rfind("\n") + 1].splitlines() for output in outputs]
    by_rank = [[json.loads(x) for x in lines if x.startswith("{")] for lines in whole]
    num_lines = min(map(len, by_rank), default=0)
    if num_lines == 0:
        return []
    return [{**lines[0], "steps": lines[1:num_lines]} for lines in by_rank]


def make_rows(ways: Sequence[Predicted], reports: Sequence[Mapping[str, Any]]) -> list[Row]:
    """`reports` of all ranks, as they printed them; ways that have not run yet have no row."""
    rows = []
    for way in ways:
        by_rank = [[s for s in report["steps"] if s["way"] == way.name] for report in reports]
        rounds = [*zip(*by_rank, strict=True)]
        if not rounds:
            continue
        passes = [
            [max(rank[name] for rank in ranks) for ranks in rounds]
            for name in ("forward", "backward")
        ]
        both = [sum(seconds) for seconds in zip(*passes, strict=True)]
        rows.append(
            Row(
                way.name,
                way.settings,
                measured=tuple(map(statistics.median, passes)),
                predicted=way.predicted,
                least=min(both),
                most=max(both),
                cpu=statistics.median(sum(rank["cpu"] for rank in ranks) for ranks in rounds),
            )
        )
    return rows


def of_all_ranks(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every step as a line: each number as a list of all ranks."""
    lines = []
    for ranks in zip(*(report["steps"] for report in reports), strict=True):
        numbers = {name: [round(r[name], 4) for r in ranks] for name in ranks[0] if name != "way"}
        lines.append(json.dumps({"way": ranks[0]["way"]} | numbers))
    return lines


def ratios(rows: Iterable[Row]) -> dict[str, tuple[float, float]]:
    """Of each way to the mesh: measured and predicted."""
    rows = [*rows]
    mesh = next(row for row in rows if row.name == REFERENCE)
    return {
        row.name: (row.step / mesh.step, row.predicted_step / mesh.predicted_step) for row in rows
    }


def turned_round(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Pairs whose measured order is not the predicted order; pairs predicted alike have none."""
    return [(row.name, other.name) for row, other in _apart(rows) if other.step < row.step]


def _apart(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs that are not predicted alike, the faster row first."""
    pairs = combinations(sorted(rows, key=lambda row: row.predicted_step), 2)
    return [(a, b) for a, b in pairs if b.predicted_step > (1 + ALIKE) * a.predicted_step]


def order(rows: Sequence[Row]) -> dict[str, Any]:
    """Who comes before whom, and nothing about by how much. `agreement`: Kendall's, of the pairs
    that are not predicted alike, 1 where all are as predicted and -1 where none is."""
    pairs, turned = len(_apart(rows)), turned_round(rows)
    fastest = min(rows, key=lambda row: row.step)
    auto = next((row for row in rows if row.name == AUTO), None)
    return {
        "turned_round": turned,
        "pairs": pairs,
        "agreement": round(1 - 2 * len(turned) / pairs, 3) if pairs else None,
        "measured_order": [row.name for row in sorted(rows, key=lambda row: row.step)],
        "predicted_order": [row.name for row in sorted(rows, key=lambda row: row.predicted_step)],
        "fastest": fastest.name,
        "auto_behind": None if auto is None else round(auto.step / fastest.step - 1, 3),
    }


def verdict(rows: Sequence[Row]) -> dict[str, Any]:
    off = {name: predicted / real - 1 for name, (real, predicted) in ratios(rows).items()}
    worst = max(off, key=lambda name: abs(off[name]))
    return order(rows) | {
        "worst_ratio": [worst, round(off[worst], 3)],
        "ratios_near": abs(off[worst]) <= NEAR,
    }


def uncut(rows: Sequence[Row]) -> list[Row]:
    """Each method with one slice and one chunk: by a row of its own, or where its best is that."""
    own = {row.name.removesuffix(UNCUT): row for row in rows if row.name.endswith(UNCUT)}
    names = [row.name for row in rows if not row.name.endswith(UNCUT)]
    return [replace(own.get(row.name, row), name=row.name) for row in rows if row.name in names]


def at_best(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row.name.endswith(UNCUT)]


def words(verdict: Mapping[str, Any]) -> str:
    turned = ", ".join(f"{a} before {b}" for a, b in verdict["turned_round"])
    behind, fastest = verdict["auto_behind"], verdict["fastest"]
    parts = [f"order: {f'predicted, but not measured: {turned}' if turned else 'as predicted'}"]
    if "worst_ratio" in verdict:
        name, off = verdict["worst_ratio"]
        parts.append(f"ratios to {REFERENCE}: {name} is off most, {off:+.1%}")
    else:
        right = verdict["pairs"] - len(verdict["turned_round"])
        parts.append(f"{right} of {verdict['pairs']} pairs, Kendall's tau {verdict['agreement']}")
        parts.append(f"measured {' < '.join(verdict['measured_order'])}")
        parts.append(f"predicted {' < '.join(verdict['predicted_order'])}")
    if behind is not None:
        parts.append(f"auto: {f'{behind:.1%} behind {fastest}' if behind else 'the fastest'}")
    return "; ".join(parts)


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| | forward, s | backward, s | both (least, most) | predicted | to mesh: measured, "
        "predicted | CPU s | setting |",
        "|---|---|---|---|---|---|---|---|",
    ]
    to_mesh = ratios(rows)
    for row in sorted(rows, key=lambda row: row.step):
        passes = [f"{a:.3g} ({b:.3g})" for a, b in zip(row.measured, row.predicted, strict=True)]
        real, predicted = to_mesh[row.name]
        cells = [
            row.name,
            *passes,
            f"{row.step:.3g} ({row.least:.3g}, {row.most:.3g})",
            f"{row.predicted_step:.3g}",
            f"{real:.2f}, {predicted:.2f} ({predicted / real - 1:+.0%})",
            f"{row.cpu:.1f}",
            " / ".join(dict.fromkeys(row.settings)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def title_of(links: Mapping[str, Any]) -> str:
    ranks = links["ranks_per_node"]
    nodes = f"{links['num_nodes']} nodes of {ranks} rank{'s' * (ranks > 1)}"
    if "between" in links:
        return f"{nodes}, {links['between']:g} Mbit/s a node"
    return f"{nodes} over {links['backend']} and sockets of one machine"
