"""A question is what a plan answers: a problem, a number of ranks, a method and its options.

`ask` is the only function that turns the options of a method into a question. Callers that may
leave the method out use `choose/ask.py`, which ends here. An option that is None was not set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.machine.rates import Costs
from mesh_attention.plan.language.plan import Direction, Plan, a_direction
from mesh_attention.plan.methods.parts.setting import Keep, Setting
from mesh_attention.plan.methods.table import AUTO, METHODS, taken_elsewhere
from mesh_attention.plan.problem.arguments import flag, number
from mesh_attention.plan.problem.layout import LayoutKind, Stretches
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

BOTH = (Direction.FORWARD, Direction.BACKWARD)


@dataclass(frozen=True)
class Question:
    """Equal questions have equal plans, on every rank. `backward`: a separate question for that
    pass, with another method or setting; both must have the same layouts."""

    problem: Problem
    num_ranks: int
    method: str
    setting: Setting
    directions: tuple[Direction, ...] = BOTH
    backward: Question | None = None

    @property
    def of_any_mask(self) -> Question | None:
        """The question whose programs also answer this one, under any mask; None where programs
        depend on the mask."""
        if METHODS[self.method].reads_mask or not self.setting.one_call or self.backward:
            return None
        if self.setting.layout is None:  # the mask chooses it
            return None
        return replace(self, problem=self.problem.of_any_mask)

    def for_batch(
        self, problem: Problem, layout: LayoutKind, stretches: Stretches | None
    ) -> Question:
        """The same question for a batch that has its documents and is sharded already."""
        setting = replace(
            self.setting, layout=layout, stretches=stretches, stripe_block=1, one_call=True
        )
        return replace(self, problem=problem, setting=setting)

    def with_problem(self, problem: Problem) -> Question:
        backward = None if self.backward is None else self.backward.with_problem(problem)
        return replace(self, problem=problem, backward=backward)

    @property
    def of_shards(self) -> Question:
        """The same question, whose forward pass keeps no rows for the backward pass."""
        backward = None if self.backward is None else self.backward.of_shards
        return replace(self, setting=replace(self.setting, keep=Keep.SHARDS), backward=backward)

    def plan(self) -> Plan:
        build = METHODS[self.method].build
        plan = build(self.problem, self.num_ranks, self.setting, self.directions)
        if self.backward is None:
            return plan
        other = self.backward.plan()
        shards = (plan.q_layout, plan.kv_layout, plan.devices)
        if shards != (other.q_layout, other.kv_layout, other.devices):
            raise PlanError("the passes of a plan must have the same shards on the same devices")
        name = plan.method if plan.method == other.method else f"{plan.method}/{other.method}"
        return replace(plan, passes=(*plan.passes, *other.passes), method=name)


def joined(forward: Question, backward: Question) -> Question:
    """One question for both passes, from a question for each. A backward pass finds what the
    forward pass keeps only where both have one setting."""
    if replace(forward, directions=backward.directions) == backward:
        return replace(forward, directions=BOTH)
    return replace(forward, backward=backward).of_shards


def ask(
    problem: Problem,
    num_ranks: int,
    *,
    method: str,
    directions: tuple[Direction, ...] = BOTH,
    **options: Any,
) -> Question:
    """Every option is used, or refused by name. `choose/ask.py` handles method `auto`."""
    if not isinstance(method, str) or method not in METHODS:
        known_methods = ", ".join((*METHODS, AUTO))
        raise PlanError(f"unknown method {method!r}; known methods: {known_methods}")
    num_ranks = number("ranks", num_ranks)
    if not isinstance(problem, Problem):
        raise PlanError(f"problem={problem!r}: must be a Problem")
    if isinstance(directions, str):
        raise PlanError(f"directions={directions!r}: must be a tuple of passes")
    options = {name: value for name, value in options.items() if value is not None}
    setting = _setting(method, options)
    return Question(problem, num_ranks, method, setting, tuple(map(a_direction, directions)))


def ask_passes(
    problem: Problem,
    num_ranks: int,
    chosen: Mapping[Direction, tuple[str, Mapping[str, Any]]],
    *,
    ranks_per_node: int,
    costs: Costs,
) -> Question:
    """One question from a method and its options for each pass, or for the only one; `costs` are
    for methods with a scheduler."""
    questions = []
    for direction, (method, settings) in chosen.items():
        options: dict[str, Any] = {"ranks_per_node": ranks_per_node, **settings}
        if "costs" in METHODS[method].options():
            options.setdefault("costs", costs)
        questions.append(ask(problem, num_ranks, method=method, directions=(direction,), **options))
    return questions[0] if len(questions) == 1 else joined(*questions)


def _setting(method: str, options: Mapping[str, Any]) -> Setting:
    known = METHODS[method].options()
    unknown = [name for name in options if name not in known]
    if unknown:
        name, others = unknown[0], ", ".join(known)
        raise PlanError(
            f"method {method} has no option {name!r}{taken_elsewhere(name)}; its options: {others}"
        )
    return METHODS[method].setting(**{n: known[n].read(value) for n, value in options.items()})


def attention_mask(
    *, causal: bool | None, mask: Mask | None = None, window_size: tuple[int, int] | None = None
) -> Mask:
    """The mask that these arguments describe together; contradictions are refused. With causal=None
    the mask decides."""
    if causal is not None:
        causal = flag("causal", causal)
    window = _window(window_size)
    if mask is not None and not isinstance(mask, Mask):
        raise PlanError(f"mask={mask!r}: must be a Mask, such as Mask(causal=True)")
    if mask is None:
        return Mask(causal=bool(causal), window=window)
    if window is not None:
        raise PlanError("give the window either as window_size or inside mask, not both")
    if causal is not None and causal != mask.causal:
        kind = "causal" if mask.causal else "not causal"
        raise PlanError(
            f"causal={causal} contradicts a mask that is {kind}; say it in the mask, and leave "
            "causal out"
        )
    return mask


def _window(size: Any) -> tuple[int | None, int | None] | None:
    """flash-attn's window: -1 is no limit."""
    if size is None:
        return None
    try:
        if isinstance(size, Iterator):  # of which the next reader would find nothing
            raise TypeError
        left, right = (number("window_size", side, least=-1) for side in size)
    except (TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"window_size={size!r}: give (left, right), -1 for no limit") from None
    if (left, right) == (-1, -1):
        return None
    return (None if left == -1 else left, None if right == -1 else right)
