"""Measures the best predicted settings on the ranks that will use them, and keeps the fastest.

`mesh-attention tune` and benchmarks use it. The first rank searches, reads and writes. All ranks
measure what it chooses, and times are those of the last rank that is done, so all of them agree on
every number.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from mesh_attention.api.context_parallel import ContextParallel
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
from mesh_attention.measure.ranks import MeasureError, Ranks, Refusal, attempt
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.version import __version__

LEAST_RUNS, MOST_RUNS = 5, 30
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class TuningOutcome:
    """`taken` runs were made now, `before` were known from the file. `answer` is what the file has
    now: an earlier one `stays` where it was measured faster."""

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
    measurements: int = 10,
    lasting: float = 2.0,
    again: bool = False,
    progress: Callable[[int, int], None] | None = None,
    tell_line: Callable[[str], None] | None = None,
) -> TuningOutcome:
    """All ranks call it with the same arguments. At most so many `measurements` are made, of about
    `lasting` seconds each; those of a tuning that was ended count, unless all is to be measured
    `again`. The answer goes to the file `output`, unless the file has one that was measured faster
    and `again` is not set. `tell_line` is called after every measurement."""
    options = dict(options or {})
    file: _Output = ranks.of_first(
        lambda: _Output.of(ranks, wanted(problem, ranks.size, options), cluster, output)
    )
    known: Known = ranks.of_first(file.known)
    settings: dict[Direction, list[Scored]] = ranks.of_first(
        lambda: contenders(problem, ranks.size, cluster, options)
    )
    tuning = Tuning(settings, {} if again else known)
    before = taken = _runs(tuning)
    while taken < measurements and (pair := tuning.next()) is not None:
        if progress:
            progress(taken, measurements)
        seconds = attempt(ranks, partial(_measure, ranks, problem, cluster, pair, lasting))
        if isinstance(seconds, Refusal):
            tuning.refuse(pair, seconds.reason)
        else:
            tuning.known |= {scored.key: seconds[scored.direction] for scored in pair}
            taken += 1
        ranks.of_first(lambda: file.note(tuning.known))
        if tell_line:
            tell_line(_line(pair, seconds, taken, measurements))
    best = tuning.best()
    if best is None:
        reasons = [reason for reason in tuning.known.values() if isinstance(reason, str)]
        raise MeasureError(f"no setting could run here; the last: {reasons[-1]}")
    answer = Answer(
        {scored.direction: scored.setting for scored in best},
        {scored.direction: tuning.measured(scored) for scored in best},
        cluster.node.ranks,
        costs_of(cluster, ranks.size),
        file.measured_on,
    )
    kept: Answer = ranks.of_first(lambda: file.keep(answer, replaces=again))
    return TuningOutcome(best, tuning, taken - before, before, kept, stays=kept != answer)


@dataclass(frozen=True)
class _Output:
    """The entry of a tuning in its file, which the first rank reads and writes. The file is read
    anew whenever it is written, so that its answers to other questions stay."""

    file: Path
    asked: Wanted
    by: dict[str, Any]

    @staticmethod
    def of(ranks: Ranks, asked: Wanted, cluster: Cluster, output: Path | str) -> _Output:
        """Refuses now what could not be written later."""
        # Predictions and plans depend on all of the cluster.
        text = json.dumps(asdict(cluster), sort_keys=True)
        by = {
            "device": torch.cuda.get_device_name() if ranks.is_cuda else ranks.device.type,
            "backend": ranks.backend,
            "torch": torch.__version__,
            "cluster": hashlib.sha256(text.encode()).hexdigest()[:32],
            "version": __version__,
        }
        check_writable(output)
        return _Output(Path(output), asked, by)

    @property
    def measured_on(self) -> str:
        return f"{self.by['device']}, {self.by['backend']}, torch {self.by['torch']}"

    def known(self) -> Known:
        """What was measured before on the same device and with the same versions and cluster."""
        entry = self._entries().get(self.asked, TunedEntry())
        return entry.measured if entry.measured_by == self.by else {}

    def note(self, known: Known) -> None:
        self._write(measured=known, measured_by=self.by)

    def keep(self, answer: Answer, *, replaces: bool) -> Answer:
        """Writes `answer` unless an earlier one was faster; returns the one that the file has."""
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


def _measure(
    ranks: Ranks, problem: Problem, cluster: Cluster, pair: Pair, lasting: float
) -> dict[Direction, float]:
    chosen = {scored.direction: scored.setting for scored in pair}
    plan = question_of(cluster, problem, ranks.size, chosen).plan()
    return plan_seconds(ranks, plan, lasting=lasting)


def _line(pair: Pair, seconds: dict[Direction, float] | Refusal, taken: int, most: int) -> str:
    settings = [f"{scored.direction.value} {scored.text}" for scored in pair]
    if isinstance(seconds, Refusal):
        return f"cannot run: {', '.join(settings)}: {seconds.reason}"
    times = [f"{seconds[scored.direction] * 1e3:.2f} ms" for scored in pair]
    done = ", ".join(map(" ".join, zip(settings, times, strict=True)))
    return f"measured {taken} of at most {most}: {done}"


def _runs(tuning: Tuning) -> int:
    """Runs that were made: each measures a setting of each pass, of which one may be known."""
    return max(
        sum(tuning.measured(scored) < inf for scored in every)
        for every in tuning.contenders.values()
    )


def plan_seconds(ranks: Ranks, plan: Plan, *, lasting: float) -> dict[Direction, float]:
    """Seconds of both passes until the last rank is done: the mean of the faster half of as many
    runs as take about `lasting` seconds, after one that is not counted. All ranks give the same
    plan."""
    problem = plan.problem
    dtype = _DTYPES[problem.element_bytes]
    with ContextParallel(ranks.group, plan=plan) as cp:
        queries, keys = (len(cp.positions(side=side)) for side in ("q", "kv"))
        q, k, v, grad_out = (
            torch.randn(1, n, heads, dim, dtype=dtype, device=ranks.device)
            for n, heads, dim in (
                (queries, problem.num_heads, problem.head_dim),
                (keys, problem.kv_heads, problem.head_dim),
                (keys, problem.kv_heads, problem.v_dim),
                (queries, problem.num_heads, problem.v_dim),
            )
        )
        inputs = [x.requires_grad_() for x in (q, k, v)]
        times: list[tuple[float, float]] = []
        runs = 1 + LEAST_RUNS
        while len(times) < runs:
            out, forward = ranks.timed(partial(cp.attention, *inputs))
            _, backward = ranks.timed(partial(torch.autograd.grad, out, inputs, grad_out))
            times.append((ranks.longest(forward), ranks.longest(backward)))
            if len(times) == 2:  # the first makes executors, and buffers of transports
                once = sum(times[-1])
                runs = 1 + max(LEAST_RUNS, min(MOST_RUNS, int(lasting / max(once, 1e-9))))
    # The mean of the faster half: a disturbance only ever makes a run longer.
    forward, backward = (
        statistics.mean(sorted(column)[: (len(column) + 1) // 2])
        for column in zip(*times[1:], strict=True)
    )
    return {Direction.FORWARD: forward, Direction.BACKWARD: backward}
