"""Head groups: how heads and tokens are shared out before a method begins.

With Ulysses degree U, U consecutive ranks form a *unit*: they swap tokens for heads, and then rank
i of every unit holds all of the unit's tokens for the i-th slice of heads. The ranks with equal i
are head group i; a method runs on each head group as if its units were ranks. U = 1 is one head
group of all.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_attention.errors import PlanError
from mesh_attention.plan.buffers import Buffer, Kind, Role
from mesh_attention.plan.build.chunks import Chunk, by_heads, chunks_between
from mesh_attention.plan.layout import Layout, LayoutKind, Spans
from mesh_attention.plan.problem import Problem


def ulysses_degrees(problem: Problem, num_ranks: int | None = None) -> list[int]:
    """Degrees that divide the heads, and the ranks, such that every KV head stays whole."""
    group = problem.heads_per_kv_head
    return [
        degree
        for degree in range(1, problem.num_heads + 1)
        if problem.num_heads % degree == 0
        and (num_ranks is None or num_ranks % degree == 0)
        and (
            (problem.num_heads // degree) % group == 0 or group % (problem.num_heads // degree) == 0
        )
    ]


def chosen_degree(
    problem: Problem, num_ranks: int, degree: int | None, ranks_per_node: int | None
) -> int:
    """The given degree, if it fits; left out: the largest up to 8 (or a node) that works."""
    fits = ulysses_degrees(problem, num_ranks)
    if degree is None:
        return max(one for one in fits if one <= (ranks_per_node or 8))
    if degree not in fits:
        raise PlanError(
            f"ulysses={degree} does not share out {problem.num_heads} heads "
            f"({problem.kv_heads} KV heads) on {num_ranks} ranks; degrees that work: "
            f"{', '.join(map(str, fits))}"
        )
    return degree


@dataclass(frozen=True, slots=True)
class HeadGroup:
    problem: Problem
    q_layout: Layout
    kv_layout: Layout
    degree: int = 1
    index: int = 0

    @property
    def num_units(self) -> int:
        return self.q_layout.num_ranks // self.degree

    def rank_of(self, unit: int) -> int:
        return unit * self.degree + self.index

    def layout(self, kind: Kind) -> Layout:
        return self.kv_layout if kind.is_key_side else self.q_layout

    def halves(self, kind: Kind) -> tuple[int, ...]:
        """Row boundaries inside a unit that a gather keeps apart."""
        return tuple(self.degree * half for half in self.layout(kind).halves)

    def size(self, kind: Kind) -> int:
        return self.degree * self.layout(kind).slots

    def chunks(
        self, kind: Kind, count: int, slices: tuple[int, ...] | None = None
    ) -> tuple[Chunk, ...]:
        """`count` chunks of rows for each slice of this head group's heads, given by KV heads."""
        rows = chunks_between(self.halves(kind), count)
        if slices is None or len(slices) == 1:
            return rows
        first, last = self.heads(kind)
        return by_heads(rows, [size * (last - first) // sum(slices) for size in slices])

    def rows(self, kind: Kind, unit: int) -> Spans:
        """The places of a unit's rows. High halves of a zigzag come in order of position, so that
        a unit is a zigzag partition of larger blocks."""
        layout = self.layout(kind)
        first, slots = unit * self.degree, layout.slots
        members = range(first, first + self.degree)
        if layout.kind is not LayoutKind.ZIGZAG:
            return ((first * slots, (first + self.degree) * slots),)
        half = slots // 2
        low = [(m * slots, m * slots + half) for m in members]
        high = [(m * slots + half, (m + 1) * slots) for m in reversed(members)]
        return tuple(low + high)

    def member_rows(self, kind: Kind, member: int) -> tuple[tuple[int, int], ...]:
        """Where the stretches of one member lie among the rows of its unit."""
        layout = self.layout(kind)
        slots = layout.slots
        if layout.kind is not LayoutKind.ZIGZAG:
            return ((member * slots, (member + 1) * slots),)
        half = slots // 2
        low, high = member * half, (2 * self.degree - 1 - member) * half
        return ((low, low + half), (high, high + half))

    def heads(self, kind: Kind) -> tuple[int, int]:
        """This head group's heads; a KV head that serves several is held by each of them."""
        size = self.problem.num_heads // self.degree
        first, last = self.index * size, (self.index + 1) * size
        if not kind.is_key_side:
            return first, last
        group = self.problem.heads_per_kv_head
        return first // group, -(-last // group)

    def local(self, kind: Kind) -> str:
        """The name of this rank's own rows of a tensor inside the method."""
        return kind.value if self.degree == 1 else f"{kind.value}.u"

    def local_buffer(self, kind: Kind, unit: int, role: Role) -> Buffer:
        held = role if self.degree == 1 else Role.WORKSPACE
        rows, heads = self.rows(kind, unit), self.heads(kind)
        return Buffer(self.local(kind), kind, rows, heads, kind.precision, held)

    def group_name(self, name: str) -> str:
        return name if self.degree == 1 else f"{name}.{self.index}"

    def members(self, units: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.rank_of(unit) for unit in units)
