"""StarTrail: teams of C gather Q, K and V; KV blocks of teams wander in concentric sub-rings.

Teams are numbered (u, w) with u < C and w < n/C^2. The C members of a team share out the teams
whose KV the team's Q must meet: member j of team (u, w) takes those with the first number u + j.
It begins with one of them (the placement), and the others come round in the sub-ring of the
members j of the teams with equal u. algorithm.md, section 9; causal masks too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.buffers import Buffer, Kind, Piece
from mesh_attention.plan.chunks import stack_rows
from mesh_attention.plan.home import Combine, Home, bring_sum_home
from mesh_attention.plan.layout import Spans
from mesh_attention.plan.methods.circulate import ring
from mesh_attention.plan.methods.frame import frame_of, plan_by
from mesh_attention.plan.methods.key_steps import Gradients, KeySteps
from mesh_attention.plan.methods.kv_ring import KeyRing
from mesh_attention.plan.methods.lowerings import Lowerings
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.methods.on_mesh import OnMesh
from mesh_attention.plan.methods.ring import query_pieces
from mesh_attention.plan.methods.setting import Setting
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import AllGather, Move, Operation, SendRecv
from mesh_attention.plan.schedule.tasks import Schedule, Step

__all__ = ["FirstBlock", "StarTrailSetting", "plan_startrail", "team_sizes"]

_SIDES = ((Kind.K, Kind.GRAD_K), (Kind.V, Kind.GRAD_V))


class FirstBlock(StrEnum):
    """The block with which a member begins."""

    NEAR = "near"  # of team (u + j, w): member 0 has it already and saves the placement
    NEXT = "next"  # of team (u + j, w + 1): every member moves one, as the paper's formula counts


@dataclass(frozen=True, slots=True)
class StarTrailSetting(Setting):
    """team: C, with C^2 dividing the ranks; None takes the one that moves the fewest bytes."""

    team: int | None = None
    combine: Combine = Combine.AUTO
    gradients: Gradients = Gradients.TRAVEL
    first_block: FirstBlock = FirstBlock.NEAR


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


class StarInner(OnMesh):
    """What `weave` asks of a method, for StarTrail. The Q side is the mesh's, with C rows."""

    def __init__(
        self, mesh: MeshPass, lowerings: Lowerings, star: _Star, gradients: Gradients
    ) -> None:
        super().__init__(mesh)
        self.mesh = mesh
        self.lowerings = lowerings
        self.star = star
        self.gradients = gradients
        self._queries = query_pieces(mesh)
        self._block = cache(self._block_rows)
        self._steps = cache(self._steps_from)
        self._made: dict[int, KeyRing] = {}

    @property
    def setting(self) -> dict[str, str]:
        star = self.star
        setting = {"team": str(star.size), "sub_ring": str(star.width)}
        return setting | {"q_home": self.mesh.q_route.value}

    @property
    def schedule(self) -> Schedule:
        backward = self.direction is Direction.BACKWARD
        ring_steps = [Step(name, tuple(tasks)) for name, tasks in self._ring(0).steps(backward)]
        before = [Step(name, ()) for name in ("AG-Q-0", "AG-KV-0", "P-0")]
        after = [Step(name, ()) for name in (f"{self.mesh.q_return}-0", "PB-0", "RS-dKV-0")]
        return Schedule((*before, *ring_steps, *after))

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

    def _block_rows(self, team: int) -> Spans:
        return self.mesh.kv_rows_of(self.mesh.tile.q_group(team))

    def _steps_from(self, own: tuple[str, str]) -> KeySteps:
        return KeySteps(own, self.star.size * self.strand.size(Kind.K), self._queries)

    def _places(self, unit: int) -> bool:
        """Does this member get its first block from another?"""
        return self.star.first_team(unit) != unit // self.star.size

    def _ring(self, unit: int) -> KeyRing:
        if unit not in self._made:
            star = self.star
            u, w, j = star.place(unit)
            own = ("k.first", "v.first") if self._places(unit) else self._team_names()
            self._made.clear()
            self._made[unit] = KeyRing(
                f"S{u}.{j}",
                ring(w, star.width),
                lambda member: self._block(star.team(u + j, member + star.shift)),
                self.strand.heads(Kind.K),
                self.mesh.q_spans(unit // star.size, 0),
                self._queries,
                self._steps(own),
                self.lowerings,
            )
        return self._made[unit]

    def _team_names(self) -> tuple[str, str]:
        if self.star.size == 1:
            return self.strand.local(Kind.K), self.strand.local(Kind.V)
        return "k.team", "v.team"

    def unit_buffers(self, unit: int) -> Mapping[str, Buffer]:
        mesh, star = self.mesh, self.star
        team = unit // star.size
        made = {**mesh.row_buffers(team), **mesh.stack_buffers(unit), **self._ring(unit).buffers}
        chunk = self.strand.chunks(Kind.K, 1)[0]
        stack = stack_rows(self.strand.rows(Kind.K, unit), star.size, chunk)
        for kind, grad in _SIDES:
            heads = self.strand.heads(kind)
            near, first = self._block(team), self._block(star.first_team(unit))
            for name, rows, held in (
                (f"{kind}.team", near, kind),
                (f"{kind}.first", first, kind),
                (f"{grad}.block", first, grad),
                (f"{grad}.team", near, grad),
                (f"{grad}.team.in", stack, grad),
            ):
                made[name] = Buffer(name, held, rows, heads)
        return made

    def unit_operations(self, unit: int) -> Sequence[Operation]:
        mesh, team = self.mesh, unit // self.star.size
        operations: list[Operation] = []
        if self.star.size > 1:
            operations += [mesh.gather_q(team, 0), self._gather_kv(team)]
        if self._places(unit):
            operations.append(self._place(unit))
        home = mesh.return_q(0, mesh.q_home(team, 0))
        if self.direction is Direction.FORWARD:
            return [*operations, *self._ring(unit).forward(), *home]
        suffix = "block" if self._places(unit) else "team"
        results = (f"grad_k.{suffix}", f"grad_v.{suffix}")
        operations += self._ring(unit).backward(self.gradients, results)
        return [*operations, *home, *self._gradients_home(unit)]

    def _gather_kv(self, team: int) -> AllGather:
        chunk = self.strand.chunks(Kind.K, 1)[0]
        moves = tuple(
            Move(
                chunk.local(self.strand.local(kind)),
                Piece(f"{kind}.team", 0, self.star.size * chunk.size),
                chunk.cuts,
            )
            for kind, _ in _SIDES
        )
        return AllGather("AG-KV-0", f"Q{team}", moves)

    def _pieces(self, names: Sequence[str]) -> tuple[Piece, ...]:
        size = self.star.size * self.strand.size(Kind.K)
        return tuple(Piece(name, 0, size) for name in names)

    def _place(self, unit: int) -> SendRecv:
        star = self.star
        return SendRecv(
            "P-0",
            f"P{unit % star.size}",
            star.taker(unit),
            self._pieces(self._team_names()),
            star.first_team(unit),
            self._pieces(("k.first", "v.first")),
        )

    def _gradients_home(self, unit: int) -> list[Operation]:
        """The placement backwards, then the sum over the team's members at each owner."""
        star = self.star
        operations: list[Operation] = []
        if self._places(unit):
            operations.append(
                SendRecv(
                    "PB-0",
                    f"P{unit % star.size}",
                    star.first_team(unit),
                    self._pieces(("grad_k.block", "grad_v.block")),
                    star.taker(unit),
                    self._pieces(("grad_k.team", "grad_v.team")),
                )
            )
        chunk = self.strand.chunks(Kind.K, 1)[0]
        group = f"Q{unit // star.size}"
        home = Home(self.mesh.q_route, group, star.size, chunk, num_owners=star.size)
        tensors = tuple(
            (f"{grad}.team", f"{grad}.team", self.strand.local(grad)) for _, grad in _SIDES
        )
        return operations + bring_sum_home("RS-dKV-0", home, tensors)


def plan_startrail(
    problem: Problem, num_ranks: int, setting: StarTrailSetting, directions: tuple[Direction, ...]
) -> Plan:
    sizes = team_sizes(num_ranks)
    team = setting.team if setting.team is not None else _best_team(num_ranks)
    if team not in sizes:
        raise PlanError(
            f"team={team}: its square must divide {num_ranks} ranks; "
            f"team sizes that fit: {', '.join(map(str, sizes))}"
        )
    width = num_ranks // (team * team)
    shift = 1 if setting.first_block is FirstBlock.NEXT and width > 1 else 0
    return plan_by(
        problem,
        num_ranks,
        frame_of("startrail", setting),
        Tile(team, num_ranks // team),
        directions,
        lambda mesh, low: StarInner(mesh, low, _Star(team, width, shift), setting.gradients),
    )


def _best_team(num_ranks: int) -> int:
    """The fewest bytes forward by the formula of algorithm.md, section 8."""
    return min(
        team_sizes(num_ranks), key=lambda c: (4 * c - 4) / max(1, num_ranks) + 2 / c, default=1
    )
