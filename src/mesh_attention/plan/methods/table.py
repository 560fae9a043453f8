"""All methods by name, with their options: the only place outside builders that names methods.

The command line, the search, the tests and the support matrix read this table; a new method is a
builder and a row here. `candidates` are the settings that a search should try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods import box_methods as box
from mesh_attention.plan.methods import needed_rows, startrail
from mesh_attention.plan.methods.parts.assignment import best_tile, factorisations, patch_widths
from mesh_attention.plan.methods.parts.head_group import ulysses_degrees
from mesh_attention.plan.methods.parts.setting import Option, Setting, options_of
from mesh_attention.plan.problem.problem import Problem

Settings = list[dict[str, Any]]
Candidates = Callable[[Problem, int, int | None], Settings]
Builder = Callable[[Problem, int, Any, tuple[Direction, ...]], Plan]


@dataclass(frozen=True, slots=True)
class Method:
    """`setting` is the dataclass of its options; `build` turns a setting into a plan."""

    name: str
    summary: str
    setting: type[Setting]
    build: Builder
    candidates: Candidates
    reads_mask: bool = True  # False: programs are the same under every mask
    rotates: bool = False  # keys go round in rings of all units: estimates count their steps
    all_exchange: bool = False  # whether all ranks exchange tokens for heads with each other
    by_stretches: bool = False  # only the ranges of tokens that the mask shows travel
    is_plain_box: bool = False  # bytes follow from its degree and its tile

    def degree(self, setting: Mapping[str, Any], num_ranks: int) -> int:
        """The Ulysses degree of a setting; 1 where the method has none."""
        return num_ranks if self.all_exchange else setting.get("ulysses") or 1

    def options(self) -> Mapping[str, Option]:
        return options_of(self.setting)  # type: ignore[arg-type]  # classes can be hashed


def _no_choice(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    """One setting, with nothing to choose."""
    return [{}]


def _tiles(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    """Tiles near the one that moves the fewest bytes, with every node patch that fits."""
    p, settings = ranks_per_node or 1, Settings()
    for tile in _near_best(problem, ranks):
        settings.append({"tile": tile})
        # A patch as wide as a node is row by row, as without alpha; and so is all in one node.
        if ranks > p:
            settings += [{"tile": tile, "alpha": w} for w in patch_widths(*tile, p) if w < p]
    return settings


def _near_best(problem: Problem, units: int) -> list[tuple[int, int]]:
    best = best_tile(units, problem)[0]
    return [(a, b) for a, b in factorisations(units) if best / 2 <= a <= best * 2]


def _degrees(problem: Problem, ranks: int) -> list[int]:
    """All Ulysses degrees that work; 1, which exchanges nothing, only where there is no other."""
    fits = ulysses_degrees(problem, ranks)
    return [u for u in fits if u > 1 or len(fits) == 1]


def _rings_of_units(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    return [
        {"ulysses": u} | place
        for u in _degrees(problem, ranks)
        for place in _unit_places(u, (1, ranks // u), ranks_per_node)
    ]


def _unit_tiles(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    return [
        {"ulysses": u, "tile": tile} | place
        for u in _degrees(problem, ranks)
        for tile in factorisations(ranks // u)
        for place in _unit_places(u, tile, ranks_per_node)
        if place or tile in _near_best(problem, ranks // u)
    ]


def _unit_places(
    degree: int, tile: tuple[int, int], ranks_per_node: int | None
) -> Iterator[dict[str, Any]]:
    """Units in order, and then as many units in a node as possible: gathers stay in the node, and
    exchanges leave it, as most exchanges of large units do anyway."""
    yield {}
    p = ranks_per_node or 1
    if p < degree or (p == degree and tile[0] * tile[1] > 1):
        for units in range(p, 1, -1):
            if p % units == 0 and degree % (p // units) == 0 and patch_widths(*tile, units):
                yield {"units_per_node": units}
                return


def _inner_rings(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    """Degrees that leave several units in a node; inner rings of one unit would be USP."""
    sizes = {
        u: box.usual_inner(ranks // u, u, ranks_per_node) for u in ulysses_degrees(problem, ranks)
    }
    return [{"ulysses": u, "inner": inner} for u, inner in sizes.items() if inner > 1]


def _teams(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    return [{"team": team} for team in startrail.team_sizes(ranks)]


def _row_or_tiles(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    """A tile with the rank's own queries only, for masks that show little, and tiles of a mesh."""
    tiles = dict.fromkeys([(1, ranks), *_near_best(problem, ranks)])
    return [{"tile": tile} for tile in tiles]


