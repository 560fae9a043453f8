"""A plan as one rank sees it: the part it plays, and what it tells the others of its plan.

Plans come from a question (one plan for each size of element that turns up) or from the caller. A
rank asks only for its own programs, and for the backward one when gradients are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction, Plan, Programs
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.methods.question import Question
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.agreement import AS_MADE, Meetings, meetings, question_digest

if TYPE_CHECKING:
    from mesh_attention.runtime.execute.binding import CallShape
    from mesh_attention.runtime.session.latest_calls import LatestCalls
    from mesh_attention.runtime.session.prepared_call import CallOptions


@dataclass(frozen=True)
class PlanOnRank:
    """`rank` is the logical rank of this process."""

    plan: Plan
    rank: int
    base: PlanOnRank | None = None  # with the same programs, which serve any mask

    @staticmethod
    def on(plan: Plan, place: int, num_ranks: int) -> PlanOnRank:
        """`place`: of this process in its group."""
        if plan.num_ranks != num_ranks:
            raise PlanError(
                f"the plan is for {plan.num_ranks} ranks, and the process group has {num_ranks}"
            )
        if sorted(plan.devices) != list(range(num_ranks)):
            raise PlanError(f"the plan's devices {plan.devices} are not the ranks of the group")
        return PlanOnRank(plan, plan.devices.index(place))

    @cached_property
    def words(self) -> str:
        """A digest of the question, and enough for people to see in what two plans differ."""
        plan, p = self.plan, self.plan.problem
        heads = f"{p.num_heads} heads of {p.head_dim}, {p.kv_heads} KV heads"
        setting = ", ".join(f"{name} {value}" for name, value in plan.forward.setting.items())
        tokens = f"{p.q_tokens} by {p.keys} tokens of {p.element_bytes} bytes"
        told = f"{plan.method}, {tokens}, {heads}, {p.mask.describe()}, {plan.q_layout.kind}"
        return f"{question_digest(plan)} ({told}, {setting})"

    @cached_property
    def programs(self) -> str:
        """A digest of programs that were parsed, compiled or put together by hand. Those that a
        method makes when they are asked for follow from the question: they need none, and are not
        made."""
        plan = self.plan
        made = plan.target is None and all(isinstance(o.programs, Programs) for o in plan.passes)
        return AS_MADE if made else digest(self.plan)

    @cached_property
    def key(self) -> tuple[str, str]:
        """Equal for equal plans."""
        return self.words, self.programs

    def for_mask(self, problem: Problem) -> PlanOnRank:
        """The plan for a problem of another mask, where programs serve any."""
        return PlanOnRank(replace(self.plan, problem=problem), self.rank, base=self)

    def meetings(self, directions: Iterable[Direction]) -> dict[str, Meetings]:
        """The collectives of this rank's programs, as `plan.agreement` compares them."""
        passes = tuple(self.plan.direction(direction) for direction in directions)
        return meetings(replace(self.plan, passes=passes), self.rank)


class PlanSource:
    """Plans for calls: of one question, for any size of element, or one that was given.

    `find` gives the plan of a question on this rank. A source with `calls` of its own comes anew
    with every batch: ranks do not stop to agree on what it brings, and see in each call whether it
    was the same.
    """

    def __init__(
        self,
        asked: Question | PlanOnRank,
        find: Callable[[Question], PlanOnRank],
        calls: LatestCalls | None = None,
    ) -> None:
        self.calls = calls
        self.contents = ""  # of the batch, in words that ranks compare
        # Options, shape and need of gradients, of the calls made.
        self.kinds: set[tuple[CallOptions, CallShape, bool]] = set()
        self._asked = asked
        self._find = find
        self._known: dict[int, PlanOnRank] = {}
        self.first = asked if isinstance(asked, PlanOnRank) else find(asked)

    def of(self, element_bytes: int) -> PlanOnRank:
        """A given plan is for one size of element; the executor refuses others."""
        asked = self._asked
        if isinstance(asked, PlanOnRank) or asked.problem.element_bytes == element_bytes:
            return self.first
        if element_bytes not in self._known:
            problem = replace(asked.problem, element_bytes=element_bytes)
            self._known[element_bytes] = self._find(asked.with_problem(problem))
        return self._known[element_bytes]
