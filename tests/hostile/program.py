"""Random programs of training code, as data.

A program is a list of instructions, the same on all ranks until `faults.py` changes those of one.
An instruction says at which batch its rank believes to be: that is what its numbers are held
against. Batches mostly have the same length and documents, so that shapes tell nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Literal

__all__ = ["COLLECTIVE", "FORWARD", "Change", "Instruction", "Kind", "Program", "random_program"]

Style = Literal["shard", "documents", "shard_batch"]
Change = Literal["", "dtype", "rows", "no gradient"]


class Kind(StrEnum):
    ATTEND = "attention"
    FUNCTION = "mesh_attention"
    CHECKPOINT = "checkpointed attention"
    BACKWARD = "backward"
    UNSHARD = "unshard"
    LOSS = "cross_entropy"
    # What only faults bring:
    RAISE = "exception"
    CLOSE = "close"
    SLEEP = "sleep"


FORWARD = (Kind.ATTEND, Kind.FUNCTION, Kind.CHECKPOINT)
COLLECTIVE = (*FORWARD, Kind.BACKWARD, Kind.UNSHARD, Kind.LOSS)


@dataclass(frozen=True)
class Instruction:
    """`change`: of the tensors of this call, which another rank does not make."""

    kind: Kind
    step: int
    batch: int
    layer: int = 0
    change: Change = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        batch = "" if self.batch == self.step else f" with batch {self.batch}"
        change = f", other {self.change}" if self.change else ""
        return f"{self.kind} {self.step}.{self.layer}{batch}{change}"


@dataclass(frozen=True)
class Program:
    """
    style        how a rank gets its part of a batch; all but "shard" tell the library about it
    labels       of attention: none, the layer, or step and layer
    documents    starts, of each batch, whose last is its length
    windowed     layers of the second object, which has a window
    after_error  "stop" ends the program; "continue" goes on with the next step, as in
                 `except MeshAttentionError: continue`
    """

    seed: int
    ranks: int
    style: Style
    labels: Literal["", "layer", "step"]
    rows: int
    dtype: Literal["float64", "float32"]
    documents: tuple[tuple[int, ...], ...]
    windowed: tuple[int, ...]
    after_error: Literal["stop", "continue"]
    instructions: tuple[Instruction, ...]

    @property
    def knows_batch(self) -> bool:
        return self.style != "shard"

    @property
    def identity(self) -> str:
        """What calls are told apart by."""
        if self.knows_batch:
            return "batch and label" if self.labels else "batch"
        return "label" if self.labels else "nothing"

    def __str__(self) -> str:
        words = (self.style, f"labels {self.labels or 'none'}", f"{self.rows} rows", self.dtype)
        after = f"documents {self.documents}, {self.after_error} after an error"
        calls = "; ".join(map(str, self.instructions))
        return f"{', '.join(words)}, {after}: {calls}"

    def with_instructions(self, instructions: list[Instruction]) -> Program:
        return replace(self, instructions=tuple(instructions))


def random_program(draw: Random) -> Program:
    style: Style = draw.choice(("shard", "documents", "shard_batch", "shard_batch"))
    steps, layers = draw.randint(2, 4), draw.randint(1, 3)
    windowed = draw.choice(((), (), (1,), (0, 2)))
    return Program(
        seed=draw.randrange(1 << 30),
        ranks=draw.choice((2, 2, 3, 3, 4, 4, 5, 6)),
        style=style,
        labels=draw.choice(("", "layer", "layer", "step")),
        rows=draw.choice((1, 2)),
        dtype=draw.choice(("float64", "float64", "float32")),
        documents=_documents(draw, steps, whole=style == "shard"),
        windowed=windowed,
        after_error=draw.choice(("stop", "continue", "continue")),
        instructions=tuple(_instructions(draw, steps, layers, windowed, style)),
    )


def _documents(draw: Random, steps: int, *, whole: bool) -> tuple[tuple[int, ...], ...]:
    def starts() -> tuple[int, ...]:
        tokens = draw.randint(8, 40)
        cuts = {draw.randint(1, tokens - 1) for _ in range(0 if whole else draw.randint(0, 3))}
        return (0, *sorted(cuts), tokens)

    alike = whole or draw.random() < 0.7
    return (starts(),) * steps if alike else tuple(starts() for _ in range(steps))


def _instructions(
    draw: Random, steps: int, layers: int, windowed: tuple[int, ...], style: str
) -> list[Instruction]:
    kinds = [
        draw.choice((Kind.ATTEND, Kind.ATTEND, Kind.CHECKPOINT))
        if style != "shard" or layer in windowed
        else draw.choice((Kind.ATTEND, Kind.FUNCTION, Kind.CHECKPOINT))
        for layer in range(layers)
    ]
    when = draw.choice(("now", "end", "end", "next", "never"))
    unshards, losses = draw.random() < 0.4, draw.random() < 0.5
    made: list[Instruction] = []
    waiting: list[Instruction] = []
    for step in range(steps):
        backward = []
        for layer, kind in enumerate(kinds):
            made.append(Instruction(kind, step, step, layer))
            backward.append(Instruction(Kind.BACKWARD, step, step, layer))
            if when == "now":
                made.append(backward.pop())
        if unshards:
            made.append(Instruction(Kind.UNSHARD, step, step))
        if losses:
            made.append(Instruction(Kind.LOSS, step, step))
        if when == "end":
            made += backward[::-1]
        elif when == "next":
            made += waiting
            waiting = backward[::-1]
    return made + waiting
