"""The paper's 128-GPU table (docs/spec/algorithm.md, 10), and the same cells simulated.

The authors' kernel (`authors` in the cluster's file) and settings: striped causal layout, O
gathered in the backward pass, outputs reduced by reduce-scatter, USP with U = 8; mesh and StarTrail
at their best setting in each row. Gradients of rings travel with their blocks: the published ring
takes 2.3 times its forward time backward, which is its one slow link carrying dK and dV
beside K and V. Gradients that go direct to their owners (our default) pass all NICs of a node.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from mesh_attention.choose.ask import make_plan
from mesh_attention.cost import Cluster, simulate
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

RANKS = 128
TOKENS = {"256K": 1 << 18, "512K": 1 << 19}
TRAVEL = {"gradients": "travel"}
MESH = [
    {"method": "mesh", "tile": tile, "chunks": chunks, "alpha": 4, "combine": "reduce-scatter"}
    for tile, chunks in (((8, 16), (2, 4)), ((8, 16), (4, 4)), ((16, 8), (4, 4)))
]
METHODS: dict[str, list[dict[str, Any]]] = {
    "mesh": MESH,
    "ring": [{"method": "ring", **TRAVEL}],
    "usp": [{"method": "usp", "ulysses": 8, **TRAVEL}],
    "startrail": [{"method": "startrail", "team": team, **TRAVEL} for team in (4, 8)],
}

# direction, causal, tokens: MFU in percent of mesh, ring, usp, startrail
PUBLISHED: dict[tuple[Direction, bool, str], dict[str, float]] = {
    (direction, causal, tokens): dict(zip(METHODS, values, strict=False))
    for direction, causal, tokens, values in (
        (Direction.FORWARD, False, "256K", (49.1, 3.0, 21.3, 12.3)),
        (Direction.FORWARD, False, "512K", (55.1, 5.9, 31.0, 22.5)),
        (Direction.FORWARD, True, "256K", (38.3, 1.3, 10.1)),
        (Direction.FORWARD, True, "512K", (46.6, 2.6, 19.9)),
        (Direction.BACKWARD, False, "256K", (49.4, 3.3, 19.4, 10.7)),
        (Direction.BACKWARD, False, "512K", (54.6, 6.3, 30.2, 18.3)),
        (Direction.BACKWARD, True, "256K", (39.5, 1.4, 10.0)),
        (Direction.BACKWARD, True, "512K", (45.1, 2.8, 17.7)),
    )
}


@dataclass(frozen=True)
class Cell:
    direction: Direction
    causal: bool
    tokens: str
    method: str

    @property
    def row(self) -> tuple[Direction, bool, str]:
        return self.direction, self.causal, self.tokens

    @property
    def published(self) -> float:
        return PUBLISHED[self.row][self.method]


def cells() -> Iterator[Cell]:
    for row, values in PUBLISHED.items():
        for method in values:
            yield Cell(*row, method)


@cache
def plan_of(cell: Cell, setting: str) -> Plan:
    problem = Problem(
        q_tokens=TOKENS[cell.tokens], num_heads=64, head_dim=128, mask=Mask(causal=cell.causal)
    )
    options = json.loads(setting) | {"layout": "striped" if cell.causal else "contiguous"}
    for name in ("tile", "chunks"):
        if name in options:
            options[name] = tuple(options[name])
    options |= {"directions": (cell.direction,), "ranks_per_node": 8, "gather_out": True}
    return make_plan(problem, RANKS, **options)


@dataclass(frozen=True)
class SimulatedCell:
    cell: Cell
    setting: dict[str, Any]
    mfu: float

    @property
    def error(self) -> float:
        """Logarithm of simulated over published."""
        return math.log(self.mfu / self.cell.published)


Results = dict[Cell, SimulatedCell]


def run_cell(cell: Cell, cluster: Cluster, settings: list[dict[str, Any]]) -> SimulatedCell:
    """Simulates a cell at each of these settings, and returns the best."""
    tries = []
    for setting in settings:
        plan = plan_of(cell, json.dumps(setting))
        timeline = simulate(plan, cluster, cell.direction, kernel="authors")
        tries.append(SimulatedCell(cell, setting, timeline.mfu_percent))
    return max(tries, key=lambda result: result.mfu)


def run_all(cluster: Cluster, only: dict[Cell, list[dict[str, Any]]] | None = None) -> Results:
    results = {}
    chosen = only or {cell: METHODS[cell.method] for cell in cells()}
    for done, (cell, settings) in enumerate(chosen.items(), start=1):
        if sys.stderr.isatty():
            print(f"\r{done}/{len(chosen)} cells", end="", file=sys.stderr, flush=True)
        results[cell] = run_cell(cell, cluster, settings)
    return results


def table(results: Results) -> str:
    lines = ["row                      " + "".join(f"{m:>24}" for m in METHODS)]
    for row, values in PUBLISHED.items():
        direction, causal, tokens = row
        texts = []
        for method in METHODS:
            result = results.get(Cell(*row, method))
            text = "-"
            if result is not None:
                text = f"{result.mfu:.1f} / {values[method]} ({math.exp(result.error):.2f})"
            texts.append(f"{text:>24}")
        name = f"{direction.value} {'causal' if causal else 'full'} {tokens}"
        lines.append(f"{name:<25}" + "".join(texts))
    return "\n".join(lines)


def summary(results: Results) -> dict[str, Any]:
    errors = [abs(result.error) for result in results.values()]
    worst = max(results.values(), key=lambda result: abs(result.error))
    same_order = []
    for row, published in PUBLISHED.items():
        simulated = {method: results[Cell(*row, method)].mfu for method in published}
        orders = [sorted(mfu, key=mfu.__getitem__) for mfu in (published, simulated)]
        same_order.append(orders[0] == orders[1])
    return {
        "geometric_mean_ratio_error": math.exp(sum(errors) / len(errors)),
        "worst_ratio_error": math.exp(abs(worst.error)),
        "worst_cell": f"{worst.cell.method} {worst.cell.direction.value} "
        f"{'causal' if worst.cell.causal else 'full'} {worst.cell.tokens}",
        "same_order_of_methods_in_every_row": all(same_order),
    }
