"""Which settings to measure, one after the other, so that few measurements find the fastest.

Predictions are wrong most of all by method: a method that was twice as slow as predicted is so at
all its settings. So each prediction is corrected by what was measured of its method, or of all
where nothing was, and taken a little better than that, the more so the less is known. What promises
most is measured next, and it ends when nothing promises more than what was measured. Pure: the same
measurements lead to the same choice.

One run of a plan measures both passes, and they have one place: shards on devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log

from mesh_attention.choose.search import Scored
from mesh_attention.plan.language.plan import Direction

# Of a corrected prediction: better than that is not hoped for.
HOPE_OF_SETTING = 0.9  # where the method was measured in this pass
HOPE_OF_METHOD = 0.6  # where it was not

MOST_REFUSALS = 3  # beside settings of which none has run: then it is not asked any more

Pair = tuple[Scored, Scored]  # forward and backward, in one place


def key_of(pair: Pair) -> str:
    """For files, as `Scored.key`."""
    return " and ".join(one.key for one in pair)


@dataclass
class Tuning:
    """`measured` seconds by `Scored.key`; inf: it cannot run, and `refused` has the reason, by
    that key or by `key_of` two that cannot run together."""

    contenders: Mapping[Direction, Sequence[Scored]]
    measured: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def next(self) -> Pair | None:
        """What to measure now; None when nothing promises more than the best."""
        best = self.best()
        hopes = {one.key: self._hope(one) for every in self.contenders.values() for one in every}

        def hope(pair: Pair) -> float:
            return sum(hopes[one.key] for one in pair)

        most = inf if best is None else self.seconds(best)
        new = [
            pair
            for pair in self._pairs()
            if any(one.key not in self.measured for one in pair) and hope(pair) < most
        ]
        refusals = self._refusals()
        # Settings that cannot run together are asked after others: beside one that has run by then
        # it is seen which of them is the cause.
        found = min(
            new, key=lambda pair: (sum(refusals[x.key] for x in pair), hope(pair)), default=None
        )
        if found is None or any(refusals[one.key] for one in found):
            return found
        forward, backward = (self._unmeasured_beside(one, found, hopes) for one in found)
        return forward, backward

    def refuse(self, pair: Pair, reason: str) -> None:
        """They cannot run together. One that has run before is not the cause; where none has, it
        may be one of them or both together."""
        causes = [one for one in pair if not self._is_known(one)]
        if len(causes) == len(pair):
            self.refused[key_of(pair)] = reason
            causes = [one for one in pair if self._refusals()[one.key] >= MOST_REFUSALS]
        self.refused |= {one.key: reason for one in causes}
        self.measured |= {one.key: inf for one in causes}

    def seconds(self, pair: Pair) -> float:
        return sum(self.measured[one.key] for one in pair)

    def best(self) -> Pair | None:
        """Of what was measured; passes may come from different runs."""
        known = [pair for pair in self._pairs() if all(self._is_known(one) for one in pair)]
        return min(known, key=self.seconds, default=None)

    def ratio(self, one: Scored) -> tuple[float, bool]:
        """Measured over predicted, and whether it is of this method in this pass."""
        ratios = {
            method_only: [
                log(self.measured[other.key] / other.seconds)
                for other in self.contenders[one.direction]
                if self._is_known(other) and (not method_only or other.name == one.name)
            ]
            for method_only in (True, False)
        }
        for method_only, found in ratios.items():
            if found:
                return exp(sum(found) / len(found)), method_only
        return 1.0, False

    def _hope(self, one: Scored) -> float:
        if one.key in self.measured:
            return self.measured[one.key]
        ratio, is_of_method = self.ratio(one)
        return one.seconds * ratio * (HOPE_OF_SETTING if is_of_method else HOPE_OF_METHOD)

    def _unmeasured_beside(self, one: Scored, pair: Pair, hopes: Mapping[str, float]) -> Scored:
        """A run measures both passes: one that is known gives its turn to the most promising that
        is not, in the same place."""
        if one.key not in self.measured:
            return one
        others = [
            other
            for other in self.contenders[one.direction]
            if other.key not in self.measured and other.place == pair[0].place
        ]
        return min(others, key=lambda other: hopes[other.key], default=one)

    def _refusals(self) -> Counter[str]:
        """Of settings that have not run: how often they could not beside others."""
        pairs = [pair for pair in self._all_pairs() if key_of(pair) in self.refused]
        return Counter(one.key for pair in pairs for one in pair if not self._is_known(one))

    def _is_known(self, one: Scored) -> bool:
        return self.measured.get(one.key, inf) < inf

    def _pairs(self) -> list[Pair]:
        """That may run together."""
        if not self.refused:
            return self._all_pairs()
        return [pair for pair in self._all_pairs() if key_of(pair) not in self.refused]

    def _all_pairs(self) -> list[Pair]:
        return [
            (forward, backward)
            for forward in self.contenders[Direction.FORWARD]
            for backward in self.contenders[Direction.BACKWARD]
            if forward.place == backward.place
        ]
