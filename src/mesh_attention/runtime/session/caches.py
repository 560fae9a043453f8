"""What a session keeps: prepared calls by kind, and plans by question.

What ranks have agreed on must be the same on each of them, also after one of them met an error. So
`AgreedCache` drops by the last call that all ranks made together, not by what one rank looked up.
Whether a kind of call is known decides whether ranks stop to agree on it: so a kind depends on what
ranks compare, and on nothing that one of them chooses alone. Those choices (a kernel, the device,
nvtx) tell apart a rank's own calls of one kind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from threading import RLock
from typing import TypeVar
from weakref import WeakValueDictionary

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.methods.question import Question
from mesh_attention.runtime.agreement.identity import AgreedKind
from mesh_attention.runtime.execute.binding import CallShape
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepared_call import AgreedPasses, PreparedCall
from mesh_attention.runtime.session.rank_plan import RankPlan

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
T = TypeVar("T")
Kind = TypeVar("Kind", bound="AgreedKind | CallsOfKind")
CallKey = tuple[tuple[str, str], CallOptions, CallShape]  # the first is that of the plan
NUM_CALLS = 64  # kinds of call, with their executors
NUM_CHOICES = 4  # calls that differ in what this rank chooses alone, for each kind


class LruCache(OrderedDict[Key, Value]):
    """The values used last, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def find(self, key: Key) -> Value | None:
        """The value, which now was used last; None if it is not kept."""
        if key not in self:
            return None
        self.move_to_end(key)
        return self[key]

    @property
    def is_full(self) -> bool:
        """Whether values may have been dropped."""
        return len(self) >= self._limit

    def keep(self, key: Key, value: Value) -> Value:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)
        return value


class AgreedCache(dict[Hashable, Kind]):
    """At most `limit` values that all ranks have agreed on. The value whose last call is the oldest
    goes first; among values without a call, the first that was kept."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def keep(self, key: Hashable, value: Kind) -> Kind | None:
        """Returns the value that had to go, if one had to."""
        self[key] = value
        if len(self) <= self._limit:
            return None
        return self.pop(min(self, key=lambda candidate: self[candidate].last_call))


class WeakRegistry(WeakValueDictionary[int, T]):
    """Objects that operators name by a number, since they take tensors and constants only.
    A number keeps nothing alive; `gone` is the error for an object that nobody holds any more."""

    def __init__(self, gone: str) -> None:
        super().__init__()
        self._gone = gone
        self._numbers = count(1)

    def add(self, entry: T) -> int:
        number = next(self._numbers)
        self[number] = entry
        return number

    def find(self, number: int | str) -> T:
        if not str(number).isdecimal():
            raise MeshAttentionError(
                f"{number!r} is the name of no object: call ContextParallel.attention, which calls "
                "the operators with its own"
            )
        entry = self.get(int(number))
        if entry is None:
            raise MeshAttentionError(self._gone)
        return entry


@dataclass(frozen=True, eq=False)
class CallsOfKind:
    """The calls that ranks compare as one kind. `compared`: what their keys have in common, which
    is the same on all ranks."""

    compared: Hashable
    kind: AgreedPasses = field(default_factory=AgreedPasses)
    calls: LruCache[CallKey, PreparedCall] = field(default_factory=lambda: LruCache(NUM_CHOICES))

    @property
    def last_call(self) -> int:
        return max((agreed.last_call for agreed in self.kind.agreed.values()), default=0)


class CallCache(AgreedCache[CallsOfKind]):
    """Prepared calls by kind."""

    def of_kind(self, key: CallKey) -> CallsOfKind:
        """The kept calls of the key's kind; of a new kind there are none."""
        plan, options, shape = key
        compared = plan, options.compared, shape.batch, shape.dtype, shape.device.type
        return self.get(compared) or CallsOfKind(compared)

    def keep_call(self, of_kind: CallsOfKind, key: CallKey, call: PreparedCall) -> None:
        of_kind.calls.keep(key, call)
        of_kind.kind.is_kept = True
        dropped = self.keep(of_kind.compared, of_kind)
        if dropped is not None:
            dropped.kind.is_kept = False

    def clear(self) -> None:
        for of_kind in self.values():
            of_kind.kind.is_kept = False
        super().clear()


class Plans(LruCache[Question, RankPlan]):
    """Plans by question, as one rank of a group sees them. Plans that differ in their masks alone
    share a `base` without a mask, where the programs serve any mask."""

    def __init__(self, limit: int, place: int, num_ranks: int) -> None:
        super().__init__(limit)
        self._place = place, num_ranks
        self._making = RLock()  # another thread makes batches ready
        # Of plans with the same passes, by these, which the bases hold.
        self._bases: LruCache[tuple[int, ...], RankPlan] = LruCache(limit)

    def of(self, question: Question) -> RankPlan:
        """The plan of a question; made if it is not kept."""
        with self._making:
            made = self.find(question)
            if made is None:
                base = question.of_any_mask
                if base is None or base == question:
                    made = RankPlan.on(question.plan(), *self._place)
                    if base is None and all(pass_.shared for pass_ in made.plan.passes):
                        made = self._on_shared_passes(made)
                else:
                    made = self.of(base).for_mask(question.problem)
            return self.keep(question, made)

    def _on_shared_passes(self, made: RankPlan) -> RankPlan:
        key, problem = tuple(map(id, made.plan.passes)), made.plan.problem
        base = self._bases.find(key)
        if base is None:
            base = RankPlan(replace(made.plan, problem=problem.of_any_mask), made.rank)
            self._bases.keep(key, base)
        return base.for_mask(problem, by_mask=True)

    def clear(self) -> None:
        super().clear()
        self._bases.clear()


class PlanSource:
    """Where calls get their plan for a size of element: from one question, or from the caller.

    `find` returns the plan of a question on this rank. A source of a batch keeps its `calls`
    itself: ranks do not stop to agree on these calls, and compare them when they begin.
    """

    def __init__(
        self,
        asked: Question | RankPlan,
        find: Callable[[Question], RankPlan],
        *,
        of_batch: bool = False,
    ) -> None:
        self.calls = CallCache(NUM_CALLS) if of_batch else None
        self._asked = asked
        self._find = find
        self.first = asked if isinstance(asked, RankPlan) else find(asked)

    @property
    def is_given(self) -> bool:
        """Whether the caller brings the plan."""
        return isinstance(self._asked, RankPlan)

    @cached_property
    def of_shards(self) -> PlanSource:
        """The same plans, whose forward passes leave no rows to backward passes."""
        if isinstance(self._asked, RankPlan):
            return self
        return PlanSource(self._asked.of_shards, self._find)

    def of(self, element_bytes: int) -> RankPlan:
        """A plan that the caller brings is for one size of element; the executor refuses others."""
        asked = self._asked
        if isinstance(asked, RankPlan) or asked.problem.element_bytes == element_bytes:
            return self.first
        problem = replace(asked.problem, element_bytes=element_bytes)
        return self._find(asked.with_problem(problem))
