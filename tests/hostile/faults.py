"""What one rank does otherwise than the others: the mistakes that people make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from hostile.program import COLLECTIVE, FORWARD, Change, Instruction, Kind, Program

__all__ = ["FAULTS", "TIMEOUT", "is_detectable", "with_fault"]

Instructions = list[Instruction]
Fault = Callable[[Random, Instructions], Instructions | None]
TIMEOUT = 12.0  # seconds of the process group
SHORT_SLEEP = 1.5  # changes nothing


def _any(draw: Random, made: Instructions, *kinds: Kind) -> int | None:
    places = [at for at, each in enumerate(made) if each.kind in kinds]
    return draw.choice(places) if places else None


def skip_a_call(draw: Random, made: Instructions) -> Instructions | None:
    at = _any(draw, made, *FORWARD, Kind.UNSHARD, Kind.LOSS)
    return None if at is None else made[:at] + made[at + 1 :]


def skip_a_step(draw: Random, made: Instructions) -> Instructions | None:
    step = draw.choice(made).step
    return [each for each in made if each.step != step]


def skip_backward(draw: Random, made: Instructions) -> Instructions | None:
    """Of one call, or of a step."""
    at = _any(draw, made, Kind.BACKWARD)
    if at is None:
        return None
    if draw.random() < 0.5:
        return made[:at] + made[at + 1 :]
    step = made[at].step
    return [each for each in made if each.kind is not Kind.BACKWARD or each.step != step]


def swap_two_calls(draw: Random, made: Instructions) -> Instructions | None:
    """Next to each other, or anywhere."""
    if len(made) < 2:
        return None
    at = draw.randrange(len(made) - 1)
    other = at + 1 if draw.random() < 0.6 else draw.randrange(len(made))
    if made[at] == made[other]:
        return None
    made[at], made[other] = made[other], made[at]
    return made


def repeat_a_call(draw: Random, made: Instructions) -> Instructions | None:
    at = _any(draw, made, *FORWARD, Kind.UNSHARD, Kind.LOSS)
    return None if at is None else [*made[: at + 1], made[at], *made[at + 1 :]]


def batches_in_another_order(draw: Random, made: Instructions) -> Instructions | None:
    batches = sorted({each.batch for each in made})
    if len(batches) < 2:
        return None
    first, other = draw.sample(batches, 2)
    places = {first: other, other: first}
    return [replace(each, batch=places.get(each.batch, each.batch)) for each in made]


def exception_between_calls(draw: Random, made: Instructions) -> Instructions | None:
    at = draw.randrange(len(made))
    return [*made[:at], replace(made[at], kind=Kind.RAISE), *made[at:]]


def other_tensors(draw: Random, made: Instructions) -> Instructions | None:
    at = _any(draw, made, *FORWARD)
    if at is None:
        return None
    changes: tuple[Change, ...] = ("dtype", "rows", "no gradient")
    return [*made[:at], replace(made[at], change=draw.choice(changes)), *made[at + 1 :]]


def close_an_object(draw: Random, made: Instructions) -> Instructions | None:
    at = draw.randrange(len(made))
    return [*made[:at], replace(made[at], kind=Kind.CLOSE), *made[at:]]


def sleep_shortly(draw: Random, made: Instructions) -> Instructions | None:
    at = draw.randrange(len(made))
    return [*made[:at], replace(made[at], kind=Kind.SLEEP, seconds=SHORT_SLEEP), *made[at:]]


def sleep_for_long(draw: Random, made: Instructions) -> Instructions | None:
    """The others are told before it wakes up."""
    at = draw.randrange(len(made))
    return [*made[:at], replace(made[at], kind=Kind.SLEEP, seconds=1.5 * TIMEOUT), *made[at:]]


FAULTS: tuple[Fault, ...] = (
    skip_a_call,
    skip_a_step,
    skip_backward,
    swap_two_calls,
    repeat_a_call,
    batches_in_another_order,
    exception_between_calls,
    other_tensors,
    close_an_object,
    sleep_shortly,
    sleep_for_long,
)
SELDOM: dict[Fault, float] = {sleep_for_long: 0.2}  # it takes long


def is_detectable(fault: str, program: Program) -> bool:
    """Whether ranks know enough: what a batch holds is read by `shard_batch` alone, batches are
    counted by the library or by labels, and calls on one batch that look alike are told apart by
    labels."""
    if fault == "batches_in_another_order":
        return program.style == "shard_batch"
    knows_step = program.knows_batch or program.labels == "step"
    return knows_step and (fault == "skip_a_step" or bool(program.labels))


def with_fault(draw: Random, program: Program) -> tuple[str, int, Program]:
    """The name of a fault, the rank that has it, and the program of that rank."""
    assert all(each.kind in COLLECTIVE for each in program.instructions)
    while True:
        fault = draw.choices(FAULTS, [SELDOM.get(each, 1.0) for each in FAULTS])[0]
        changed = fault(draw, list(program.instructions))
        if changed is not None and changed != list(program.instructions):
            odd = program.with_instructions(changed)
            return fault.__name__, draw.randrange(program.ranks), odd
