"""Finds the best plan over all methods.

`find_best` searches with all effort. `find_default` is the search of `auto`: it has the effort that
a constructor can afford, and leaves tokens where they are by default. Both passes of a plan have
the same shards on the same devices, so they are chosen together (`passes_together.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesh_attention.choose.busiest import shows_little
from mesh_attention.choose.pass_scores import sum_of
from mesh_attention.choose.passes_together import (
    PassSearches,
    faster_of,
    in_one_place,
    methods_at_their_best,
    search_together,
)
from mesh_attention.choose.scored import (
    DEFAULT,
    DEFAULT_OF_MANY,
    SEARCH,
    Scored,
    SearchEffort,
    SearchQuestion,
)
from mesh_attention.cost.operation_costs import Overlap
from mesh_attention.cost.planning import collector_paused, default_layout
from mesh_attention.cost.timeline import Timeline
from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import a_cluster
from mesh_attention.machine.rates import costs_of
from mesh_attention.plan.language.plan import Direction, Plan, a_direction
from mesh_attention.plan.methods.question import BOTH, Question, ask_passes
from mesh_attention.plan.methods.table import METHODS, all_options, methods_with
from mesh_attention.plan.problem.arguments import choice, number
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.problem import Problem

Progress = Callable[[int, int], None]  # settings tried, and about how many there will be

_FEW_RANKS, _MANY_RANKS = 8, 64


@dataclass(frozen=True)
class PlanChoice:
    """What a search chose. `unmoved` are the best settings that leave tokens where they are by
    default: the same as `chosen`, unless others are faster."""

    asked: SearchQuestion
    chosen: dict[Direction, Scored]
    unmoved: dict[Direction, Scored]
    methods: dict[str, dict[Direction, Scored]]  # the best settings of each, the best method first
    refused: dict[str, str]  # methods that took no setting, with the reason
    tried: int  # settings
    default: PlanChoice | None = None  # what the default chooses, where a search compared it

    @property
    def seconds(self) -> float:
        return sum(scored.seconds for scored in self.chosen.values())

    @property
    def place(self) -> dict[str, Any]:
        """Options that say where tokens lie, if not where they are by default."""
        if all(scored.stays for scored in self.chosen.values()):
            return {}
        return {"layout": self.plan().q_layout.kind.value}

    @property
    def question(self) -> Question:
        """The question whose answer is the plan of all passes."""
        chosen = {direction: scored.setting for direction, scored in self.chosen.items()}
        return question_of(self.asked.cluster, self.asked.problem, self.asked.num_ranks, chosen)

    def plan(self) -> Plan:
        return self.question.plan()

    @property
    def timelines(self) -> list[Timeline]:
        """Those of the chosen settings that were simulated."""
        return [scored.timeline for scored in self.chosen.values() if scored.timeline is not None]

    def timeline(self, direction: Direction) -> Timeline:
        """The timeline of a chosen setting. It is simulated now if an estimate was enough to
        choose it."""
        return self.asked.timeline(self.chosen[direction])


def question_of(
    cluster: Cluster,
    problem: Problem,
    num_ranks: int,
    chosen: Mapping[Direction, tuple[str, Mapping[str, Any]]],
) -> Question:
    """One question from a method and its options for each pass."""
    how: dict[str, Any] = {"ranks_per_node": cluster.node.ranks}
    return ask_passes(problem, num_ranks, chosen, costs=costs_of(cluster, num_ranks), **how)


def find_best(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    *,
    directions: Sequence[Direction | str] = BOTH,
    options: Mapping[str, Any] | None = None,
    method: str | None = None,
    overlap: Overlap | str = Overlap.EVENTS,
    kernel: str | None = None,
    effort: SearchEffort = SEARCH,
    moves_tokens: bool = True,
    progress: Progress | None = None,
) -> PlanChoice:
    """The best plan over all methods that have these options, or of one method. The same question
    has the same answer. With `moves_tokens` other layouts are searched too, unless `options` name
    one. It takes the choice of the default where it finds nothing better."""
    if options is not None and not isinstance(options, Mapping):
        raise PlanError(f"options={options!r}: must be a mapping of names to values")
    known, said = all_options(), {n: x for n, x in (options or {}).items() if x is not None}
    # As methods declare them; options that no method has are refused later, by name.
    options = {n: known[n][0].read(x) if n in known else x for n, x in said.items()}
    cluster, num_ranks = a_cluster(cluster), number("ranks", num_ranks)
    if not isinstance(problem, Problem):
        raise PlanError(f"problem={problem!r}: must be a Problem")
    if method is not None and (not isinstance(method, str) or method not in METHODS):
        raise PlanError(f"unknown method {method!r}; known methods: {', '.join(METHODS)}")
    names = methods_with(options) if method is None else (method,)
    if not effort.every_name and num_ranks > _FEW_RANKS:  # plain boxes, and what sends single rows
        names = (
            tuple(n for n in names if METHODS[n].is_plain_box or METHODS[n].by_stretches) or names
        )
    overlap = choice(Overlap, "overlap", overlap)
    asked = SearchQuestion(problem, num_ranks, cluster, options, names, effort, overlap, kernel)
    default = None
    if effort.every_name and kernel is None:
        how: dict[str, Any] = {"directions": directions, "method": method}
        default = find_default(problem, num_ranks, cluster, options, **how)
    return search_best(asked, directions, default, moves_tokens=moves_tokens, progress=progress)


@collector_paused()
def search_best(
    asked: SearchQuestion,
    directions: Sequence[Direction | str],
    default: PlanChoice | None = None,
    *,
    moves_tokens: bool,
    progress: Progress | None = None,
) -> PlanChoice:
    """`find_best` for a question that has been read and checked."""
    layouts = _layouts(asked, moves_tokens=moves_tokens and asked.kernel is None)
    tried, expected = 0, 60 * len(directions) * len(layouts)

    def report() -> None:
        nonlocal tried
        tried += 1
        if progress:
            progress(tried, max(tried, expected))

    asked = replace(asked, report=report)
    passes = [PassSearches(asked, a_direction(direction), layouts) for direction in directions]
    search_together(passes)
    if not all(pass_.scored for pass_ in passes):
        for pass_ in passes:  # with nothing but the caller's options, a method says what is wrong
            asked.plan(pass_.direction, asked.methods[0], asked.options)
        words = ", ".join(f"{name}={value}" for name, value in asked.options.items())
        nothing = PlanError(f"no setting of any method takes {words}; leave something out")
        raise next(iter(passes[0].refusals.values()), nothing)
    stay = all(any(scored.stays for scored in pass_.scored) for pass_ in passes)
    unmoved = in_one_place(passes, stays=stay)
    if default is not None:
        unmoved = faster_of(passes, unmoved, default.chosen)
    chosen = in_one_place(passes) if moves_tokens else unmoved
    if sum_of(unmoved) <= sum_of(chosen):
        chosen = unmoved
    fitting = {scored.name for scored in passes[0].scored}
    return PlanChoice(
        asked,
        {scored.direction: scored for scored in chosen},
        {scored.direction: scored for scored in unmoved},
        methods_at_their_best(passes) if asked.effort.every_name else {},
        {n: str(error) for n, error in passes[0].refusals.items() if n not in fitting},
        sum(len(pass_.scored) for pass_ in passes),
        default,
    )


def find_default(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    directions: Sequence[Direction | str] = BOTH,
    method: str | None = None,
) -> PlanChoice:
    """The choice that plans, objects and commands take if nobody names a method. `method`: what the
    same search chooses of one method."""
    many = number("ranks", num_ranks) > _MANY_RANKS
    return find_best(
        problem,
        num_ranks,
        cluster,
        directions=directions,
        options=options,
        method=method,
        effort=DEFAULT_OF_MANY if many else DEFAULT,
        moves_tokens=False,
    )


def _layouts(asked: SearchQuestion, *, moves_tokens: bool) -> list[LayoutKind | None]:
    """The layouts to search: the one that tokens have by default and, under a mask that shows
    little, contiguous shards. None stands for the layout that the options name."""
    if asked.options.get("layout") is not None:
        return [None]
    first = default_layout(asked.problem)
    free = moves_tokens or asked.options.get("relayout")  # shards are contiguous anyway
    if free and shows_little(asked.problem):
        return [first, LayoutKind.CONTIGUOUS]
    return [first]
