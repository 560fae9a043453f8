"""StarTrail: teams of C gather Q, K and V; KV blocks of teams rotate in concentric sub-rings.

Teams are numbered (u, w) with u < C and w < n/C^2. The C members of a team share out the teams
whose KV the team's Q must meet: member j of team (u, w) takes the teams whose first number is
u + j. It begins with one of them (the placement), and the others come round in the sub-ring of the
members j of the teams with equal u. algorithm.md, section 9; causal masks too. `table.py` lists
`plan_startrail`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Buffer, Kind, Piece
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import (
    AllGather,
    MergeRule,
    Move,
    Operation,
    SendRecv,
    Task,
)
from mesh_attention.plan.language.tasks import Step
from mesh_attention.plan.methods.parts.assemble import GroupPass, Unit, with_exchanges
from mesh_attention.plan.methods.parts.lower import Lowerings, Pair
from mesh_attention.plan.methods.parts.reduce import PartialBuffers, Reduction
from mesh_attention.plan.methods.parts.ring_steps import RingRoute, RingSteps
from mesh_attention.plan.methods.parts.rotate import (
    GradientRoute,
    deliveries,
    members_per_node,
    ring,
)
from mesh_attention.plan.methods.parts.setting import CombineSetting, RotationSetting, option
from mesh_attention.plan.methods.parts.tile_plan import Box, TilePass, TilePlanner
from mesh_attention.plan.problem.problem import Problem

_SIDES = ((Kind.K, Kind.GRAD_K), (Kind.V, Kind.GRAD_V))


class FirstBlock(StrEnum):
    """The block with which a member begins."""

    NEAR = "near"  # of team (u + j, w): member 0 has it already and saves the placement
    NEXT = "next"  # of team (u + j, w + 1): every member moves one, as the paper's formula counts


@dataclass(frozen=True)
class StarTrailSetting(CombineSetting, RotationSetting):
    """Teams, and sub-rings of teams."""

    team: int | None = option(
        None,
        "team size C: its square divides the ranks; left out: the one that moves the fewest bytes",
        "C",
    )
    first_block: FirstBlock = option(
        FirstBlock.NEAR,
        "`near`: member 0 of a team begins with its own block; `next`: all fetch their first block",
        "NAME",
    )


def team_sizes(num_ranks: int) -> list[int]:
    """
    >>> team_sizes(256), team_sizes(18)
    ([1, 2, 4, 8, 16], [1, 3])
    """
    return [c for c in range(1, num_ranks + 1) if c * c <= num_ranks and num_ranks % (c * c) == 0]


@dataclass(frozen=True, slots=True)
class _Star:
    """Places in the star: rank = (team (u, w), member j)."""

    size: int  # C
    width: int  # teams with equal u: n / C^2
    shift: int  # 1 where members begin one team on

    def team(self, u: int, w: int) -> int:
        return (u % self.size) * self.width + w % self.width

    def place(self, unit: int) -> tuple[int, int, int]:
        team, j = divmod(unit, self.size)
        u, w = divmod(team, self.width)
        return u, w, j

    def first_team(self, unit: int) -> int:
        """The team whose block a member begins with."""
        u, w, j = self.place(unit)
        return self.team(u + j, w + self.shift)

    def taker(self, unit: int) -> int:
        """The team whose member j begins with this member's block."""
        u, w, j = self.place(unit)
        return self.team(u - j, w - self.shift)

    def groups(self) -> dict[str, tuple[int, ...]]:
        size, teams = self.size, self.size * self.width
        members = range(size * teams)
        groups = {
            f"Q{team}": tuple(members[team * size :][:size]) for team in range(teams) if size > 1
        }
        for j in range(size):
            if teams > 1:
                groups[f"P{j}"] = tuple(members[j::size])
            for u in range(size) if self.width > 1 else ():
                first = self.team(u, 0)
                groups[f"S{u}.{j}"] = tuple(members[j::size][first : first + self.width])
        return groups


