"""Random programs on 2 to 6 gloo ranks, one of which makes a mistake.

Allowed are right numbers, and an error. Wrong are: a number that is not of the batch at which its
rank believes to be, a rank that waits longer than the timeout says, an error of somebody else, and
any error in a program without a mistake (one in eight). Wrong numbers that nobody can detect, since
calls have no label or the library was not told about the batch, are counted only.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from hostile.campaign import Verdict
from hostile.faults import TIMEOUT, is_detectable, with_fault
from hostile.program import Program, random_program
from hostile.program_rank import Event, run
from support.pool import WorkerError, WorkerPool

__all__ = ["Programs", "judge"]

LATE = TIMEOUT + 10.0  # a call that takes longer kept its rank waiting
JOB_SECONDS = 120.0


class Programs:
    def __init__(self, seed: int, mutant: str | None) -> None:
        self._seed = seed
        self._mutant = mutant
        self._pool = WorkerPool(modules=("hostile.program_rank", "torch.utils.checkpoint"))

    def case(self, number: int) -> Verdict:
        draw = Random(f"programs {self._seed} {number}")
        program = random_program(draw)
        fault, odd, changed = "no fault", -1, program
        if draw.randrange(8):
            fault, odd, changed = with_fault(draw, program)
        programs = [changed if rank == odd else program for rank in range(program.ranks)]
        where = f"{fault}, {program.identity} known"
        described = f"{fault} on rank {odd} of {program.ranks}, which does: {changed}"
        try:
            by_rank = self._pool.run(
                run_own, program.ranks, programs, self._mutant,
                seconds=JOB_SECONDS, group_seconds=TIMEOUT,
            )  # fmt: skip
        except WorkerError as error:
            outcome = "hang" if "did not finish in time" in str(error) else "ended"
            return Verdict(Counter({f"{outcome}: {where}": 1}), (f"{described}\n{error}"[:4000],))
        verdict = judge(by_rank, fault, program, where)
        return Verdict(verdict.counts, tuple(f"{described}\n  {x}" for x in verdict.wrong))

    def close(self) -> None:
        self._pool.close()


def run_own(rank: int, world_size: int, programs: list[Program], mutant: str | None) -> list[Event]:
    return run(rank, world_size, programs[rank], mutant)


def judge(by_rank: list[list[Event]], fault: str, program: Program, where: str) -> Verdict:
    """By what happened on each rank."""
    counts = Counter({f"programs, {program.identity} known": 1})
    by_outcome: dict[str, list[str]] = {}
    for rank, events in enumerate(by_rank):
        for event in events:
            words = f"rank {rank}, {event.instruction}: {event.outcome} {event.words}"
            by_outcome.setdefault(event.outcome, []).append(words)
            if event.seconds > LATE:
                by_outcome.setdefault("late", []).append(f"{words} after {event.seconds:.0f} s")
            if event.outcome == "told":
                counts[f"error: {event.words.partition(':')[0]}"] += 1
            counts["calls"] += 1
    worst = next((x for x in ("wrong", "foreign", "late", "told") if x in by_outcome), "right")
    counts[f"{worst}: {where}"] += 1
    wrong = [words for name in ("wrong", "foreign", "late") for words in by_outcome.get(name, ())]
    if fault in ("no fault", "sleep_shortly"):
        wrong += by_outcome.get("told", [])
    if wrong and (worst != "wrong" or is_detectable(fault, program)):
        return Verdict(counts, ("\n  ".join(wrong[:3]),))
    return Verdict(counts)
