"""Which settings to measure, one after the other, so that few measurements find the fastest.

A search leaves out what cannot be the best by the model. A tuner measures because the model is not
exact, so `contenders` searches each method by itself: its best few settings and its best that is
not cut, in each pass, with tokens where they are by default, as objects have them.

Predictions are wrong most of all by method: a method that was twice as slow as predicted is so at
all its settings. So `Tuning` corrects each prediction by what was measured of its method, or of all
methods where nothing was, and takes it a little better than that, the more so the less is known.
It measures the most promising next, and ends when nothing promises more than the best measurement.
The same measurements lead to the same choice. One run of a plan measures both passes, and they have
one place: shards on devices. `measure/tune.py` runs the plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log
from pathlib import Path
from typing import Any

from mesh_attention.choose.pass_scores import PassScores
from mesh_attention.choose.scored import SEARCH, Scored, SearchQuestion
from mesh_attention.choose.search import PassSearch
from mesh_attention.choose.tuned import Known
from mesh_attention.cost.planning import collector_paused, default_layout
from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import a_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Program
from mesh_attention.plan.methods.parts.setting import Keep
from mesh_attention.plan.methods.table import methods_with
from mesh_attention.plan.problem.problem import Problem

_OF_METHOD = 3  # settings, beside the best that is not cut
_EFFORT = SEARCH._replace(shapes=6, simulated_operations=300_000)  # of each method

# A setting may take this part of its corrected prediction, and no less.
HOPE_OF_SETTING = 0.9  # where the method was measured in this pass
HOPE_OF_METHOD = 0.6  # where it was not

MOST_REFUSALS = 3  # of a setting, beside others that have not run: then it is given up

Pair = tuple[Scored, Scored]  # forward and backward, in one place


@collector_paused()
def contenders(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    options: Mapping[str, Any] | None = None,
) -> dict[Direction, list[Scored]]:
    """The settings worth measuring, by pass, the best predicted first, without timelines. None
    needs more memory than there is, unless all do. Of settings that make the same programs in
    other words only the first is there."""
    options = {name: value for name, value in (options or {}).items() if value is not None}
    asked = SearchQuestion(
        problem, num_ranks, a_cluster(cluster), options, methods_with(options), _EFFORT
    )
    by_pass = {direction: _contenders_of_pass(asked, direction) for direction in Direction}
    _add_partners(asked, by_pass)
    return by_pass


def _add_partners(asked: SearchQuestion, by_pass: dict[Direction, list[Scored]]) -> None:
    """Adds, for each backward pass that recalls, the forward pass of its setting, the only one that
    it runs with, and the same setting with nothing kept, for other forward passes."""
    forward, backward = (by_pass[direction] for direction in Direction)
    for scored in [scored for scored in backward if scored.recalls]:
        apart = {**scored.options, "keep": Keep.SHARDS.value}
        tries = ((forward, Direction.FORWARD, scored.options), (backward, scored.direction, apart))
        for several, direction, options in tries:
            if all(x.setting != (scored.name, options) for x in several):
                scores = PassScores(asked, direction, None)
                attempted = scores.attempt(scored.name, dict(options))
                several += [scores.met(attempted)] if attempted else []
    for several in (forward, backward):
        several.sort(key=lambda scored: scored.seconds)


def _contenders_of_pass(asked: SearchQuestion, direction: Direction) -> list[Scored]:
    said = any(asked.options.get(name) for name in ("layout", "relayout"))
    layout = None if said else default_layout(asked.problem)
    best: list[Scored] = []
    refusals: dict[str, PlanError] = {}
    for method in asked.methods:
        search = PassSearch(replace(asked, methods=(method,)), direction, layout)
        search.run()
        best += _best_few(asked, [scored for scored in search.scores.scored if scored.stays])
        refusals |= search.scores.refusals
    if not best:
        name, error = next(iter(refusals.items()))
        raise PlanError(f"no method fits; {name}: {error}")
    best.sort(key=lambda scored: (scored.score, len(scored.options)))
    fitting = [scored for scored in best if scored.fits]
    predicted, operations = [], 0
    for scored in _different(asked, fitting or best):
        operations += scored.operations
        if operations <= _EFFORT.simulated_operations:  # those after it are predicted by one rank
            scored = replace(asked.simulated(scored), timeline=None)
        predicted.append(scored)
    return sorted(predicted, key=lambda scored: scored.seconds)


def _best_few(asked: SearchQuestion, scored: Sequence[Scored]) -> list[Scored]:
    few = _different(asked, scored[: 2 * _OF_METHOD])[:_OF_METHOD]
    uncut = [setting for setting in scored if _is_uncut(setting.options)]
    return [*few, *(setting for setting in uncut[:1] if setting not in few)]


def _is_uncut(options: Mapping[str, Any]) -> bool:
    return options.get("chunks", (1, 1)) == (1, 1) and "head_slices" not in options


def _different(asked: SearchQuestion, scored: Sequence[Scored]) -> list[Scored]:
    """The settings, without those that make the same programs as an earlier one."""
    different: list[Scored] = []
    for setting in scored:
        alike = [other for other in different if _facts(other) == _facts(setting)]
        if not alike or _program(asked, setting) not in [_program(asked, x) for x in alike]:
            different.append(setting)
    return different


def _program(asked: SearchQuestion, scored: Scored) -> Program:
    plan = asked.plan(scored.direction, scored.name, scored.options)
    return plan.direction(scored.direction).programs[0]


def _facts(scored: Scored) -> tuple[object, ...]:
    return scored.seconds, scored.peak_bytes, scored.place, scored.operations


def key_of(pair: Pair) -> str:
    """The key of two settings in files, where `Scored.key` is that of one."""
    return " and ".join(scored.key for scored in pair)


@dataclass
class Tuning:
    """What was measured so far, and what to measure next. `known` is as files have it: by
    `Scored.key` seconds, or why a setting cannot run; by `key_of` why two cannot run together."""

    contenders: Mapping[Direction, Sequence[Scored]]
    known: Known = field(default_factory=dict)

    def measured(self, scored: Scored) -> float:
        """The seconds of a setting; inf where it cannot run, or was not measured yet."""
        known = self.known.get(scored.key, inf)
        return inf if isinstance(known, str) else known

    def next(self) -> Pair | None:
        """The two settings to measure now; None when nothing promises more than the best."""
        best = self.best()
        hopes = {s.key: self._hope(s) for several in self.contenders.values() for s in several}

        def hope(pair: Pair) -> float:
            return sum(hopes[scored.key] for scored in pair)

        most = inf if best is None else self.seconds(best)
        new = [
            pair
            for pair in self._pairs()
            if any(scored.key not in self.known for scored in pair) and hope(pair) < most
        ]
        refusals = self._refusals()

        def turn(pair: Pair) -> tuple[int, float]:
            # Settings that cannot run together are asked after others: beside one that has run by
            # then it is seen which of them is the cause.
            return sum(refusals[scored.key] for scored in pair), hope(pair)

        pair = min(new, key=turn, default=None)
        if pair is None or pair[1].recalls or any(refusals[scored.key] for scored in pair):
            return pair
        forward, backward = (self._unmeasured_beside(scored, pair, hopes) for scored in pair)
        return forward, backward

    def refuse(self, pair: Pair, reason: str) -> None:
        """Notes that two settings cannot run together. One that has run before is not the cause;
        where neither has, the cause may be one of them or both together."""
        causes = [scored for scored in pair if self.measured(scored) == inf]
        if len(causes) == len(pair):
            self.known[key_of(pair)] = reason
            refusals = self._refusals()
            causes = [scored for scored in pair if refusals[scored.key] >= MOST_REFUSALS]
        self.known |= {scored.key: reason for scored in causes}

    def seconds(self, pair: Pair) -> float:
        return sum(map(self.measured, pair))

    def best(self) -> Pair | None:
        """The fastest two that were measured; the passes may come from different runs."""
        known = [pair for pair in self._pairs() if self.seconds(pair) < inf]
        return min(known, key=self.seconds, default=None)

    def ratio(self, scored: Scored) -> tuple[float, bool]:
        """Measured over predicted seconds, and whether that is about this method in this pass."""
        known = [other for other in self.contenders[scored.direction] if self.measured(other) < inf]
        of_method = [other for other in known if other.name == scored.name]
        if not known:
            return 1.0, False
        logs = [log(self.measured(x) / x.seconds) for x in of_method or known]
        return exp(sum(logs) / len(logs)), bool(of_method)

    def _hope(self, scored: Scored) -> float:
        if scored.key in self.known:
            return self.measured(scored)
        ratio, is_of_method = self.ratio(scored)
        return scored.seconds * ratio * (HOPE_OF_SETTING if is_of_method else HOPE_OF_METHOD)

    def _unmeasured_beside(self, scored: Scored, pair: Pair, hopes: Mapping[str, float]) -> Scored:
        """The setting, or if it was measured before, the most promising that was not, in the same
        place: a run measures both passes."""
        if scored.key not in self.known:
            return scored
        others = [
            other
            for other in self.contenders[scored.direction]
            if other.key not in self.known and other.place == pair[0].place and not other.recalls
        ]
        return min(others, key=lambda other: hopes[other.key], default=scored)

    def _refusals(self) -> Counter[str]:
        """How often each setting that has not run could not run beside others."""
        pairs = [pair for pair in self._all_pairs() if key_of(pair) in self.known]
        return Counter(x.key for pair in pairs for x in pair if self.measured(x) == inf)

    def _pairs(self) -> list[Pair]:
        """The pairs that may run together."""
        return [pair for pair in self._all_pairs() if key_of(pair) not in self.known]

    def _all_pairs(self) -> list[Pair]:
        return [
            (forward, backward)
            for forward in self.contenders[Direction.FORWARD]
            for backward in self.contenders[Direction.BACKWARD]
            if forward.place == backward.place
            and (not backward.recalls or forward.setting == backward.setting)
        ]