class _StarTrail:
    """StarTrail on one head group. The Q side is that of a tile with C rows."""

    def __init__(
        self,
        tiles: TilePass,
        lowerings: Lowerings,
        star: _Star,
        gradients: GradientRoute,
        nodes: tuple[int, ...],
    ) -> None:
        self.tiles, self.lowerings, self.star = tiles, lowerings, star
        self.backward = tiles.direction is Direction.BACKWARD
        # The rows of the KV block of a team.
        self._block = cache(lambda team: tiles.kv.rows_of(tiles.tile.q_group(team), 0))
        self._groups = star.groups()
        rings = [members for name, members in self._groups.items() if name[0] == "S"]
        direct = gradients is GradientRoute.DIRECT
        self._route = RingRoute(True, gradients, members_per_node(rings, nodes) if direct else 1)

    def on_group(self) -> GroupPass:
        tiles, star = self.tiles, self.star
        setting = {"team": str(star.size), "sub_ring": str(star.width)}
        setting["q_reduce"] = tiles.q.reduce_by.value
        groups = (tiles.head_group, tiles.direction, tiles.needs, self._groups)
        return GroupPass(*groups, self._steps(), setting, self._unit)

    def _steps(self) -> tuple[Step, ...]:
        width = self.star.width
        steps = [Step(Task(kind, (0,)), ()) for kind in ("AG-Q", "AG-KV", "P")]
        sent_after = deliveries(ring(0, width), per_node=self._route.per_node)
        for step, sent in enumerate(sent_after):
            following = Task("KV", (step + 1,)) if step + 1 < width else None
            steps.append(Step(following, (Task("C", (0, step)),)))
            steps += [Step(Task("dKV", (x.step,)), ()) for x in sent if self.backward]
        after = (self.tiles.q.reduce_kind, "PB", "RS-dKV")
        return (*steps, *(Step(Task(kind, (0,)), ()) for kind in after))

    def _unit(self, unit: int, index: int) -> Unit:
        tiles, star, group = self.tiles, self.star, self.tiles.head_group
        chunk, (u, w, j) = tiles.kv.chunks[0], star.place(unit)
        team, taker, giver = unit // star.size, star.taker(unit), star.first_team(unit)
        places = giver != team  # this member gets its first block from another
        rows = star.size * group.side(Kind.K).size

        def pair(k: str, v: str) -> Pair:
            return Piece(k, 0, rows), Piece(v, 0, rows)

        local = group.local(Kind.K), group.local(Kind.V)
        near = pair(*local) if star.size == 1 else pair("k.team", "v.team")
        first = pair("k.first", "v.first") if places else near
        near_sums = pair("grad_k.team", "grad_v.team")
        first_sums = pair("grad_k.block", "grad_v.block") if places else near_sums
        rotation = ring(w, star.width)
        blocks = [self._block(star.team(u + j, at + star.shift)) for at in rotation.blocks]
        keys = RingSteps(
            tiles,
            self.lowerings,
            self._route,
            team,
            f"S{u}.{j}",
            rotation,
            blocks,
            own=[first],
            results=[first_sums],
        )
        operations: list[Operation] = []
        if star.size > 1:
            wholes = zip(local, near, strict=True)
            moves = tuple(Move(chunk.local(name), whole, chunk.cuts) for name, whole in wholes)
            gather_kv = AllGather(Task("AG-KV", (0,)), f"Q{team}", moves)
            operations += [*tiles.q.gather(unit, 0), gather_kv]
        if places:
            operations.append(SendRecv(Task("P", (0,)), f"P{j}", taker, near, giver, first))
        operations += [*keys.all_operations(), *tiles.q.reduce(unit, 0)]
        reduction = replace(tiles.q.reduction(unit, 0), chunk=chunk)  # of dK and dV in a team
        if self.backward:  # the placement backwards, then the sum over the team's members
            if places:
                back = (giver, first_sums, taker, near_sums)
                operations.append(SendRecv(Task("PB", (0,)), f"P{j}", *back))
            names = [(f"{grad}.team", group.local(grad)) for _, grad in _SIDES]
            sums = [(PartialBuffers(total, total, result),) for total, result in names]
            operations += reduction.operations(Task("RS-dKV", (0,)), MergeRule.SUM, sums)
        made = tiles.q.buffers(team) | tiles.q.stack_buffers(unit) | keys.buffers
        return Unit(operations, made | self._buffers(unit, reduction))

    def _buffers(self, unit: int, reduction: Reduction) -> dict[str, Buffer]:
        """Blocks of keys, and of their gradients."""
        star, keys = self.star, self.tiles.kv.own
        team = unit // star.size
        near, first = self._block(team), self._block(star.first_team(unit))
        owned = [keys.rows(member) for member in self.tiles.tile.q_group(team)]
        made: dict[str, Buffer] = {}
        for kind, grad in _SIDES:
            named = {f"{kind}.team": (kind, near), f"{kind}.first": (kind, first)}
            named |= {f"{grad}.block": (grad, first), f"{grad}.team": (grad, near)}
            stacks = reduction.stacks(f"{grad}.team", owned, keys.rows(unit))
            named |= {stack: (grad, rows) for stack, rows in stacks.items()}
            for name, (tensor, rows) in named.items():
                made[name] = Buffer(name, tensor, rows, keys.heads)
        return made


def plan_startrail(
    problem: Problem, num_ranks: int, setting: StarTrailSetting, directions: tuple[Direction, ...]
) -> Plan:
    sizes = team_sizes(num_ranks)
    team = setting.team
    if team is None:  # the fewest bytes forward by the formula of algorithm.md, section 8
        team = min(sizes, key=lambda c: (4 * c - 4) / num_ranks + 2 / c)
    if team not in sizes:
        raise PlanError(
            f"team={team}: its square must divide {num_ranks} ranks; "
            f"team sizes that fit: {', '.join(map(str, sizes))}"
        )
    width = num_ranks // (team * team)
    shift = 1 if setting.first_block is FirstBlock.NEXT and width > 1 else 0
    star = _Star(team, width, shift)
    box = Box.of("startrail", setting, tile=(team, num_ranks // team))
    planner = TilePlanner(problem, num_ranks, box)
    lowerings = planner.lowerings(problem)

    def build(direction: Direction) -> Pass:
        (tiles,) = planner.tile_passes(direction)
        method = _StarTrail(tiles, lowerings, star, setting.gradients, planner.nodes)
        return with_exchanges(method.on_group())

    return planner.plan(problem, map(build, directions))
