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
from mesh_attention.plan.language.tasks import Schedule, Step
from mesh_attention.plan.methods.parts.assemble import Unit, with_exchanges
from mesh_attention.plan.methods.parts.assignment import Tile
from mesh_attention.plan.methods.parts.key_ring import KeyRing
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.reduce import Partial, Reduction
from mesh_attention.plan.methods.parts.rotate import (
    GradientRoute,
    deliveries,
    members_per_node,
    ring,
)
from mesh_attention.plan.methods.parts.setting import CombineSetting, RotationSetting, option
from mesh_attention.plan.methods.parts.tile_pass import Pair, TilePass
from mesh_attention.plan.methods.parts.tile_plan import SharedOptions, TilePlanner
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


class StarTrailBuilder:
    """StarTrail on one head group: a `UnitBuilder`. The Q side is that of a tile with C rows."""

    hold = 0  # rotating blocks have two buffers, and are freed when their attention is done

    def __init__(
        self,
        mesh: TilePass,
        lowerings: Lowerings,
        star: _Star,
        gradients: GradientRoute,
        nodes: tuple[int, ...],
    ) -> None:
        self.head_group, self.direction, self.needs = mesh.head_group, mesh.direction, mesh.needs
        self.keeps_gathered = False
        self.mesh, self.lowerings, self.star, self.gradients = mesh, lowerings, star, gradients
        # The rows of the KV block of a team.
        self._block = cache(lambda team: mesh.kv.rows_of(mesh.tile.q_group(team), 0))
        self._shared: dict[object, list[Operation]] = {}
        self._per_node: int | None = None
        rings = [members for name, members in self.groups().items() if name[0] == "S"]
        if gradients is GradientRoute.DIRECT and rings:
            self._per_node = members_per_node(rings, nodes)

    @property
    def setting(self) -> dict[str, str]:
        star = self.star
        setting = {"team": str(star.size), "sub_ring": str(star.width)}
        return setting | {"q_reduce": self.mesh.q.reduce_by.value}

    @property
    def schedule(self) -> Schedule:
        width, backward = self.star.width, self.direction is Direction.BACKWARD
        steps = [Step(Task(kind, (0,)), ()) for kind in ("AG-Q", "AG-KV", "P")]
        for step, sent in enumerate(deliveries(ring(0, width), self._per_node)):
            following = Task("KV", (step + 1,)) if step + 1 < width else None
            steps.append(Step(following, (Task("C", (0, step)),)))
            steps += [Step(Task("dKV", (delivery.step,)), ()) for delivery in sent if backward]
        after = (self.mesh.q.reduce_kind, "PB", "RS-dKV")
        return Schedule((*steps, *(Step(Task(kind, (0,)), ()) for kind in after)))

    def groups(self) -> dict[str, tuple[int, ...]]:
        star, teams = self.star, self.star.size * self.star.width
        groups = {f"Q{t}": self.mesh.tile.q_group(t) for t in range(teams)} if star.size > 1 else {}
        for j in range(star.size):
            members = tuple(t * star.size + j for t in range(teams))
            if teams > 1:
                groups[f"P{j}"] = members
            if star.width > 1:
                for u in range(star.size):
                    first = star.team(u, 0)
                    groups[f"S{u}.{j}"] = members[first : first + star.width]
        return groups

    def _places(self, unit: int) -> bool:
        """Whether this member gets its first block from another."""
        return self.star.first_team(unit) != unit // self.star.size

    def _ring(self, unit: int) -> KeyRing:
        star = self.star
        u, w, j = star.place(unit)
        places = self._places(unit)
        end = "block" if places else "team"
        rotation = ring(w, star.width)
        return KeyRing(
            self.mesh,
            self.lowerings,
            unit // star.size,
            f"S{u}.{j}",
            rotation,
            [self._block(star.team(u + j, member + star.shift)) for member in rotation.blocks],
            own=self._pieces(("k.first", "v.first") if places else self._team_names()),
            results=self._pieces((f"grad_k.{end}", f"grad_v.{end}")),
            gradients=self.gradients,
            shared=self._shared,
            per_node=self._per_node,
        )

    def _team_names(self) -> tuple[str, str]:
        if self.star.size == 1:
            return self.head_group.local(Kind.K), self.head_group.local(Kind.V)
        return "k.team", "v.team"

    def unit(self, unit: int) -> Unit:
        keys = self._ring(unit)
        return Unit(self._operations(unit, keys), self._buffers(unit, keys))

    def _buffers(self, unit: int, keys: KeyRing) -> dict[str, Buffer]:
        mesh, star = self.mesh, self.star
        team = unit // star.size
        made = {**mesh.q.buffers(team), **mesh.stack_buffers(unit), **keys.buffers}
        owners = [self.head_group.rows(Kind.K, member) for member in mesh.tile.q_group(team)]
        own = self.head_group.rows(Kind.K, unit)
        for kind, grad in _SIDES:
            heads = self.head_group.heads(kind)
            near, first = self._block(team), self._block(star.first_team(unit))
            blocks = {f"{kind}.team": near, f"{kind}.first": first}
            results = {f"{grad}.block": first, f"{grad}.team": near}
            results |= self._reduction(unit).stacks(f"{grad}.team", owners, own)
            for tensor, named in ((kind, blocks), (grad, results)):
                made |= {name: Buffer(name, tensor, rows, heads) for name, rows in named.items()}
        return made

    def _operations(self, unit: int, keys: KeyRing) -> list[Operation]:
        mesh, team = self.mesh, unit // self.star.size
        operations: list[Operation] = []
        if self.star.size > 1:
            wholes, chunk = self._pieces(self._team_names()), mesh.kv.chunks[0]
            moves = tuple(
                Move(chunk.local(self.head_group.local(kind)), whole, chunk.cuts)
                for (kind, _), whole in zip(_SIDES, wholes, strict=True)
            )
            gather_kv = AllGather(Task("AG-KV", (0,)), f"Q{team}", moves)
            operations += [*mesh.q.gather(unit, 0), gather_kv]
        if self._places(unit):
            first = self._pieces(("k.first", "v.first"))
            operations.append(self._place(unit, self._pieces(self._team_names()), first))
        operations += [*keys.operations(), *mesh.q.reduce(unit, 0)]
        backward = self.direction is Direction.BACKWARD
        return operations + (self._reduce_gradients(unit) if backward else [])

    def _pieces(self, names: tuple[str, str]) -> Pair:
        size, (k, v) = self.star.size * self.head_group.size(Kind.K), names
        return Piece(k, 0, size), Piece(v, 0, size)

    def _place(
        self, unit: int, near: tuple[Piece, ...], first: tuple[Piece, ...], *, back: bool = False
    ) -> SendRecv:
        """Sends the team's own block to the member that begins with it, and receives this member's
        first block from its team. `back`: their gradients go the other way."""
        taker, giver = self.star.taker(unit), self.star.first_team(unit)
        group = f"P{unit % self.star.size}"
        if back:
            return SendRecv(Task("PB", (0,)), group, giver, first, taker, near)
        return SendRecv(Task("P", (0,)), group, taker, near, giver, first)

    def _reduction(self, unit: int) -> Reduction:
        """The reduction of dK and dV in a team."""
        return replace(self.mesh.q.reduction(unit, 0), chunk=self.mesh.kv.chunks[0])

    def _reduce_gradients(self, unit: int) -> list[Operation]:
        """The placement backwards, then the sum over the team's members at each owner."""
        operations: list[Operation] = []
        if self._places(unit):
            near, first = (
                self._pieces((f"grad_k.{end}", f"grad_v.{end}")) for end in ("team", "block")
            )
            operations.append(self._place(unit, near, first, back=True))
        reduction = self._reduction(unit)
        names = [(f"{grad}.team", self.head_group.local(grad)) for _, grad in _SIDES]
        tensors = [(Partial(total, total, result),) for total, result in names]
        task = Task("RS-dKV", (0,))
        return operations + reduction.operations(task, MergeRule.SUM, tensors)


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
    star, tile = _Star(team, width, shift), Tile(team, num_ranks // team)
    planner = TilePlanner(problem, num_ranks, SharedOptions.of("startrail", setting), tile)

    def build(direction: Direction) -> Pass:
        (mesh,) = planner.tile_passes(direction, tile)
        gradients, nodes = setting.gradients, planner.nodes
        builder = StarTrailBuilder(mesh, planner.lowerings, star, gradients, nodes)
        return with_exchanges([builder])

    return planner.plan(map(build, directions))
