"""Strange values on two ranks, or on one of them: whoever refuses, no rank waits for it in vain,
and none gets a number that is not right."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from time import monotonic

import torch.distributed as dist

from hostile.arguments import random_strange, shown_value
from hostile.campaign import Verdict
from hostile.mutants import mutate_for_good
from hostile.scene import Scene, outcome_of
from support.pool import WorkerError, WorkerPool

__all__ = ["ArgumentsOnRanks"]

RANKS, OF_A_JOB = 2, 8
TIMEOUT = 10.0  # seconds of the process group
LATE = TIMEOUT + 10.0


@dataclass(frozen=True)
class Played:
    words: str
    outcome: str
    wrong: str
    seconds: float


class ArgumentsOnRanks:
    def __init__(self, seed: int, mutant: str | None) -> None:
        self._seed = seed
        self._mutant = mutant
        self._pool = WorkerPool(modules=("hostile.arguments_on_ranks",))

    def case(self, number: int) -> Verdict:
        try:
            by_rank = self._pool.run(
                run, RANKS, f"{self._seed} {number}", self._mutant,
                seconds=OF_A_JOB * LATE, group_seconds=TIMEOUT,
            )  # fmt: skip
        except WorkerError as error:
            return Verdict(Counter({"failed": 1}), (str(error)[:4000],))
        counts: Counter[str] = Counter()
        wrong = []
        for rank, scenes in enumerate(by_rank):
            for each in scenes:
                counts[each.outcome] += 1
                if each.wrong:
                    wrong.append(f"rank {rank}, {each.words}: {each.wrong}")
                elif each.seconds > LATE:
                    wrong.append(f"rank {rank}, {each.words}: after {each.seconds:.0f} s")
        return Verdict(counts, tuple(wrong))

    def close(self) -> None:
        self._pool.close()


def run(rank: int, world_size: int, seed: str, mutant: str | None) -> list[Played]:
    mutate_for_good(mutant)
    warnings.simplefilter("ignore")
    patient = dist.new_group(timeout=timedelta(seconds=3 * LATE))
    return [_play(rank, Random(f"ranks {seed} {at}"), patient) for at in range(OF_A_JOB)]


def _play(rank: int, draw: Random, patient: dist.ProcessGroup) -> Played:
    strange, everybody = random_strange(draw), draw.randrange(2) == 0
    group = dist.new_group([*range(RANKS)], timeout=timedelta(seconds=TIMEOUT))
    scene = Scene(strange if everybody or rank == 1 else None, Random(draw.random()), group)
    begun = monotonic()
    outcome, wrong = outcome_of(scene)
    seconds = monotonic() - begun
    dist.barrier(patient)  # a group that one rank has left would be told as lost
    if scene.strange is None:
        outcome = f"the other rank: {'told' if outcome == 'refused later' else outcome}"
    words = f"{strange[0]}({strange[1]}={shown_value(scene.value)}) on {'all' if everybody else 1}"
    return Played(words, outcome, wrong, seconds)
