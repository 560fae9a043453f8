"""How finely a plan is cut, in chunks of rows and slices of heads: one step at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_attention.plan.methods.head_slices import HeadsAtOnce, usual_heads
from mesh_attention.plan.methods.mesh import MAX_TASKS
from mesh_attention.plan.problem import Problem

__all__ = ["Cut", "first_cut", "free_names"]

_NAMES = ("chunks", "heads_at_once")


@dataclass(frozen=True, slots=True)
class Cut:
    """`heads` None: all at once, and no way to cut them."""

    chunks: tuple[int, int]
    heads: HeadsAtOnce | None

    @staticmethod
    def of(setting: Mapping[str, Any]) -> Cut:
        return Cut(setting.get("chunks", (1, 1)), setting.get("heads_at_once"))

    def options(self, free: Sequence[str]) -> dict[str, Any]:
        """As options, of those names that are free to be chosen."""
        whole = {"chunks": self.chunks, "heads_at_once": self.heads}
        return {name: whole[name] for name in free if whole[name] is not None}

    def neighbours(self) -> Iterator[Cut]:
        """Twice or half as many; a method refuses what does not fit."""
        kq, kkv = self.chunks
        for chunks in (
            (2 * kq, kkv),
            (kq, 2 * kkv),
            (kq // 2, kkv),
            (kq, kkv // 2),
            (2 * kq, kkv // 2),
            (kq // 2, 2 * kkv),
        ):
            if min(chunks) >= 1 and chunks[0] * chunks[1] <= MAX_TASKS:
                yield Cut(chunks, self.heads)
        if self.heads is None:
            return
        first, most = self.heads
        for heads in (
            (2 * first, most),
            (first // 2, most),
            (first, 2 * most),
            (first, most // 2),
            (2 * first, 2 * most),
            (first // 2, most // 2),
        ):
            if 1 <= heads[0] <= heads[1]:
                yield Cut(self.chunks, heads)


def free_names(options: Sequence[str], given: Mapping[str, Any]) -> tuple[str, ...]:
    """What of a cut the method has and the caller did not give, for either pass."""
    return tuple(
        name
        for name in _NAMES
        if name in options and name not in given and f"backward_{name}" not in given
    )


def first_cut(problem: Problem, shape: Mapping[str, Any]) -> Cut:
    """Slices of heads where there are several, chunks of rows where not."""
    heads = usual_heads(problem, shape.get("ulysses") or 1)
    return Cut((2, 2), None) if heads is None else Cut((1, 1), heads)
