"""The context of a process group: all that outlives plans, shared by everybody who calls on it.

Process groups, workspaces, shared memory and communication streams are made once and stay for as
long as somebody uses the context. Plans, executors and captured graphs come and go: the latest are
kept. So documents that change with every batch make new plans and nothing else.

All ranks are at the same calls in the same order, and so keep and let go of the same kinds of call;
nothing that ranks do together depends on when an object is garbage collected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from threading import RLock
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.methods.question import Question
from mesh_attention.plan.read.agreement import AS_MADE
from mesh_attention.runtime.agreement.guard import Guard
from mesh_attention.runtime.agreement.handshake import OUT_OF_STEP, DisagreementError, Handshake
from mesh_attention.runtime.agreement.identity import AgreedKind, Statement
from mesh_attention.runtime.execute.executor import CallShape
from mesh_attention.runtime.session.latest_calls import CallKey, LatestCalls
from mesh_attention.runtime.session.lru_cache import Latest, LatestAgreed
from mesh_attention.runtime.session.plan_on_rank import PlanOnRank, PlanSource
from mesh_attention.runtime.session.prefetch_streams import AheadStreams
from mesh_attention.runtime.session.prepared_call import CallOptions, PreparedCall
from mesh_attention.runtime.session.share import Share
from mesh_attention.runtime.session.transports import TransportName, Transports
from mesh_attention.runtime.transport.groups import Groups, is_registered

NUM_PLANS = 64  # kept, of each context
NUM_CALLS = 64  # kinds of call, with their executors
NUM_BASES = 8  # calls that serve any mask; each holds the mask it was made with
NUM_CAPTURED_CALLS = 16  # a CUDA graph keeps copies of inputs and outputs

LATER = "made when calls come"  # in place of a plan

# A cache, not a setting: it never changes a result. Contexts of destroyed groups are dropped.
_CONTEXTS: dict[dist.ProcessGroup, Context] = {}


class Context:
    """Found with `context_of`. Every user holds a `Share`; groups and memory are released when the
    last share is closed, and made anew when they are needed again."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        self._process = os.getpid()
        self.groups = Groups(parent)
        self.handshake = Handshake(self.groups)
        self.transports = Transports(self.groups)
        self.guard = Guard(self.groups, self.handshake, self._drop)
        self._ahead = AheadStreams()
        self._making = RLock()  # batches are made ready by another thread
        self.plans: Latest[Question, PlanOnRank] = Latest(NUM_PLANS)
        # What `mesh_attention()` was asked for, by its arguments.
        self.asked: Latest[Hashable, tuple[PlanSource, CallOptions]] = Latest(NUM_CALLS)
        self._function: Share | None = None
        # By whether they are captured.
        self._calls = {False: LatestCalls(NUM_CALLS), True: LatestCalls(NUM_CAPTURED_CALLS)}
        # Of plans whose programs serve any mask.
        self._bases: Latest[CallKey, PreparedCall] = Latest(NUM_BASES)
        self._living_calls: WeakSet[PreparedCall] = WeakSet()  # also those that only autograd holds
        # On what is no attention.
        self._agreed: LatestAgreed[str, AgreedKind] = LatestAgreed(NUM_CALLS)
        self.num_begun = 0  # calls that all ranks were at together
        self.num_shares = 0  # that are open
        self._num_users = 0  # that ever were, besides the function

    # Plans.

    def source(self, asked: Question | Plan) -> PlanSource:
        """Plans for calls, as this rank sees them."""
        return PlanSource(self._on_rank(asked) if isinstance(asked, Plan) else asked, self._planned)

    def source_of_batch(self, asked: Question) -> PlanSource:
        """The same for one batch: its calls go when the source does."""
        return PlanSource(asked, self._planned, LatestCalls(NUM_CALLS))

    def _planned(self, question: Question) -> PlanOnRank:
        with self._making:
            made = self.plans.find(question)
            if made is None:
                base = question.of_any_mask
                if base is None or base == question:
                    made = self._on_rank(question.plan())
                else:
                    made = self._planned(base).for_mask(question.problem)
            return self.plans.keep(question, made)

    def _on_rank(self, plan: Plan) -> PlanOnRank:
        return PlanOnRank.on(plan, dist.get_rank(self.groups.parent), len(self.groups.ranks))

    # Agreement.

    def agree_on_plan(
        self,
        mine: PlanOnRank | None,
        options: CallOptions,
        error: Exception | None,
        chosen_by: str | None = None,
    ) -> str | None:
        """The same plan and options on all ranks, or an error on all of them. `chosen_by`: what the
        plan was chosen by, where it was; where ranks differ in it, that of the first is returned.

        `error` is what is wrong with this rank's arguments; `mine` may then be missing, as it is
        where calls say the sizes.
        """
        statement: Statement = {}
        try:
            self.guard.refuse_if_broken()
            if error is None:
                words, programs = (mine.words, mine.programs) if mine else (LATER, AS_MADE)
                statement = self._stated(words, options) | {"programs": programs}
                if chosen_by is not None:
                    statement["auto"] = chosen_by
        except Exception as found:  # whatever it is, the others must not wait for us
            error = error or found
        if self._agree(statement, options, error) and mine is not None:
            self._agree({"programs": digest(mine.plan)}, options, None)
        return self.handshake.followed

    def prepare(
        self,
        source: PlanSource | None,
        options: CallOptions,
        call_shape: CallShape,
        needs_grad: bool,
        error: Exception | None = None,
    ) -> PreparedCall:
        """The call that all ranks are about to make: of a kind agreed on before, or agreed on now.

        `error` is what is wrong with this rank's arguments; `source` may then be missing.
        """
        self.guard.refuse_if_broken()
        statement: Statement = {}
        ahead = known = False  # `ahead`: of the others, without a word
        meetings: Statement = {}
        directions = tuple(Direction) if needs_grad else (Direction.FORWARD,)
        try:
            if error is not None or source is None:
                raise error or AssertionError("neither a plan nor an error")
            kept = self._calls[options.cuda_graph] if source.calls is None else source.calls
            source.kinds.add((options, call_shape, needs_grad))
            mine = source.of(call_shape.dtype.itemsize)
            key = (mine.key, options, call_shape)
            call = kept.find(key) or self._new_call(mine, options, call_shape)
            known = needs_grad in kept.kinds(key)
            if known and call.is_ready(directions):
                return call
            kind = self._stated(mine.words, options) | {
                "batch": call_shape.batch,
                "dtype": str(call_shape.dtype),
                "device": call_shape.device.type,
                "needs_grad": needs_grad,
            }
            if source.contents:
                kind["the whole batch"] = source.contents
            # A kernel may refuse what only some ranks have to do: all must know.
            call.make_ready(directions)
            call.transport.check()
            if source.calls is not None:
                call.make_kernels_ready()
            if options.cuda_graph:
                call.reserve()
            ahead = source.calls is not None and call.transport.is_connected(directions)
            if not ahead and not known:
                meetings = mine.meetings(directions)
            statement = kind | {"meetings": meetings}
        except Exception as found:
            error = found
        except BaseException as ended:  # the others would wait for us in vain
            self.guard.break_off(ended)
            raise
        if error is not None or not (ahead or known):
            self._agree(statement, options, error)
            self._connect(call, directions)
        if not known:
            call.kinds[needs_grad] = AgreedKind(kind, meetings, self.num_begun)
        kept.keep(key, call)
        self._living_calls.add(call)
        return call

    def make_ready(
        self, source: PlanSource, options: CallOptions, call_shape: CallShape, needs_grad: bool
    ) -> None:
        """Ahead of the call, in a thread of its own: nothing here is told to other ranks."""
        assert source.calls is not None
        mine = source.of(call_shape.dtype.itemsize)
        call = self._new_call(mine, options, call_shape)
        directions = tuple(Direction) if needs_grad else (Direction.FORWARD,)
        with self._ahead.making(call, call_shape.device):
            call.make_ready(directions)
            call.make_kernels_ready()
        source.calls.keep((mine.key, options, call_shape), call)
        self._living_calls.add(call)

    def _new_call(
        self, mine: PlanOnRank, options: CallOptions, call_shape: CallShape
    ) -> PreparedCall:
        base = None
        if mine.base is not None:
            key = (mine.base.key, options, call_shape)
            with self._making:
                base = self._bases.find(key) or self._new_call(mine.base, options, call_shape)
                self._bases.keep(key, base)
                self._living_calls.add(base)
        return PreparedCall(self.transports, mine, options, call_shape, base)

    def tell_of(self, error: BaseException, options: CallOptions) -> None:
        """Of what has ended a call of this rank, unless all know it. Before calls are compared
        nothing has moved, but the others must not wait for us; where all fail alike, all objects
        stay usable."""
        alone = len(self.groups.ranks) == 1 or self.is_copy
        if not alone and not self.guard.is_known(error):
            if self.guard.compared or not isinstance(error, Exception):
                self.guard.break_off(error)
            else:
                try:
                    self._agree({}, options, error)
                except Exception as raised:
                    if raised is not error:
                        self.guard.break_off(error)
        self.guard.left_by = None

    def _stated(self, words: str, options: CallOptions) -> Statement:
        releases = {"number of releases of this group": self.groups.releases}
        return {"plan": words} | options.statement() | releases

    def _agree(self, statement: Statement, options: CallOptions, error: Exception | None) -> bool:
        place, timeout = self.guard.place, self.groups.timeout(options.timeout)
        try:
            return self.handshake.agree(statement, error, call=place, timeout=timeout)
        except BaseException as raised:
            # Ranks that know a kind of call may be in it already; where none does nobody can be.
            knows_calls = any((*self._calls.values(), self._agreed))
            in_flight = knows_calls and self.handshake.left_in_flight
            by_all = isinstance(raised, DisagreementError)
            out_of_step = by_all and OUT_OF_STEP in str(raised)
            if in_flight or out_of_step or not (by_all or raised is error):
                self.guard.break_off(raised)
            self.guard.known(raised)
            raise

    def _connect(self, call: PreparedCall, directions: tuple[Direction, ...]) -> None:
        """Shared memory and process groups for a kind of call that all ranks have agreed on."""
        with self.guard.whole_or_broken():
            call.transport.share(directions)
        if call.options.transport is TransportName.SYMMETRIC:
            refusal = call.transport.refusal(directions)
            self._agree({"transport": "symmetric"}, call.options, refusal)
        with self.guard.whole_or_broken():
            self.groups.everybody(None)
            # Where memory is shared no longer, older calls need groups as well.
            for other in (one for kept in self._calls.values() for one in kept.one_of_each()):
                other.transport.make_groups(other.directions)
            call.transport.make_groups(directions)

    def agree_on(
        self,
        statement: Statement,
        options: CallOptions,
        *,
        ahead: bool = False,
    ) -> AgreedKind:
        """A kind of call that is no attention: known, or agreed on now, unless ranks go `ahead` and
        leave it to the call to compare."""
        self.guard.refuse_if_broken()
        if ahead and self.groups.has_everybody(options.timeout):
            return AgreedKind(statement)
        key = json.dumps(statement, sort_keys=True)
        known = self._agreed.get(key)
        if known is None:
            self._agree(statement, options, None)
            with self.guard.whole_or_broken():
                self.groups.everybody(None)
                self.groups.everybody(options.timeout)
            known = self._agreed.keep(key, AgreedKind(statement, last_call=self.num_begun))
        return known

    # Users.

    @property
    def is_copy(self) -> bool:
        """In a process that was forked: its connections are those of its parent."""
        return os.getpid() != self._process

    def refuse_copies(self) -> None:
        if self.is_copy:
            raise MeshAttentionError(
                f"this process was forked from process {self._process}, whose connections it "
                "shares, so it cannot communicate here: make such calls there, or start processes "
                "anew (multiprocessing's spawn) that make process groups of their own"
            )

    def join(self) -> Share:
        self._num_users += 1
        self.num_shares += 1
        return Share(self, self._num_users)

    def share_of_function(self) -> Share:
        """The share of `mesh_attention()`."""
        if self._function is None:
            self.num_shares += 1
            self._function = Share(self, 0)
        return self._function

    def release_function(self) -> None:
        if self._function is not None:
            self._function.close()
            self._function = None
            self.asked.clear()

    def release(self) -> None:
        """Let go of all that was made; what is needed again is made anew."""
        self.guard.rest()
        self._drop()
        self.plans.clear()

    def _drop(self) -> None:
        """All that calls hold, process groups last. What is in flight is broken off before: graphs
        cannot be given up while they run, and would wait for ranks that never come."""
        if self.guard.broken:
            self.groups.abort()
        for call in self._living_calls:
            call.clear()
        self._living_calls.clear()
        for kept in self._calls.values():
            kept.clear()
        self._bases.clear()
        self._agreed.clear()
        self.transports.close(abandon=self.guard.broken)
        self.groups.close(abort=self.guard.broken)


