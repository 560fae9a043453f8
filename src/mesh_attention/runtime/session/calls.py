"""The calls of a session: ranks agree on each new kind of call once, and keep the latest kinds.

`ObjectCalls` prepares attention here; losses and `unshard` agree on their kinds of call here. All
ranks make the same calls in the same order, and so keep and drop the same kinds of call: nothing
that ranks do together depends on garbage collection.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import RLock
from weakref import WeakSet

from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.read.agreement import AS_MADE
from mesh_attention.runtime.agreement.guard import Guard
from mesh_attention.runtime.agreement.handshake import DisagreementError, Handshake
from mesh_attention.runtime.agreement.identity import AgreedKind, Statement
from mesh_attention.runtime.agreement.verdict import OUT_OF_STEP, SAMPLE
from mesh_attention.runtime.execute.executor import CallShape
from mesh_attention.runtime.session.caches import (
    NUM_CALLS,
    AgreedCache,
    CallCache,
    CallKey,
    LruCache,
    PlanSource,
)
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepared_call import (
    AgreedPasses,
    PrefetchStreams,
    PreparedCall,
)
from mesh_attention.runtime.session.rank_plan import RankPlan
from mesh_attention.runtime.session.transports import TransportName, Transports
from mesh_attention.runtime.transport.groups import Groups

NUM_BASES = 16  # kept calls that serve any mask: of a few layers, with and without lse
NUM_CAPTURED_CALLS = 16  # kept kinds with CUDA graphs, which hold copies of inputs and outputs

BaseKey = tuple[RankPlan, CallOptions, CallShape]
_NO_PLAN_YET = "made when calls come"  # stated in place of a plan


class Calls:
    """The prepared calls of a session, and the kinds of call that its ranks have agreed on."""

    def __init__(
        self, groups: Groups, handshake: Handshake, guard: Guard, transports: Transports
    ) -> None:
        self._groups, self._handshake = groups, handshake
        self._guard, self._transports = guard, transports
        # Prepared calls, without and with CUDA graphs (`options.cuda_graph`).
        self._caches = {False: CallCache(NUM_CALLS), True: CallCache(NUM_CAPTURED_CALLS)}
        # Calls whose programs serve any mask; calls of batches are made from them.
        self._bases: LruCache[BaseKey, PreparedCall] = LruCache(NUM_BASES)
        self._living: WeakSet[PreparedCall] = WeakSet()  # also calls that only autograd holds
        # Kinds of call other than attention.
        self._agreed: AgreedCache[AgreedKind] = AgreedCache(NUM_CALLS)
        self._prefetch = PrefetchStreams()
        self._lock = RLock()  # of bases and living calls: `prefetch` runs in another thread
        self.num_begun = 0  # passes of calls that all ranks have begun together

    def prepare(
        self,
        source: PlanSource,
        options: CallOptions,
        call_shape: CallShape,
        needs_grad: bool,
        sample: Callable[[], str | None] | None = None,
    ) -> PreparedCall:
        """Returns the call of an attention that all ranks are about to make. If its kind is new,
        ranks agree on it first. `sample` returns a digest of tensors that must differ on ranks."""
        error: Exception | None = None
        statement: Statement = {}
        meetings: Statement = {}
        known = ahead = False  # `ahead`: ranks only compare the call, as it begins
        directions = tuple(Direction) if needs_grad else (Direction.FORWARD,)
        try:
            cache = self._caches[options.cuda_graph] if source.calls is None else source.calls
            rank_plan = source.of(call_shape.dtype.itemsize)
            key = (rank_plan.key, options, call_shape)
            of_kind = cache.of_kind(key)
            call = of_kind.calls.find(key) or self._new_call(
                options, call_shape, rank_plan, of_kind.kind
            )
            if call.is_warm(needs_grad):
                return call
            known = needs_grad in call.kind.agreed
            kind = self._statement(rank_plan.words, options) | {
                "batch": call_shape.batch,
                "dtype": str(call_shape.dtype),
                "device": call_shape.device.type,
                "needs_grad": needs_grad,
            }
            # A kernel may refuse the work of some ranks only: then `agree` raises on all ranks.
            call.make_ready(directions)
            call.transport.check()
            if source.calls is not None:
                call.make_kernels_ready()
            if options.cuda_graph:
                call.reserve()
            ahead = source.calls is not None and call.transport.is_connected(directions)
            if not ahead and not known:
                meetings = rank_plan.meetings(directions)
            statement = kind | {"meetings": meetings}
            if sample is not None and not ahead and not known:
                statement[SAMPLE] = sample()
        except Exception as raised:
            error = raised
        except BaseException as ended:  # such as KeyboardInterrupt: nobody must wait for this rank
            self._guard.break_off(ended)
            raise
        if error is not None or not (ahead or known):
            self.agree(statement, options, error)
            if self._handshake.left_to_the_call:  # ranks differ: the call is refused as it begins
                return call.refused(needs_grad, AgreedKind(kind))
            self._connect(call, directions)
        if not known:
            call.kind.agreed[needs_grad] = AgreedKind(kind, meetings, self.num_begun)
        cache.keep_call(of_kind, key, call)
        self._add_living(call)
        return call

    def prefetch(self, source: PlanSource, like: CallKey, needs_grad: bool) -> None:
        """Makes a call ready before it is needed, in another thread and without other ranks. `like`
        is the key of a call with the same options and shape."""
        assert source.calls is not None
        _, options, call_shape = like
        rank_plan = source.of(call_shape.dtype.itemsize)
        key = (rank_plan.key, options, call_shape)
        of_kind = source.calls.of_kind(key)
        call = self._new_call(options, call_shape, rank_plan, of_kind.kind)
        with self._prefetch.making(call, call_shape.device):
            call.make_ready(tuple(Direction) if needs_grad else (Direction.FORWARD,))
            call.make_kernels_ready()
        source.calls.keep_call(of_kind, key, call)
        self._add_living(call)

    def _new_call(
        self,
        options: CallOptions,
        call_shape: CallShape,
        rank_plan: RankPlan,
        kind: AgreedPasses | None = None,
    ) -> PreparedCall:
        base = None
        if rank_plan.base is not None:
            key = (rank_plan.base, options, call_shape)
            with self._lock:
                base = self._bases.find(key) or self._new_call(options, call_shape, rank_plan.base)
                self._bases.keep(key, base)
                self._add_living(base)
        return PreparedCall(self._transports, rank_plan, options, call_shape, base, kind)

    def _add_living(self, call: PreparedCall) -> None:
        with self._lock:
            self._living.add(call)

    def agree_on_plan(
        self,
        rank_plan: RankPlan | None,
        options: CallOptions,
        error: Exception | None,
        chosen_by: str | None = None,
    ) -> str | None:
        """Raises on all ranks unless all have the same plan and options and none has an `error`.

        `rank_plan` is None after an error, or if the sizes come with calls. `chosen_by` is the
        reason for a chosen plan; if ranks differ in it, returns that of the first rank.
        """
        statement: Statement = {}
        try:
            self._guard.refuse_if_broken()
            if error is None:
                words, programs = _NO_PLAN_YET, AS_MADE
                if rank_plan is not None:
                    words, programs = rank_plan.words, rank_plan.programs
                statement = self._statement(words, options) | {"programs": programs}
                if chosen_by is not None:
                    statement["auto"] = chosen_by
        except Exception as raised:  # whatever it is, the others must not wait for us
            error = error or raised
        if self.agree(statement, options, error) and rank_plan is not None:
            self.agree({"programs": digest(rank_plan.plan)}, options, None)
        return self._handshake.followed

    def agree_on(
        self, statement: Statement, options: CallOptions, *, ahead: bool = False
    ) -> AgreedKind:
        """Returns the kind of a call other than attention. If it is new, ranks agree on it first;
        with `ahead` they only compare it in the call, if a process group of all ranks exists."""
        self._guard.refuse_if_broken()
        if ahead and self._groups.has(self._groups.ranks):
            return AgreedKind(statement)
        key = json.dumps(statement, sort_keys=True)
        known = self._agreed.get(key)
        if known is None:
            self.agree(statement, options, None)
            if self._handshake.left_to_the_call:
                return AgreedKind(statement)
            with self._guard.whole_or_broken():
                self._groups.everybody()
            known = AgreedKind(statement, last_call=self.num_begun)
            self._agreed.keep(key, known)
        return known

    def agree(self, statement: Statement, options: CallOptions, error: Exception | None) -> bool:
        """As `Handshake.agree`: raises unless ranks agree, and returns whether they must compare
        their programs too. An error that may leave ranks inside a call breaks the group."""
        guard, timeout = self._guard, self._groups.set_timeout(options.timeout)
        # Other ranks can be inside a call already only if its kind was agreed on before.
        first = not any((*self._caches.values(), self._agreed))
        try:
            return self._handshake.agree(
                statement, error, call=guard.place, timeout=timeout, first=first
            )
        except BaseException as raised:
            in_flight = self._handshake.left_in_flight
            on_all_ranks = isinstance(raised, DisagreementError)
            out_of_step = on_all_ranks and OUT_OF_STEP in str(raised)
            if in_flight or out_of_step or not (on_all_ranks or raised is error):
                guard.break_off(raised)
            guard.known(raised)
            raise

    def _statement(self, words: str, options: CallOptions) -> Statement:
        releases = {"number of releases of this group": self._groups.releases}
        return {"plan": words} | options.statement | releases

    def _connect(self, call: PreparedCall, directions: tuple[Direction, ...]) -> None:
        """Makes shared memory and process groups for a call whose kind ranks have agreed on."""
        with self._guard.whole_or_broken():
            call.transport.share(directions)
        if call.options.transport is TransportName.SYMMETRIC:
            refusal = call.transport.refusal(directions)
            self.agree({"transport": "symmetric"}, call.options, refusal)
        with self._guard.whole_or_broken():
            self._groups.everybody()
            # If memory is shared no longer, older kinds need groups too, in one order on all ranks.
            kinds = [of_kind for cache in self._caches.values() for of_kind in cache.values()]
            for of_kind in kinds:
                older = [*of_kind.calls.values()][-1]
                older.transport.make_groups(older.directions)
            call.transport.make_groups(directions)

    def clear(self) -> None:
        with self._lock:
            living = [*self._living]
            self._living.clear()
            self._bases.clear()
        for call in living:
            call.clear()
        for cache in self._caches.values():
            cache.clear()
        self._agreed.clear()
