"""The fastest of the best predicted settings, measured on the ranks that will use it.

The first rank searches, reads and writes; what it chooses to measure next is made by all ranks, and
times are those of the last rank that is done, so all of them agree on every number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from mesh_attention.choose.auto import question_of
from mesh_attention.choose.scored import Scored
from mesh_attention.choose.tuned import (
    Answer,
    Known,
    TunedEntry,
    Wanted,
    read_entries,
    wanted,
    write_entries,
)
from mesh_attention.choose.tuning import Pair, Tuning, contenders
from mesh_attention.files import check_writable
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.rates import costs_of
from mesh_attention.measure.attempts import Attempts, Refusal
from mesh_attention.measure.plan_seconds import plan_seconds
from mesh_attention.measure.ranks import MeasureError, Ranks
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.version import __version__

MEASUREMENTS = 10
LASTING = 2.0  # seconds of one measurement, about

Progress = Callable[[int, int], None]
TellLine = Callable[[str], None]


@dataclass(frozen=True)
class TuningOutcome:
    """`taken` runs were made now, `before` were known from the file; `answer` is what the file has
    now, which `stays` where it was measured faster before."""

    best: Pair
    tuning: Tuning
    taken: int
    before: int
    answer: Answer
    stays: bool

    @property
    def seconds(self) -> float:
        return self.tuning.seconds(self.best)


def tune_ranks(
    ranks: Ranks,
    problem: Problem,
    cluster: Cluster,
    options: Mapping[str, Any] | None = None,
    *,
    output: Path | str,
    measurements: int = MEASUREMENTS,
    lasting: float = LASTING,
    again: bool = False,
    progress: Progress | None = None,
    tell_line: TellLine | None = None,
) -> TuningOutcome:
    """All ranks call it with the same arguments. At most so many `measurements` are made; those of
    a tuning that was ended count, unless all is to be measured `again`. The answer goes to the file
    `output`, unless one that was measured faster is there and not all is measured `again`.
    `tell_line` hears of every measurement."""
    given = dict(options or {})
    file: _Output = ranks.of_first(lambda: _output(ranks, problem, cluster, given, output))
    known: Known = ranks.of_first(lambda: {} if again else file.known())
    found: dict[Direction, list[Scored]] = ranks.of_first(
        lambda: contenders(problem, ranks.size, cluster, given)
    )
    refused = {key: one for key, one in known.items() if isinstance(one, str)}
    tuning = Tuning(
        found, {key: inf if isinstance(x, str) else x for key, x in known.items()}, refused
    )
    attempts = Attempts(ranks)
    before = taken = _runs(tuning)
    while taken < measurements and (pair := tuning.next()) is not None:
        if progress:
            progress(taken, measurements)
        seconds = attempts.make(partial(measure_pair, ranks, problem, cluster, pair, lasting))
        if isinstance(seconds, Refusal):
            tuning.refuse(pair, seconds.reason)
        else:
            tuning.measured |= {one.key: seconds[one.direction] for one in pair}
            taken += 1
        ranks.of_first(lambda: file.note(tuning.measured | tuning.refused))
        if tell_line:
            tell_line(_line(pair, seconds, taken, measurements))
    best = tuning.best()
    if best is None:
        raise MeasureError(f"no setting could run here; the last: {[*tuning.refused.values()][-1]}")
    mine = answer_of(tuning, best, cluster, ranks.size, file.measured_on)
    kept: Answer = ranks.of_first(lambda: file.keep(mine, replaces=again))
    return TuningOutcome(best, tuning, taken - before, before, kept, stays=kept != mine)


@dataclass(frozen=True)
class _Output:
    """The question of a tuning in its file, which the first rank reads and writes. The file is read
    anew whenever it is written: other questions of it stay."""

    file: Path
    asked: Wanted
    by: dict[str, Any]

    @property
    def measured_on(self) -> str:
        return f"{self.by['device']}, {self.by['backend']}, torch {self.by['torch']}"

    def known(self) -> Known:
        """What was measured before, by the same."""
        entry = self._entries().get(self.asked, TunedEntry())
        return entry.measured if entry.measured_by == self.by else {}

    def note(self, known: Known) -> None:
        self._write(measured=known, measured_by=self.by)

    def keep(self, answer: Answer, *, replaces: bool) -> Answer:
        """The faster one, unless it is to be replaced."""
        earlier = self._entries().get(self.asked, TunedEntry()).answer
        if earlier is not None and earlier.seconds < answer.seconds and not replaces:
            return earlier
        self._write(answer=answer)
        return answer

    def _entries(self) -> dict[Wanted, TunedEntry]:
        return read_entries(self.file) if self.file.exists() else {}

    def _write(self, **changes: Any) -> None:
        entries = self._entries()
        entries[self.asked] = replace(entries.get(self.asked, TunedEntry()), **changes)
        write_entries(self.file, entries)


def _output(
    ranks: Ranks,
    problem: Problem,
    cluster: Cluster,
    options: Mapping[str, Any],
    output: Path | str,
) -> _Output:
    """Refuses now what could not be written later."""
    asked = wanted(problem, ranks.size, options)
    device = torch.cuda.get_device_name() if ranks.is_cuda else ranks.device.type
    where = {"device": device, "backend": ranks.backend, "torch": torch.__version__}
    by = where | {"cluster": digest_of(cluster), "version": __version__}
    check_writable(output)
    found = _Output(Path(output), asked, by)
    found.known()
    return found


def digest_of(cluster: Cluster) -> str:
    """Predictions and plans depend on all of it."""
    text = json.dumps(asdict(cluster), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def answer_of(
    tuning: Tuning, best: Pair, cluster: Cluster, num_ranks: int, measured_on: str
) -> Answer:
    return Answer(
        {one.direction: (one.name, one.options) for one in best},
        {one.direction: tuning.measured[one.key] for one in best},
        cluster.node.ranks,
        costs_of(cluster, num_ranks),
        measured_on,
    )


def measure_pair(
    ranks: Ranks, problem: Problem, cluster: Cluster, pair: Pair, lasting: float
) -> dict[Direction, float]:
    chosen = {one.direction: (one.name, one.options) for one in pair}
    plan = question_of(cluster, problem, ranks.size, chosen).plan()
    return plan_seconds(ranks, plan, lasting=lasting)


def _line(pair: Pair, found: dict[Direction, float] | Refusal, taken: int, most: int) -> str:
    if isinstance(found, Refusal):
        settings = ", ".join(f"{one.direction.value} {one.text}" for one in pair)
        return f"cannot run: {settings}: {found.reason}"
    settings = ", ".join(
        f"{one.direction.value} {one.text} {found[one.direction] * 1e3:.2f} ms" for one in pair
    )
    return f"measured {taken} of at most {most}: {settings}"


def _runs(tuning: Tuning) -> int:
    """Runs that were made: each measures a setting of each pass, of which one may be known."""
    counts = [
        sum(tuning.measured.get(one.key, inf) < inf for one in every)
        for every in tuning.contenders.values()
    ]
    return max(counts)
