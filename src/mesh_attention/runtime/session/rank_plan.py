"""`RankPlan`: a plan as one rank sees it, with the digests that ranks compare before they run it.

`Session` makes rank plans from questions and from plans that the caller brings; prepared calls and
transports read them. Only this rank's programs are made, the backward program only if gradients are
needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Buffer, Kind, Role
from mesh_attention.plan.language.plan import Direction, Plan, Programs
from mesh_attention.plan.language.program import Program
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.passes.place import without_lse
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.agreement import AS_MADE, Meetings, meetings, question_digest
from mesh_attention.plan.read.count import recalled

_BOUNDS = 8  # document bounds that a message names


@dataclass(frozen=True, eq=False)
class RankPlan:
    """
    rank       the logical rank of this process
    base       a plan with the same passes for any mask; a call prepared for it serves this plan too
    by_mask    with a base: the number of SMs that calls leave to transfers depends on the mask
    """

    plan: Plan
    rank: int
    base: RankPlan | None = None
    by_mask: bool = False

    @staticmethod
    def on(plan: Plan, place: int, num_ranks: int) -> RankPlan:
        """`place`: the rank of this process in its group."""
        if plan.num_ranks != num_ranks:
            raise PlanError(
                f"the plan is for {plan.num_ranks} ranks, and the process group has {num_ranks}"
            )
        if sorted(plan.devices) != list(range(num_ranks)):
            raise PlanError(f"the plan's devices {plan.devices} are not the ranks of the group")
        return RankPlan(plan, plan.devices.index(place))

    @property
    def place(self) -> int:
        """The rank of this process in its group."""
        return self.plan.devices[self.rank]

    @cached_property
    def shards(self) -> tuple[Layout, Layout]:
        """How the caller's queries and keys lie on the ranks of the group."""
        return self.plan.shards

    @cached_property
    def words(self) -> str:
        """A digest of the question, and a summary that shows people how two plans differ."""
        plan, p = self.plan, self.plan.problem
        heads = f"{p.num_heads} heads of {p.head_dim}, {p.kv_heads} KV heads"
        heads += "" if p.v_dim == p.head_dim else f", v_head_dim {p.v_dim}"
        setting = ", ".join(f"{name} {value}" for name, value in plan.forward.setting.items())
        tokens = f"{p.q_tokens} by {p.keys} tokens of {p.element_bytes} bytes"
        mask = p.mask.describe()
        if p.mask.documents is not None:
            first, others = p.mask.documents[:_BOUNDS], p.mask.documents[_BOUNDS:]
            mask += f" at {', '.join(map(str, first))}{', ...' if others else ''}"
        summary = f"{plan.method}, {tokens}, {heads}, {mask}, {plan.q_layout.kind}"
        return f"{question_digest(plan)} ({summary}, {setting})"

    @cached_property
    def programs(self) -> str:
        """A digest of programs that were parsed, compiled or put together by hand. Programs made by
        a method follow from the question: making all of them for a digest would take time."""
        plan = self.plan
        made = plan.target is None and all(isinstance(p.programs, Programs) for p in plan.passes)
        return AS_MADE if made else digest(plan)

    @cached_property
    def key(self) -> tuple[str, str]:
        """Equal for equal plans."""
        return self.words, self.programs

    @cached_property
    def recalled(self) -> tuple[Buffer, ...]:
        """The buffers of the forward pass that the backward pass reads."""
        return recalled(self._backward)

    @cached_property
    def retaken(self) -> tuple[str, ...]:
        """The names of the forward call's tensors that the backward pass reads."""
        inputs = [buffer.name for buffer in self._backward.buffers if buffer.role is Role.INPUT]
        return tuple(name for name in ("q", "k", "v", "lse") if name in inputs)

    @property
    def _backward(self) -> Program:
        return self.plan.program(self.rank, Direction.BACKWARD)

    @cached_property
    def keeps_lse(self) -> bool:
        """Whether the forward pass keeps lse for the backward pass."""
        buffers = self.plan.program(self.rank, Direction.FORWARD).buffers
        return any(b.kind is Kind.LSE and b.role is Role.KEPT for b in buffers)

    @cached_property
    def without_lse(self) -> RankPlan:
        """This plan for callers that do not ask for lse."""
        if self.base is not None:
            return self.base.without_lse.for_mask(self.plan.problem, by_mask=self.by_mask)
        return RankPlan(without_lse(self.plan), self.rank)

    def for_mask(self, problem: Problem, *, by_mask: bool = False) -> RankPlan:
        """This plan for a problem that differs in its mask, if the programs serve any mask."""
        return RankPlan(replace(self.plan, problem=problem), self.rank, self, by_mask)

    def meetings(self, directions: Iterable[Direction]) -> dict[str, Meetings]:
        """Digests of the collectives of this rank's programs, for ranks to compare."""
        passes = tuple(self.plan.direction(direction) for direction in directions)
        return meetings(replace(self.plan, passes=passes), self.rank)