def context_of(parent: dist.ProcessGroup) -> Context:
    """The context of a process group, one for all who ask."""
    for group, context in [*_CONTEXTS.items()]:
        if not is_registered(group) and not context.is_copy:
            del _CONTEXTS[group]
            context.release_function()
            context.release()
    if parent in _CONTEXTS:
        _CONTEXTS[parent].refuse_copies()
    else:
        _CONTEXTS[parent] = Context(parent)
    return _CONTEXTS[parent]


def process_group(group_or_mesh: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise MeshAttentionError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    if isinstance(group_or_mesh, DeviceMesh):
        if group_or_mesh.ndim != 1:
            raise MeshAttentionError(
                f"the DeviceMesh has {group_or_mesh.ndim} dimensions "
                f"{group_or_mesh.mesh_dim_names}; pass one of them, as in mesh['cp']"
            )
        if group_or_mesh.get_coordinate() is not None:
            return group_or_mesh.get_group()
        raise MeshAttentionError("this rank is not a member of the DeviceMesh it was given")
    group = dist.group.WORLD if group_or_mesh is None else group_or_mesh
    if isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0:
        return group
    # To ranks it leaves out, new_group gives a number in place of a group.
    if isinstance(group, dist.ProcessGroup | type(dist.GroupMember.NON_GROUP_MEMBER)):
        raise MeshAttentionError("this rank is not a member of the group it was given")
    raise MeshAttentionError(
        f"the group is {group!r}; give a torch.distributed.ProcessGroup, a 1-D DeviceMesh, "
        "or None for the default group"
    )
