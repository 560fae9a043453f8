"""Into how many slices of heads and chunks of rows a shape is cut: those to begin with, and the
neighbours to go on to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_attention.plan.build.slices import HeadSlices, usual_heads
from mesh_attention.plan.build.tile_plan import MAX_TASKS
from mesh_attention.plan.problem import Problem

_NAMES = ("chunks", "head_slices")


@dataclass(frozen=True, slots=True)
class Cut:
    """`heads` None: all of the `held` KV heads at once."""

    chunks: tuple[int, int]
    heads: HeadSlices | None
    held: int

    @staticmethod
    def of(setting: Mapping[str, Any], held: int) -> Cut:
        return Cut(setting.get("chunks") or (1, 1), setting.get("head_slices"), held)

    def options(self, free: Sequence[str]) -> dict[str, Any]:
        """As options, of those names that are free to be chosen."""
        whole = {"chunks": self.chunks, "head_slices": self.heads}
        return {name: whole[name] for name in free if whole[name] is not None}

    def neighbours(self) -> Iterator[Cut]:
        """Twice or half as many, or moved from one side to the other."""
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
                yield Cut(chunks, self.heads, self.held)
        first, most = self.heads or (self.held, self.held)
        for heads in (
            (2 * first, most),
            (first // 2, most),
            (first, 2 * most),
            (first, most // 2),
            (2 * first, 2 * most),
            (first // 2, most // 2),
            (first // 4, most // 2),
        ):
            if 1 <= heads[0] <= heads[1] <= self.held:
                all_at_once = heads == (self.held, self.held)
                yield Cut(self.chunks, None if all_at_once else heads, self.held)


def free_names(options: Collection[str], given: Mapping[str, Any]) -> tuple[str, ...]:
    """What of a cut the method has and the caller did not give, for either pass."""
    return tuple(
        name
        for name in _NAMES
        if name in options and name not in given and f"backward_{name}" not in given
    )


def first_cuts(problem: Problem, held: int, *, rotates: bool = False) -> tuple[Cut, ...]:
    """To begin with: slices of the heads that a rank holds, where there are several, with all keys
    and with half of them at a time, and chunks of rows. What rotates is hidden as it is, and cut
    only where tokens were exchanged for heads."""
    if rotates and held == problem.kv_heads:
        return ()
    heads = usual_heads(problem, problem.kv_heads // held)
    chunks = Cut((2, 1) if rotates else (2, 2), None, held)
    if heads is None:
        return (chunks,)
    halves = () if rotates else (Cut((1, 2), heads, held),)
    return (Cut((1, 1), heads, held), *halves, chunks)