AUTO = "auto"  # not in the table: a search chooses a method of the table
DEFAULT_METHOD = AUTO
USUAL = ("ulysses", "usp", "ring")  # the methods that people use without this library
HEADS_FIRST, SEEN_ROWS, TILES = "ulysses", "seen", "mesh"  # the choices for batches of documents
# fmt: off
_METHODS = (
    Method("mesh", "2-D tiles a x b of the query-key matrix",
           box.MeshSetting, box.box_plan, _tiles,
           is_plain_box=True),
    Method("ring", "KV rotates in a ring (Ring-Attention)",
           box.RingSetting, box.box_plan, _no_choice,
           rotates=True, is_plain_box=True),
    Method("ring-q", "Q rotates in a ring, outputs are reduced last",
           box.RingQSetting, box.box_plan, _no_choice),
    Method("double-ring", "KV rotates in rings inside nodes and in one between them (LoongTrain)",
           box.DoubleRingSetting, box.box_plan, _inner_rings,
           rotates=True),
    Method("allgather-kv", "every rank gathers all KV (Llama 3 training)",
           box.AllGatherKvSetting, box.box_plan, _no_choice,
           is_plain_box=True),
    Method("ulysses", "ranks exchange tokens for heads",
           box.UlyssesSetting, box.box_plan, _no_choice,
           reads_mask=False, all_exchange=True, is_plain_box=True),
    Method("usp", "Ulysses inside, a ring outside",
           box.UspSetting, box.box_plan, _rings_of_units,
           rotates=True, is_plain_box=True),
    Method("startrail", "teams gather Q and KV, team blocks rotate in sub-rings",
           startrail.StarTrailSetting, startrail.plan_startrail, _teams),
    Method("mesh-usp", "Ulysses inside, mesh outside",
           box.MeshUspSetting, box.box_plan, _unit_tiles,
           is_plain_box=True),
    Method("agq-ringkv", "a mesh that gathers Q while KV rotates",
           box.AgqRingKvSetting, box.box_plan, _tiles),
    Method("agkv-ringqo", "a mesh that gathers KV while Q and its output rotate",
           box.AgkvRingQoSetting, box.box_plan, _tiles),
    Method("seen", "rows travel only to ranks whose queries see them",
           needed_rows.NeededRowsSetting, needed_rows.plan_needed_rows, _row_or_tiles,
           by_stretches=True),
)
# fmt: on
METHODS: Mapping[str, Method] = {method.name: method for method in _METHODS}


def all_options() -> dict[str, tuple[Option, tuple[str, ...]]]:
    """Every option of every method, once, with the methods that have it; in order of the table."""
    options: dict[str, tuple[Option, tuple[str, ...]]] = {}
    for method in METHODS.values():
        for name, option in method.options().items():
            first, users = options.get(name, (option, ()))
            options[name] = (first, (*users, method.name))
    return options


# Arguments that are not options of plans, and the functions that take them.
_TAKEN_ELSEWHERE = {
    "cluster": "plan_on(cluster, problem, ranks, ...) of mesh_attention.cost.planning plans for "
    "one, find_best of mesh_attention.choose.auto searches on it, and ContextParallel("
    "cluster=...) chooses by it",
    "scheduler": "gone in 1.0: the order of tasks is that of the greedy scheduler",
}


def taken_elsewhere(option: str) -> str:
    """A hint in brackets about an unknown option; empty where there is none."""
    return f" ({_TAKEN_ELSEWHERE[option]})" if option in _TAKEN_ELSEWHERE else ""


def methods_with(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The methods that have all of these options. An option that is None was not set."""
    names = {name for name, value in options.items() if value is not None}
    fits = tuple(name for name, method in METHODS.items() if names <= method.options().keys())
    if not fits:
        known = all_options()
        for name in sorted(names - known.keys()):
            near = get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near and not taken_elsewhere(name) else ""
            raise PlanError(f"no method has an option {name!r}{taken_elsewhere(name)}{meant}")
        raise PlanError(
            f"no method has all of the options {', '.join(sorted(names))}; leave one out, or name "
            "a method"
        )
    return fits
