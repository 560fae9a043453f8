"""The cells of the replay tables: which plan, on which cluster, in which direction.

Planning and simulating 256 ranks takes longer than replaying one of them, and needs no GPU. So a
cell can be prepared on any computer (`prepare`) and stored; the GPU then runs what was stored.
`replay_tables.py` uses it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from replay.rank import RankToReplay, may_be_slowest, rank_to_replay

from mesh_attention.choose.auto import find_best, find_default
from mesh_attention.cost.planning import setting_of
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import AUTO
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

K = 1024
TABLES = ("auto", "default")


@dataclass(frozen=True)
class Cell:
    """A method at its best setting, or with `auto` the best of all methods, in one pass."""

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
        for key, value in self.options.items():
            text = "x".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f"{key}={text}")
        return "-".join(words)

    @property
    def problem(self) -> Problem:
        mask = Mask(causal=self.causal)
        return Problem(self.tokens, 64, 128, num_kv_heads=self.kv_heads, mask=mask)


def cells() -> Iterator[Cell]:
    """`default` has the problems of `auto` with the default, which leaves tokens where they are."""
    auto = list(_auto())
    yield from auto
    yield from (replace(cell, table="default") for cell in auto if cell.method == AUTO)


def _auto() -> Iterator[Cell]:
    """The best of all methods; beside it the box of heads, queries and keys that receives the least
    (at most 14 units in any pass); and the published problem of few KV heads."""
    least = {"ulysses": 64, "tile": (2, 2)}
    for causal, direction in product((False, True), Direction):
        sizes = (256, 512 * K, causal, direction.value)
        yield Cell("auto", "hgx-h100", AUTO, *sizes)
        yield Cell("auto", "hgx-h100", "mesh-usp", *sizes, options=least)
    for ranks, direction in product((8, 16, 32, 64), Direction):
        yield Cell("auto", "hgx-h100", AUTO, ranks, ranks * 8 * K, True, direction.value, 8)
    for cluster, tokens in (("hgx-h100", 1024 * K), ("paper", 512 * K)):
        for causal, direction in product((False, True), Direction):
            yield Cell("auto", cluster, AUTO, 256, tokens, causal, direction.value)


def prepare(cell: Cell, folder: Path) -> None:
    """Plans, simulates, and stores the parts of ranks that may be the slowest."""
    cluster, direction = load_cluster(cell.cluster), Direction(cell.direction)
    how: dict[str, Any] = {"directions": (direction,), "options": cell.options}
    if cell.table == "default":
        choice = find_default(cell.problem, cell.ranks, cluster, **how)
    else:
        method = None if cell.method == AUTO else cell.method
        choice = find_best(cell.problem, cell.ranks, cluster, method=method, **how)
    timeline, options = choice.timeline(direction), choice.chosen[direction].options
    setting = setting_of(timeline.plan, timeline.pass_, options)
    texts = {key: str(value) for key, value in setting.items()}
    if cell.method == AUTO:
        texts["method"] = timeline.plan.method
    parts = []
    for rank in may_be_slowest(timeline):
        part = rank_to_replay(timeline, rank)
        part.predicted["setting"] = texts
        parts.append(part.to_json())
    path = path_of(cell, folder)
    part_of_it = path.with_suffix(".part")
    with gzip.open(part_of_it, "wt", encoding="utf-8") as file:
        json.dump(parts, file)
    part_of_it.rename(path)


def load(cell: Cell, folder: Path) -> list[RankToReplay]:
    with gzip.open(path_of(cell, folder), "rt", encoding="utf-8") as file:
        return [RankToReplay.from_json(part) for part in json.load(file)]


def path_of(cell: Cell, folder: Path) -> Path:
    return folder / f"{cell.name}.json.gz"
