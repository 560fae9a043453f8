"""Chooses both passes together: they share shards, and backward finds what it recalls.

The best setting of each pass alone may want other shards, or rows that the forward pass of another
setting does not keep. `auto.py` asks here for searches that know of each other, and for the two
settings that go together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mesh_attention.choose.pass_scores import PassScores, best_first, sum_of
from mesh_attention.choose.scored import Place, Score, Scored, SearchQuestion
from mesh_attention.choose.search import PassSearch
from mesh_attention.choose.shapes import setting_key
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.parts.setting import Keep
from mesh_attention.plan.problem.layout import LayoutKind


class PassSearches:
    """The searches of one pass, one in each layout."""

    def __init__(
        self, asked: SearchQuestion, direction: Direction, layouts: Sequence[LayoutKind | None]
    ) -> None:
        self.asked, self.direction = asked, direction
        self.searches = [PassSearch(asked, direction, layout) for layout in layouts]

    @property
    def scores(self) -> PassScores:
        """The scores to which settings are added that no search came to."""
        return self.searches[0].scores

    @property
    def scored(self) -> list[Scored]:
        return best_first(scored for search in self.searches for scored in search.scores.scored)

    @property
    def refusals(self) -> dict[str, PlanError]:
        """The first refusal of each method."""
        refusals: dict[str, PlanError] = {}
        for search in reversed(self.searches):
            refusals |= search.scores.refusals
        return refusals


def search_together(passes: Sequence[PassSearches]) -> None:
    """Each pass tries the best shape of the other before it spends effort on cuts. The backward
    pass takes longer, so it is cut first; where it recalls, only the forward pass of its setting
    keeps what it needs, so forward begins with its best cut."""
    for searches in zip(*(pass_.searches for pass_ in passes), strict=True):  # of one layout
        backward_first = sorted(searches, key=lambda x: x.direction is Direction.FORWARD)
        for search in backward_first:
            search.look()
        for search, other in zip(backward_first, reversed(backward_first), strict=True):
            search.look_as(other)
        shape = _best_shape(backward_first) if len(searches) == 2 else None
        for search, other in zip(backward_first, reversed(backward_first), strict=True):
            if shape is not None:
                search.begin_as(other, shape)
            search.cut(shape)


def _best_shape(searches: Sequence[PassSearch]) -> str | None:
    """The key of the shape in which both passes are fastest together, if backward recalls there;
    None where each pass in a shape of its own is faster."""
    backward, forward = (search.taken() for search in searches)
    common = [key for key in backward if key in forward and backward[key].recalls]
    best = min(common, key=lambda key: sum_of([forward[key], backward[key]]), default=None)
    alone = [x for x in backward.values() if not x.recalls]
    if best is None or not alone:
        return best
    apart = sum_of([min(several, key=lambda x: x.score) for several in (forward.values(), alone)])
    return best if sum_of([forward[best], backward[best]]) <= apart else None


def in_one_place(passes: Sequence[PassSearches], *, stays: bool = False) -> list[Scored]:
    """The best of each pass where both have the same shards on the same devices; otherwise the two
    of a common place that take the least time together. `stays`: of settings that leave tokens
    where they are."""

    def candidates(pass_: PassSearches) -> list[Scored]:
        return [scored for scored in pass_.scored if scored.stays or not stays]

    firsts = [pass_.scores.best_of(candidates(pass_)) for pass_ in passes]
    if len({scored.place for scored in firsts}) <= 1:
        return _of_one_setting(passes, firsts)
    for pass_, other in zip(passes, reversed(firsts), strict=True):
        # The setting of one pass may do for the other.
        pass_.scores.attempt(other.name, dict(other.options))
    by_place = [_by_place(candidates(pass_)) for pass_ in passes]
    common = [place for place in by_place[0] if place in by_place[1]]
    best = min(common, key=lambda place: _least_together([places[place] for places in by_place]))
    scores = [pass_.scores for pass_ in passes]
    return _of_one_setting(
        passes, [x.best_of(places[best]) for x, places in zip(scores, by_place, strict=True)]
    )


def _least_together(passes: Sequence[Sequence[Scored]]) -> Score:
    """The least score of two settings that go together: backward recalls nothing, or what this
    forward pass keeps. Where no two do, that of the best of each pass."""
    firsts = [scored[0] for scored in passes]
    by_setting = [{setting_key(*x.setting): x for x in scored} for scored in passes]
    same = [[by_setting[0][key], x] for key, x in by_setting[1].items() if key in by_setting[0]]
    apart = [x for scored in passes for x in [y for y in scored if not y.recalls][:1]]
    pairs = [*same, apart] if len(apart) == len(passes) else same
    return min(map(sum_of, pairs), default=sum_of(firsts))


def faster_of(
    passes: Sequence[PassSearches], best: list[Scored], others: Mapping[Direction, Scored]
) -> list[Scored]:
    """The best of these searches, or other settings that were chosen together, if these are
    faster."""
    pair = [
        pass_.scores.attempt(other.name, dict(other.options))
        for pass_ in passes
        for other in (others[pass_.direction],)
    ]
    known = [scored for scored in pair if scored is not None]
    if len(known) < len(pair) or sum_of(best) <= sum_of(known):
        return best
    simulated = [x.scores.best_of([scored]) for x, scored in zip(passes, known, strict=True)]
    return min(best, simulated, key=sum_of)


def _of_one_setting(
    passes: Sequence[PassSearches], pair: list[Scored], *, simulates: bool = True
) -> list[Scored]:
    """The pair, if the backward pass recalls nothing, or what this forward pass keeps. Otherwise
    the best setting that both passes have tried; if it takes longer than the pair would, the best
    of four: that, either setting for both passes, or both as they are and nothing kept. Among ties
    that keep something, the pair with the fewest operations."""
    by_direction = {scored.direction: scored for scored in pair}
    if len(pair) < 2 or not by_direction[Direction.BACKWARD].recalls:
        return pair
    scores = {pass_.direction: pass_.scores for pass_ in passes}
    forward, backward = (by_direction[direction] for direction in Direction)
    if forward.setting == backward.setting:
        return pair
    of_forward, of_backward = (scores[direction] for direction in Direction)
    tie = 1 + passes[0].asked.effort.tie
    stays = forward.stays and backward.stays
    same = of_forward.best_in_common(of_backward, {forward.name, backward.name}, stays=stays)
    tries: list[tuple[Scored | None, Scored | None]] = [same] if same else []
    does_not_fit, seconds = sum_of(pair)
    enough: Score = (does_not_fit, seconds * tie)
    if same is None or any(scored.may_wait for scored in same) or enough < sum_of(same):
        apart = {**backward.options, "keep": Keep.SHARDS.value}
        other = of_backward.best_sums(of_backward.attempt(forward.name, dict(forward.options)))
        kept = other if other is not None and other.recalls else None
        tries += [
            (of_forward.attempt(backward.name, dict(backward.options)), backward),
            (of_forward.attempt(kept.name, dict(kept.options)) if kept else forward, other),
            (forward, of_backward.attempt(backward.name, apart)),
        ]
    known = [[x for x in both if x is not None and x.stays >= stays] for both in tries]
    pairs = [both for both in known if len(both) == 2 and both[0].place == both[1].place]
    tie = tie if simulates else 1.0
    compared: list[list[Scored]] = []
    enough = True, math.inf
    for both in sorted(pairs, key=sum_of):
        if enough < sum_of(both):
            break  # a simulation is not shorter than its estimate
        if simulates:
            both = [scores[x.direction].best_of([x]) for x in both]
        compared.append(both)
        does_not_fit, seconds = min(map(sum_of, compared))
        enough = does_not_fit, seconds * tie
    best = min(compared, key=sum_of)
    ties = [both for both in compared if sum_of(both) <= enough and both[1].recalls]
    best = min([best, *ties], key=lambda both: sum(x.rank_operations for x in both))
    return best if pair[0].direction is Direction.FORWARD else best[::-1]


def _by_place(scored: Sequence[Scored]) -> dict[Place, list[Scored]]:
    by_place: dict[Place, list[Scored]] = {}
    for setting in scored:
        by_place.setdefault(setting.place, []).append(setting)
    return by_place


def methods_at_their_best(passes: Sequence[PassSearches]) -> dict[str, dict[Direction, Scored]]:
    """Each method at its best, as far as it was simulated; passes in a common place."""
    rows: dict[str, list[Scored]] = {}
    scored = [pass_.scored for pass_ in passes]
    for name in dict.fromkeys(setting.name for settings in scored for setting in settings):
        by_place = [_by_place([s for s in settings if s.name == name]) for settings in scored]
        pairs = [
            [places[place][0] for places in by_place]
            for place in by_place[0]
            if all(place in places for places in by_place)
        ]
        if pairs:
            rows[name] = _of_one_setting(passes, min(pairs, key=sum_of), simulates=False)
    order = sorted(rows, key=lambda name: sum_of(rows[name]))
    return {name: {setting.direction: setting for setting in rows[name]} for name in order}
