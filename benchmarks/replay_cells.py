"""The cells of the replay tables: which plan, on which cluster, in which direction.

Planning and simulating 256 ranks takes longer than replaying one of them, and needs no GPU. So a
cell can be prepared on any computer (`prepare`) and stored; the GPU then runs what was stored.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from replay.rank import RankToReplay, may_be_slowest, rank_to_replay

from mesh_attention.choose.auto import find_best, find_default
from mesh_attention.cost.planning import plan_on, setting_of
from mesh_attention.cost.simulator import simulate
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import AUTO, METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

__all__ = ["TABLES", "Cell", "cells", "load", "prepare"]

CLUSTERS = ("paper", "hgx-h100")
K = 1024
SIZES = (256 * K, 512 * K, 1024 * K)
SEARCHED = ("mesh", "mesh-usp")  # always at their best predicted setting
GIVEN: dict[str, dict[str, Any]] = {"usp": {"ulysses": 8}}
# Heads at once, of the first slice and the largest: less memory, and what a measured search tries.
LEAN = ((4, 4), (2, 4), (2, 2))
TUNED = ((8, 8), (2, 8), (4, 16))
TILES = ((16, 16), (8, 32), (32, 8))
TABLES = ("settings", "methods", "grouped", "memory", "tuned", "auto", "default")


@dataclass(frozen=True)
class Cell:
    table: str
    cluster: str
    method: str
    ranks: int
    tokens: int
    causal: bool
    direction: str
    kv_heads: int = 64
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        method = "default" if self.table == "default" else self.method
        words = [self.cluster, method, str(self.ranks), f"{self.tokens // K}K"]
        words += ["causal" if self.causal else "full", self.direction]
        words += [f"kv{self.kv_heads}"] if self.kv_heads != 64 else []
        words += [f"{key}={_short(value)}" for key, value in self.options.items()]
        return "-".join(words)

    @property
    def problem(self) -> Problem:
        mask = Mask(causal=self.causal)
        return Problem(self.tokens, 64, 128, num_kv_heads=self.kv_heads, mask=mask)


def _short(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def cells() -> Iterator[Cell]:
    """What matters most and lasts least first."""
    yield from _settings("mesh")
    yield from _settings("usp")
    yield from _grouped()
    yield from _memory()
    ring = list(_settings("ring"))
    yield from (cell for cell in ring if cell.tokens < 1024 * K)
    yield from _methods()
    yield from (cell for cell in ring if cell.tokens >= 1024 * K)
    yield from _tuned()
    yield from _auto()
    yield from _default()


ALL_TOKENS = (512 * K, 256 * K, 1024 * K)
# Seconds of waiting each, and no goal is set for the others.
TOKENS_OF = {("ring", "hgx-h100"): (512 * K,), ("usp", "hgx-h100"): (512 * K,)}


def _settings(method: str) -> Iterator[Cell]:
    given = GIVEN.get(method, {})
    for cluster in CLUSTERS:
        for tokens in ALL_TOKENS:
            if tokens not in TOKENS_OF.get((method, cluster), ALL_TOKENS):
                continue
            for ranks in (256, 128):
                for causal in (False, True):
                    for direction in Direction:
                        yield Cell(
                            *("settings", cluster, method, ranks, tokens, causal),
                            direction.value,
                            options=given,
                        )


def _methods() -> Iterator[Cell]:
    """All at their best predicted setting; mesh and ring are among the settings."""
    for method in [name for name in METHODS if name not in ("mesh", "ring")]:
        for causal in (False, True):
            for direction in Direction:
                place = ("methods", "hgx-h100", method, 256, 512 * K, causal, direction.value)
                yield Cell(*place)


def _grouped() -> Iterator[Cell]:
    for method in ("mesh", "mesh-usp", "usp", "ulysses", "ring"):
        for ranks in (8, 16, 32, 64):
            for direction in Direction:
                place = ("grouped", "hgx-h100", method, ranks, ranks * 8 * K, True)
                yield Cell(*place, direction.value, 8, GIVEN.get(method, {}))


def _memory() -> Iterator[Cell]:
    for cluster in CLUSTERS:
        for direction in Direction:
            for heads in LEAN:
                place = ("memory", cluster, "mesh", 256, 512 * K, False, direction.value)
                yield Cell(*place, options={"head_slices": heads})


def _tuned() -> Iterator[Cell]:
    """Tiles and slices of heads near those that the search thinks best, on their slowest ranks:
    what a measured search might find. The node patch is the best one by the simulator."""
    for cluster in CLUSTERS:
        for causal in (False, True):
            for direction in Direction:
                place = ("tuned", cluster, "mesh", 256, 512 * K, causal, direction.value)
                for tile, heads in product(TILES, TUNED):
                    yield Cell(*place, options={"tile": tile, "head_slices": heads})


def _auto() -> Iterator[Cell]:
    """The best of all methods; beside it the box of heads, queries and keys that receives the least
    (at most 14 units in any pass); and the published problem of few KV heads."""
    least = {"ulysses": 64, "tile": (2, 2)}
    for causal in (False, True):
        for direction in Direction:
            place = (256, 512 * K, causal, direction.value)
            yield Cell("auto", "hgx-h100", AUTO, *place)
            yield Cell("auto", "hgx-h100", "mesh-usp", *place, options=least)
    for ranks in (8, 16, 32, 64):
        for direction in Direction:
            place = (ranks, ranks * 8 * K, True, direction.value)
            yield Cell("auto", "hgx-h100", AUTO, *place, 8)
    for cluster, tokens in (("hgx-h100", 1024 * K), ("paper", 512 * K)):
        for causal in (False, True):
            for direction in Direction:
                yield Cell("auto", cluster, AUTO, 256, tokens, causal, direction.value)


def _default() -> Iterator[Cell]:
    """The same problems with the default, which leaves tokens where they are."""
    for cell in _auto():
        if cell.method == AUTO:
            yield replace(cell, table="default")


def prepare(cell: Cell, folder: Path) -> Path:
    """Plan, simulate, and store the parts of ranks that may be the slowest; what is stored already
    stays."""
    path = folder / f"{cell.name}.json.gz"
    if path.exists():
        return path
    cluster, direction = load_cluster(cell.cluster), Direction(cell.direction)
    lean = cell.table == "memory"
    options = cell.options | (_shape_of_best(cell, folder) if lean else {})
    searched = cell.method in SEARCHED or cell.table == "methods"
    if cell.method == AUTO or (searched and not lean):
        how: dict[str, Any] = {"directions": (direction,), "options": cell.options}
        place = cell.problem, cell.ranks, cluster
        if cell.table == "default":
            found = find_default(*place, **how)
        else:
            method = None if cell.method == AUTO else cell.method
            found = find_best(*place, method=method, **how)
        timeline, options = found.timeline(direction), found.chosen[direction].options
    else:
        plan = plan_on(
            *(cluster, cell.problem, cell.ranks),
            method=cell.method,
            directions=(direction,),
            **options,
        )
        timeline = simulate(plan, cluster, direction)
    setting = setting_of(timeline.plan, timeline.pass_, options)
    said = {key: str(value) for key, value in setting.items()} | (
        {"method": timeline.plan.method} if cell.method == AUTO else {}
    )
    parts = []
    for rank in may_be_slowest(timeline):
        given = rank_to_replay(timeline, rank)
        given.predicted["setting"] = said
        parts.append(given.to_json())
    part = path.with_suffix(f".{os.getpid()}")  # several processes may prepare the same cell
    with gzip.open(part, "wt", encoding="utf-8") as file:
        json.dump(parts, file)
    return part.rename(path)


def _shape_of_best(cell: Cell, folder: Path) -> dict[str, Any]:
    """Tile and patch that the search found for the same cell."""
    searched = replace(cell, table="settings", options={})
    prepare(searched, folder)
    setting = load(searched, folder)[0].predicted["setting"]
    a, b = map(int, setting["tile"].split("x"))
    alpha = setting["alpha"]
    return {"tile": (a, b)} | ({} if alpha == "None" else {"alpha": int(alpha)})


def load(cell: Cell, folder: Path) -> list[RankToReplay]:
    with gzip.open(folder / f"{cell.name}.json.gz", "rt", encoding="utf-8") as file:
        return [RankToReplay.from_json(part) for part in json.load(file)]
