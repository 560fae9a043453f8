"""What `doctor` returns: numbers, and in words what is most likely wrong."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Kind = Literal[
    "nothing", "error", "batches", "parameters", "layout", "heads first", "positions", "documents",
    "attention", "token mixing", "randomness", "labels", "loss", "gradient scale",
    "gradients not reduced", "clipping", "gradients",
]  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """`where`: the first module whose numbers differ, or a parameter."""

    kind: Kind
    words: str
    where: str | None = None


@dataclass(frozen=True)
class Limits:
    """Errors up to which numbers count as equal, as parts of the largest number: `least`, or for a
    name in `rounding` the error of rounding on one process, if that is more."""

    least: float
    rounding: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return max(self.least, self.rounding.get(name, 0.0))

    def exceeded(self, errors: dict[str, float], part: float = 1.0) -> list[str]:
        return [name for name, error in errors.items() if error > self[name] * part]


@dataclass(frozen=True)
class Diagnosis:
    """The same on all ranks.

    cause        what is most likely wrong; its kind is "nothing" where all is equal
    loss         of the batch on ranks; `whole_loss`: on one process; None where a step failed
    gradients    of each parameter, how far it is from that of one process, as a part of the largest
    activations  of each module and each attention, in the order in which they are computed
    limits       up to which numbers count as equal
    notes        what was done so that numbers can be compared
    """

    cause: Cause
    loss: float | None = None
    whole_loss: float | None = None
    gradients: dict[str, float] | None = None
    activations: dict[str, float] | None = None
    limits: Limits = Limits(0.0, {})
    notes: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return self.cause.kind == "nothing"

    def to_json(self) -> str:
        return json.dumps({"is_right": self.is_right, **asdict(self)})

    def __str__(self) -> str:
        lines = [self.cause.words]
        if self.loss is not None and self.whole_loss is not None:
            lines.append(f"loss: {self.loss:.7g} on ranks, {self.whole_loss:.7g} on one process")
        for name, errors in ("gradients", self.gradients), ("activations", self.activations):
            if errors:
                worst = max(errors, key=lambda x: errors[x] / self.limits[x])
                wrong = len(self.limits.exceeded(errors))
                lines.append(
                    f"{name}: {wrong} of {len(errors)} differ, most of all {worst} by "
                    f"{errors[worst]:.2g}, where up to {self.limits[worst]:.2g} counts as equal"
                )
        return "\n".join([*lines, *self.notes])
